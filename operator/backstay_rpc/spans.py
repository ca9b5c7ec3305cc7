"""Reads `Spans`: what a pod did, in columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from backstay_rpc.control_pb2 import Spans

__all__ = ["PodSpan", "spans_in"]


class PodSpan(NamedTuple):
    """A part of a pod's work; times are nanoseconds of the pod's clock."""

    point: str
    thread: str
    began: int
    ended: int
    step: int | None
    notes: Mapping[str, Any]


def spans_in(message: Spans) -> Iterator[PodSpan]:
    """Yields the spans of a message, in the order in which they ended.

    Raises:
        ValueError: the columns differ in length, or a note is not JSON.
        IndexError: a name is missing.
    """
    at = 0
    for position, (point, thread, delta, lasted, step) in enumerate(
        zip(message.point, message.thread, message.began, message.lasted, message.step, strict=True)
    ):
        at += delta
        notes = json.loads(message.notes[position]) if position in message.notes else {}
        yield PodSpan(
            message.points[point], message.threads[thread], at, at + lasted, step - 1 if step else None, notes
        )
