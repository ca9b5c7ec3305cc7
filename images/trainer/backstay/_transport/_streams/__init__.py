"""Defines frames and their order, the stream as an interface, and TCP as its transport."""

from __future__ import annotations

from . import frames
from ._interfaces import (
    PLACED,
    Answer,
    Bytes,
    CheckpointHook,
    DataClient,
    Engine,
    FrameStream,
    Incoming,
    LayoutLike,
    PartPush,
    Place,
    Pulled,
    Refusal,
    ServerStream,
    ShardPort,
    flow_of,
)
from ._tcp import ClientStream, Listener
from .frames import CHUNK_BYTES, Cover, kind_of

__all__ = [
    "CHUNK_BYTES",
    "PLACED",
    "Answer",
    "Bytes",
    "CheckpointHook",
    "ClientStream",
    "Cover",
    "DataClient",
    "Engine",
    "FrameStream",
    "Incoming",
    "LayoutLike",
    "Listener",
    "PartPush",
    "Place",
    "Pulled",
    "Refusal",
    "ServerStream",
    "ShardPort",
    "flow_of",
    "frames",
    "kind_of",
]
