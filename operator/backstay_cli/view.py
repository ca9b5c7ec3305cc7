"""How a running job looks: a live table on a terminal, one line for each thing that happens elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from backstay_cli.follow import JobView, RoleView
from backstay_cli.waiting import waiting_for
from backstay_cli.words import on_one_line, plain, printable

_NAMES = {"ParameterServer": "parameter servers", "Worker": "workers", "Evaluator": "evaluator"}
_STYLES = {"Succeeded": "bold green", "Failed": "bold red", "Running": "bold cyan", "Suspended": "yellow"}
_EVENTS = 6
SCRIPT = "worker 0"
"""Stands before what its script prints."""


def told(events: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The events to show: the results of evaluations are shown as numbers."""
    return [event for event in events if event[1] != "Evaluated"]


def number(value: float | None, digits: int = 4) -> str:
    """A number for people: a dash when there is none, few digits, no exponent where it can be avoided."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def shown(metrics: Mapping[str, float]) -> str:
    """Such as ``accuracy 0.97, loss 0.1``; the names come from the script."""
    return ", ".join(f"{printable(name)} {number(value)}" for name, value in sorted(metrics.items()))


class Display(Protocol):
    """Shows a job while it runs; a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, view: JobView) -> None:
        """Show the job as it is now."""

    def print(self, lines: Sequence[str]) -> None:
        """Show what worker 0's script has printed; the lines are printable."""


class LiveDisplay:
    """Roles, step, examples/s, loss, metrics, restarts, and the newest events, redrawn in place."""

    def __init__(self, console: Console, hint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hint = hint
        self._started = clock()
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._seen: list[str] = []  # when each event was seen first

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def show(self, view: JobView) -> None:
        """Redraw."""
        self._live.update(self.render(view))

    def print(self, lines: Sequence[str]) -> None:
        """Above the picture, where it stays."""
        for line in lines:
            self._console.print(Text(f"{SCRIPT} | {line}"))

    def render(self, view: JobView) -> RenderableType:
        """The picture of `view`."""
        seconds = int(self._clock() - self._started)
        elapsed = f"{seconds // 60}:{seconds % 60:02}"
        head = Text.assemble(
            (view.name, "bold"),
            "  ",
            (view.phase, _STYLES.get(view.phase, "bold")),
            f"  {elapsed}",
            (f"  {waiting_for(view)}", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        numbers = Table.grid(padding=(0, 3))
        for _ in range(3):
            numbers.add_column(min_width=12)
        numbers.add_row(Text("step", "dim"), Text("examples/s", "dim"), Text("loss", "dim"))
        numbers.add_row(number(view.step), number(view.examples_per_second, 3), number(view.loss))
        metrics = [
            Text.assemble((f"{label}  ", "dim"), shown(values), no_wrap=True, overflow="ellipsis")
            for label, values in (
                ("loss's metrics", view.train_metrics),
                (f"evaluation of step {number(view.evaluated_step)}", view.metrics),
            )
            if values
        ]
        roles = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("", "ready", "restarts", "disruptions"):
            roles.add_column(column, justify="left" if not column else "right")
        for role, values in view.roles.items():
            if values.desired or values.restarts or values.disruptions:
                roles.add_row(
                    _NAMES.get(role, role),
                    _ready(view, values),
                    Text(str(values.restarts), "red" if values.restarts else ""),
                    Text(str(values.disruptions), "yellow" if values.disruptions else ""),
                )
        known = told(view.events)
        self._seen += [elapsed] * (len(known) - len(self._seen))
        events = [
            Text(
                f"{when:>6}  {reason}: {on_one_line(message)}",
                "yellow" if kind == "Warning" else "dim",
                no_wrap=True,
                overflow="ellipsis",
            )
            for when, (kind, reason, message) in list(zip(self._seen, known, strict=False))[-_EVENTS:]
        ]
        parts: list[RenderableType] = [head, Text(), numbers, *metrics, Text()]
        if roles.row_count:
            parts += [roles, Text()]
        if not view.ended and not view.stage:
            events.append(Text(self._hint, "dim", overflow="fold"))  # a path that is cut is of no use
        return Group(*parts, *events)


def _ready(view: JobView, role: RoleView) -> Text:
    """How many pods are ready; at the end they all leave, which is not a problem."""
    if view.ended:
        return Text(str(role.desired))
    return Text(f"{role.ready}/{role.desired}", "green" if role.ready >= role.desired else "yellow")


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
        self._evaluated: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, view: JobView) -> None:
        """Write what is new."""
        known = told(view.events)
        for kind, reason, message in known[self._events :]:
            self._say(f"{'warning: ' if kind == 'Warning' else ''}{reason}: {message}")
        self._events = max(self._events, len(known))
        waiting = waiting_for(view)
        if view.phase != self._phase:
            self._phase = view.phase
            self._say(f"{view.name} is {view.phase}")
        now = self._clock()
        # Where pods die again and again, their events say it better.
        if waiting and waiting != self._waiting and not view.restarts:
            self._say(waiting)
        self._waiting = waiting
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
            self._say(f"step {number(view.step)}  loss {number(view.loss)}{metrics}{rate}  restarts {view.restarts}")
        if view.evaluated_step is not None and view.evaluated_step != self._evaluated and not view.ended:
            self._evaluated = view.evaluated_step
            self._say(f"evaluation of step {number(view.evaluated_step)}: {shown(view.metrics)}")

    def print(self, lines: Sequence[str]) -> None:
        """As lines of their own, without a time."""
        for line in lines:
            self._write(f"{SCRIPT} | {line}")

    def _say(self, line: str) -> None:
        first, *more = plain(line)
        self._write(f"[{self._clock() - self._started:6.1f}s] {first}")
        for text in more:
            self._write(f"{'':10}{text}")
