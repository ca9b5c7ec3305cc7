"""Tensors between workers and servers: the transport interface, the rules of a stream, and TCP as transport.

- A worker: `connect` gives a `ShardedClient`, which exchanges a `Push` for `Pulled` parameters. An `Arrangement`
  divides leaves into blocks, and `ParamBuffers` are what it receives into.
- A server: a `DataServer` passes streams to a `ShardPort`, with a `Refusal` as the answer to an invalid frame.
  `Staging` and `BufferPool` are memory; an `Engine` computes on it.
- Both ends: `frames` has the frames and their order, which `Cover` checks. A `FrameStream` transports them:
  `ClientStream` and `Listener` over TCP.
"""

from __future__ import annotations

from . import frames
from .buffers import Arrangement, ParamBuffers
from .client import Push, ShardedClient, connect, record_exchange
from .frames import CHUNK_BYTES, Cover, kind_of
from .memory import BufferPool, Staging
from .seam import (
    Answer,
    Bytes,
    CheckpointHook,
    Engine,
    FrameStream,
    Incoming,
    LayoutLike,
    Pulled,
    PullKind,
    Refusal,
    ServerStream,
    ShardPort,
    flow_of,
)
from .server import DataServer
from .tcp import ClientStream, Listener

__all__ = [
    "CHUNK_BYTES",
    "Answer",
    "Arrangement",
    "BufferPool",
    "Bytes",
    "CheckpointHook",
    "ClientStream",
    "Cover",
    "DataServer",
    "Engine",
    "FrameStream",
    "Incoming",
    "LayoutLike",
    "Listener",
    "ParamBuffers",
    "PullKind",
    "Pulled",
    "Push",
    "Refusal",
    "ServerStream",
    "ShardPort",
    "ShardedClient",
    "Staging",
    "connect",
    "flow_of",
    "frames",
    "kind_of",
    "record_exchange",
]
