"""Decides about the end of training, and the script of worker 0, which continues after training.

Training ends with the last checkpoint. The first message of a pod that has received the end sets the condition Trained
(O10). The job ends when the script of worker 0 has ended. Its exit code counts, because exporting and uploading a model
is part of the job. The job no longer needs any other pod.

The final message of shard 0 names the incarnation of rank 0 that has the result (`TrainingEnded.returned`). A worker
reports the result to that server before `train` returns. If the worker died before that, it is replaced, and its
replacement reads the last checkpoint. If it was lost after that, it is not replaced: its script must not do its work
twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Final, TypeAlias

from backstay_spec import end_of_job, runtime, status
from backstay_spec.causes import PodOutcome, finite, outcome_of, parsed, terminated_state, verdict_of
from backstay_spec.contract import AFTER_TRAINING_FAILED, ALREADY_COMPLETE, STOPPED_EARLY
from backstay_spec.events import normal, warning
from backstay_spec.job_report import CheckpointStatus
from backstay_spec.planner import replacement
from backstay_spec.planner.conditions import Statement
from backstay_spec.planner.creating import create, look_up
from backstay_spec.planner.effects import Decision, Effects, JobFailure
from backstay_spec.planner.end import Success
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.last_messages import SHARD_0, WORKER_0, LastMessages
from backstay_spec.planner.new_status import checkpoint_status
from backstay_spec.planner.pods import PodView, cause_due, ended_at, has_worked, is_restored
from backstay_spec.planner.record import Record

__all__ = [
    "AFTER_TRAINING",
    "WORKER_0",
    "Act",
    "Ended",
    "HasResult",
    "TrainingEnded",
    "Verdict",
    "Worker0Pod",
    "interrupted",
    "judge",
    "restored_from",
    "statements",
    "trained",
]

# Worker 0 may end before shard 0's server, whose final message has the loss and the metrics.
LAST_MESSAGE: Final = timedelta(seconds=end_of_job.LAST_MESSAGE)
# Shard 0's server leaves within these times: without a checkpoint, rank 0 needs it.
STAYS_STORED: Final = timedelta(seconds=end_of_job.STAYS_STORED)
STAYS: Final = timedelta(seconds=end_of_job.STAYS)


@dataclass(frozen=True, slots=True)
class TrainingEnded:
    """Training has ended.

    Attributes:
        reason, message: the reason and the message of the condition.
        fields: fields of the status, from the final messages of the pods.
        returned: the incarnation of rank 0 that has the result; 0: none has it; None: not known.
        checkpoint: the last one; None where none is stored.
        confirmed: whether shard 0's server reported it, and not only another pod.
        served_until: the latest time at which shard 0's server may still run. Its last message will name the
            incarnation of rank 0 that has the result, and a worker can get the result from that server. None: the
            server has ended.
    """

    reason: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    returned: int | None = None
    checkpoint: CheckpointStatus | None = None
    confirmed: bool = False
    served_until: datetime | None = None

    @property
    def stored(self) -> str:
        """The place of the result in words."""
        if self.checkpoint is None:
            return "the job stores no checkpoint"
        return f"the checkpoint of step {self.checkpoint.step} is {self.checkpoint.uri}"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the job; `complete` is the condition AfterTrainingComplete."""

    ending: Success | JobFailure
    complete: Statement


Verdict: TypeAlias = Ended | Decision


class Worker0Pod(Enum):
    """The newest pod of worker 0 after training."""

    DUE = "is to be created, or its creation was refused"
    UNSEEN = "is not in the list of pods"
    GONE = "does not exist"
    RUNS = "runs"
    ENDS = "has ended, and another pod of its rank has the cause"
    DONE = "has ended with code 0"
    LOST = "was lost: evicted, deleted, or with its node"
    FAILED = "has failed: exit code, or memory"


class HasResult(Enum):
    """Whether that pod has received the result of training."""

    PRESENT = "it has the result"
    UNCERTAIN = "it may have it"
    ABSENT = "it does not"


class Act(Enum):
    """The verdict about it."""

    WAIT = "wait"
    LOOK_UP = "read the pod by its name"
    REPLACE = "replace it"
    COMPLETE = "the job succeeds"
    LOSE = "the job succeeds, with a warning"
    FAIL = "the job fails"


def _row(present: Act | None, uncertain: Act, absent: Act) -> Mapping[HasResult, Act]:
    found = {HasResult.PRESENT: present, HasResult.UNCERTAIN: uncertain, HasResult.ABSENT: absent}
    return {result: act for result, act in found.items() if act is not None}


# A pod that may have the result may have done the work of the script, which a replacement would do again. If it failed,
# it ended by itself: with the result in the code after training, and otherwise within `train`, before that code.
# Only a pod that has ended shows that it has the result.
AFTER_TRAINING: Final[Mapping[Worker0Pod, Mapping[HasResult, Act]]] = {
    Worker0Pod.DUE: _row(None, Act.REPLACE, Act.REPLACE),
    Worker0Pod.UNSEEN: _row(None, Act.LOOK_UP, Act.REPLACE),
    Worker0Pod.GONE: _row(None, Act.LOSE, Act.REPLACE),
    Worker0Pod.RUNS: _row(None, Act.WAIT, Act.REPLACE),
    Worker0Pod.ENDS: _row(Act.WAIT, Act.WAIT, Act.WAIT),
    Worker0Pod.DONE: _row(Act.COMPLETE, Act.COMPLETE, Act.REPLACE),
    Worker0Pod.LOST: _row(Act.LOSE, Act.LOSE, Act.REPLACE),
    Worker0Pod.FAILED: _row(Act.FAIL, Act.REPLACE, Act.REPLACE),
}


def trained(facts: Facts, record: Record, said: LastMessages) -> TrainingEnded | None:
    """Returns whether training has ended: by the final message of any pod, or by the status."""
    known = facts.conditions.get(status.TRAINED)
    holds = status.holds(facts.conditions, status.TRAINED)
    if not (holds or said.outcomes):
        return None
    fields: dict[str, Any] = {}
    for outcome in said.outcomes:
        fields |= _fields(facts, outcome)
    if said.server is not None and said.server.term is not None:
        # Only with the message that has the term's start: its events are sent when the term is new.
        fields["term"] = said.server.term
    returned: int | None = said.returned or None
    if said.server is not None and returned is None:
        returned = said.server.returned
    if holds and known is not None:
        reason, text = known.reason, known.message
    else:
        reason, text = said.reason, _text(said.reason, fields, facts.old.step)
        wrong = facts.old.non_finite_loss or (facts.progress and facts.progress.report.non_finite_loss)
        text += "" if wrong is None else f"; the loss was NaN or infinite, first at step {wrong}"
    found = TrainingEnded(
        reason=reason,
        message=text,
        fields=fields,
        returned=returned,
        checkpoint=fields.get("checkpoint", facts.old.checkpoint),
        confirmed=said.server is not None,
    )
    return replace(found, served_until=_served_until(facts, record, found))


def _text(reason: str, fields: Mapping[str, Any], known_step: int | None) -> str:
    step = fields.get("step", known_step)
    stored = f", stored as {fields['checkpoint'].uri}" if "checkpoint" in fields else ""
    if reason == ALREADY_COMPLETE:
        return f"a checkpoint held step {step} already, so nothing was left to train{stored}"
    if reason == STOPPED_EARLY:
        return f"training was stopped early, at step {step}, because stop_when returned true{stored}"
    return f"trained to step {step}{stored}"


def _begun(facts: Facts) -> datetime:
    """Returns when the end of training was observed; now, if it is observed for the first time."""
    since = facts.conditions.get(status.TRAINED)
    return since.last_transition_time if since is not None and since.status == "True" else facts.now


def _served_until(facts: Facts, record: Record, end: TrainingEnded) -> datetime | None:
    server = facts.pod(SHARD_0, record.current(SHARD_0))
    return None if end.confirmed or server is None or not server.alive else _decided_by(facts, end)


def judge(facts: Facts, record: Record, end: TrainingEnded) -> Verdict:
    """Returns the verdict about worker 0 after training, which is the job's end, or the next actions."""
    verdict = _judge_worker_0(facts, record, end)
    if isinstance(verdict, Ended):
        return verdict
    if verdict.effects.failure is not None:
        return _failed(end, verdict.effects.failure.message)
    seconds = facts.spec.run_policy.after_training_seconds
    deadline = _begun(facts) + timedelta(seconds=seconds)
    if facts.now < deadline:
        return verdict.also(Effects(wake=deadline)).also(Effects(wake=_decided_by(facts, end)))
    late = f"the script of worker 0 has not ended within spec.runPolicy.afterTrainingSeconds ({seconds} s)"
    return _failed(end, late)


def statements(end: TrainingEnded, verdict: Verdict) -> list[Statement]:
    """Returns the conditions Trained and AfterTrainingComplete, and the other conditions in the meantime."""
    found = [Statement(status.TRAINED, True, end.reason, end.message, normal("Trained", end.message))]
    if isinstance(verdict, Ended):
        return [*found, verdict.complete]
    text = "training has ended; the script of worker 0 has not ended yet"
    return [
        *found,
        Statement(status.AFTER_TRAINING_COMPLETE, None, "ScriptRuns", text),
        Statement(status.RUNNING, True, "AfterTraining", text),
        Statement(status.TRAINING, False, "Trained", "training has ended"),
        Statement(status.PODS_READY, False, "Trained", "training has ended, and the other pods are ending"),
    ]


def interrupted(end: TrainingEnded, failure: JobFailure) -> Ended:
    """Another policy ends the job while the script of worker 0 runs."""
    text = f"{failure.message}; {end.stored}"
    complete = Statement(status.AFTER_TRAINING_COMPLETE, False, failure.reason, text)
    return Ended(JobFailure(failure.reason, text, failure.detail, end.fields), complete)


def restored_from(end: TrainingEnded, facts: Facts) -> runtime.Trained | None:
    """Returns how a worker that is created now gets the result, or None if the servers send it, or no checkpoint has
    it."""
    if end.checkpoint is None or not end.checkpoint.uri or end.served_until is not None:
        return None
    metrics = (facts.progress and finite(facts.progress.report.metrics)) or facts.old.metrics
    return runtime.Trained(step=end.checkpoint.step, checkpoint=end.checkpoint.uri, metrics=dict(metrics))


def _judge_worker_0(facts: Facts, record: Record, end: TrainingEnded) -> Verdict:
    pod = facts.pod(WORKER_0, record.current(WORKER_0))
    found = _by_named_pod(facts, record, end, pod)
    if found is not None:
        return found
    if _waits_for_servers(end, pod) or _waits_for_its_rank(facts, pod):
        return replacement.judge(facts, record, WORKER_0)
    result = _has_result(facts, end, pod)
    act = AFTER_TRAINING[_worker_0_pod(facts, record, end, pod, result)][result]
    return _verdict(facts, record, end, pod, act)


def _by_named_pod(facts: Facts, record: Record, end: TrainingEnded, pod: PodView | None) -> Verdict | None:
    """Returns the verdict about the pod that has the result by a last message, if it has ended in order or was replaced
    during training."""
    if not end.returned:
        return None
    named = facts.pod(WORKER_0, end.returned)
    if named is not None and _is_done(named):
        return _complete(facts, record, end, named)
    if record.current(WORKER_0) > end.returned and not (pod is not None and is_restored(pod)):
        return _lost(end, f"incarnation {end.returned} of worker 0 had the result and was lost")
    return None


def _waits_for_servers(end: TrainingEnded, pod: PodView | None) -> bool:
    """Returns whether worker 0 is judged as before the end: the servers have the result."""
    return end.served_until is not None and not end.returned and not _has_ended_in_order(pod)


def _waits_for_its_rank(facts: Facts, pod: PodView | None) -> bool:
    """Returns whether not all pods of its rank were created. None of them has the result before all have joined."""
    joins = pod is not None and pod.alive and is_restored(pod) and not has_worked(pod, None)
    return joins and pod is not None and bool(facts.absent(WORKER_0, pod.incarnation))


def _verdict(facts: Facts, record: Record, end: TrainingEnded, pod: PodView | None, act: Act) -> Verdict:
    current = record.current(WORKER_0)
    match act:
        case Act.LOOK_UP:
            return Decision(record, look_up(facts, WORKER_0, current))
        case Act.REPLACE:
            return _replaced(facts, record, end, pod)
        case Act.WAIT:
            return Decision(record, Effects(wake=None if pod is None or pod.alive else cause_due(pod)))
        case Act.LOSE if pod is None:
            return _lost(end, f"worker 0 (pod {facts.pod_name(WORKER_0, current)}) no longer exists")
        case Act.LOSE if pod is not None:
            return _lost(end, f"worker 0 (pod {pod.name}) was lost before its script had ended: {_death(pod)}")
        case Act.COMPLETE if pod is not None:
            return _complete(facts, record, end, pod)
        case Act.FAIL if pod is not None:
            found = outcome_of(pod.raw)
            text = f"worker 0 (pod {pod.name}) failed after training: {_death(pod)}"
            failed = _failed(end, text, found.traceback if found is not None else "")
            return _once_server_left(facts, record, end, pod, failed)
    raise ValueError(f"worker 0 has no pod, which {act.name} needs")


def _worker_0_pod(
    facts: Facts, record: Record, end: TrainingEnded, pod: PodView | None, result: HasResult
) -> Worker0Pod:
    # A pod may end with the result, and be counted as dead before the servers report the end of training.
    had_it = result is HasResult.PRESENT or (pod is None and end.returned == record.current(WORKER_0))
    if record.waits_until(WORKER_0.key) is not None and not had_it:
        return Worker0Pod.DUE
    if pod is None:
        current = record.current(WORKER_0)
        if facts.refusal(WORKER_0, current) is not None:
            return Worker0Pod.DUE
        return Worker0Pod.GONE if facts.pod_name(WORKER_0, current) in facts.observed.missing else Worker0Pod.UNSEEN
    if pod.alive:
        return Worker0Pod.RUNS
    cause_by = cause_due(pod)
    if cause_by is not None and facts.now < cause_by:
        return Worker0Pod.ENDS
    if _is_done(pod):
        return Worker0Pod.DONE
    return Worker0Pod.FAILED if verdict_of(pod.raw).cause.charged else Worker0Pod.LOST


def _has_result(facts: Facts, end: TrainingEnded, pod: PodView | None) -> HasResult:
    if pod is None:
        return HasResult.ABSENT if end.returned == 0 else HasResult.UNCERTAIN
    if pod.alive:
        return HasResult.ABSENT if _lacks_result(facts, end, pod) else HasResult.UNCERTAIN
    found = outcome_of(pod.raw)
    returned = found is not None and found.returned_from_train
    # A message that the script has overwritten is not the trainer's; then shard 0's message counts.
    if returned or (found is None and end.returned == pod.incarnation and not _failed_in_train(pod)):
        return HasResult.PRESENT
    # A worker that was created after training is Ready as soon as it has the result.
    has = end.returned is None or (is_restored(pod) and has_worked(pod, None))
    return HasResult.UNCERTAIN if has else HasResult.ABSENT


def _has_ended_in_order(pod: PodView | None) -> bool:
    """Returns whether `train` has returned in this pod, by its message, or by its exit code where the script has
    replaced the message."""
    if pod is None or not pod.ended:
        return False
    found = outcome_of(pod.raw)
    return found.returned_from_train if found is not None else _is_done(pod)


def _exit_code(pod: PodView) -> Any:
    return (terminated_state(pod.raw) or {}).get("exitCode")


def _is_done(pod: PodView) -> bool:
    return pod.ended and _exit_code(pod) == 0 and not pod.deleting


def _death(pod: PodView) -> str:
    return verdict_of(pod.raw).text


def _decided_by(facts: Facts, end: TrainingEnded) -> datetime | None:
    """Returns the time when it is certain that a worker 0 that never was Ready gets nothing from the servers. It is
    None if that is certain."""
    until = _begun(facts) + (STAYS if end.checkpoint is None else STAYS_STORED)
    return until if facts.now < until else None


def _lacks_result(facts: Facts, end: TrainingEnded, pod: PodView) -> bool:
    """Returns whether this living pod waits for servers that have left.

    A server that finds the training complete does not know whether worker 0 has reported to a previous one. But a pod
    that never was Ready, such as one that was created with that server after a suspension, has no result.
    """
    if is_restored(pod):
        return False
    if end.returned is None and not has_worked(pod, None):
        return end.reason == ALREADY_COMPLETE or _decided_by(facts, end) is None
    return end.returned == 0


def _replaced(facts: Facts, record: Record, end: TrainingEnded, pod: PodView | None) -> Verdict:
    """Worker 0 does not have the result: its replacement reads the last checkpoint.

    Args:
        pod: its pod; one that is alive tries to connect to servers that have left.
    """
    if restored_from(end, facts) is None:
        return _failed(end, "worker 0 died before it had the result of the training, and the servers have ended")
    if pod is None or not pod.alive or record.waits_until(WORKER_0.key) is not None:
        return replacement.judge(facts, record, WORKER_0)
    return create(record, WORKER_0, None) if facts.can_create else Decision(record)


def _complete(facts: Facts, record: Record, end: TrainingEnded, pod: PodView) -> Verdict:
    """The script has ended with exit code 0."""
    kind = status.AFTER_TRAINING_COMPLETE
    complete = Statement(kind, True, "Completed", "the script of worker 0 has ended with exit code 0")
    ended = Ended(Success(end.reason, end.message, end.fields), complete)
    return _once_server_left(facts, record, end, pod, ended)


def _once_server_left(facts: Facts, record: Record, end: TrainingEnded, pod: PodView, ended: Ended) -> Verdict:
    """Returns the verdict `ended`, or a short wait for the final message of shard 0's server, which has the loss."""
    server = facts.pod(SHARD_0, record.current(SHARD_0))
    at = ended_at(pod)
    if not end.confirmed and server is not None and server.alive and at is not None and facts.now < at + LAST_MESSAGE:
        return Decision(record, Effects(wake=at + LAST_MESSAGE))
    return ended


def _lost(end: TrainingEnded, why: str) -> Verdict:
    text = f"{why}; whether its code after training was complete is not known; {end.stored}"
    complete = Statement(status.AFTER_TRAINING_COMPLETE, False, "PodLost", text, warning("AfterTrainingLost", text))
    return Ended(Success(end.reason, end.message, end.fields), complete)


def _failed(end: TrainingEnded, why: str, detail: str = "") -> Ended:
    text = f"{why.rstrip('.')}; {end.stored}"
    complete = Statement(status.AFTER_TRAINING_COMPLETE, False, AFTER_TRAINING_FAILED, text)
    return Ended(JobFailure(AFTER_TRAINING_FAILED, text, detail, end.fields), complete)


def _failed_in_train(pod: PodView) -> bool:
    """Returns whether the final message is the trainer's about an exception inside `train`."""
    return "reason" in (parsed((terminated_state(pod.raw) or {}).get("message") or "") or {})


def _fields(facts: Facts, found: PodOutcome) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if found.step is not None:
        fields["step"] = found.step
        if found.checkpoint:
            reported = None if facts.progress is None else facts.progress.report.checkpoint
            stored = CheckpointStatus(step=found.step, uri=found.checkpoint).dated(reported)
            fields["checkpoint"] = checkpoint_status(facts.old, stored, facts.now)
    return fields
