"""Exchanges a worker's tensors with all shards, and serves streams of pushes and pulls."""

from __future__ import annotations

from ._buffers import Arrangement, ParamBuffers
from ._client import Push, ShardedClient, connect, record_exchange
from ._divided import DividedArrangement, DividedSlot
from ._memory import BufferPool, Staging
from ._server import QUIET_CHECKS, DataServer, StreamHandlers

__all__ = [
    "QUIET_CHECKS",
    "Arrangement",
    "BufferPool",
    "DataServer",
    "DividedArrangement",
    "DividedSlot",
    "ParamBuffers",
    "Push",
    "ShardedClient",
    "Staging",
    "StreamHandlers",
    "connect",
    "record_exchange",
]
