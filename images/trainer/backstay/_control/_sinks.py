"""Carries a coordinator's message to the method of a shard that takes it, on either end of a link."""

from __future__ import annotations

from typing import Protocol

from backstay_rpc.control_pb2 import (
    Commit,
    CoordinatorMessage,
    Done,
    NormRequest,
    Reject,
    Rollback,
    Save,
)

from .._coordination import Message
from .._coordination.seam import ShardSink

__all__ = ["ServerSink", "deliver", "pack", "unpack"]


class ServerSink(ShardSink, Protocol):
    """A shard's server: also told where to start."""

    def on_rollback(self, rollback: Rollback) -> None:
        """Start there, in that term; what was before is over. Only queues."""


def deliver(message: Message, sink: ServerSink) -> None:
    """Call the method of `sink` that takes `message`."""
    match message:
        case Commit():
            sink.on_commit(message)
        case Reject():
            sink.on_reject(message)
        case NormRequest():
            sink.on_norm_request(message)
        case Save():
            sink.on_save(message)
        case Rollback():
            sink.on_rollback(message)
        case Done():
            sink.on_done(message)


def pack(message: Message) -> CoordinatorMessage:
    """For the stream."""
    match message:
        case Commit():
            return CoordinatorMessage(commit=message)
        case Reject():
            return CoordinatorMessage(reject=message)
        case NormRequest():
            return CoordinatorMessage(norm_request=message)
        case Save():
            return CoordinatorMessage(save=message)
        case Rollback():
            return CoordinatorMessage(rollback=message)
        case Done():
            return CoordinatorMessage(done=message)


def unpack(envelope: CoordinatorMessage) -> Message | None:
    """From the stream; None for a kind that this version does not know."""
    match envelope.WhichOneof("kind"):
        case "commit":
            return envelope.commit
        case "reject":
            return envelope.reject
        case "norm_request":
            return envelope.norm_request
        case "save":
            return envelope.save
        case "rollback":
            return envelope.rollback
        case "done":
            return envelope.done
        case _:
            return None
