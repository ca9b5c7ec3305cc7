"""Computes the updates of one shard on its device: `ShardEngine` has the state, and `_kernels` the jitted functions.

`_sums` is the order in which many contributions are added up.
"""

from __future__ import annotations

from ._shard_engine import ShardEngine

__all__ = ["ShardEngine"]
