"""A plan while it is made: the old status beside the new, and everything that the parts of the planner add."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final, Literal

from backstay_spec import names, status
from backstay_spec.actions import Action, Death, Plan
from backstay_spec.causes import finite
from backstay_spec.events import Event, normal, warning
from backstay_spec.observed import Observed, Progress
from backstay_spec.plan_pods import PodView
from backstay_spec.types import ObjectMeta
from backstay_spec.types_status import (
    Backoff,
    CheckpointStatus,
    Condition,
    Role,
    RoleStatus,
    TrainingJobStatus,
)

# How often progress alone may change a status (O8).
PROGRESS_INTERVAL: Final = timedelta(seconds=10)


class Draft:
    """What one call of `plan` collects.

    Attributes:
        meta, old, now: what is planned from; the job's spec is the business of the parts.
        pods: the job's own pods by place, oldest incarnation first.
        incarnations, active, backoff, conditions, fields: the new status; `fields` holds the plain ones that change.
        restarts, disruptions, desired, ready: the counters of each role.
        created_late: PodsCreated has become True, which is written with the next change.
        actions, events, deaths: of the plan.
    """

    def __init__(self, meta: ObjectMeta, old: TrainingJobStatus, now: datetime) -> None:
        self.meta = meta
        self.old = old
        self.now = now
        self.pods: dict[names.Slot, list[PodView]] = {}
        self.incarnations: dict[str, int] = dict(old.incarnations)
        self.active: dict[str, int] = dict(old.active)
        self.backoff: dict[str, Backoff] = dict(old.backoff)
        self.conditions: dict[str, Condition] = {c.type: c for c in old.conditions}
        self.restarts: dict[Role, int] = {role: r.restarts for role, r in old.roles.items()}
        self.disruptions: dict[Role, int] = {role: r.disruptions for role, r in old.roles.items()}
        self.desired: dict[Role, int] = {role: r.desired for role, r in old.roles.items()}
        self.ready: dict[Role, int] = {}
        self.fields: dict[str, Any] = {}
        self.created_late = False
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.deaths: list[Death] = []
        self._wake: datetime | None = None

    def wake_at(self, when: datetime) -> None:
        """Plan again at `when` at the latest."""
        if self._wake is None or when < self._wake:
            self._wake = when

    def condition(self, kind: str, value: bool | None, reason: str, message: str) -> bool:
        """Set a condition (None: Unknown); returns whether its status or its reason is new."""
        before = self.conditions.get(kind)
        said: Literal["True", "False", "Unknown"] = "Unknown" if value is None else "True" if value else "False"
        after = status.conditioned(before, kind, said, reason, message, self.now, self.meta.generation)
        self.conditions[kind] = after
        return before is None or (before.status, before.reason) != (after.status, after.reason)

    def fail(self, reason: str, message: str) -> None:
        """End the job as Failed; the first reason stands."""
        if self.finished():
            return
        self.condition(status.FAILED, True, reason, message)
        self._end(reason, message)
        self.events.append(warning("Failed", f"{reason}: {message}"))

    def succeed(self, reason: str, message: str) -> None:
        """End the job as Succeeded."""
        if self.finished():
            return
        self.condition(status.SUCCEEDED, True, reason, message)
        self._end(reason, message)
        self.events.append(normal("Succeeded", message))

    def _end(self, reason: str, message: str) -> None:
        self.condition(status.RUNNING, False, "Finished", message)
        self.condition(status.PODS_READY, False, "Finished", "the job has ended")
        self.fields["completion_time"] = status.whole_seconds(self.now)
        self.backoff.clear()

    def waits(self, key: str) -> datetime | None:
        """Until when a place, or a shard's standby, backs off: its dead pod is counted, and the next one is not on
        record yet. None: it does not."""
        known = self.backoff.get(key)
        return known.not_before if known is not None else None

    def waited(self, key: str) -> None:
        """The next one is on record; that there were crashes in a row is remembered."""
        if self.waits(key) is not None:
            self.backoff[key] = self.backoff[key].model_copy(update={"not_before": None})

    def trained(self, progress: Progress | None) -> bool:
        """Whether there was an update, of this run or of one that it goes on from."""
        known = progress.step if progress is not None and progress.step is not None else self.old.step
        return bool(known)

    def finished(self) -> bool:
        """Whether the job has ended, in this plan or before."""
        return status.holds(self.conditions, status.FAILED) or status.holds(self.conditions, status.SUCCEEDED)

    def plan(self, observed: Observed) -> Plan:
        """The plan: a status only if it differs, and one that progress alone changed at most every 10 s (O8)."""
        after = self._status()
        if after != self.old:
            after = self._with_late(after, observed.progress)
        elif not self.finished():
            after = self._paced(self._with_late(after, observed.progress), observed.status_written)
        return Plan(
            status=None if after == self.old else after.to_dict(),
            actions=tuple(self.actions),
            events=tuple(self.events),
            deaths=tuple(self.deaths),
            requeue_after=None if self._wake is None else max(self._wake - self.now, self.now - self.now),
        )

    def _with_late(self, after: TrainingJobStatus, progress: Progress | None) -> TrainingJobStatus:
        """The status with what is not worth a write of its own; what this plan has decided stands."""
        if status.holds({c.type: c for c in self.old.conditions}, status.FAILED) or status.holds(
            {c.type: c for c in self.old.conditions}, status.SUCCEEDED
        ):
            return after
        late = with_progress(after, progress, self.now).model_copy(update=self.fields)
        if not self.created_late:
            return late
        conditions = dict(self.conditions)
        conditions[status.PODS_CREATED] = status.conditioned(
            conditions.get(status.PODS_CREATED),
            status.PODS_CREATED,
            "True",
            "AllCreated",
            "every pod has been created",
            self.now,
            self.meta.generation,
        )
        return late.model_copy(update={"conditions": list(conditions.values())})

    def _paced(self, after: TrainingJobStatus, written: datetime | None) -> TrainingJobStatus:
        if after == self.old:
            return self.old
        if written is not None and self.now < written + PROGRESS_INTERVAL:
            self.wake_at(written + PROGRESS_INTERVAL)
            return self.old
        return after

    def _status(self) -> TrainingJobStatus:
        roles = {}
        for role in ("ParameterServer", "Worker", "Evaluator"):
            said = RoleStatus(
                desired=self.desired.get(role, 0),
                ready=self.ready.get(role, 0),
                restarts=self.restarts.get(role, 0),
                disruptions=self.disruptions.get(role, 0),
            )
            if role != "Evaluator" or said != RoleStatus():
                roles[role] = said
        workers = roles["Worker"]
        return self.old.model_copy(
            update={
                "phase": status.phase_of(self.conditions),
                "conditions": list(self.conditions.values()),
                "observed_generation": self.meta.generation,
                "incarnations": self.incarnations,
                "active": self.active,
                "backoff": self.backoff,
                "roles": roles,
                "workers": f"{workers.ready}/{workers.desired}",
                **self.fields,
            }
        )


def with_progress(before: TrainingJobStatus, progress: Progress | None, now: datetime) -> TrainingJobStatus:
    """The status with what the servers said last; what they did not say stays as it was."""
    if progress is None:
        return before
    plain = {"step": progress.step, "term": progress.term, "world": progress.world}
    said: dict[str, Any] = {field: value for field, value in plain.items() if value is not None}
    if progress.examples_per_second is not None:
        said["examples_per_second"] = readable(progress.examples_per_second, 4)
    if progress.loss is not None:
        said["loss"] = readable(progress.loss, 6)
    if progress.metrics:
        said["metrics"] = finite(progress.metrics)
    if progress.checkpoint_step is not None:
        said["checkpoint"] = checkpoint_status(before, progress.checkpoint_step, progress.checkpoint_uri, now)
    return before.model_copy(update=said)


def checkpoint_status(before: TrainingJobStatus, step: int, uri: str, now: datetime) -> CheckpointStatus:
    """The newest whole checkpoint; its time stays when it is the one that was known."""
    known = before.checkpoint
    if known is not None and (known.step, known.uri) == (step, uri):
        return known
    return CheckpointStatus(step=step, uri=uri, time=status.whole_seconds(now))


def readable(value: float, digits: int) -> float | None:
    """To as many significant digits as a person reads in `kubectl get`; None for what JSON does not have, NaN and the
    infinities."""
    found = finite({"value": value}).get("value")
    return None if found is None else float(f"{found:.{digits}g}")
