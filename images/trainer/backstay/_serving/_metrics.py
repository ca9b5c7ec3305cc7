"""The metrics of a serving process, in their own registry. `ROWS` is also their documentation."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

__all__ = ["ROWS", "MetricOfServing", "ServingMetrics"]

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LOAD_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_EXAMPLES: Final = tuple(float(2**power) for power in range(11))
_KEPT: Final = 5


class MetricOfServing(NamedTuple):
    """One metric, with its type, its name without ``backstay_serving_``, its meaning, labels and buckets."""

    kind: type[Any]
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


ROWS: Final = (
    MetricOfServing(Counter, "requests", "requests for inference, by their HTTP status", ("protocol", "status")),
    MetricOfServing(
        Histogram, "request_seconds", "time from a whole request to its answer", ("protocol",), buckets=_SECONDS
    ),
    MetricOfServing(Histogram, "queue_seconds", "time that a request waits for its batch", buckets=_SECONDS),
    MetricOfServing(Histogram, "predict_seconds", "time of one batch", buckets=_SECONDS),
    MetricOfServing(Histogram, "batch_examples", "examples of one batch, without padding", buckets=_EXAMPLES),
    MetricOfServing(Counter, "padding_examples", "examples that were computed for padding"),
    MetricOfServing(Gauge, "queued_examples", "examples that wait for a batch"),
    MetricOfServing(Counter, "examples", "examples that were answered, by the version of the model", ("version",)),
    MetricOfServing(Gauge, "ready", "1 while the process accepts requests"),
    MetricOfServing(Gauge, "step", "the step of the checkpoint that is served"),
    MetricOfServing(Gauge, "version", "1 for the version that is served", ("version", "checkpoint")),
    MetricOfServing(Counter, "versions", "versions that were served"),
    MetricOfServing(
        Histogram, "load_seconds", "time from the first sight of a checkpoint to its first batch", buckets=_LOAD_SECONDS
    ),
    MetricOfServing(
        Counter, "skipped_checkpoints", "checkpoints that were not served; the log has the reason", ("reason",)
    ),
    MetricOfServing(Gauge, "storage_available", "0 while the folder cannot be listed, or has no checkpoint any more"),
)


class ServingMetrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._made = {
            row.name: row.kind(
                f"backstay_serving_{row.name}",
                row.text,
                row.labels,
                registry=self.registry,
                **({"buckets": row.buckets} if row.buckets else {}),
            )
            for row in ROWS
        }
        self._versions: list[tuple[str, str]] = []
        self._by_request: dict[tuple[str, int], Any] = {}

    @property
    def families(self) -> tuple[Any, ...]:
        """All metrics, for their documentation."""
        return tuple(self._made.values())

    def counter(self, name: str) -> Counter:
        """Returns the counter of that name."""
        return cast(Counter, self._made[name])

    def gauge(self, name: str) -> Gauge:
        """Returns the gauge of that name."""
        return cast(Gauge, self._made[name])

    def histogram(self, name: str) -> Histogram:
        """Returns the histogram of that name."""
        return cast(Histogram, self._made[name])

    def request(self, protocol: str, status: int, seconds: float) -> None:
        """Count one request for inference."""
        key = (protocol, status)
        if key not in self._by_request:
            count = self.counter("requests").labels(protocol, str(status))
            self._by_request[key] = count, self.histogram("request_seconds").labels(protocol)
        count, histogram = self._by_request[key]
        count.inc()
        histogram.observe(seconds)

    def served(self, step: int, version: str, checkpoint: str) -> None:
        """Another version is served. The series of versions before the last five are removed."""
        self.counter("versions").inc()
        self.gauge("step").set(step)
        self.gauge("version").clear()
        self.gauge("version").labels(version, checkpoint).set(1)
        self._versions = [kept for kept in self._versions if kept[0] != version] + [(version, checkpoint)]
        for old, _ in self._versions[:-_KEPT]:
            self.counter("examples").remove(old)
        self._versions = self._versions[-_KEPT:]
        self.counter("examples").labels(version)

    def page(self) -> bytes:
        """Returns the page for Prometheus."""
        return generate_latest(self.registry)
