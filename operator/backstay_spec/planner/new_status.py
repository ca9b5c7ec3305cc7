"""Decides which status is written, and when, with progress alone every 10 s and other changes immediately (O8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract, status
from backstay_spec.events import Event, one_line
from backstay_spec.goodput import goodput
from backstay_spec.job_report import CheckpointStatus, readable
from backstay_spec.observed import Observed, Progress, Spent, Updates
from backstay_spec.planner.record import Record
from backstay_spec.types import ObjectMeta
from backstay_spec.types_status import (
    Condition,
    HistoryEntry,
    Role,
    RoleStatus,
    TrainingJobStatus,
)

__all__ = ["ALL_CREATED", "NewStatus", "PlannedStatus", "checkpoint_status", "judge", "with_history"]

# The shortest time between two writes of a status in which only the progress changed (O8).
PROGRESS_INTERVAL: Final = timedelta(seconds=10)
ALL_CREATED: Final = "every pod has been created"
_ENTRIES: Final = 50  # of the history
_ENTRY_LENGTH: Final = 300
_NOT_HISTORY: Final = frozenset({"Evaluated"})  # there is one for each checkpoint
_ROLES: Final[tuple[Role, ...]] = ("ParameterServer", "Worker", "Evaluator")


@dataclass(frozen=True, slots=True)
class NewStatus:
    """The parts of the status that a plan has decided.

    Attributes:
        record: incarnations, back-off and counters.
        conditions: the conditions by type.
        desired, ready: pods of each role.
        fields: other fields by name.
        all_created: PodsCreated has become True, which is written with the next change.
    """

    record: Record
    conditions: Mapping[str, Condition]
    desired: Mapping[Role, int]
    ready: Mapping[Role, int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    all_created: bool = False


@dataclass(frozen=True, slots=True)
class PlannedStatus:
    """The status to write, and when to plan again.

    Attributes:
        status: the status to write; None: no write.
        wake: plan again at this time at the latest, because progress must be written then; None: no need.
    """

    status: dict[str, Any] | None = None
    wake: datetime | None = None


def judge(
    meta: ObjectMeta,
    old: TrainingJobStatus,
    new: NewStatus,
    observed: Observed,
    now: datetime,
    events: Sequence[Event] = (),
) -> PlannedStatus:
    """Returns the status to write after `old`. The history in it records `events`: without a record, the next plan
    would send them again."""
    assembled = _assembled(meta, old, new)
    after = _with_progress(meta, old, new, assembled, observed, now)
    counted = _with_spent(after, observed.spent)
    if assembled != old or any(event.reason not in _NOT_HISTORY for event in events):
        return PlannedStatus(counted.to_dict())
    if counted == old:
        return PlannedStatus()
    written = observed.status_written
    if written is not None and now < written + PROGRESS_INTERVAL and not status.has_ended(new.conditions):
        # Seconds pass in any case: they alone do not cause another plan.
        return PlannedStatus(wake=None if after == old else written + PROGRESS_INTERVAL)
    return PlannedStatus(counted.to_dict())


def with_history(
    report: PlannedStatus, old: TrainingJobStatus, events: Sequence[Event], now: datetime
) -> PlannedStatus:
    """Returns the verdict with the events in the status, because the API server deletes events, but a job may train for
    weeks."""
    if report.status is None or not events:
        return report
    known = report.status.get("history")
    entries = [_written(entry) for entry in old.history] if known is None else list(known)
    for event in events:
        if event.reason not in _NOT_HISTORY:
            entry = HistoryEntry(
                time=now,
                type=event.type,
                reason=event.reason,
                message=one_line(event.message, _ENTRY_LENGTH),
                slot=event.slot or None,
                incarnation=event.incarnation,
            )
            entries.append(_written(entry))
    return replace(report, status={**report.status, "history": entries[-_ENTRIES:]})


def _written(entry: HistoryEntry) -> dict[str, Any]:
    return entry.model_dump(mode="json", by_alias=True, exclude_none=True)


def recovered(
    history: Sequence[HistoryEntry], progress: Progress | None, updates: Updates | None
) -> list[HistoryEntry]:
    """Returns the history, with the times at which slots took part in training again, as reported in `progress`.

    Args:
        updates: when the job's step last changed.
    """
    found = []
    for entry in history:
        at = _recovery(entry, progress, updates)
        found.append(entry if at is None else entry.model_copy(update={"recovered": _milliseconds(at)}))
    return found


def _recovery(entry: HistoryEntry, progress: Progress | None, updates: Updates | None) -> datetime | None:
    if entry.slot is None or entry.incarnation is None or entry.recovered is not None or progress is None:
        return None
    role, _, index = entry.slot.rpartition("-")
    if role == contract.ROLE_WORKER:
        contributes = progress.contributed.get(int(index), 0) > entry.incarnation
        return max(entry.time, progress.taken) if contributes else None
    if role != contract.ROLE_SERVER or int(index) not in progress.reached or updates is None:
        return None
    if int(index) == 0:
        # A standby that takes over reports the step that it holds. Its server may have applied it before it died.
        return updates.began if updates.coordinator > entry.incarnation else None
    return updates.at if updates.at > entry.time else None


def _milliseconds(value: datetime) -> datetime:
    """Rounds as in the status, because a model must be equal to itself after a round trip."""
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


def _assembled(meta: ObjectMeta, old: TrainingJobStatus, new: NewStatus) -> TrainingJobStatus:
    """Returns the status without changes that do not justify a separate write."""
    roles = {}
    for role in _ROLES:
        counts = RoleStatus(
            desired=new.desired.get(role, 0),
            ready=new.ready.get(role, 0),
            restarts=new.record.restarts.get(role, 0),
            disruptions=new.record.disruptions.get(role, 0),
        )
        if role != "Evaluator" or counts != RoleStatus():
            roles[role] = counts
    workers = roles["Worker"]
    return old.model_copy(
        update={
            "phase": status.phase_of(new.conditions),
            "conditions": list(new.conditions.values()),
            "observed_generation": meta.generation,
            "incarnations": dict(new.record.incarnations),
            "active": dict(new.record.active),
            "backoff": dict(new.record.backoff),
            "roles": roles,
            "workers": f"{workers.ready}/{workers.desired}",
            **new.fields,
        }
    )


def _with_progress(
    meta: ObjectMeta,
    old: TrainingJobStatus,
    new: NewStatus,
    after: TrainingJobStatus,
    observed: Observed,
    now: datetime,
) -> TrainingJobStatus:
    """Returns the status with the answers of the servers; the decisions of this plan stay."""
    if status.has_ended({c.type: c for c in old.conditions}):
        return after
    progress = observed.progress
    late = with_progress(after, progress, now).model_copy(
        update={"history": recovered(after.history, progress, observed.updates), **new.fields}
    )
    if not new.all_created:
        return late
    kind = status.PODS_CREATED
    before = new.conditions.get(kind)
    created = status.conditioned(before, kind, "True", "AllCreated", ALL_CREATED, now, meta.generation)
    return late.model_copy(update={"conditions": list({**new.conditions, kind: created}.values())})


def with_progress(before: TrainingJobStatus, progress: Progress | None, now: datetime) -> TrainingJobStatus:
    """Returns the status with the last answers of the servers; fields without a new value stay the same."""
    if progress is None:
        return before
    report = progress.report
    fields = report.stored()
    if report.term_start is None:
        # A term is recorded with the report of its start, which comes later: `history` sends its event only once.
        fields.pop("term", None)
    if report.checkpoint is not None:
        fields["checkpoint"] = checkpoint_status(before, report.checkpoint, now)
    return before.model_copy(update=fields)


def _with_spent(before: TrainingJobStatus, spent: Spent | None) -> TrainingJobStatus:
    """Returns the status with the seconds of the worker pods."""
    if spent is None:
        return before
    seconds, gone = _rounded(spent.seconds), _rounded(spent.gone)
    if seconds == before.worker_seconds:
        return before
    share = goodput(seconds)
    fields = {"worker_seconds": seconds, "worker_seconds_gone": gone, "worker_seconds_until": spent.until}
    return before.model_copy(update={**fields, "goodput": None if share is None else readable(share, 4)})


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: shown for part, value in seconds.items() if (shown := round(value, 1))}


def checkpoint_status(before: TrainingJobStatus, stored: CheckpointStatus, now: datetime) -> CheckpointStatus:
    """Returns the newest complete checkpoint. One whose time no server has reported was stored now."""
    found = stored.dated(before.checkpoint)
    return found if found.time is not None else found.model_copy(update={"time": status.whole_seconds(now)})
