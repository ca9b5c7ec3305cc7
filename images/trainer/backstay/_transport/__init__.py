"""Transports control messages over gRPC, and tensors and links in frames over TCP, between pods.

- `_streams`: streams of frames. `frames` has the frames and their order, which `Cover` checks. A `FrameStream`
  transports them: `ClientStream` and `Listener` over TCP. A `Refusal` is the answer to an invalid frame.
- `_tensors`, a worker: `connect` gives a `ShardedClient`, which exchanges a `Push` for `Pulled` parameters. An
  `Arrangement` divides leaves into blocks, and `ParamBuffers` are what it receives into.
- `_tensors`, a server: a `DataServer` passes streams to a `ShardPort`. `Staging` and `BufferPool` are memory; an
  `Engine` computes on it.
- `_control`: a `ControlServer` answers a `ControlClient` and the operator. A `Link` connects a shard with the
  coordinator's `Links`. Pods compare their `Agreement` when they join.
"""

from __future__ import annotations

from ._control import (
    CONSTANTS,
    LAYOUT,
    PROGRAM,
    SOFTWARE,
    STRUCTURE,
    VERSION,
    Agreement,
    ControlClient,
    ControlServer,
    Heartbeats,
    Host,
    JobState,
    Kept,
    Link,
    Links,
    Outbox,
    Peers,
    first_difference,
)
from ._streams import (
    CHUNK_BYTES,
    Answer,
    Bytes,
    CheckpointHook,
    ClientStream,
    Cover,
    Engine,
    FrameStream,
    Incoming,
    LayoutLike,
    Listener,
    Pulled,
    Refusal,
    ServerStream,
    ShardPort,
    flow_of,
    frames,
    kind_of,
)
from ._tensors import (
    QUIET_CHECKS,
    Arrangement,
    BufferPool,
    DataServer,
    ParamBuffers,
    Push,
    ShardedClient,
    Staging,
    StreamHandlers,
    connect,
    record_exchange,
)

__all__ = [
    "CHUNK_BYTES",
    "CONSTANTS",
    "LAYOUT",
    "PROGRAM",
    "QUIET_CHECKS",
    "SOFTWARE",
    "STRUCTURE",
    "VERSION",
    "Agreement",
    "Answer",
    "Arrangement",
    "BufferPool",
    "Bytes",
    "CheckpointHook",
    "ClientStream",
    "ControlClient",
    "ControlServer",
    "Cover",
    "DataServer",
    "Engine",
    "FrameStream",
    "Heartbeats",
    "Host",
    "Incoming",
    "JobState",
    "Kept",
    "LayoutLike",
    "Link",
    "Links",
    "Listener",
    "Outbox",
    "ParamBuffers",
    "Peers",
    "Pulled",
    "Push",
    "Refusal",
    "ServerStream",
    "ShardPort",
    "ShardedClient",
    "Staging",
    "StreamHandlers",
    "connect",
    "first_difference",
    "flow_of",
    "frames",
    "kind_of",
    "record_exchange",
]
