"""Decides the cost of a pod's death (O4), and whether its slot may have another pod.

A crash is charged to its role's `maxRestarts`. A disruption is replaced without charge. A slot backs off if its pods
die before they did any work. It waits after each crash, and from the third death in a row on after any death. So no
cause makes pods without limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from backstay_spec import contract
from backstay_spec.causes import Verdict
from backstay_spec.events import one_line
from backstay_spec.names import Slot
from backstay_spec.planner.effects import JobFailure
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, created_at, has_run, has_worked, is_settled
from backstay_spec.planner.record import Record, standby_key
from backstay_spec.types import TrainingJobSpec
from backstay_spec.types_status import Backoff

__all__ = [
    "HOPELESS",
    "Cost",
    "NoReplacement",
    "backed_off",
    "cost_of_pod",
    "cost_of_standby",
    "is_brief",
    "is_spent",
    "wait_after",
]

LONGEST_WAIT: Final = timedelta(seconds=60)
# After this many crashes in a row of one slot before the first update, the script is considered broken. The waits are
# 1 + 2 + 4 + 8 + 16 s. No work is lost by then. After the first update, the budgets decide.
HOPELESS: Final = 6
# Disruptions in a row without a wait.
UNPACED: Final = 2
# A pod that ran for this long before a disruption is not in a row of deaths, even without known work.
LIVED: Final = LONGEST_WAIT
_LAST: Final = 300
# A pod that lives for less is in a row of deaths even if it has worked. Otherwise a slot could have many pods a second.
# Times of Kubernetes are whole seconds.
BRIEF: Final = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class Cost:
    """The slot gets another pod.

    Attributes:
        charged: the death is charged to the role's budget.
        backoff: the slot's back-off after this death; None: its pods have worked.
        wait: the next pod is not created before this time; None: it is created immediately.
    """

    charged: bool
    backoff: Backoff | None
    wait: datetime | None = None


@dataclass(frozen=True, slots=True)
class NoReplacement:
    """A standby gets no successor: the budget is spent."""


PodVerdict: TypeAlias = Cost | JobFailure
StandbyVerdict: TypeAlias = Cost | NoReplacement


def cost_of_pod(facts: Facts, record: Record, pod: PodView, verdict: Verdict) -> PodVerdict:
    """Returns the cost of the death of a slot's current pod; a failure of the job if no replacement can help."""
    slot = pod.slot
    known = record.backoff.get(slot.key)
    # A crash in the first step may come before the next answer of the servers. It does not end a row of deaths.
    worked = (has_worked if known is None else is_settled)(pod, facts.progress)
    if not verdict.cause.charged:
        return _uncharged(facts, pod, known, verdict, worked=worked)
    if is_spent(facts, record, slot):
        budget = max_restarts(facts.spec, slot.role)
        return JobFailure(
            "MaxRestartsExceeded",
            f"{slot.text} (pod {pod.name}) died ({verdict.cause}: {verdict.text}), and the "
            f"{budget_field(slot.role)} of {budget} is used up",
        )
    if worked:
        return Cost(charged=True, backoff=None)
    backoff = backed_off(facts, known, verdict, started=has_run(pod), charged=True)
    if backoff.failures >= HOPELESS and slot.role != contract.ROLE_EVALUATOR and not facts.trained:
        return JobFailure(
            "CrashLoop",
            f"{slot.text} died {backoff.failures} times in a row, and there has been no update yet; the "
            f"last time (pod {pod.name}): {verdict.cause}: {verdict.text}",
        )
    return Cost(charged=True, backoff=backoff, wait=backoff.not_before)


def cost_of_standby(facts: Facts, record: Record, standby: PodView, verdict: Verdict) -> StandbyVerdict:
    """Returns the cost of the death of a standby, which is the same, but a spent budget ends only the standbys."""
    known, worked = record.backoff.get(standby_key(standby.slot)), has_worked(standby, facts.progress)
    if not verdict.cause.charged:
        return _uncharged(facts, standby, known, verdict, worked=worked)
    if is_spent(facts, record, standby.slot):
        return NoReplacement()
    if worked:
        return Cost(charged=True, backoff=known)
    backoff = backed_off(facts, known, verdict, started=has_run(standby), charged=True)
    return Cost(charged=True, backoff=backoff, wait=backoff.not_before)


def _uncharged(facts: Facts, pod: PodView, known: Backoff | None, verdict: Verdict, *, worked: bool) -> Cost:
    age = _age(facts, pod) or timedelta()
    if (worked and age >= BRIEF) or (has_run(pod) and age >= LIVED):
        return Cost(charged=False, backoff=None)
    backoff = backed_off(facts, known, verdict, started=has_run(pod))
    return Cost(charged=False, backoff=backoff, wait=backoff.not_before)


def is_brief(facts: Facts, pod: PodView, known: Backoff) -> bool:
    """Returns whether a pod has not lived long enough to end a row of deaths in which a death was not charged."""
    age = _age(facts, pod)
    return (known.deaths or 0) > known.failures and age is not None and age < BRIEF


def _age(facts: Facts, pod: PodView) -> timedelta | None:
    created = created_at(pod)
    return None if created is None else facts.now - created


def is_spent(facts: Facts, record: Record, slot: Slot) -> bool:
    """Returns whether the budget of the slot's role is used up."""
    return record.restarts_of(slot) >= max_restarts(facts.spec, slot.role)


def max_restarts(spec: TrainingJobSpec, role: str) -> int:
    """Returns the budget of a role (value of the role label)."""
    if role == contract.ROLE_SERVER:
        return spec.parameter_servers.max_restarts
    if role == contract.ROLE_WORKER:
        return spec.workers.max_restarts
    return spec.evaluator.max_restarts if spec.evaluator is not None else 0


def budget_field(role: str) -> str:
    """Returns the field of a TrainingJob with the budget of a role."""
    part = {contract.ROLE_SERVER: "parameterServers", contract.ROLE_WORKER: "workers"}.get(role, "evaluator")
    return f"spec.{part}.maxRestarts"


def wait_after(failures: int, first: timedelta = timedelta(seconds=1)) -> timedelta:
    """Returns how long a slot waits after its `failures`-th crash in a row before its first gradient: 1, 2, 4 ... 60 s.

    Args:
        first: the wait after the first crash.
    """
    # min() before the power: a job may fail often enough to overflow a timedelta.
    return min(LONGEST_WAIT, first * (1 << min(failures - 1, 6)))


def backed_off(
    facts: Facts, before: Backoff | None, verdict: Verdict, *, started: bool, charged: bool = False
) -> Backoff:
    """Returns the back-off after the death of one more pod that did no work.

    Args:
        started: whether a container of the pod ran.
        charged: whether its death is charged, so that the next pod waits after the first one.
    """
    known, first = before or Backoff(), facts.settings.first_wait
    failures, deaths = known.failures + charged, (known.deaths or 0) + 1
    waits = [wait_after(failures, first)] if charged else []
    waits += [wait_after(deaths - UNPACED, first)] if deaths > UNPACED else []
    return Backoff(
        failures=failures,
        deaths=deaths,
        not_before=facts.now + max(waits) if waits else None,
        unstarted_since=None if started else facts.now if known.deaths is None else known.unstarted_since,
        last=one_line(f"{verdict.cause}: {verdict.text}", _LAST),
    )
