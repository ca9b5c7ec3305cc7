"""Shares a resource equally among its users, such as a network interface or the processors of a machine. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ._heap import EventHeap, PlannedEvent

__all__ = ["FairShare", "SharedWork"]

_ROUNDING: Final = 1e-9


@dataclass(slots=True, eq=False)
class SharedWork:
    """Pieces of work of one size that a `FairShare` began at the same time, such as streams of bytes.

    Attributes:
        ends: the amount of work for each piece at which they are done.
        then: what is called at their end; None: they have ended.
        count: the number of pieces that were not removed.
    """

    ends: float
    then: Callable[[], None] | None
    count: int = 1


class FairShare:
    """Does work at a rate that all pieces of work share equally, as processor sharing.

    All pieces have one rate, so a single number, the work for each of them since the beginning, gives the end of each
    piece. An event costs O(log n).

    Args:
        heap: the clock.
        capacity: units of work a second of all pieces together; infinite: each piece has the rate `cap`.
        cap: the largest rate of one piece, in units a second.
    """

    def __init__(self, heap: EventHeap, capacity: float, cap: float = math.inf) -> None:
        self._heap, self._capacity, self._cap = heap, capacity, cap
        self._served = 0.0  # work for each piece
        self._at = 0.0
        self._count = 0
        self._number = 0
        self._pieces: list[tuple[float, int, SharedWork]] = []
        self._event: PlannedEvent | None = None
        self._is_unlimited = math.isinf(capacity) and not math.isinf(cap)

    @property
    def count(self) -> int:
        """The number of pieces now."""
        return self._count

    def add(self, amount: float, then: Callable[[], None], count: int = 1) -> SharedWork:
        """Begin `count` pieces of `amount` units each, and call `then` once, at their common end."""
        if self._is_unlimited:
            piece = SharedWork(0.0, then, count)
            self._heap.after(amount / self._cap, self._end_unlimited, piece)
            return piece
        self._advance()
        if self._count == 0:
            self._served = 0.0
        piece = SharedWork(self._served + max(0.0, amount), then, count)
        self._count += count
        self._number += 1
        heapq.heappush(self._pieces, (piece.ends, self._number, piece))
        # With one more piece, the others end later. So a planned event changes only if this piece is the first to end.
        if self._event is None or self._pieces[0][2] is piece:
            self._plan()
        return piece

    def remove(self, piece: SharedWork | None) -> None:
        """Take one piece away before it is done; nothing happens if it has ended."""
        if piece is None or piece.then is None:
            return
        piece.count -= 1
        if piece.count == 0:
            piece.then = None
        if not self._is_unlimited:
            self._advance()
            self._count -= 1
            self._plan()

    @staticmethod
    def _end_unlimited(piece: SharedWork) -> None:
        then, piece.then = piece.then, None
        if then is not None:
            then()

    def _rate(self) -> float:
        return min(self._cap, self._capacity / max(1, self._count))

    def _advance(self) -> None:
        now = self._heap.now
        if now > self._at and self._count:
            self._served += (now - self._at) * min(self._cap, self._capacity / self._count)
        self._at = now

    def _plan(self) -> None:
        self._heap.cancel(self._event)
        self._event = None
        while self._pieces and self._pieces[0][2].then is None:
            heapq.heappop(self._pieces)
        if self._pieces:
            rate = self._rate()
            left = self._pieces[0][0] - self._served
            self._event = self._heap.after(0.0 if math.isinf(rate) else max(0.0, left / rate), self._end)

    def _end(self) -> None:
        self._event = None
        self._advance()
        rate = self._rate()
        limit = math.inf if math.isinf(rate) else self._served * (1 + _ROUNDING) + rate * _ROUNDING
        ended: list[Callable[[], None]] = []
        while self._pieces and (self._pieces[0][0] <= limit or self._pieces[0][2].then is None):
            piece = heapq.heappop(self._pieces)[2]
            if piece.then is not None:
                ended.append(piece.then)
                piece.then = None
                self._count -= piece.count
        self._plan()
        for then in ended:
            then()
