"""Lists the facts about a job that people see, in one order, for all formats.

A format chooses sections. It decides only about width, colours and line breaks. A row of `JobReport` with the words
`shown` is a fact in every format that has its section (docs/decisions/0047).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from backstay_client.view.follow import JobView, RoleView
from backstay_client.words import clock, count, loss, number, on_one_line, printable, shown, size, step_of_goal
from backstay_spec.job_report import JobReport, shown_rows

__all__ = ["JobFact", "cells", "facts", "ready_of"]

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
    """Returns the known facts about a job.

    Args:
        sections: the sections to list; none: all.
    """
    return [fact for fact in _known(view) if not sections or fact.section in sections]


def cells(view: JobView) -> Mapping[str, str]:
    """Returns the facts of the sections ``progress`` and ``numbers`` for a table of jobs, by label.

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
        yield JobFact("costs", "goodput", _spent(view))
    if traffic := _traffic(view):
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


def ready_of(view: JobView, role: RoleView) -> str:
    """Returns how many pods are ready; at the end all pods leave, which is not a problem."""
    return str(role.desired) if view.ended else f"{role.ready}/{role.desired}"


def _traffic(view: JobView) -> str:
    """Returns the traffic in words, such as ``1.2 MB per update and worker (Exact: 3.8 MB)``; empty if not known."""
    used, exact = view.report.traffic.get("carried"), view.report.traffic.get("exact")
    if not used:
        return ""
    more = f" (Exact: {size(exact)})" if exact and abs(exact - used) > _SAME * used else ""
    trained, frozen = view.report.trained_parameters, view.report.frozen_parameters
    if trained is not None and frozen:
        more += f", {number(trained)} of {number(trained + frozen)} values train"
    return f"{size(used)} per update and worker{more}"


def _spent(view: JobView) -> str:
    """Returns the goodput in words, such as ``81 % of 90 worker seconds: wait 12 %``; empty if not known."""
    if view.goodput is None:
        return ""
    total = sum(view.worker_seconds.values())
    if total <= 0:
        return f"{100 * view.goodput:.0f} %"
    shares = {part: seconds / total for part, seconds in view.worker_seconds.items() if part != "applied"}
    named = {part: share for part, share in shares.items() if share >= _LEAST_SHARE}
    if (other := sum(shares.values()) - sum(named.values())) >= _LEAST_SHARE:
        named["other"] = other
    parts = [f"{part} {100 * share:.0f} %" for part, share in sorted(named.items(), key=lambda one: -one[1])]
    of = f"{100 * view.goodput:.0f} % of {number(round(total), 3)} worker seconds"
    return f"{of}: {', '.join(parts)}" if parts else of


_LEAST_SHARE = 0.005
_SAME = 0.01
