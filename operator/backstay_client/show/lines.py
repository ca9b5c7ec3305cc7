"""Shows a running job by one line for each event."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from backstay_client.view.facts import facts
from backstay_client.view.follow import JobView
from backstay_client.view.waiting import WROTE, no_update, waiting_for
from backstay_client.words import plain, without_folder

__all__ = ["SCRIPT", "Display", "LineDisplay", "shown_events"]

SCRIPT = "worker 0"
"""Prefix of the script's output."""

_NO_UPDATE_SECONDS = 60.0
"""Seconds between two lines about the same wait."""

_COMPILES_SECONDS = 20.0
"""The same before the first update, when JAX may compile for minutes."""

_NEWEST_LINE_SECONDS = 10.0
"""Seconds between two lines of a log of a pod that starts."""


def shown_events(events: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Returns the events to show, where the results of evaluations are shown as numbers."""
    return [event for event in events if event[1] != "Evaluated"]


class Display(Protocol):
    """Shows a job while it runs; a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, view: JobView) -> None:
        """Show the current state of the job."""

    def print(self, lines: Sequence[str]) -> None:
        """Show output of worker 0's script; the lines are printable."""


class LineDisplay:
    """A line when the phase changes, for each event, and for the progress every few seconds."""

    def __init__(
        self, write: Callable[[str], None], interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._interval = interval
        self._clock = clock
        self._started = clock()
        self._phase = ""
        self._events = 0
        self._last = clock()
        self._step: int | None = None
        self._waiting = self._stage = ""
        self._waiting_at = -math.inf
        self._no_update_at = -math.inf
        self._evaluated: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, view: JobView) -> None:
        """Write the changes."""
        events = shown_events(view.events)
        for kind, reason, message in events[self._events :]:
            if not (view.ended and reason == view.phase):  # the report after the end has the same text
                self._write_line(f"{'warning: ' if kind == 'Warning' else ''}{reason}: {without_folder(message)}")
        self._events = max(self._events, len(events))
        waiting = waiting_for(view)
        if view.phase != self._phase:
            self._phase = view.phase
            self._write_line(f"{view.name} is {view.phase}")
        now = self._clock()
        stage = waiting.partition(WROTE)[0]
        # If pods die repeatedly, their events are a better explanation.
        if waiting != self._waiting and (stage != self._stage or now - self._waiting_at >= _NEWEST_LINE_SECONDS):
            self._stage, self._waiting, self._waiting_at = stage, waiting, now
            if waiting and not view.restarts:
                self._write_line(waiting)
        text = no_update(view)
        pause = _NO_UPDATE_SECONDS if view.report.step else _COMPILES_SECONDS
        if text and not view.ended and now - self._no_update_at >= pause:
            self._no_update_at = now
            self._write_line(text)
        elif not text:
            self._no_update_at = -math.inf
        if view.ended:
            return
        step, evaluated = view.report.step, view.report.evaluated_step
        if step and step != self._step and now - self._last >= self._interval:
            self._last, self._step = now, step
            known = facts(view, "progress", "numbers", "metrics", "deaths")
            self._write_line("  ".join(fact.text if fact.section == "metrics" else fact.words for fact in known))
        if evaluated is not None and evaluated != self._evaluated:
            self._evaluated = evaluated
            for fact in facts(view, "results"):
                if not fact.tone:  # the others have events
                    self._write_line(fact.words)

    def print(self, lines: Sequence[str]) -> None:
        """Print as separate lines, without a time."""
        for line in lines:
            self._write(f"{SCRIPT} | {line}")

    def _write_line(self, line: str) -> None:
        first, *more = plain(line)
        self._write(f"[{self._clock() - self._started:6.1f}s] {first}")
        for text in more:
            self._write(f"{'':10}{text}")
