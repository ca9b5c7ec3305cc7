"""How a job stops: its outcome, its deadlines, suspension, and what is cleaned up afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from backstay_spec import contract, status
from backstay_spec.actions import DeleteJob, DeletePod
from backstay_spec.causes import Outcome, outcome_of
from backstay_spec.events import normal
from backstay_spec.observed import Progress
from backstay_spec.plan_draft import Draft, checkpoint_status, readable
from backstay_spec.plan_places import newest_pod
from backstay_spec.plan_pods import PodView, gone_by
from backstay_spec.types import RunPolicy, TrainingJob

# When the last step is stored the pods leave by themselves; deleting them at once would only spoil their last words.
LEAVING: Final = timedelta(seconds=10)


def apply_outcome(draft: Draft, progress: Progress | None) -> None:
    """End the job if a pod has said how it ended: shard 0's success, any server's failure, or, before the first update,
    that a pod was refused for good: its parameters are not the others', and its replacement's would not be (O4).

    Later the others train on, so a rank that is refused is one that crashes, with its back-off and its budget.
    """
    succeeded: Outcome | None = None
    trained = draft.trained(progress)
    for slot, pods in sorted(draft.pods.items()):
        if not any(p.ended for p in pods):
            continue
        pod = newest_pod(draft, slot)
        outcome = outcome_of(pod.raw) if pod is not None and pod.ended else None
        if outcome is None:
            continue
        if trained if outcome.refused else slot.role != contract.ROLE_SERVER:
            continue
        if not outcome.succeeded:
            said = outcome.message or "the training runtime gave no reason"
            reason = "Refused" if outcome.refused else "TrainingFailed"
            draft.fail(status.reason_or(outcome.reason, reason), f"{slot.text}: {said}")
            return
        if slot.index == 0:
            succeeded = outcome
    if succeeded is not None:
        _succeed(draft, succeeded)


def _succeed(draft: Draft, outcome: Outcome) -> None:
    step = outcome.step if outcome.step is not None else draft.old.step
    if outcome.step is not None:
        draft.fields["step"] = outcome.step
        if outcome.checkpoint:
            draft.fields["checkpoint"] = checkpoint_status(draft.old, outcome.step, outcome.checkpoint, draft.now)
    if outcome.term is not None:
        draft.fields["term"] = outcome.term
    if outcome.loss is not None:
        draft.fields["loss"] = readable(outcome.loss, 6)
    if outcome.metrics:
        draft.fields["metrics"] = dict(outcome.metrics)
    stored = f", stored as {outcome.checkpoint}" if outcome.checkpoint else ""
    if outcome.result == "AlreadyComplete":
        draft.succeed("AlreadyComplete", f"a checkpoint held step {step} already, so nothing was left to train{stored}")
    else:
        draft.succeed("Completed", f"trained to step {step}{stored}")


def apply_active_deadline(draft: Draft, policy: RunPolicy) -> None:
    """End the job if it has run for longer than it may."""
    started = draft.fields.get("start_time", draft.old.start_time)
    if policy.active_deadline_seconds is None or started is None:
        return
    deadline = started + timedelta(seconds=policy.active_deadline_seconds)
    if draft.now >= deadline:
        draft.fail(
            "DeadlineExceeded", f"ran for spec.runPolicy.activeDeadlineSeconds: {policy.active_deadline_seconds} s"
        )
    else:
        draft.wake_at(deadline)


def suspend(draft: Draft) -> None:
    """Delete the workers, then, when they are gone, the servers, which store a checkpoint as they leave."""
    if draft.condition(status.SUSPENDED, True, "Suspended", "spec.runPolicy.suspend is true"):
        draft.events.append(
            normal("Suspended", "deleting the workers, then the servers; their state is in the checkpoint")
        )
    draft.condition(status.RUNNING, False, "Suspended", "the job is suspended")
    draft.condition(status.PODS_READY, False, "Suspended", "the job is suspended")
    draft.fields["start_time"] = None
    draft.fields["examples_per_second"] = None
    draft.backoff.clear()
    for role in draft.desired:
        draft.desired[role] = 0
    lingering = False
    for slot in sorted(draft.pods, reverse=True):
        if slot.role != contract.ROLE_SERVER:
            for pod in draft.pods[slot]:
                lingering = _delete_running(draft, pod, "Suspended") or lingering
    for slot in sorted(draft.pods):
        if slot.role == contract.ROLE_SERVER and not lingering:
            for pod in draft.pods[slot]:
                _delete_running(draft, pod, "Suspended")


def _delete_running(draft: Draft, pod: PodView, reason: str) -> bool:
    """Delete a pod unless it has ended; returns whether it may still be running, which a lost node's pod is held to be
    for its grace period only (T8)."""
    if pod.terminal:
        return False
    if not pod.deleting:
        draft.actions.append(DeletePod(pod.name, pod.uid, None, reason))
        return not pod.ended
    end = gone_by(pod)
    if pod.ended or end is None or draft.now >= end:
        return False
    draft.wake_at(end)
    return True


def clean_up(draft: Draft, job: TrainingJob) -> None:
    """What is left to do for a job that has ended: its pods by `cleanPods`, then the job itself by its time to live."""
    policy = job.spec.run_policy
    ended = draft.fields.get("completion_time", draft.old.completion_time) or draft.now
    deletable = [
        pod
        for _, pods in sorted(draft.pods.items(), reverse=True)
        for pod in pods
        if not pod.deleting and (policy.clean_pods == "All" or (policy.clean_pods == "Running" and not pod.terminal))
    ]
    leave_by = ended + LEAVING if status.holds(draft.conditions, status.SUCCEEDED) else ended
    if deletable and draft.now < leave_by and any(not pod.terminal for pod in deletable):
        draft.wake_at(leave_by)
    else:
        draft.actions.extend(DeletePod(pod.name, pod.uid, None, "Finished") for pod in deletable)
    if policy.ttl_seconds_after_finished is not None:
        expiry = ended + timedelta(seconds=policy.ttl_seconds_after_finished)
        if draft.now >= expiry:
            draft.actions.append(DeleteJob(job.metadata.name, job.metadata.uid))
        else:
            draft.wake_at(expiry)
