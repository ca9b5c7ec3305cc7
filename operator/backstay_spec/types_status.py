"""The status of a job: what the operator reports about it.

Every field is for people (phase, step, loss), for other controllers (conditions, replicas, selector), or for the
operator itself (incarnations, backoff, world, term). The operator stores its memory here, so that a restart of the
operator loses nothing.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

__all__ = [
    "Backoff",
    "CheckpointStatus",
    "Condition",
    "FiniteFloat",
    "HistoryEntry",
    "Phase",
    "PreciseTime",
    "Role",
    "RoleStatus",
    "Time",
    "TrainingJobStatus",
    "WaitedForStatus",
    "format_precise_time",
    "format_time",
    "slot_key",
]

Phase: TypeAlias = Literal["Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"]
Role: TypeAlias = Literal["ParameterServer", "Worker", "Evaluator"]


def _whole_seconds(value: datetime) -> datetime:
    """metav1.Time has whole seconds and UTC; a model must equal itself after a round trip."""
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return aware.astimezone(UTC).replace(microsecond=0)


def format_time(value: datetime) -> str:
    """A time as metav1.Time writes it: ``2026-01-31T12:00:00Z``."""
    return _whole_seconds(value).strftime("%Y-%m-%dT%H:%M:%SZ")


def _milliseconds(value: datetime) -> datetime:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return aware.astimezone(UTC).replace(microsecond=aware.microsecond // 1000 * 1000)


def format_precise_time(value: datetime) -> str:
    """A time with milliseconds: ``2026-01-31T12:00:00.250Z``, which RFC 3339 and so `date-time` allow."""
    return _milliseconds(value).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity, and a diverged loss must not stop a status from being written."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Time: TypeAlias = Annotated[
    datetime,
    Field(strict=False),
    AfterValidator(_whole_seconds),
    PlainSerializer(format_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
# For the operator's own reckoning: rounded to whole seconds, the first back-off of 1 s would be anything up to 2 s.
PreciseTime: TypeAlias = Annotated[
    datetime,
    Field(strict=False),
    AfterValidator(_milliseconds),
    PlainSerializer(format_precise_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
FiniteFloat: TypeAlias = Annotated[float | None, BeforeValidator(_finite)]


@lru_cache(maxsize=4096)
def slot_key(role: str, index: int) -> str:
    """The key of a pod's slot in `incarnations` and `backoff`: ``worker-3``.

    Args:
        role: the value of the role label (`contract.ROLE_WORKER`, ...), not the CamelCase `Role`.
        index: shard, rank, or 0.
    """
    return f"{role}-{index}"


class StatusModel(BaseModel):
    """A part of the status: immutable; unknown fields are dropped, so an older operator can read a newer
    one's status."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )


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
    """The pods of one role."""

    desired: int = 0
    """Pods that must exist, standbys included."""

    ready: int = 0
    """Pods that are ready."""

    restarts: int = 0
    """Pods replaced after a crash: charged to `maxRestarts`."""

    disruptions: int = 0
    """Pods replaced after an eviction, a preemption, a lost node or a deletion, without charge."""


class Backoff(StatusModel):
    """A slot whose pods die before they did any work; its next pod waits."""

    failures: int = 0
    """Crashes in a row before the first gradient."""

    not_before: PreciseTime | None = None
    """The replacement is not created before this time."""


class CheckpointStatus(StatusModel):
    """The newest complete checkpoint."""

    step: int
    """The version that it holds."""

    uri: str = ""
    """The URI of its manifest, which `backstay.load` reads."""

    time: Time | None = None
    """When the operator first observed it."""


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
    """When the slot took part in training again: a worker with a contribution, a server with an update."""

    report: str | None = None
    """The URI of the report about the pod that died."""


class WaitedForStatus(StatusModel):
    """A rank that updates waited for after all others that they needed."""

    rank: int
    """The rank."""

    shard: int | None = None
    """The server that received its contributions much later than the others."""

    part: str
    """The slow part of the rank's step: `data` (waiting for a batch), `compute`, `send` or `receive`."""

    seconds: float
    """The sum over the updates of the last 5 minutes."""

    updates: int
    """How many updates waited."""


class TrainingJobStatus(StatusModel):
    """The state of the job that was last observed."""

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

    step: int | None = None
    """Updates applied."""

    goal_steps: int | None = None
    """The number of updates at which training ends: `steps` of `backstay.train`."""

    local_steps: int | None = None
    """Optimizer steps that each worker makes between two updates (`backstay.LocalSteps`); absent: none."""

    examples_per_second: FiniteFloat = None
    """Examples trained on per second, over all workers, recently."""

    updates_per_second: FiniteFloat = None
    """Updates applied per second, recently."""

    goodput: FiniteFloat = None
    """The share of the seconds of all worker pods whose computation was applied."""

    worker_seconds: dict[str, float] = Field(default_factory=dict)
    """The seconds of all worker pods, and of slots without one, by part. See docs/goodput.md."""

    worker_seconds_gone: dict[str, float] = Field(default_factory=dict)
    """The part of `workerSeconds` of deleted pods and of slots without a pod. Only the operator uses it."""

    worker_seconds_until: PreciseTime | None = None
    """The time up to which slots without a pod are counted. Only the operator uses it."""

    loss: FiniteFloat = None
    """Loss of the newest update; absent when it is not finite."""

    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest result of `evaluate`; finite values only."""

    evaluated_step: int | None = None
    """The step that was evaluated last."""

    untrained_leaves: list[str] = Field(default_factory=list)
    """Parameters whose gradient was zero in the first updates of every worker; at most 20."""

    mistakes_of_batches: list[str] = Field(default_factory=list)
    """Mistakes of `batches` that were found: `SameBatches`, `ImpureBatches`. Their events describe them."""

    train_metrics: dict[str, float] = Field(default_factory=dict)
    """The metrics that `loss` returned, mean of the newest update; finite values only."""

    traffic: dict[str, float] = Field(default_factory=dict)
    """The bytes of tensors that a worker sends and receives for an update, mean over workers and updates. `carried` are
    those of the job, and `exact` those without codecs."""

    replicas: int = 0
    """Worker pods that exist: for the scale subresource."""

    selector: str = ""
    """Label selector of the worker pods: for the scale subresource."""

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

    term: int | None = None
    """The current term: it grows with each rollback and each start from a checkpoint."""

    world: int | None = None
    """The number of ranks that the coordinator uses now."""

    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""

    waited_for: list[WaitedForStatus] = Field(default_factory=list)
    """The ranks that the updates of the last minutes waited for, the longest first; at most three. Async: the ranks
    that took longer than the median of all ranks for their contributions."""

    history: list[HistoryEntry] = Field(default_factory=list)
    """The newest 50 events, oldest first. The API server itself deletes events after an hour."""

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON for the API server: camelCase, absent values left out, and so are empty maps of what
        most jobs have none of."""
        written = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {name: value for name, value in written.items() if value or name not in _LEFT_OUT}


_LEFT_OUT = frozenset(
    ("metrics", "trainMetrics", "backoff", "history", "waitedFor", "workerSeconds", "workerSecondsGone", "traffic")
)
