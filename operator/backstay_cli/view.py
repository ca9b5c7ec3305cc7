"""Shows a running job: a live table on a terminal, and elsewhere one line for each event."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from backstay_cli.follow import JobView
from backstay_cli.picture import Losses, Picture
from backstay_cli.waiting import no_update, waiting_for
from backstay_cli.words import duration, number, plain, shown, without_folder

SCRIPT = "worker 0"
"""Prefix of the script's output."""

_NO_UPDATE_SECONDS = 60.0
"""Seconds between two lines about the same wait."""

_COMPILES_SECONDS = 20.0
"""The same before the first update: JAX may compile for minutes."""


def shown_events(events: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The events to show: the results of evaluations are shown as numbers."""
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


class LiveDisplay:
    """The job's picture, redrawn in place: progress, a curve of the loss, one row for each pod, and the last events."""

    def __init__(self, console: Console, hint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hint = hint
        self._started = clock()
        self._console = console
        self._losses = Losses()
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def show(self, view: JobView) -> None:
        """Redraw the view."""
        self._live.update(self.render(view))

    def print(self, lines: Sequence[str]) -> None:
        """Print above the picture, where the lines stay."""
        for line in lines:
            self._console.print(Text(f"{SCRIPT} | {line}"))

    def render(self, view: JobView) -> RenderableType:
        """The picture of `view`."""
        self._losses.add(view)
        return Picture(view, self._clock() - self._started, self._losses, hint=self._hint)


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
        self._waiting = ""
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
        known = shown_events(view.events)
        for kind, reason, message in known[self._events :]:
            if not (view.ended and reason == view.phase):  # the report after the end has the same text
                self._write_line(f"{'warning: ' if kind == 'Warning' else ''}{reason}: {without_folder(message)}")
        self._events = max(self._events, len(known))
        waiting = waiting_for(view)
        if view.phase != self._phase:
            self._phase = view.phase
            self._write_line(f"{view.name} is {view.phase}")
        now = self._clock()
        # If pods die repeatedly, their events are a better explanation.
        if waiting and waiting != self._waiting and not view.restarts:
            self._write_line(waiting)
        self._waiting = waiting
        text = no_update(view)
        pause = _NO_UPDATE_SECONDS if view.step else _COMPILES_SECONDS
        if text and not view.ended and now - self._no_update_at >= pause:
            self._no_update_at = now
            self._write_line(text)
        elif not text:
            self._no_update_at = -math.inf
        if (
            view.step
            and view.loss is not None
            and view.step != self._step
            and not view.ended
            and now - self._last >= self._interval
        ):
            self._last, self._step = now, view.step
            metrics = f"  {shown(view.train_metrics)}" if view.train_metrics else ""
            rate = f"  {number(view.examples_per_second, 3)} examples/s" if view.examples_per_second else ""
            goal = f" of {number(view.goal_steps)}" if view.goal_steps else ""
            local = f"  local step {number(view.step * view.local_steps)}" if view.local_steps else ""
            left = f"  {duration(seconds)} left" if (seconds := view.seconds_left) is not None else ""
            restarts = f"  restarts {view.restarts}" if view.restarts else ""
            where = f"step {number(view.step)}{goal}{local}"
            self._write_line(f"{where}  loss {number(view.loss)}{metrics}{rate}{left}{restarts}")
        if view.evaluated_step is not None and view.evaluated_step != self._evaluated and not view.ended:
            self._evaluated = view.evaluated_step
            self._write_line(f"evaluation of step {number(view.evaluated_step)}: {shown(view.metrics)}")

    def print(self, lines: Sequence[str]) -> None:
        """Print as separate lines, without a time."""
        for line in lines:
            self._write(f"{SCRIPT} | {line}")

    def _write_line(self, line: str) -> None:
        first, *more = plain(line)
        self._write(f"[{self._clock() - self._started:6.1f}s] {first}")
        for text in more:
            self._write(f"{'':10}{text}")
