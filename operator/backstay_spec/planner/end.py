"""Decides how a job stops, by its outcome, its deadlines, suspension, and the clean-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract, end_of_job, names, status
from backstay_spec.actions import Action, DeleteJob, DeleteNetworkPolicy, DeletePod, DeleteSecret, DeleteService
from backstay_spec.causes import Blocked, outcome_of
from backstay_spec.contract import ALREADY_COMPLETE
from backstay_spec.names import Slot
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import Effects, JobFailure, Obstructed
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, gone_by, has_worked, is_deleting, is_owned
from backstay_spec.planner.record import Record
from backstay_spec.types_status import Condition

__all__ = ["Success", "active_deadline", "clean_up", "failure", "pending_deadline", "suspended"]

# When the last step is stored, the pods leave by themselves; deleting them immediately would lose their last log lines.
LEAVING: Final = timedelta(seconds=end_of_job.LEAVING)


@dataclass(frozen=True, slots=True)
class Success:
    """The job has succeeded; `fields` are fields of its status."""

    reason: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def failure(facts: Facts, record: Record) -> JobFailure | None:
    """Returns the job's failure, if a pod reported it.

    A server may report it at any time. Before the first update, the final refusal of a pod counts too: its parameters
    differ, and those of its replacement would differ too (O4). Later the other pods continue, so a refused rank counts
    as crashed, with its back-off and its budget.
    """
    for slot, pods in sorted(facts.pods.items()):
        if not any(p.ended for p in pods):
            continue
        pod = facts.pod(slot, record.current(slot))
        found = outcome_of(pod.raw) if pod is not None and pod.ended else None
        if found is None or found.succeeded:
            continue
        if facts.trained if found.refused else slot.role != contract.ROLE_SERVER:
            continue
        message = found.message or "the training runtime gave no reason"
        reason = "Refused" if found.refused else "TrainingFailed"
        return JobFailure(status.reason_or(found.reason, reason), f"{slot.text}: {message}", found.traceback)
    return None


def active_deadline(facts: Facts) -> Effects:
    """Returns whether the job has run for longer than `activeDeadlineSeconds`."""
    limit, started = facts.spec.run_policy.active_deadline_seconds, facts.old.start_time
    if limit is None:
        return Effects()
    deadline = (started or status.whole_seconds(facts.now)) + timedelta(seconds=limit)
    if facts.now < deadline:
        return Effects(wake=deadline)
    text = f"the job ran for {limit} s, the limit of spec.runPolicy.activeDeadlineSeconds"
    return Effects(failure=JobFailure("DeadlineExceeded", text))


def pending_deadline(facts: Facts, obstructed: Sequence[Obstructed], held: Mapping[Slot, int]) -> Effects:
    """Returns whether a pod that the job needs could not be started in time: a server, or so many ranks that the quorum
    is missing.

    A rank counts once it has waited for the whole time. Otherwise, a backup that waits for room would end the job with
    the next death of another rank.

    Args:
        held: ranks without a living pod, of which none is created before those of the quorum -> their incarnation.
    """
    seconds, world = facts.spec.run_policy.pending_deadline_seconds, facts.needed_world
    limit, start = timedelta(seconds=seconds), facts.old.start_time or facts.now
    effects, late = Effects(), []
    for found in obstructed:
        is_server = found.slot.role == contract.ROLE_SERVER and not found.standby
        if not is_server and (found.slot.role != contract.ROLE_WORKER or found.slot.index >= world):
            continue
        if found.obstacle.blocked is Blocked.GATED:
            continue  # the controller that set the gate, such as a queue, decides when the pod may start
        due = max(found.since, start) + limit  # a refusal of before a suspension is past
        if facts.now < due:
            effects += Effects(wake=due)
        else:
            late.append(found)
    # Each pod of a rank that was refused is one entry.
    ranks = {found.slot for found in late if found.slot.role == contract.ROLE_WORKER}
    for slot, incarnation in held.items() if ranks else ():
        # It may have died now. The quorum lacks it for as long as there are no updates.
        due = max(_idle_since(facts), facts.lost_at(slot, incarnation)) + limit
        if slot.index < world and facts.now < due:
            effects += Effects(wake=due)
        elif slot.index < world:
            ranks.add(slot)
    is_short = world - len(ranks) < facts.spec.update.quorum(world)
    for found in sorted(late, key=lambda one: one.obstacle.blocked is Blocked.GIVEN_BACK):  # others say more
        if found.slot.role == contract.ROLE_SERVER or is_short:
            failed = "did not join" if found.obstacle.blocked is Blocked.NOT_JOINED else "could not be started"
            text = (
                f"{found.slot.text} {failed} within spec.runPolicy.pendingDeadlineSeconds "
                f"({seconds} s): {found.obstacle.text}"
            )
            return effects + Effects(failure=JobFailure(found.obstacle.blocked, text))
    return effects


def _idle_since(facts: Facts) -> datetime:
    """Returns the time of the last update, or of the start if there was none yet."""
    if facts.observed.updates is not None:
        return facts.observed.updates.at
    known, start = facts.conditions.get(status.TRAINING), facts.old.start_time or facts.now
    if not facts.trained or known is None:
        return start
    # A new operator has no answer of the servers yet.
    made = facts.observed.begun if known.status == "True" else None
    return max(known.last_transition_time, made or start)


def suspended(facts: Facts) -> tuple[Effects, bool]:
    """Delete the workers, and when they no longer exist, the servers, which then store a checkpoint.

    Returns:
        The effects, and whether a pod may still run.
    """
    effects, lingering = Effects(), False
    for slot in sorted(facts.pods, reverse=True):
        if slot.role != contract.ROLE_SERVER:
            for pod in facts.pods[slot]:
                deleted, running = _delete_running(facts, pod, "Suspended")
                effects, lingering = effects + deleted, lingering or running
    if lingering:
        return effects, True
    for slot in sorted(facts.pods):
        if slot.role == contract.ROLE_SERVER:
            for pod in facts.pods[slot]:
                deleted, running = _delete_running(facts, pod, "Suspended")
                effects, lingering = effects + deleted, lingering or running
    return effects, lingering


def _delete_running(facts: Facts, pod: PodView, reason: str) -> tuple[Effects, bool]:
    """Delete a pod unless it has ended. Also returns whether it may still run: the pod of a lost node is assumed to run
    only for its grace period (T8)."""
    if pod.terminal:
        return Effects(), False
    if not pod.deleting:
        return Effects(actions=deletions(pod, None, reason)), not pod.ended
    end = gone_by(pod)
    if pod.ended or end is None or facts.now >= end:
        return Effects(), False
    return Effects(wake=end), True


def clean_up(facts: Facts, conditions: Mapping[str, Condition], completed: datetime) -> Effects:
    """Clean up after a job that has ended.

    Delete its pods by `cleanPods`, then the objects that they used, and then the job itself by its time to live.

    Args:
        conditions: the conditions of the job that has ended.
        completed: when the job ended.
    """
    policy, effects = facts.spec.run_policy, Effects()
    deletable = [
        pod
        for _, views in sorted(facts.pods.items(), reverse=True)
        for view in views
        for pod in view.pods
        if not pod.deleting and (policy.clean_pods == "All" or (policy.clean_pods == "Running" and not pod.terminal))
    ]
    leave_by = completed + LEAVING if _leave(facts, conditions) else completed
    if deletable and facts.now < leave_by and any(not pod.terminal for pod in deletable):
        effects += Effects(wake=leave_by)
    else:
        effects += Effects(actions=tuple(DeletePod(pod.name, pod.uid, None, "Finished") for pod in deletable))
        effects += _delete_objects(facts)
    if policy.ttl_seconds_after_finished is None:
        return effects
    expiry = completed + timedelta(seconds=policy.ttl_seconds_after_finished)
    if facts.now < expiry:
        return effects + Effects(wake=expiry)
    last: Action = DeleteJob(facts.meta.name, facts.meta.uid)
    return effects + Effects(actions=(last,))


def _leave(facts: Facts, conditions: Mapping[str, Condition]) -> bool:
    """Returns whether pods may leave by themselves.

    Where nothing was left to train, shard 0's server ends immediately. Pods that have not joined it, and thus never
    were Ready, do not receive the end of the job.
    """
    if not status.holds(conditions, status.SUCCEEDED):
        return False
    joined = any(has_worked(view, None) for views in facts.pods.values() for view in views if not view.ended)
    return joined or conditions[status.SUCCEEDED].reason != ALREADY_COMPLETE


def _delete_objects(facts: Facts) -> Effects:
    """Delete the Secret, the Services and the NetworkPolicy once no pod of the job runs.

    The Secret is deleted before the NetworkPolicy. The operator cannot read whether a Secret exists, so it may exist as
    long as the policy exists. After both are deleted, nothing is left to do for any operator.
    """
    meta = facts.meta
    if any(not pod.terminal for pods in facts.pods.values() for pod in pods):
        return Effects()
    services = [found for found in facts.observed.services if is_owned(found, meta.uid) and not is_deleting(found)]
    policies = [
        found for found in facts.observed.network_policies if is_owned(found, meta.uid) and not is_deleting(found)
    ]
    actions: list[Action] = [DeleteService(found["metadata"]["name"], found["metadata"]["uid"]) for found in services]
    if policies and not facts.observed.secret_deleted:
        actions.append(DeleteSecret(names.secret_name(meta.name, meta.uid)))
    elif policies:
        actions += [DeleteNetworkPolicy(found["metadata"]["name"], found["metadata"]["uid"]) for found in policies]
    return Effects(actions=tuple(actions))
