"""Lists the facts about a job that people see, in one order, for all formats.

A format chooses sections. It decides only about width, colours and line breaks. A row of `JobReport` with the words
`shown` is a fact in every format that has its section (docs/decisions/0047).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from backstay_client.view.follow import JobView, carried, ready_of, spent
from backstay_client.words import clock, count, loss, number, on_one_line, printable, shown, step_of_goal
from backstay_spec.job_report import JobReport, shown_rows

__all__ = ["JobFact", "cells", "facts"]

Section: TypeAlias = Literal["progress", "numbers", "metrics", "results", "costs", "pods", "deaths"]
Tone: TypeAlias = Literal["", "warn", "bad"]

_ROLES = {"ParameterServer": "parameter servers", "Worker": "workers", "Evaluator": "evaluator"}


@dataclass(frozen=True)
class JobFact:
    """One fact in words.

    Attributes:
        section: the group of facts that formats show together.
        label: the name of the fact, for a table.
        text: its value.
        tone: whether a person may have to act.
        is_unit: whether the label follows the value, as a unit does.
    """

    section: Section
    label: str
    text: str
    tone: Tone = ""
    is_unit: bool = False

    @property
    def words(self) -> str:
        """The fact outside a table, such as ``loss 0.25`` or ``128 examples/s``."""
        if self.is_unit:
            return f"{self.text} {self.label}"
        return f"{self.label}{':' if self.section in {'metrics', 'results'} else ''} {self.text}"


def facts(view: JobView, *sections: Section) -> list[JobFact]:
    """The known facts about a job.

    Args:
        sections: the sections to list; none: all.
    """
    return [fact for fact in _known(view) if not sections or fact.section in sections]


def cells(view: JobView) -> Mapping[str, str]:
    """The facts of the sections ``progress`` and ``numbers`` for a table of jobs, by label.

    An unknown fact is absent. A loss that was not finite is ``NaN``.
    """
    found = {fact.label: fact.text for fact in facts(view, "progress", "numbers")}
    newest = view.report.newest_loss
    return found if newest is None or math.isfinite(newest) else {**found, "loss": "NaN"}


def _known(view: JobView) -> Iterator[JobFact]:
    runs = not view.ended and view.phase != "Suspended"
    report, rows = view.report, [*_of_rows(view.report, rates=runs)]
    if report.step is not None:
        yield JobFact("progress", "step", step_of_goal(report))
        if report.local_steps:
            yield JobFact("progress", "local step", number(report.step * report.local_steps))
    if (left := view.seconds_left) and runs:
        yield JobFact("progress", "time left", clock(left))
    if newest := loss(report):
        yield JobFact("numbers", "loss", newest)
    yield from (fact for fact in rows if fact.section == "numbers")
    yield from (fact for fact in rows if fact.section == "metrics")
    yield from _results(report, newest)
    if view.goodput is not None:
        yield JobFact("costs", "goodput", spent(view))
    if traffic := carried(view):
        yield JobFact("costs", "traffic", traffic)
    yield from _of_pods(view)


def _of_pods(view: JobView) -> Iterator[JobFact]:
    ready = [f"{ready_of(view, of)} {_ROLES.get(role, role)}" for role, of in view.roles.items() if of.desired]
    if ready:
        yield JobFact("pods", "pods" if view.ended else "ready", ", ".join(ready), is_unit=not view.ended)
    if view.restarts or view.disruptions:
        crashes = f"{view.restarts} {'crash' if view.restarts == 1 else 'crashes'}"
        text = f"after {crashes} and {count(view.disruptions, 'disruption')}"
        yield JobFact("deaths", "pods replaced", text, "bad" if view.restarts else "warn")


def _of_rows(report: JobReport, *, rates: bool) -> Iterator[JobFact]:
    for name, row in shown_rows().items():
        value = getattr(report, name) if rates or not row.is_rate else None
        if value and isinstance(value, Mapping):
            yield JobFact("metrics", row.shown, shown(value))
        elif value:
            yield JobFact("numbers", row.shown, number(value, 3), is_unit=True)


def _results(report: JobReport, newest: str) -> Iterator[JobFact]:
    if report.evaluation_error:
        yield JobFact("results", "the evaluation failed", on_one_line(report.evaluation_failed), "bad")
    if report.metrics:
        at = "" if report.evaluated_step is None else f" of step {number(report.evaluated_step)}"
        yield JobFact("results", f"evaluation{at}", shown(report.metrics))
    if report.non_finite_loss is not None and "NaN" not in newest:
        label = f"the loss of step {number(report.non_finite_loss)} was NaN or infinite"
        yield JobFact("results", label, "see `backstay history`", "warn")
    if report.non_finite_metrics:
        names = ", ".join(printable(name) for name in report.non_finite_metrics)
        yield JobFact("results", "metrics that were NaN or infinite", f"{names} (see `backstay history`)", "warn")
