"""Every Prometheus metric of a training pod, in one place. `_http.py` has the port that shows them.

Names and units follow https://prometheus.io/docs/practices/naming/. A pod exports only the metrics of its role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from backstay_spec import contract
from backstay_spec.types_status import Role

from .._coordination import Outcome

__all__ = ["Metrics", "metric_names"]

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


class Metrics:
    """The metrics of one pod. Every metric has the labels `training_job`, `role` and `index`.

    All instruments exist in every pod, so that shared code needs no case for each role. Only those of the pod's own
    role are exported: shard 0's server exports the coordinator's and every server's, a worker a worker's.
    """

    def __init__(self, job: str, role: Role, index: int) -> None:
        """
        Args:
            job: name of the TrainingJob.
            index: shard of a server, rank of a worker, or 0.
        """
        self.registry = CollectorRegistry()
        self._who = (job, role, str(index))
        self._kinds = {
            "ParameterServer": {_SERVER, _COORDINATOR} if index == 0 else {_SERVER},
            "Worker": {_WORKER},
            "Evaluator": {_EVALUATOR},
        }[role]
        self.families: list[MetricWrapperBase] = []
        self.exporters: dict[str, str] = {}
        ProcessCollector(registry=self.registry)

        # Of the job: exported by shard 0's server.
        of = _COORDINATOR
        self.updates = self._counter(of, "updates", "Updates decided, skipped ones included.")
        self.skipped = self._counter(of, "updates_skipped", "Updates skipped because a gradient was not finite.")
        self.examples = self._counter(of, "examples", "Examples in applied contributions.")
        self.tokens = self._counter(
            of, "tokens", "Tokens in applied contributions: the sum of the metric tokens that loss returns."
        )
        self._gradient_norm = self._family(
            of, Gauge, "gradient_norm", "Norm of the newest mean gradient before it is clipped; only with clip_norm."
        )
        self._learning_rate = self._family(
            of, Gauge, "learning_rate", "Learning rate of the newest update; only if optax.inject_hyperparams keeps it."
        )
        self._contributions = self._family(
            of,
            Counter,
            "contributions",
            "Contributions by their outcome. skipped: finite, but another contribution of the update was not.",
            (*_WHO, "outcome"),
        )
        self.staleness = self._histogram(
            of, "staleness_versions", "Versions between computing and applying a gradient.", _STALENESS
        )
        self.quorum_seconds = self._histogram(
            of,
            "quorum_wait_seconds",
            "Seconds from the first contribution of an update to the decision about the update.",
            _SECONDS,
        )
        self.grace_seconds = self._gauge(
            of, "grace_seconds", "Seconds that an update waits for more gradients after its quorum."
        )
        self.grace_rate = self._gauge(
            of,
            "grace_applied_per_second",
            "Applied gradients a second that update.grace: Auto expects with the current wait; 0: no estimate.",
        )
        self.live_workers = self._gauge(of, "live_workers", "Workers with a heartbeat in the last 10 s.")
        self.world = self._gauge(of, "world_size", "Number of ranks that the coordinator uses now.")
        self._loss = self._family(
            of, Gauge, "loss", "Mean loss of the newest update's contributions. No series before the first update."
        )
        self.examples_per_second = self._gauge(
            of, "examples_per_second", "Examples in applied contributions a second, over the last 30 s."
        )
        self.term = self._gauge(
            of, "term", "The current term: it grows with each rollback and each start from a checkpoint."
        )
        self.redone = self._counter(of, "steps_redone", "Updates that a rollback discarded, and that are made again.")
        self._evaluation = self._family(
            of, Gauge, "evaluation", "The newest result of evaluate, by its name.", (*_WHO, "name")
        )
        self.evaluation_step = self._gauge(of, "evaluation_step", "The step of backstay_evaluation; 0: none yet.")
        self._train = self._family(
            of,
            Gauge,
            "train_metric",
            "The metrics that loss returned, by their name: mean over the newest update's contributions.",
            (*_WHO, "name"),
        )
        self._traffic = self._family(
            of,
            Gauge,
            "update_bytes",
            "Bytes of tensors that a worker sends and receives for an update, mean over workers and updates. "
            "exact: as if no codec were used.",
            (*_WHO, "encoding"),
        )
        self._stragglers = self._family(
            of,
            Gauge,
            "straggler_delay_seconds",
            "How much longer a slow rank's gradient takes than the others' median. A rank that is not slow has no "
            f"series; of more than {_MOST_STRAGGLERS} slow ranks the slowest have one.",
            (*_WHO, "rank"),
        )
        self._slow: set[int] = set()
        self._waited = self._family(
            of,
            Counter,
            "waited_for_seconds",
            "Seconds that updates waited for a rank after all others that they needed, by the part of the rank's step. "
            "Async: seconds that its contributions took beyond the median of all ranks.",
            (*_WHO, "rank", "part"),
        )
        self.checkpoints = self._counter(of, "checkpoints", "Complete checkpoints stored.")
        self._checkpoint_timestamp = self._family(
            of,
            Gauge,
            "checkpoint_timestamp_seconds",
            "Unix time at which the newest complete checkpoint was stored. No series before the first.",
        )
        self.checkpoint_failures = self._counter(of, "checkpoint_failures", "Checkpoints that could not be stored.")

        # Of every server.
        of = _SERVER
        self.joins = self._counter(of, "joins", "Pods that joined this server; an incarnation counts once.")
        self.apply_seconds = self._histogram(
            of,
            "apply_seconds",
            "Seconds from the arrival of a commit at a shard until it is applied.",
            _SECONDS,
        )
        self.staged_bytes = self._gauge(
            of, "staged_bytes", "Contributions in this server's memory, the most at one time in the last second."
        )
        self.staged_bytes_limit = self._gauge(
            of, "staged_bytes_limit", "Contributions that may be in this server's memory at one time."
        )
        self.checkpoint_seconds = self._histogram(
            of, "checkpoint_write_seconds", "Seconds to write a shard's part of a checkpoint.", _SECONDS
        )
        self.checkpoint_bytes = self._counter(
            of, "checkpoint_written_bytes", "Bytes of checkpoints written by this server."
        )

        # Of every worker.
        of = _WORKER
        self.worker_loss = self._gauge(of, "worker_loss", "Loss of this worker's newest gradient.")
        self.worker_examples = self._counter(
            of, "worker_examples", "Examples in this worker's contributions, applied or not."
        )
        self.gradient_seconds = self._histogram(
            of, "gradient_seconds", "Seconds of a worker's own part of a step: batch and gradient.", _SECONDS
        )
        self._step = self._family(
            of, Summary, "step_part_seconds", "Seconds of a worker's step by part.", (*_WHO, "part")
        )
        self._fates = self._family(
            of,
            Counter,
            "worker_contributions",
            "This worker's contributions by the outcome that the servers reported. lost: a server was lost before it "
            "reported one.",
            (*_WHO, "outcome"),
        )
        self._bytes = self._family(
            of,
            Counter,
            "tensor_bytes",
            "Bytes of tensors on the worker's data streams, also of exchanges that failed.",
            (*_WHO, "direction"),
        )
        self._contribution_flops = self._family(
            of,
            Gauge,
            "contribution_flops",
            "Floating-point operations of one contribution, as XLA estimates them.",
        )
        self._mfu = self._family(
            of,
            Gauge,
            "mfu_ratio",
            "Model FLOPs utilization: operations a second, as a share of the BFloat16 peak of the worker's devices. No "
            "series if their peak is not known.",
        )
        self._memory = self._family(
            of,
            Gauge,
            "device_memory_bytes",
            "Memory of a device of the worker: in_use now, the peak since the process began, and the limit. Only where "
            "the device reports it.",
            (*_WHO, "device", "state"),
        )
        self.reconnects = self._counter(
            of, "reconnects", "Times that a worker connected again after the loss of a server."
        )

        self.evaluation_seconds = self._histogram(
            _EVALUATOR, "evaluation_seconds", "Seconds to load and evaluate one checkpoint.", _SECONDS
        )

        # Of every pod.
        self.step = self._gauge(_EVERY, "step", "Updates applied to the parameters that this pod holds.")

        # Series that exist from the start can be added up and compared from the start.
        for outcome in Outcome:
            self.contributions(outcome.value)
        for outcome in (Outcome.APPLIED, Outcome.LATE):
            self.worker_contributions(outcome.value)
        for part in contract.STEP_PARTS.values():
            self.step_part(part)
        for direction in ("sent", "received"):
            self.tensor_bytes(direction)

    @property
    def loss(self) -> Gauge:
        """The series begins with the first use: a 0 would be a loss that was not computed."""
        return self._loss.labels(*self._who)

    @property
    def checkpoint_timestamp(self) -> Gauge:
        """The series begins with the first use: a 0 would be an age of 50 years."""
        return self._checkpoint_timestamp.labels(*self._who)

    @property
    def gradient_norm(self) -> Gauge:
        """The series begins with the first use: without `clip_norm` there is none."""
        return self._gradient_norm.labels(*self._who)

    @property
    def learning_rate(self) -> Gauge:
        """The series begins with the first use: few optimizers have it in their state."""
        return self._learning_rate.labels(*self._who)

    @property
    def contribution_flops(self) -> Gauge:
        """The series begins with the first use: some backends have no estimate."""
        return self._contribution_flops.labels(*self._who)

    @property
    def mfu(self) -> Gauge:
        """The series begins with the first use: the peak of most devices is not known."""
        return self._mfu.labels(*self._who)

    def device_memory(self, device: int, state: str) -> Gauge:
        """The memory of one of the worker's devices; `state` is ``in_use``, ``peak`` or ``limit``."""
        return self._memory.labels(*self._who, str(device), state)

    def contributions(self, outcome: str) -> Counter:
        """The contributions with one `Outcome`."""
        return self._contributions.labels(*self._who, outcome)

    def evaluation(self, name: str) -> Gauge:
        """The series of a metric of `evaluate`; the first 50 names are exported."""
        return self._named(self._evaluation, name)

    def train(self, name: str) -> Gauge:
        """The series of a metric that `loss` returns; the first 50 names are exported."""
        return self._named(self._train, name)

    def traffic(self, encoding: str) -> Gauge:
        """The bytes of an update and worker: ``carried`` or ``exact``."""
        return self._traffic.labels(*self._who, encoding)

    def stragglers(self, delays: Mapping[int, float]) -> None:
        """Replace the series of slow ranks; `delays` is rank -> seconds."""
        slowest = sorted(delays.items(), key=lambda item: item[1], reverse=True)[:_MOST_STRAGGLERS]
        gone, self._slow = self._slow - {rank for rank, _ in slowest}, {rank for rank, _ in slowest}
        for rank in gone:
            self._stragglers.remove(*self._who, str(rank))
        for rank, delay in slowest:
            self._stragglers.labels(*self._who, str(rank)).set(delay)

    def waited_for(self, rank: int, part: str) -> Counter:
        """The seconds that updates waited for a part of a rank's step."""
        return self._waited.labels(*self._who, str(rank), part)

    def step_part(self, part: str) -> Summary:
        """The seconds of one part of a step, a value of `contract.STEP_PARTS`."""
        return self._step.labels(*self._who, part)

    def worker_contributions(self, outcome: str) -> Counter:
        """The contributions with one `Outcome`, or ``lost``."""
        return self._fates.labels(*self._who, outcome)

    def tensor_bytes(self, direction: str) -> Counter:
        """The bytes of tensors in one direction: ``sent`` or ``received``."""
        return self._bytes.labels(*self._who, direction)

    def carried(self, sent: int, received: int) -> None:
        """Count bytes of tensors of the data streams."""
        self.tensor_bytes("sent").inc(sent)
        self.tensor_bytes("received").inc(received)

    def exports(self, family: MetricWrapperBase) -> bool:
        """Whether this pod exports a metric."""
        of = self.exporters[family._name]
        return of == _EVERY or of in self._kinds

    def page(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(_WithoutCreated(self.registry))

    def _named(self, family: Gauge, name: str) -> Gauge:
        """The series of a name that a script chose: a script must not be able to make series without end."""
        if len(family._metrics) >= _MOST_NAMES and (*self._who, name) not in family._metrics:
            return Gauge("dropped", "Beyond the names that are exported.", registry=None)
        return family.labels(*self._who, name[:_LONGEST_NAME])

    def _family(
        self, of: str, kind: type[_M], name: str, text: str, labels: tuple[str, ...] = _WHO, **more: object
    ) -> _M:
        registry = self.registry if of == _EVERY or of in self._kinds else None
        family = kind(name, text, labels, namespace="backstay", registry=registry, **more)  # type: ignore[arg-type]
        self.families.append(family)
        self.exporters[family._name] = of
        return family

    def _counter(self, of: str, name: str, text: str) -> Counter:
        return self._family(of, Counter, name, text).labels(*self._who)

    def _gauge(self, of: str, name: str, text: str) -> Gauge:
        return self._family(of, Gauge, name, text).labels(*self._who)

    def _histogram(self, of: str, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(of, Histogram, name, text, buckets=buckets).labels(*self._who)


class _WithoutCreated:
    """A registry without the `_created` series: one for each counter, which no query uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def metric_names(role: Role | None = None, index: int = 0) -> frozenset[str]:
    """The names of all time series that the pods of a role export, as a query writes them; not `process_*`.

    Args:
        role: a role; None: all roles.
        index: shard of a server, rank of a worker, or 0.
    """
    metrics = Metrics("job", role or "Worker", index)
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
