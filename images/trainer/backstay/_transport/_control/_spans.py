"""Sends the newest spans of a pod to shard 0's server, with heartbeats or on a shard's link."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from backstay_rpc.control_pb2 import ClockOffset, Peer, Spans

from ... import _instrument

__all__ = ["KEPT_BYTES", "MOST_OF_MESSAGE", "Kept", "Outbox", "columns"]

MOST_OF_MESSAGE: Final = 2000
"""Spans of one message. Steps of less than a few milliseconds make more: then older ones are left out."""

KEPT_BYTES: Final = 1 << 20
"""Bytes of spans of shard 0's server that a worker keeps."""

_NANOSECONDS: Final = 1e9


class Outbox:
    """Makes messages of the spans that shard 0's server does not have yet. Thread-safe.

    A new server of shard 0 gets what the ring buffer still has: the timeline survives the server that held it.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        most: int = MOST_OF_MESSAGE,
    ) -> None:
        """
        Args:
            peer: this pod.
            clock: the one of `_instrument`.
            most: spans of one message.
        """
        self._peer, self._clock, self._unix_clock, self._most = peer, clock, unix_clock, most
        self._lock = threading.Lock()
        self._server = -1  # the incarnation that has the spans before `_next`
        self._next = 0

    def take(self, server: int) -> Spans | None:
        """Returns the spans that the server of shard 0 with this incarnation has not received, or None if there are
        none.

        Spans that are taken and then lost on the way stay lost.
        """
        with self._lock:
            since = self._next if server == self._server else 0
            found = _instrument.spans(since, self._most)
            if not found:
                return None
            self._server, self._next = server, found[-1].number + 1
        offsets = [
            ClockOffset(shard=shard, incarnation=incarnation, seconds=seconds, error=error)
            for (shard, incarnation), (seconds, error) in _instrument.clocks.offsets().items()
        ]
        message = columns(found, lost=found[0].number - since)
        message.peer.CopyFrom(self._peer)
        message.clock, message.unix_seconds = self._clock(), self._unix_clock()
        message.offsets.extend(offsets)
        return message


class Kept:
    """The newest spans of shard 0's server on a worker, which the next server gets if this one is killed. Not
    thread-safe.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        """
        Args:
            most: bytes that are kept.
        """
        self._most = most
        self._messages: deque[tuple[int, bytes]] = deque()  # the incarnation of the server, and a `Spans`

    def of_previous(self, incarnation: int) -> list[bytes]:
        """Returns the messages of the servers with a lower incarnation."""
        return [spans for server, spans in self._messages if server < incarnation]

    def answered(self, incarnation: int, spans: Iterable[bytes]) -> None:
        """Record the answer of a server. It has the messages of previous servers; `spans` are its own newest spans."""
        own = [one for one in self._messages if one[0] >= incarnation]
        self._messages = deque([*own, *((incarnation, message) for message in spans)])
        size = sum(len(kept) for _, kept in self._messages)
        while size > self._most:
            size -= len(self._messages.popleft()[1])


def columns(spans: Sequence[_instrument.Span], lost: int = 0) -> Spans:
    """Spans in columns; `lost`: spans before them that were never sent. The sender and its clocks are left empty."""
    points: dict[str, int] = {}
    threads: dict[str, int] = {}
    began = [round(span.began * _NANOSECONDS) for span in spans]
    message = Spans(
        lost=lost,
        point=[points.setdefault(span.point, len(points)) for span in spans],
        thread=[threads.setdefault(span.thread, len(threads)) for span in spans],
        began=[at - before for at, before in zip(began, [0, *began], strict=False)],
        lasted=[max(0, round(span.ended * _NANOSECONDS) - at) for span, at in zip(spans, began, strict=True)],
        step=[0 if span.step is None else span.step + 1 for span in spans],
        notes={at: json.dumps(dict(span.notes), default=str) for at, span in enumerate(spans) if span.notes},
    )
    message.points.extend(points)
    message.threads.extend(threads)
    return message
