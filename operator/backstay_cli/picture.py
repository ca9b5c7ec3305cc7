"""The picture of a job on a terminal, for `backstay run`, `backstay status` and `top JOB`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from backstay_client.show.curve import Losses, bar
from backstay_client.view import explain
from backstay_client.view.follow import JobView, carried, ready_of, spent
from backstay_client.view.pods import PodRow, rows, summary
from backstay_client.view.waiting import no_update, waiting_for
from backstay_client.words import clock, count, duration, evaluation, loss, not_finite, number, on_one_line, shown
from backstay_spec import contract

__all__ = ["Picture", "page"]

_PHASES = {"Succeeded": "bold green", "Failed": "bold red", "Running": "bold cyan", "Suspended": "yellow"}
_STATES = {"Ready": "green", "Failed": "red", "Pending": "yellow", "Starting": "yellow", "Terminating": "yellow"}
_ROLES = {"ParameterServer": "parameter servers", "Worker": "workers", "Evaluator": "evaluator"}
_CURVE_HEIGHT = 3
_FEWEST_PODS = 3
_NEWS = 4
_MOST_NEWS = 8


class Picture:
    """Renders a job into the size of the terminal.

    Args:
        view: the job.
        elapsed: seconds since the command, or the job, was started.
        losses: the losses of the curve; None: no curve.
        hint: the last line; empty: none.
        now: the Unix time.
        whole: show every pod and the whole history, independent of the height.
    """

    def __init__(
        self,
        view: JobView,
        elapsed: float,
        losses: Losses | None = None,
        *,
        hint: str = "",
        now: Callable[[], float] = time.time,
        whole: bool = False,
    ) -> None:
        self._view, self._elapsed, self._losses, self._hint = view, elapsed, losses, hint
        self._now, self._whole = now(), whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        head = [*self._head(width)]
        tail = [*self._tail()]
        found = rows(self._view)
        taken = len(head) + len(tail) + 4
        room = len(found) if self._whole else max(_FEWEST_PODS, height - taken)
        yield Group(*head, *self._pods(found, room), *tail)

    # ---- Above the pods ----

    def _head(self, width: int) -> Iterator[RenderableType]:
        view = self._view
        yield Text.assemble(
            (view.name, "bold"),
            "  ",
            (view.phase, _PHASES.get(view.phase, "bold")),
            f"  {clock(self._elapsed)}",
            (f"  {waiting_for(view)}", "yellow" if view.report.step else "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        fraction = explain.progress_of(view)
        if fraction is not None and view.report.step is not None and view.report.goal_steps:
            yield self._progress(fraction, width)
        elif view.report.step is not None:
            yield Text.assemble(("step ", "dim"), number(view.report.step))
        yield from self._numbers(width)
        if view.report.evaluation_error:
            yield _line(("the evaluation failed: ", "red"), on_one_line(view.report.evaluation_failed))
        for label, values in (
            ("metrics of loss", view.report.train_metrics),
            (evaluation(view.report), view.report.metrics),
        ):
            if values:
                yield _line((f"{label}  ", "dim"), shown(values))
        if names := not_finite(view.report):
            yield _line((f"metrics that were {names}", "yellow"))
        if waits := no_update(view):
            yield _line((waits, "yellow"))
        yield Text()

    def _progress(self, fraction: float, width: int) -> Text:
        view = self._view
        assert view.report.step is not None
        text = f" {100 * fraction:3.0f} %  step {view.report.step:,} of {view.report.goal_steps:,}"
        if view.report.local_steps:
            text += f"  local step {view.report.step * view.report.local_steps:,}"
        if view.report.updates_per_second and not view.ended:
            text += f"  {number(view.report.updates_per_second, 3)} updates/s"
        if (left := view.seconds_left) is not None and fraction < 1:
            text += f"  {clock(left)} left"
        style = "red" if view.phase == "Failed" else "green" if fraction >= 1 else "cyan"
        return Text.assemble((bar(fraction, max(8, min(60, width - len(text) - 1))), style), text, no_wrap=True)

    def _numbers(self, width: int) -> Iterator[RenderableType]:
        view = self._view
        newest = loss(view.report)
        if not newest and not view.report.examples_per_second:
            return
        text = Text.assemble(("loss ", "dim"), newest or number(None), no_wrap=True, overflow="ellipsis")
        if view.report.examples_per_second and not view.ended:
            text.append_text(Text.assemble(("   examples/s ", "dim"), number(view.report.examples_per_second, 3)))
        if view.goodput is not None:
            text.append_text(Text.assemble(("   goodput ", "dim"), f"{100 * view.goodput:.0f} %"))
        yield text
        lines = [] if self._losses is None else self._losses.lines(min(60, width - 12), _CURVE_HEIGHT)
        if lines and self._losses is not None:
            highest, lowest = (number(value, 3) for value in self._losses.ends)
            labels = [highest, *[""] * (len(lines) - 2), lowest]
            for label, line in zip(labels, lines, strict=True):
                yield Text.assemble((f"{label:>8} ", "dim"), (line, "cyan"), no_wrap=True)

    # ---- The pods ----

    def _pods(self, found: Sequence[PodRow], room: int) -> Iterator[RenderableType]:
        view = self._view
        counts = [*_counts(view)]
        if found:
            yield from self._rows(found, room)
        if found or counts:
            yield Text.assemble(*counts, no_wrap=True, overflow="ellipsis")
            yield Text()

    def _rows(self, found: Sequence[PodRow], room: int) -> Iterator[RenderableType]:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for column, texts in (("pod", [row.slot for row in found]), ("state", [row.state for row in found])):
            # In a narrow terminal the others give way.
            table.add_column(column, no_wrap=True, overflow="ellipsis", min_width=max(map(len, texts), default=0))
        table.add_column("does now", no_wrap=True, overflow="ellipsis")
        several = len({row.node for row in found}) > 1
        if several:
            table.add_column("node", no_wrap=True, overflow="ellipsis", max_width=24)
        # If there is not enough space, the pods that are not ready come first.
        order = list(found) if len(found) <= room else sorted(found, key=lambda row: row.state == "Ready")[: room - 1]
        chosen = [row for row in found if row in order]
        for row in chosen:
            cells = [Text(row.slot), Text(row.state, _STATES.get(row.state, "")), Text(row.does)]
            table.add_row(*cells, *([Text(row.node, "dim")] if several else []))
        yield table
        if len(chosen) < len(found):
            yield Text(summary([row for row in found if row not in chosen]), "dim")

    # ---- Below the pods ----

    def _tail(self) -> Iterator[RenderableType]:
        view = self._view
        found = explain.job_events(view)
        for one in found[-_MOST_NEWS if self._whole else -_NEWS :]:
            when = "" if one.at is None else f"{clock(self._now - one.at)} ago"
            style = "yellow" if one.bad else "dim"
            yield _line((f"{when:>9}  ", "dim"), (f"{one.what}: ", style), (one.text, "" if one.bad else "dim"))
        if view.checkpoint_step is not None and not view.ended:
            age = (
                "" if view.checkpoint_time is None else f", {duration(max(0.0, self._now - view.checkpoint_time))} ago"
            )
            place = f": {view.checkpoint}" if self._whole and view.checkpoint else ""
            yield _line((f"checkpoint of step {number(view.checkpoint_step)}{age}{place}", "dim"))
        if self._hint and not view.ended and not view.stage:
            yield Text(self._hint, "dim", overflow="fold")  # a path that is cut cannot be used


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _counts(view: JobView) -> Iterator[str | tuple[str, str]]:
    """The pods in words, such as ``2/2 parameter servers, 3/4 workers ready; replaced: 1 crash, 2 disruptions``."""
    parts = []
    for role, values in view.roles.items():
        if values.desired:
            parts.append(f"{ready_of(view, values)} {_ROLES.get(role, role)}")
    if parts:
        yield (", ".join(parts) + ("" if view.ended else " ready"), "dim")
    if view.restarts or view.disruptions:
        yield ("; replaced after " if parts else "replaced after ", "dim")
        yield (f"{view.restarts} {'crash' if view.restarts == 1 else 'crashes'}", "red" if view.restarts else "dim")
        yield (" and ", "dim")
        yield (count(view.disruptions, "disruption"), "yellow" if view.disruptions else "dim")


_WINDOW = 300.0  # seconds that the job's status adds up


def blame_words(view: JobView, entry: Mapping[str, Any]) -> str:
    """A wait in words, such as ``worker 2 on node-7, its input batches: 31 s in 40 updates of the last 5 min``."""
    rank, shard, part = entry.get("rank"), entry.get("shard"), str(entry.get("part", ""))
    who = f"worker {rank}" if shard is None else f"server {shard}, receiving from worker {rank}"
    found = rows(view)
    node = next((row.node for row in found if row.slot == who), "")
    where = f" on {node}" if node and len({row.node for row in found}) > 1 else ""
    what = "" if shard is not None else f", {contract.SLOW_PARTS.get(part, part)}"
    seconds, updates = float(entry.get("seconds") or 0.0), int(entry.get("updates") or 0)
    window = duration(float(entry.get("windowSeconds") or _WINDOW))
    return f"{who}{where}{what}: {duration(seconds)} in {count(updates, 'update')} of the last {window}"


def page(view: JobView, now: float, cluster: str) -> Group:
    """Draws the page of `backstay status`, which explains the job on one screen."""
    ended = view.completed if view.completed is not None else now
    elapsed = 0.0 if view.started is None else max(0.0, ended - view.started)
    parts: list[RenderableType] = []
    if view.message and view.phase != "Running":
        parts += [Text(line) for line in view.message.splitlines()[:12]]
    steps = list(explain.next_steps(view, now))
    goodput = [_line((text, "dim")) for text in (spent(view), carried(view)) if text]
    is_async = ((view.job.get("spec") or {}).get("update") or {}).get("mode") == "Async"
    label = "slower than others  " if is_async else "waited for  "
    blame = [_line((label, "dim"), blame_words(view, entry)) for entry in view.blame[:3]]
    parts += [Picture(view, elapsed, now=lambda: now, whole=True), *goodput, *blame]
    parts += [Text.assemble(("next  ", "bold"), step) for step in steps]
    if not view.live and not view.ended and view.report.step is not None:
        parts.append(Text("the numbers are from the job's status, which the operator writes every 10 s", "dim"))
    parts.append(_line((f"in {cluster}, namespace {view.namespace}", "dim")))
    return Group(*parts)
