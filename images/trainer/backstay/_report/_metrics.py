"""Every Prometheus metric of a training pod, in one place. `_http.py` has the port that shows them.

Names and units follow https://prometheus.io/docs/practices/naming/. A pod exports only the metrics of its role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar, cast, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from backstay_spec import contract
from backstay_spec.types_status import Role

from .._coordination import Outcome

__all__ = ["PodMetrics", "metric_names"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STALENESS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_WHO: Final = ("training_job", "role", "index")
_COORDINATOR: Final = "coordinator"
_SERVER: Final = "server"
_WORKER: Final = "worker"
_EVALUATOR: Final = "evaluator"
_EVERY: Final = "every pod"
_MOST_NAMES: Final = 50
_LONGEST_NAME: Final = 100
_MOST_STRAGGLERS: Final = 16

_M = TypeVar("_M", bound=MetricWrapperBase)


class _MetricRow(Generic[_M]):
    """A row declares a metric. Its attribute of `PodMetrics` is the metric's series in this pod.

    The series begins with the pod, or with the first use of the attribute if the row is `late`.
    """

    def __init__(
        self,
        kind: type[_M],
        of: str,
        text: str,
        labels: tuple[str, ...] = (),
        *,
        name: str = "",
        buckets: tuple[float, ...] = (),
        late: bool = False,
    ) -> None:
        """
        Args:
            of: the pods that export the metric.
            labels: labels beside those of the pod.
            name: the metric's name after ``backstay_``; empty: that of the attribute.
            late: whether 0 would be a value that was not measured.
        """
        self.kind, self.of, self.text, self.labels = kind, of, text, labels
        self.name, self.late = name, late
        self._more = {"buckets": buckets} if buckets else {}

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute
        self.name = self.name or attribute

    @overload
    def __get__(self, metrics: None, owner: type) -> Self: ...
    @overload
    def __get__(self, metrics: PodMetrics, owner: type) -> _M: ...
    def __get__(self, metrics: PodMetrics | None, owner: type) -> Self | _M:
        if metrics is None:
            return self
        series = vars(metrics)[self.attribute] = self.series(metrics)
        return series

    def made(self, registry: CollectorRegistry | None) -> _M:
        """Returns the metric, in the registry of a pod that exports it."""
        labels = (*_WHO, *self.labels)
        more: dict[str, Any] = self._more
        return self.kind(self.name, self.text, labels, namespace="backstay", registry=registry, **more)

    def series(self, metrics: PodMetrics, *values: object) -> _M:
        """Returns the series with these values of the row's labels."""
        found: _M = metrics.family(self).labels(*metrics.who, *map(str, values))
        return found


class _LabelledRow(_MetricRow[_M]):
    """A row with labels. The attribute is a function of their values, which returns the series."""

    @overload  # type: ignore[override]
    def __get__(self, metrics: None, owner: type) -> Self: ...
    @overload
    def __get__(self, metrics: PodMetrics, owner: type) -> Callable[..., _M]: ...
    def __get__(self, metrics: PodMetrics | None, owner: type) -> Self | Callable[..., _M]:
        return self if metrics is None else partial(self.series, metrics)


class _NamedRow(_LabelledRow[_M]):
    """A row whose label is a name that a script chose. A script must not be able to make series without end."""

    def series(self, metrics: PodMetrics, *values: object) -> _M:
        family, name = metrics.family(self), shortened_name(str(values[0]))
        if len(family._metrics) >= _MOST_NAMES and (*metrics.who, name) not in family._metrics:
            return self.kind("dropped", "Beyond the names that are exported.", registry=None)
        return super().series(metrics, name)


def shortened_name(name: str) -> str:
    """Returns the name, or if it is too long, its beginning with a digest of the whole."""
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - 9]}-{digest}"


class PodMetrics:
    """The metrics of one pod. Every metric has the labels `training_job`, `role` and `index`.

    All instruments exist in every pod, so that shared code needs no case for each role. Only those of the pod's own
    role are exported: shard 0's server exports the coordinator's and every server's, a worker a worker's.
    """

    # Of the job: exported by shard 0's server.
    updates = _MetricRow(Counter, _COORDINATOR, "Updates decided, skipped ones included.")
    skipped = _MetricRow(
        Counter, _COORDINATOR, "Updates skipped because a gradient was not finite.", name="updates_skipped"
    )
    examples = _MetricRow(Counter, _COORDINATOR, "Examples in applied contributions.")
    tokens = _MetricRow(
        Counter, _COORDINATOR, "Tokens in applied contributions: the sum of the metric tokens that loss returns."
    )
    gradient_norm = _MetricRow(
        Gauge,
        _COORDINATOR,
        "Norm of the newest mean gradient before it is clipped; only with clip_norm.",
        late=True,
    )
    learning_rate = _MetricRow(
        Gauge,
        _COORDINATOR,
        "Learning rate of the newest update; only if optax.inject_hyperparams keeps it.",
        late=True,
    )
    contributions = _LabelledRow(
        Counter,
        _COORDINATOR,
        "Contributions by their outcome. skipped: finite, but another contribution of the update was not.",
        ("outcome",),
    )
    staleness = _MetricRow(
        Histogram,
        _COORDINATOR,
        "Versions between computing and applying a gradient.",
        name="staleness_versions",
        buckets=_STALENESS,
    )
    quorum_seconds = _MetricRow(
        Histogram,
        _COORDINATOR,
        "Seconds from the first contribution of an update to the decision about the update.",
        name="quorum_wait_seconds",
        buckets=_SECONDS,
    )
    grace_seconds = _MetricRow(Gauge, _COORDINATOR, "Seconds that an update waits for more gradients after its quorum.")
    grace_rate = _MetricRow(
        Gauge,
        _COORDINATOR,
        "Applied gradients a second that update.grace: Auto expects with the current wait; 0: no estimate.",
        name="grace_applied_per_second",
    )
    live_workers = _MetricRow(Gauge, _COORDINATOR, "Workers with a heartbeat in the last 10 s.")
    world = _MetricRow(Gauge, _COORDINATOR, "Number of ranks that the coordinator uses now.", name="world_size")
    # A 0 would be a loss that was not computed.
    loss = _MetricRow(
        Gauge,
        _COORDINATOR,
        "Mean loss of the newest update's contributions. No series before the first update.",
        late=True,
    )
    examples_per_second = _MetricRow(
        Gauge, _COORDINATOR, "Examples in applied contributions a second, over the last 30 s."
    )
    term = _MetricRow(
        Gauge, _COORDINATOR, "The current term: it grows with each rollback and each start from a checkpoint."
    )
    redone = _MetricRow(
        Counter, _COORDINATOR, "Updates that a rollback discarded, and that are made again.", name="steps_redone"
    )
    evaluation = _NamedRow(Gauge, _COORDINATOR, "The newest result of evaluate, by its name.", ("name",))
    evaluation_step = _MetricRow(Gauge, _COORDINATOR, "The step of backstay_evaluation; 0: none yet.")
    train = _NamedRow(
        Gauge,
        _COORDINATOR,
        "The metrics that loss returned, by their name: mean over the newest update's contributions.",
        ("name",),
        name="train_metric",
    )
    traffic = _LabelledRow(
        Gauge,
        _COORDINATOR,
        "Bytes of tensors that a worker sends and receives for an update, all pods of its rank together, mean over "
        "workers and updates. exact: as if no codec were used.",
        ("encoding",),
        name="update_bytes",
    )
    slow_ranks = _MetricRow(
        Gauge, _COORDINATOR, "Ranks whose gradient takes more than 1.5 times the others' median.", name="stragglers"
    )
    straggler = _LabelledRow(
        Gauge,
        _COORDINATOR,
        "How much longer a slow rank's gradient takes than the others' median. A rank that is not slow has no "
        f"series; of more than {_MOST_STRAGGLERS} slow ranks the slowest have one.",
        ("rank",),
        name="straggler_delay_seconds",
    )
    waited_for = _LabelledRow(
        Counter,
        _COORDINATOR,
        "Seconds that updates waited for a rank after all others that they needed, by the part of the rank's step. "
        "Async: seconds that its contributions took beyond the median of all ranks.",
        ("rank", "part"),
        name="waited_for_seconds",
    )
    checkpoints = _MetricRow(Counter, _COORDINATOR, "Complete checkpoints stored.")
    # A 0 would be an age of 50 years.
    checkpoint_timestamp = _MetricRow(
        Gauge,
        _COORDINATOR,
        "Unix time at which the newest complete checkpoint was stored. No series before the first.",
        name="checkpoint_timestamp_seconds",
        late=True,
    )
    checkpoint_failures = _MetricRow(Counter, _COORDINATOR, "Checkpoints that could not be stored.")

    # Of every server.
    joins = _MetricRow(Counter, _SERVER, "Pods that joined this server; an incarnation counts once.")
    apply_seconds = _MetricRow(
        Histogram, _SERVER, "Seconds from the arrival of a commit at a shard until it is applied.", buckets=_SECONDS
    )
    staged_bytes = _MetricRow(
        Gauge, _SERVER, "Contributions in this server's memory, the most at one time in the last second."
    )
    staged_bytes_limit = _MetricRow(Gauge, _SERVER, "Contributions that may be in this server's memory at one time.")
    checkpoint_seconds = _MetricRow(
        Histogram,
        _SERVER,
        "Seconds to write a shard's part of a checkpoint.",
        name="checkpoint_write_seconds",
        buckets=_SECONDS,
    )
    checkpoint_bytes = _MetricRow(
        Counter, _SERVER, "Bytes of checkpoints written by this server.", name="checkpoint_written_bytes"
    )

    # Of every worker.
    worker_loss = _MetricRow(Gauge, _WORKER, "Loss of this worker's newest gradient.")
    worker_examples = _MetricRow(Counter, _WORKER, "Examples in this worker's contributions, applied or not.")
    gradient_seconds = _MetricRow(
        Histogram, _WORKER, "Seconds of a worker's own part of a step: batch and gradient.", buckets=_SECONDS
    )
    step_part = _LabelledRow(
        Summary, _WORKER, "Seconds of a worker's step by part.", ("part",), name="step_part_seconds"
    )
    worker_contributions = _LabelledRow(
        Counter,
        _WORKER,
        "This worker's contributions by the outcome that the servers reported. lost: a server was lost before it "
        "reported one.",
        ("outcome",),
    )
    tensor_bytes = _LabelledRow(
        Counter,
        _WORKER,
        "Bytes of tensors on the worker's data streams, also of exchanges that failed.",
        ("direction",),
    )
    contribution_flops = _MetricRow(
        Gauge, _WORKER, "Floating-point operations of one contribution, as XLA estimates them.", late=True
    )
    mfu = _MetricRow(
        Gauge,
        _WORKER,
        "Model FLOPs utilization: operations a second, as a share of the BFloat16 peak of the worker's devices. No "
        "series if their peak is not known.",
        name="mfu_ratio",
        late=True,
    )
    device_memory = _LabelledRow(
        Gauge,
        _WORKER,
        "Memory of a device of the worker: in_use now, the peak since the process began, and the limit. Only where "
        "the device reports it.",
        ("device", "state"),
        name="device_memory_bytes",
    )
    reconnects = _MetricRow(Counter, _WORKER, "Times that a worker connected again after the loss of a server.")

    evaluation_seconds = _MetricRow(
        Histogram, _EVALUATOR, "Seconds to load and evaluate one checkpoint.", buckets=_SECONDS
    )

    # Of every pod.
    step = _MetricRow(Gauge, _EVERY, "Updates applied to the parameters that this pod holds.")

    def __init__(self, job: str, role: Role, index: int) -> None:
        """
        Args:
            job: name of the TrainingJob.
            index: shard of a server, rank of a worker, or 0.
        """
        self.registry = CollectorRegistry()
        self.who = (job, role, str(index))
        self._kinds = {
            "ParameterServer": {_SERVER, _COORDINATOR} if index == 0 else {_SERVER},
            "Worker": {_WORKER},
            "Evaluator": {_EVALUATOR},
        }[role]
        ProcessCollector(registry=self.registry)
        self._slow: set[int] = set()
        self._made: dict[str, MetricWrapperBase] = {}
        self.exporters: dict[str, str] = {}
        for row in _ROWS:
            exported = row.of == _EVERY or row.of in self._kinds
            family = self._made[row.attribute] = row.made(self.registry if exported else None)
            self.exporters[family._name] = row.of
        self._begin()

    def _begin(self) -> None:
        """Series that exist from the start can be added up and compared from the start."""
        for row in _ROWS:
            if not row.labels and not row.late:
                row.series(self)
        for outcome in Outcome:
            self.contributions(outcome.value)
        for outcome in (Outcome.APPLIED, Outcome.LATE):
            self.worker_contributions(outcome.value)
        for part in contract.STEP_PARTS.values():
            self.step_part(part)
        for direction in ("sent", "received"):
            self.tensor_bytes(direction)

    @property
    def families(self) -> list[MetricWrapperBase]:
        """All metrics, in the order of the table."""
        return list(self._made.values())

    def family(self, row: _MetricRow[_M]) -> _M:
        """Returns the metric of a row."""
        return cast(_M, self._made[row.attribute])

    def stragglers(self, delays: Mapping[int, float]) -> None:
        """Replace the series of slow ranks; `delays` is rank -> seconds."""
        self.slow_ranks.set(len(delays))
        slowest = sorted(delays.items(), key=lambda item: item[1], reverse=True)[:_MOST_STRAGGLERS]
        gone, self._slow = self._slow - {rank for rank, _ in slowest}, {rank for rank, _ in slowest}
        family = self.family(PodMetrics.straggler)
        for rank in gone:
            family.remove(*self.who, str(rank))
        for rank, delay in slowest:
            self.straggler(rank).set(delay)

    def carried(self, sent: int, received: int) -> None:
        """Count bytes of tensors of the data streams."""
        self.tensor_bytes("sent").inc(sent)
        self.tensor_bytes("received").inc(received)

    def exports(self, family: MetricWrapperBase) -> bool:
        """Returns whether this pod exports a metric."""
        of = self.exporters[family._name]
        return of == _EVERY or of in self._kinds

    def page(self) -> bytes:
        """Returns the text that a scrape gets."""
        return generate_latest(_WithoutCreated(self.registry))


_ROWS: Final[tuple[_MetricRow[Any], ...]] = tuple(
    row for row in vars(PodMetrics).values() if isinstance(row, _MetricRow)
)


class _WithoutCreated:
    """A registry without the `_created` series of each counter, which no query uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def metric_names(role: Role | None = None, index: int = 0) -> frozenset[str]:
    """Returns the names of all time series that the pods of a role export, as a query writes them; not `process_*`.

    Args:
        role: a role; None: all roles.
        index: shard of a server, rank of a worker, or 0.
    """
    metrics = PodMetrics("job", role or "Worker", index)
    names: list[str] = []
    for family in metrics.families:
        if role is not None and not metrics.exports(family):
            continue
        base = next(iter(family.describe())).name
        match family:
            case Counter():
                names.append(f"{base}_total")
            case Histogram():
                names += [f"{base}_bucket", f"{base}_count", f"{base}_sum"]
            case Summary():
                names += [f"{base}_count", f"{base}_sum"]
            case _:
                names.append(base)
    return frozenset(names)
