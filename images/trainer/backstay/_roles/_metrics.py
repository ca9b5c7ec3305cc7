"""Every Prometheus metric of a training pod, in one place, and the HTTP port that shows them.

https://prometheus.io/docs/practices/naming/. `/metrics`, `/healthz`, `/readyz`, `/peers` and `/status` are the only
things that a pod answers without the job's token (O7).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

from backstay_spec.types_status import Role

from .._coordination import Outcome

__all__ = ["HttpPort", "Metrics", "metric_names"]

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STALENESS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_WHO: Final = ("job", "role", "index")

_M = TypeVar("_M", bound=MetricWrapperBase)

STEP_PARTS: Final = ("batch_wait", "compute", "push", "update_wait", "pull")
"""Of a worker's step; they add up to it. `push` lasts until the slowest shard's stream has taken the gradient,
`update_wait` until the first of the new parameters came from the slowest: the rest of the quorum, the update; `pull` is
the rest."""


class Metrics:
    """The metrics of one pod; labels `job`, `role`, `index` are on all of them."""

    def __init__(self, job: str, role: Role, index: int) -> None:
        self.registry = CollectorRegistry()
        self._who = (job, role, str(index))
        self.families: list[MetricWrapperBase] = []
        # Of the job; shard 0.
        self.updates = self._counter("updates", "Updates decided, skipped ones included.")
        self.skipped = self._counter("updates_skipped", "Updates skipped for a gradient that was not finite.")
        self.examples = self._counter("examples", "Examples in applied gradients.")
        self._gradients = self._family(Counter, "gradients", "Gradients by what became of them.", (*_WHO, "outcome"))
        self.staleness = self._histogram("staleness", "Versions between computing and applying a gradient.", _STALENESS)
        self.quorum_seconds = self._histogram(
            "quorum_wait_seconds", "From the first gradient of a version to the decision of its update.", _SECONDS
        )
        self.live_workers = self._gauge("live_workers", "Workers with a heartbeat in the last 10 s.")
        self.world = self._gauge("world", "Ranks in force.")
        self._loss = self._family(
            Gauge,
            "loss",
            "Mean loss of the newest update's gradients; a worker: of its newest gradient. No series before the first.",
        )
        self.examples_per_second = self._gauge("examples_per_second", "Examples a second over the last 30 s.")
        self.term = self._gauge("term", "Stretch of history without a rollback.")
        self.redone = self._counter("steps_redone", "Updates lost by going back to a checkpoint.")
        self._evaluation = self._family(Gauge, "evaluation", "What evaluate returned last.", (*_WHO, "name"))
        self.evaluation_step = self._gauge("evaluation_step", "The step of backstay_evaluation; 0: none yet.")
        self._train = self._family(
            Gauge, "train_metric", "What loss returned beside the loss: mean of the newest update.", (*_WHO, "name")
        )
        self._stragglers = self._family(
            Gauge,
            "straggler_delay_seconds",
            "How much longer a slow rank's gradient takes than the others' median; no series for those that are not.",
            (*_WHO, "rank"),
        )
        self._slow: frozenset[int] = frozenset()
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds", "Writing a shard's part of a checkpoint.", _SECONDS
        )
        self.checkpoint_bytes = self._counter("checkpoint_bytes", "Bytes of checkpoints written by this pod.")
        self.checkpoints = self._counter("checkpoints", "Whole checkpoints stored.")
        self.checkpoint_timestamp = self._gauge(
            "checkpoint_timestamp_seconds", "Unix time at which the newest whole checkpoint was stored; 0: none yet."
        )
        self.checkpoint_failures = self._counter("checkpoint_failures", "Checkpoints that could not be stored.")
        # Of every server.
        self.version = self._gauge("version", "Updates applied; a worker: version of its parameters.")
        self.joins = self._counter("joins", "Pods that joined here, each once; a worker: times that it joined.")
        self.apply_seconds = self._histogram(
            "apply_seconds", "From a commit's arrival at a shard to its update being applied.", _SECONDS
        )
        # Of every worker.
        self._step = self._family(
            Histogram, "step_seconds", "Parts of a worker's step.", (*_WHO, "part"), buckets=_SECONDS
        )
        self._bytes = self._family(Counter, "bytes", "Bytes of tensors on data streams.", (*_WHO, "direction"))
        # Series that are there from the start can be added up and compared from the start.
        for outcome in Outcome:
            self.gradients(outcome.value)
        for part in STEP_PARTS:
            self.step(part)
        for direction in ("sent", "received"):
            self.bytes(direction)
        self.reconnects = self._counter("reconnects", "Times that a worker connected again after losing a server.")

    @property
    def loss(self) -> Gauge:
        """The series begins with the first use: a 0 would be a loss that nobody computed."""
        return self._loss.labels(*self._who)

    def gradients(self, outcome: str) -> Counter:
        """By what became of them."""
        return self._gradients.labels(*self._who, outcome)

    def evaluation(self, name: str) -> Gauge:
        """Of one of `evaluate`'s metrics."""
        return self._evaluation.labels(*self._who, name)

    def train(self, name: str) -> Gauge:
        """Of one of the metrics that `loss` returns."""
        return self._train.labels(*self._who, name)

    def stragglers(self, delays: Mapping[int, float]) -> None:
        """The ranks that are slow now, and by how many seconds."""
        gone, self._slow = self._slow - delays.keys(), frozenset(delays)
        for rank in gone:
            self._stragglers.remove(*self._who, str(rank))
        for rank, delay in delays.items():
            self._stragglers.labels(*self._who, str(rank)).set(delay)

    def step(self, part: str) -> Histogram:
        """Of one of `STEP_PARTS`."""
        return self._step.labels(*self._who, part)

    def bytes(self, direction: str) -> Counter:
        """``sent`` or ``received``."""
        return self._bytes.labels(*self._who, direction)

    def _family(self, kind: type[_M], name: str, text: str, labels: tuple[str, ...] = _WHO, **more: object) -> _M:
        family = kind(name, text, labels, namespace="backstay", registry=self.registry, **more)  # type: ignore[arg-type]
        self.families.append(family)
        return family

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(*self._who)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text).labels(*self._who)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, text, buckets=buckets).labels(*self._who)


def metric_names() -> frozenset[str]:
    """The names of all time series that training pods export, as a query writes them."""
    metrics = Metrics("job", "Worker", 0)
    names: list[str] = []
    for family in metrics.families:
        base = next(iter(family.describe())).name
        match family:
            case Counter():
                names.append(f"{base}_total")
            case Histogram():
                names += [f"{base}_bucket", f"{base}_count", f"{base}_sum"]
            case _:
                names.append(base)
    return frozenset(names)


class HttpPort:
    """`/metrics`, `/healthz` (200 while the process answers), `/readyz` (200 when it is `ready`), `/peers`, `/status`.

    Attributes:
        status: returns what `/status` shows; only shard 0's server has something to show.
    """

    def __init__(
        self,
        metrics: Metrics,
        ready: Callable[[], bool],
        *,
        bind: str,
        port: int,
        peers: Callable[[], Mapping[int, tuple[float, int]]] = dict,
    ) -> None:
        """
        Args:
            peers: by shard, seconds since its server last answered this pod, and the calls it left unanswered since.
                The operator asks for it before it replaces a server that does not answer the operator.

        Raises:
            OSError: the port cannot be bound; the message names it.
        """
        registry, shown = metrics.registry, self
        self.status: Callable[[], Mapping[str, Any]] = dict

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif path == "/healthz":
                    self._answer(200, b"ok\n")
                elif path == "/readyz":
                    self._answer(*((200, b"ready\n") if ready() else (503, b"not ready\n")))
                elif path == "/peers":
                    said = {shard: {"answered": ago, "missed": missed} for shard, (ago, missed) in peers().items()}
                    self._answer(200, json.dumps(said).encode(), "application/json")
                elif path == "/status":
                    self._answer(200, json.dumps(shown.status(), allow_nan=False).encode(), "application/json")
                else:
                    self._answer(404, b"there are /metrics, /healthz, /readyz, /peers and /status\n")

            def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                try:
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:  # a probe that did not wait, while this process was stopped say
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass  # probes every few seconds are not news

        try:
            self._server = ThreadingHTTPServer((bind, port), Handler)
        except OSError as error:
            raise OSError(f"the metrics port cannot listen on {bind} port {port}: {error}") from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="backstay-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns at once; the port is free within half a second."""

        def close() -> None:
            self._server.shutdown()
            self._server.server_close()

        threading.Thread(target=close, name="backstay-http-close", daemon=True).start()
