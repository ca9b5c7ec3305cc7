"""Simulates the shards and workers of a job around the coordinator, without threads, clock and network. Pure.

A test moves one message at a time, in any order, and so checks the promises over every interleaving.
"""

from __future__ import annotations

from ._shard import SimShard, key_of
from ._worker import SimWorker

__all__ = ["SimShard", "SimWorker", "key_of"]
