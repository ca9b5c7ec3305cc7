"""The picture of a job on a terminal, for `backstay run`, `backstay status` and `top JOB`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from backstay_client.show.curve import Losses, bar
from backstay_client.view import explain
from backstay_client.view.facts import JobFact, facts
from backstay_client.view.follow import JobView
from backstay_client.view.pods import PodRow, rows, summary
from backstay_client.view.waiting import no_update, waiting_for
from backstay_client.words import clock, count, duration, number
from backstay_spec import contract
from backstay_spec.job_report import WaitedForStatus

__all__ = ["Picture", "page"]

_PHASES = {"Succeeded": "bold green", "Failed": "bold red", "Running": "bold cyan", "Suspended": "yellow"}
_STATES = {"Ready": "green", "Failed": "red", "Pending": "yellow", "Starting": "yellow", "Terminating": "yellow"}
_TONES = {"": "dim", "warn": "yellow", "bad": "red"}
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
        # Where the head is long, fewer events leave space for the pods and the hint.
        tail = [*self._tail(_MOST_NEWS if self._whole else max(1, min(_NEWS, height - len(head) - 9)))]
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
        yield from self._progress(width)
        yield from self._numbers(width)
        for fact in facts(view, "metrics", "results", "costs"):
            yield _line(_words(fact))
        if waits := no_update(view):
            yield _line((waits, "yellow"))
        yield Text()

    def _progress(self, width: int) -> Iterator[RenderableType]:
        text = "  ".join(fact.words for fact in facts(self._view, "progress"))
        fraction = explain.progress_of(self._view) if self._view.report.goal_steps else None
        if text and fraction is not None:
            text = f" {100 * fraction:3.0f} %  {text}"
            style = "red" if self._view.phase == "Failed" else "green" if fraction >= 1 else "cyan"
            yield Text.assemble((bar(fraction, max(8, min(60, width - len(text) - 1))), style), text, no_wrap=True)
        elif text:
            yield _line(text)

    def _numbers(self, width: int) -> Iterator[RenderableType]:
        if newest := facts(self._view, "numbers"):
            yield _line("   ").join(map(_words, newest))
        lines = [] if self._losses is None else self._losses.lines(min(60, width - 12), _CURVE_HEIGHT)
        if lines and self._losses is not None:
            highest, lowest = (number(value, 3) for value in self._losses.ends)
            labels = [highest, *[""] * (len(lines) - 2), lowest]
            for label, line in zip(labels, lines, strict=True):
                yield Text.assemble((f"{label:>8} ", "dim"), (line, "cyan"), no_wrap=True)

    # ---- The pods ----

    def _pods(self, found: Sequence[PodRow], room: int) -> Iterator[RenderableType]:
        counts = facts(self._view, "pods", "deaths")
        if found:
            yield from self._rows(found, room)
        if found or counts:
            yield _line("; ").join(map(_words, counts))
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

    def _tail(self, news: int) -> Iterator[RenderableType]:
        view = self._view
        for one in explain.job_events(view)[-news:]:
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


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _words(fact: JobFact) -> Text:
    """Returns a fact where its name is less bright than its value, except if a person may have to act."""
    words, tone = Text(fact.words), _TONES[fact.tone]
    words.highlight_regex(re.escape(fact.label), tone)
    return words


_WINDOW = 300.0  # seconds that the report adds up


def blame_words(view: JobView, entry: WaitedForStatus, elapsed: float) -> str:
    """Returns a wait in words, such as ``worker 2 on node-7, its input batches: 31 s in 40 updates of the last 5 min``.

    Args:
        elapsed: the time in seconds since the job began.
    """
    rank, shard = entry.rank, entry.shard
    who = f"worker {rank}" if shard is None else f"server {shard}, receiving from worker {rank}"
    found = rows(view)
    node = next((row.node for row in found if row.slot == who), "")
    where = f" on {node}" if node and len({row.node for row in found}) > 1 else ""
    what = "" if shard is not None else f", {contract.SLOW_PARTS.get(entry.part, entry.part)}"
    window = duration(min(_WINDOW, elapsed))
    return f"{who}{where}{what}: {duration(entry.seconds)} in {count(entry.updates, 'update')} of the last {window}"


def page(view: JobView, now: float, cluster: str) -> Group:
    """Draws the page of `backstay status`, which explains the job on one screen."""
    ended = view.completed if view.completed is not None else now
    elapsed = 0.0 if view.started is None else max(0.0, ended - view.started)
    parts: list[RenderableType] = []
    if view.message and view.phase != "Running":
        parts += [Text(line) for line in view.message.splitlines()[:12]]
    steps = list(explain.next_steps(view, now))
    is_async = ((view.job.get("spec") or {}).get("update") or {}).get("mode") == "Async"
    label = "slower than others  " if is_async else "waited for  "
    blame = [_line((label, "dim"), blame_words(view, entry, elapsed)) for entry in view.report.waited_for]
    parts += [Picture(view, elapsed, now=lambda: now, whole=True), *blame]
    parts += [Text.assemble(("next  ", "bold"), step) for step in steps]
    if not view.live and not view.ended and view.report.step is not None:
        parts.append(Text("the numbers are from the job's status, which the operator writes every 10 s", "dim"))
    parts.append(_line((f"in {cluster}, namespace {view.namespace}", "dim")))
    return Group(*parts)
