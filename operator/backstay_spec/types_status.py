"""Defines the status of a job, which the operator reports about it.

Every field is for people (phase, step, loss), for other controllers (conditions, replicas, selector), or for the
operator itself (incarnations, backoff, world, term). The operator stores its memory here, so that a restart of the
operator loses nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator

from backstay_spec.job_report import ReportedStatus
from backstay_spec.status_model import PreciseTime, StatusModel, Time

__all__ = [
    "Backoff",
    "Condition",
    "HistoryEntry",
    "Phase",
    "Role",
    "RoleStatus",
    "TrainingJobStatus",
    "slot_key",
]

Phase: TypeAlias = Literal["Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"]
Role: TypeAlias = Literal["ParameterServer", "Worker", "Evaluator"]


@lru_cache(maxsize=4096)
def slot_key(role: str, index: int) -> str:
    """Returns the key of a pod's slot in `incarnations` and `backoff`, such as ``worker-3``.

    Args:
        role: the value of the role label (`contract.ROLE_WORKER`, ...), not the CamelCase `Role`.
        index: shard, rank, or 0.
    """
    return f"{role}-{index}"


class Condition(StatusModel):
    """A metav1.Condition."""

    type: str
    """Name of the condition in CamelCase."""

    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""

    reason: str
    """The reason, as one word in CamelCase for programs."""

    message: str = ""
    """The reason, as a sentence for people."""

    last_transition_time: Time
    """When `status` last changed."""

    observed_generation: int | None = None
    """The `metadata.generation` that the operator used for this condition."""


class RoleStatus(StatusModel):
    """The pods of one role. A rank of several pods counts as one."""

    desired: int = 0
    """Pods that must exist, standbys included; of workers, ranks."""

    ready: int = 0
    """Pods that are ready; of workers, ranks with all their pods."""

    restarts: int = 0
    """Pods, or ranks, replaced after a crash, which are charged to `maxRestarts`."""

    disruptions: int = 0
    """Pods, or ranks, replaced after an eviction, a preemption, a lost node or a deletion, without charge."""


class Backoff(StatusModel):
    """A slot whose pods die before they did any work; its next pod waits."""

    failures: int = 0
    """Crashes in a row before the first gradient."""

    deaths: int | None = None
    """Deaths in a row, of any cause, of pods that did no work."""

    unstarted_since: PreciseTime | None = None
    """The first of these deaths, while no container of these pods has started."""

    last: str | None = None
    """The reason for the newest of these deaths."""

    no_room_since: PreciseTime | None = None
    """Since when some pods of a rank of several have had no room, so that the rank gave back what it had."""

    not_before: PreciseTime | None = None
    """The replacement is not created before this time."""


class HistoryEntry(StatusModel):
    """An event about the job."""

    time: PreciseTime
    """When the operator sent the event."""

    type: Literal["Normal", "Warning"]
    """Whether a person may have to act."""

    reason: str
    """The reason, as one word in CamelCase for programs."""

    message: str = ""
    """The message for people."""

    slot: str | None = None
    """The slot whose pod died, such as `worker-3`."""

    incarnation: int | None = None
    """The incarnation of the pod that died."""

    recovered: PreciseTime | None = None
    """The time when the slot took part in training again, a worker with a contribution and a server with an update."""

    report: str | None = None
    """The URI of the report about the pod that died."""


class _StateOfJob(StatusModel):
    """The state of the job as a whole."""

    phase: Phase | None = None
    """One word that sums up the conditions."""

    conditions: list[Condition] = Field(default_factory=list)
    """The state of the job as standard conditions."""

    observed_generation: int | None = None
    """The `metadata.generation` that the operator used for this status."""

    start_time: Time | None = None
    """When the job began to run; after a suspension, when it began again."""

    completion_time: Time | None = None
    """When the job ended."""


class TrainingJobStatus(ReportedStatus, _StateOfJob):
    """The state of the job that was last observed."""

    goodput: float | None = None
    """The share of the seconds of all worker pods whose computation was applied."""

    worker_seconds: dict[str, float] = Field(default_factory=dict)
    """The seconds of all worker pods, and of slots without one, by part. See docs/goodput.md."""

    worker_seconds_gone: dict[str, float] = Field(default_factory=dict)
    """The part of `workerSeconds` of deleted pods and of slots without a pod. Only the operator uses it."""

    worker_seconds_until: PreciseTime | None = None
    """The time up to which slots without a pod are counted. Only the operator uses it."""

    replicas: int = 0
    """The number of existing worker pods, for the scale subresource."""

    selector: str = ""
    """The label selector of the worker pods, for the scale subresource."""

    workers: str | None = None
    """Workers ready and desired, as `3/4`, for `kubectl get`."""

    roles: dict[Role, RoleStatus] = Field(default_factory=dict)
    """The pods by role."""

    incarnations: dict[str, int] = Field(default_factory=dict)
    """The newest incarnation of each slot, such as `worker-3: 2`. The operator writes it before it creates the pod, and
    pods refuse calls of older incarnations."""

    active: dict[str, int] = Field(default_factory=dict)
    """The incarnation of the active server of each shard, in jobs with standbys. A newer incarnation is its standby."""

    backoff: dict[str, Backoff] = Field(default_factory=dict)
    """The slots, such as `worker-3`, for which the operator waits before it creates the next pod."""

    history: list[HistoryEntry] = Field(default_factory=list)
    """The newest 50 events, oldest first. The API server itself deletes events after an hour."""

    @field_validator("*", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        """JSON has no NaN and no infinity, and a diverged loss must not stop a status from being written."""
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def to_dict(self) -> dict[str, Any]:
        """Returns the status as JSON for the API server, in camelCase and without absent values, and without empty maps
        that most jobs do not have."""
        written = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {name: value for name, value in written.items() if value not in ({}, []) or name not in _LEFT_OUT}


_OWN: Final = ("backoff", "history", "workerSeconds", "workerSecondsGone")
_LEFT_OUT: Final = frozenset((*_OWN, *(str(row.alias) for row in ReportedStatus.model_fields.values())))
