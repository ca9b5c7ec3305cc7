"""The messages of a link in the envelopes that its stream carries. The envelope's field follows from the type."""

from __future__ import annotations

from typing import Any, cast

from backstay_rpc.control_pb2 import CoordinatorMessage, ShardMessage

from ..._coordination import Message, Report

__all__ = ["message_in", "report_in", "wrap_message", "wrap_report"]


def _fields(envelope: Any) -> dict[str, str]:
    """Returns the name of the field for each type of message."""
    return {field.message_type.full_name: field.name for field in envelope.DESCRIPTOR.oneofs_by_name["kind"].fields}


_TO_SHARD, _TO_COORDINATOR = _fields(CoordinatorMessage), _fields(ShardMessage)


def wrap_message(message: Message) -> CoordinatorMessage:
    """Returns a message as the stream to a shard carries it."""
    return CoordinatorMessage(**{_TO_SHARD[message.DESCRIPTOR.full_name]: cast(Any, message)})


def wrap_report(report: Report) -> ShardMessage:
    """Returns a report as the stream to the coordinator carries it."""
    return ShardMessage(**{_TO_COORDINATOR[report.DESCRIPTOR.full_name]: cast(Any, report)})


def message_in(envelope: CoordinatorMessage) -> Message | None:
    """Returns the message in an envelope from the stream; None for a kind that this version does not have."""
    kind = envelope.WhichOneof("kind")
    return None if kind is None else cast(Message, getattr(envelope, kind))


def report_in(envelope: ShardMessage) -> Report | None:
    """Returns the report in an envelope from the stream.

    None for the first and the last message of a link, for spans, and for a kind that this version does not have.
    """
    kind = envelope.WhichOneof("kind")
    return None if kind in (None, "position", "spans", "ended") else cast(Report, getattr(envelope, kind))
