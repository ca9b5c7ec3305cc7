"""The clock of a simulation, which moves from one event to the next. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["EventHeap", "PlannedEvent"]

PlannedEvent: TypeAlias = list[Any]
"""An event of the heap, as a list of its time, its number, the function, and the arguments."""


class EventHeap:
    """Calls functions in order of time. Events of the same time are called in the order in which they were planned, so
    a simulation is the same each time.

    Attributes:
        now: the simulated time, in seconds since the beginning.
        called: the number of events so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.called = 0
        self._events: list[PlannedEvent] = []
        self._number = 0

    def at(self, when: float, act: Callable[..., None], *arguments: Any) -> PlannedEvent:
        """Plan a call.

        Args:
            when: its time; an earlier time than `now` counts as `now`.
            act: the function to call.
            arguments: the arguments of the call.
        """
        event = [max(when, self.now), self._number, act, arguments]
        self._number += 1
        heapq.heappush(self._events, event)
        return event

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> PlannedEvent:
        """Plan a call in `seconds`."""
        return self.at(self.now + seconds, act, *arguments)

    @staticmethod
    def cancel(event: PlannedEvent | None) -> None:
        """Drop a planned call; nothing happens if it was made."""
        if event is not None:
            event[2] = None

    def run(self, until: float, has_ended: Callable[[], bool]) -> None:
        """Call events up to the time `until`, while `has_ended` returns False."""
        events = self._events
        while events and not has_ended():
            if events[0][0] > until:
                self.now = until
                return
            when, _, act, arguments = heapq.heappop(events)
            if act is not None:
                self.now = when
                self.called += 1
                act(*arguments)
