"""Decides what to do about one job by a pure function of the job, what is observed, and the time (`plan`, O1).

The operator calls it when something may have changed. It reads everything, and returns what is still missing. Its only
memory is the job's status, so it may be called twice, late, or by another process. `backstay_spec.observed` is its
input, `backstay_spec.actions` its output and how to carry it out. The rules are in `backstay_spec.planner`, one module
per policy; this module calls them in order and adds up their verdicts.

The order of things in a job's life:

1. Secret, NetworkPolicy and one Service a shard; their addresses go into the pods' environment.
2. A pod for each slot, replaced when it dies or succeeded by its standby, until a server reports the outcome.
3. Worker 0 alone, until its script has ended.
4. Clean-up, and at last the job's own deletion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from backstay_spec import contract, manifests_pod, names, status
from backstay_spec.actions import Action, CreatePod, DeletePod, Plan
from backstay_spec.advice import advice
from backstay_spec.causes import Blocked
from backstay_spec.events import Event, normal
from backstay_spec.job_report import INTERRUPTED, NO_RATES
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Manifest, Observed, PlanSettings
from backstay_spec.planner import (
    admission,
    after_training,
    conditions,
    end,
    history,
    new_status,
    order,
    replacement,
    same_exception,
    script_mistake,
    services,
    surplus,
)
from backstay_spec.planner.conditions import Statement
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import NOTHING, Creation, Decision, Effects, JobFailure, earliest
from backstay_spec.planner.facts import Facts, desired_slots, facts_of
from backstay_spec.planner.last_messages import LastMessages, last_messages
from backstay_spec.planner.last_step import last_step
from backstay_spec.planner.new_status import NewStatus
from backstay_spec.planner.pods import own_pods
from backstay_spec.planner.record import Record, standby_key
from backstay_spec.runtime import Trained
from backstay_spec.types import ObjectMeta, QueueGroup, TrainingJob
from backstay_spec.types_status import Role, TrainingJobStatus

__all__ = ["plan", "refuse"]

_INVALID_SPEC = "InvalidSpec"


@dataclass(frozen=True, slots=True)
class _Outline:
    """The verdicts of all policies about one job, added up.

    Attributes:
        record, effects: the record and the effects after all policies.
        updated: what the conditions say.
        desired: pods of each role; None: as in the last status.
        fields: other fields of the status.
        all_created: as in `NewStatus`.
    """

    record: Record
    effects: Effects = NOTHING
    statements: tuple[Statement, ...] = ()
    desired: Mapping[Role, int] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    all_created: bool = False


def plan(job: TrainingJob, observed: Observed, now: datetime, settings: PlanSettings) -> Plan:
    """Returns the plan for `job` at this time.

    Args:
        job: as the API server has it, with the status that was last written. Its spec is valid; one that is not goes to
            `refuse`.
        observed: its objects and its servers' answers.
        now: the current time, with a time zone.
        settings: the operator's settings.
    """
    if job.metadata.deletion_timestamp is not None:
        return Plan()  # the garbage collector does the rest
    facts = facts_of(job, observed, now, settings)
    record = Record.of(job.status).including(facts.pods)
    said = LastMessages() if status.has_ended(facts.conditions) else last_messages(facts, record)
    facts = said.over(facts)
    outline = _outline(facts, record, said)
    updated, events = conditions.updated(facts.conditions, outline.statements, now, job.metadata.generation)
    if not facts.has_standbys and not job.spec.run_policy.suspend:
        updated.pop(status.STANDBYS_IN_SYNC, None)
    effects = outline.effects
    if status.has_ended(updated):
        completed = outline.fields.get("completion_time", job.status.completion_time) or now
        cleaned = end.clean_up(facts, updated, completed)
        effects = replace(effects, actions=cleaned.actions, wake=earliest((effects.wake, cleaned.wake)))
    desired = {role: r.desired for role, r in job.status.roles.items()} if outline.desired is None else outline.desired
    new = NewStatus(
        record=outline.record,
        conditions=updated,
        desired=desired,
        ready=_ready(facts, outline.record, desired),
        fields={**outline.fields, **_scale(facts, effects.actions)},
        all_created=outline.all_created,
    )
    effects = replace(effects, events=effects.events + events)
    written = new_status.judge(job.metadata, job.status, new, facts.observed, now, effects.events)
    return _plan(written, effects, job.status, now)


def refuse(
    metadata: ObjectMeta, old: TrainingJobStatus, message: str, now: datetime, pods: Sequence[Manifest] = ()
) -> Plan:
    """Returns the plan for a job whose spec breaks a rule that the API server did not enforce: it fails, and its pods
    end.

    Args:
        metadata, old: the job's metadata and status; the spec could not be read.
        message: what is invalid and what would be valid.
        now: the current time, with a time zone.
        pods: as in `Observed`; some may run when a running job is edited.
    """
    before = {c.type: c for c in old.conditions}
    ended_before = status.has_ended(before)
    updated, record, fields = before, Record.of(old), {}
    events: tuple[Event, ...] = ()
    if not ended_before:
        statements = conditions.ended(JobFailure(_INVALID_SPEC, message), before)
        updated, events = conditions.updated(before, statements, now, metadata.generation)
        record, fields = replace(record, backoff={}), {"completion_time": status.whole_seconds(now)}
    failed = updated.get(status.FAILED)
    actions: tuple[Action, ...] = ()
    if failed is not None and failed.reason == _INVALID_SPEC:
        actions = tuple(
            action
            for found in own_pods(pods, metadata.uid).values()
            for pod in found
            for action in deletions(pod, None, _INVALID_SPEC)
        )
    if ended_before:
        return Plan(actions=actions)
    desired = {role: r.desired for role, r in old.roles.items()}
    new = NewStatus(record=record, conditions=updated, desired=desired, ready={}, fields=fields)
    written = new_status.judge(metadata, old, new, Observed(), now)
    return _plan(written, Effects(actions=actions, events=events), old, now)


def _plan(written: new_status.PlannedStatus, effects: Effects, old: TrainingJobStatus, now: datetime) -> Plan:
    written = new_status.with_history(written, old, effects.events, now)
    wake = earliest((written.wake, effects.wake))
    return Plan(
        status=written.status,
        actions=effects.actions,
        events=effects.events,
        deaths=effects.deaths,
        requeue_after=None if wake is None else max(wake - now, now - now),
    )


def _outline(facts: Facts, record: Record, said: LastMessages) -> _Outline:
    if status.has_ended(facts.conditions):
        return _Outline(record)
    changes = history.judge(facts)
    outline = _Outline(
        record,
        effects=Effects(events=changes.events),
        statements=tuple(conditions.checkpointing(facts)),
        fields=changes.fields,
    )
    trained = after_training.trained(facts, record, said)
    if trained is not None:
        return _after_training(facts, outline, trained)
    failure = end.failure(facts, record) or script_mistake.judge(facts, record) or same_exception.judge(facts)
    if failure is not None:
        return _ended(facts, replace(outline, statements=()), failure)
    return _suspended(facts, outline) if facts.spec.run_policy.suspend else _running(facts, outline)


def _ended(facts: Facts, outline: _Outline, ending: end.Success | JobFailure) -> _Outline:
    reached = {}
    if isinstance(ending, JobFailure) and (step := last_step(facts)) is not None:
        reached = {"step": step}
    created = conditions.pods_created_at_the_end(facts, outline.record, desired_slots(facts.job))
    return replace(
        outline,
        record=replace(outline.record, backoff={}),
        statements=outline.statements
        + tuple(conditions.ended(ending, facts.conditions, reached.get("step")))
        + tuple(created),
        fields={
            **outline.fields,
            **reached,
            **ending.fields,
            "completion_time": status.whole_seconds(facts.now),
            **NO_RATES,
        },
    )


def _after_training(facts: Facts, outline: _Outline, trained: after_training.TrainingEnded) -> _Outline:
    """Plan a job whose training has ended. It needs worker 0 alone, until its script has ended."""
    verdict = after_training.judge(facts, outline.record, trained)
    late = end.active_deadline(facts)
    if facts.spec.run_policy.suspend and not _is_complete(verdict):
        return _suspended(facts, outline)
    if not isinstance(verdict, after_training.Ended) and late.failure is not None:
        verdict = after_training.interrupted(trained, late.failure)
    if isinstance(verdict, after_training.Ended):
        statements = outline.statements + tuple(after_training.statements(trained, verdict))
        return _ended(facts, replace(outline, statements=statements), verdict.ending)
    record, found = verdict.record, verdict.effects + late
    result = after_training.restored_from(trained, facts)
    lacks_config = any(o.obstacle.blocked is Blocked.CONFIG for o in found.obstructed)
    created = tuple(
        action
        for creation in found.creations
        for action in _create(facts, record, creation, result, admission.rank_group(facts, creation))
    )
    return replace(
        outline,
        record=record,
        effects=outline.effects
        + found
        + services.missing(facts, record, lacks_config=lacks_config)
        + Effects(actions=created)
        + surplus.judge(facts, record, frozenset(desired_slots(facts.job)), (), "gets the result of training"),
        statements=outline.statements
        + tuple(conditions.resumed(facts))
        + tuple(after_training.statements(trained, verdict)),
        fields={**outline.fields, **trained.fields, **NO_RATES},
    )


def _is_complete(verdict: after_training.Verdict) -> bool:
    return isinstance(verdict, after_training.Ended) and verdict.complete.value is True


def _suspended(facts: Facts, outline: _Outline) -> _Outline:
    effects, running = end.suspended(facts)
    return replace(
        outline,
        record=replace(outline.record, backoff={}),
        effects=effects,
        statements=outline.statements + tuple(conditions.suspended(facts, running=running)),
        desired=dict.fromkeys(facts.old.roles, 0),
        fields={"start_time": None, **NO_RATES},
    )


def _running(facts: Facts, outline: _Outline) -> _Outline:
    """Plan a job that must train: first its slots, then the objects that follow from them."""
    outline = replace(outline, statements=outline.statements + tuple(conditions.resumed(facts)))
    slots = desired_slots(facts.job)
    decided = _judge_slots(facts, outline.record, slots)
    outline = replace(outline, record=decided.record, effects=outline.effects + decided.effects)
    if facts.old.start_time is None:
        warnings = tuple(advice(facts.job))
        fields = {**outline.fields, "start_time": status.whole_seconds(facts.now)}
        outline = replace(outline, effects=outline.effects + Effects(events=warnings), fields=fields)
    if decided.effects.failure is not None:
        return _ended(facts, outline, decided.effects.failure)
    record, obstructed = decided.record, decided.effects.obstructed
    objects = _objects(facts, decided, slots)
    trains = conditions.training(facts, record, slots)
    found = [
        *conditions.pods_created(facts, decided.effects),
        conditions.pods_ready(facts, record, slots, obstructed),
        *trains.statements,
        *conditions.standbys_in_sync(facts, record, obstructed),
    ]
    outline = replace(
        outline,
        effects=outline.effects
        + objects
        + Effects(wake=earliest((conditions.slow_start(facts, obstructed), trains.check_at))),
        fields={
            **outline.fields,
            **(INTERRUPTED if trains.interrupted else {}),
        },
        statements=outline.statements + tuple(found),
        all_created=conditions.all_created(facts, record, slots, decided.effects),
    )
    if not facts.can_create:
        return outline
    return replace(outline, effects=outline.effects + Effects(events=_scaled(facts)), desired=_desired(facts, slots))


def _judge_slots(facts: Facts, record: Record, slots: Sequence[Slot]) -> Decision:
    """Returns the pods of all slots. Stops at the first verdict that fails the job."""
    if not facts.has_standbys:
        record = record.without_standbys()
    record = record.with_backoff_of([key for slot in slots for key in (slot.key, standby_key(slot))])
    ordered, given_up = order.judge(facts, record), admission.given_up(facts, record)
    decided = Decision(record, end.active_deadline(facts) + ordered.release + Effects(wake=given_up.wake))
    for slot in slots:
        if decided.effects.failure is not None:
            return decided
        hold, yields = ordered.holds(facts, slot), slot in ordered.partial[1:]
        decided = decided.then(
            replacement.judge(facts, decided.record, slot, hold=hold, yields=yields, given_up=given_up)
        )
    if decided.effects.failure is not None:
        return decided
    decided = decided.also(services.refused(facts, decided.record))
    ranks = [slot for slot in slots if slot.role == contract.ROLE_WORKER and ordered.holds(facts, slot)]
    last = {slot: decided.record.current(slot) for slot in ranks}
    held = {slot: known for slot, known in last.items() if (pod := facts.pod(slot, known)) is None or not pod.alive}
    return decided.also(end.pending_deadline(facts, decided.effects.obstructed, held))


def _objects(facts: Facts, decided: Decision, slots: Sequence[Slot]) -> Effects:
    """Returns the objects that follow from the verdicts about the slots, in the order in which they are created."""
    record, found = decided.record, decided.effects
    deleted = {action.uid for action in found.actions if isinstance(action, DeletePod)}
    lacks_config = any(o.obstacle.blocked is Blocked.CONFIG for o in found.obstructed)
    effects = services.missing(facts, record, lacks_config=lacks_config)
    in_order = sorted(found.creations, key=lambda creation: order.stage(facts, record, creation))
    admitted = admission.judge(facts, record, in_order, deleted)
    made = [action for creation, group in admitted.created for action in _create(facts, record, creation, group=group)]
    created = admitted.effects + Effects(actions=tuple(made))
    selected = services.repointed(facts, record)
    # A promoted standby serves immediately, so its Service is patched before the next standby is created.
    effects += selected + created if facts.has_standbys else created + selected
    removed = surplus.judge(facts, record, frozenset(slots), deleted)
    effects += removed
    if facts.can_create:
        deleted |= {action.uid for action in removed.actions if isinstance(action, DeletePod)}
        effects += services.with_old_address(facts, deleted)
    return effects


def _create(
    facts: Facts,
    record: Record,
    creation: Creation,
    trained: Trained | None = None,
    group: QueueGroup | None = None,
) -> list[Action]:
    slot, addresses, log_format = creation.slot, facts.server_addresses, facts.settings.log_format
    active = record.selected(slot.index) if slot.role == contract.ROLE_SERVER else 0
    stage = order.stage(facts, record, creation)
    made: list[Action] = []
    for member in facts.members(slot) if creation.members is None else creation.members:
        manifest = manifests_pod.pod(
            facts.job, slot, creation.incarnation, addresses, log_format, active, trained, member, group
        )
        made.append(CreatePod(manifest, slot.role, slot.index, creation.incarnation, creation.cause, stage))
    return made


def _desired(facts: Facts, slots: Sequence[Slot]) -> dict[Role, int]:
    desired = {role: sum(1 for slot in slots if ROLE_OF_LABEL[slot.role] == role) for role in ROLE_OF_LABEL.values()}
    desired["ParameterServer"] *= 1 + facts.spec.parameter_servers.standbys
    return desired


def _scaled(facts: Facts) -> tuple[Event, ...]:
    known, after = facts.old.roles.get("Worker"), facts.spec.workers.replicas
    if known is None or known.desired in (0, after):
        return ()
    return (normal("Scaled", f"workers: {known.desired} -> {after}"),)


def _ready(facts: Facts, record: Record, desired: Mapping[Role, int]) -> dict[Role, int]:
    """Returns the ready pods of each role, standbys included."""
    ready: Counter[str] = Counter()
    for slot, pods in facts.pods.items():
        current, has_standby = record.current(slot), slot.key in record.active
        for pod in pods:
            if pod.incarnation == current or (has_standby and pod.incarnation > current):
                ready[ROLE_OF_LABEL[slot.role]] += pod.alive and pod.ready
    return {role: min(ready[role], desired.get(role, 0)) for role in ROLE_OF_LABEL.values()}


def _scale(facts: Facts, actions: Sequence[Action]) -> dict[str, Any]:
    """Returns the fields for the scale subresource, with the number of existing worker pods and their selector."""
    existing = {
        slot for slot, pods in facts.pods.items() if slot.role == contract.ROLE_WORKER and any(p.alive for p in pods)
    }
    for action in actions:
        if isinstance(action, CreatePod) and action.role == contract.ROLE_WORKER:
            existing.add(Slot(action.role, action.index))
    labels = {**names.job_labels(facts.meta.name, facts.meta.uid), contract.LABEL_ROLE: contract.ROLE_WORKER}
    if facts.spec.workers.pods_per_rank > 1:  # an autoscaler divides by the number of selected pods
        labels[contract.LABEL_MEMBER] = "0"
    return {"replicas": len(existing), "selector": ",".join(f"{key}={value}" for key, value in labels.items())}
