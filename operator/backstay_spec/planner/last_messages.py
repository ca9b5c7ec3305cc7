"""Reads the end of training from the termination messages of a job's pods (O10).

Every pod that receives the end of the job reports it when it ends: each server, each worker in which `train` returns,
and the evaluator. One of these messages is enough, in any order, and no answer to a call is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backstay_spec import contract
from backstay_spec.causes import FAILED, PodOutcome, outcome_of
from backstay_spec.contract import ALREADY_COMPLETE, STOPPED_EARLY
from backstay_spec.job_report import JobReport
from backstay_spec.names import Slot
from backstay_spec.observed import Progress
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView
from backstay_spec.planner.record import Record

__all__ = ["SHARD_0", "WORKER_0", "LastMessages", "last_messages"]

WORKER_0 = Slot(contract.ROLE_WORKER, 0)
SHARD_0 = Slot(contract.ROLE_SERVER, 0)


@dataclass(frozen=True, slots=True)
class LastMessages:
    """The messages of pods that ended after training.

    Attributes:
        outcomes: all of them; those of worker 0 and then of shard 0's server last, because they have more fields.
        server: the message of shard 0's server.
        returned: the newest incarnation of rank 0 whose message says that `train` had returned; 0: none.
        failure: the message of shard 0's server about the job's failure; None: there is none.
    """

    outcomes: tuple[PodOutcome, ...] = ()
    server: PodOutcome | None = None
    returned: int = 0
    failure: PodOutcome | None = None

    @property
    def reason(self) -> str:
        """The reason why training ended, which is ``AlreadyComplete``, ``StoppedEarly`` or ``Completed``."""
        if any(ALREADY_COMPLETE in (found.result, found.reason) for found in self.outcomes):
            return ALREADY_COMPLETE
        return STOPPED_EARLY if any(found.reason == STOPPED_EARLY for found in self.outcomes) else "Completed"

    def over(self, facts: Facts) -> Facts:
        """Returns the facts with the report in these messages, which is newer than the servers' last answer to a call.
        A job of a second has ended before the first call."""
        report = JobReport()
        for outcome in (*self.outcomes, *(() if self.failure is None else (self.failure,))):
            report = outcome.report().over(report)
        if not report.model_fields_set:
            return facts
        progress = facts.progress or Progress(taken=facts.now)
        newer = replace(progress, report=report.over(progress.report))
        return replace(facts, observed=replace(facts.observed, progress=newer))


def last_messages(facts: Facts, record: Record) -> LastMessages:
    """Returns the messages that count, of no earlier run, and of no pod that a newer incarnation replaced in time
    (T6)."""
    found = [
        (slot, pod, outcome)
        for slot, pods in sorted(facts.pods.items())
        if not facts.outlived_suspension(slot)
        for pod in pods
        if (outcome := outcome_of(pod.raw)) is not None
        and (outcome.succeeded or outcome.returned_from_train)
        and _counts(facts, record, pod, outcome)
    ]
    found.sort(key=lambda each: (each[0] == WORKER_0) + 2 * (each[0] == SHARD_0))
    current = record.current(SHARD_0)
    return LastMessages(
        tuple(outcome for _, _, outcome in found),
        next((outcome for slot, pod, outcome in found if slot == SHARD_0 and pod.incarnation == current), None),
        max((pod.incarnation for slot, pod, _ in found if slot == WORKER_0), default=0),
        _failure(facts, current),
    )


def _failure(facts: Facts, current: int) -> PodOutcome | None:
    """Returns the message of shard 0's server about the job's failure, or None if there is none."""
    pod = facts.pod(SHARD_0, current)
    found = outcome_of(pod.raw) if pod is not None and not facts.outlived_suspension(SHARD_0) else None
    return found if found is not None and found.result == FAILED else None


def _counts(facts: Facts, record: Record, pod: PodView, outcome: PodOutcome) -> bool:
    """Returns whether the message of a pod counts. That of a replaced pod counts if a checkpoint of this run has the
    result. Otherwise its successor may have begun another history."""
    if pod.incarnation >= record.current(pod.slot):
        return True
    return bool(outcome.checkpoint) and facts.is_of_this_run(pod)
