"""Every metric that the operator exports, in one module, so that a test can compare the dashboards with the list.

The values of the label `role` are `ParameterServer`, `Worker` and `Evaluator`, as in a job's status and in the pods'
metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backstay_operator.job_metrics import JobMetrics
from backstay_spec.causes import Cause
from backstay_spec.types_status import Role

# A second series for each counter, its time of creation, which no query uses.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FAST: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class WatchCollector(Collector):
    """The state of the watches, computed at each scrape."""

    def __init__(self, ages: Callable[[], Mapping[str, float]], owed: Callable[[], float]) -> None:
        """
        Args:
            ages: returns resource -> seconds since its watch last received an event.
            owed: returns seconds without an event from a watch that has not shown a write of the operator.
        """
        self.ages, self.owed = ages, owed

    def collect(self) -> Iterable[Metric]:
        """Yields one sample for each watched resource."""
        family = GaugeMetricFamily(
            "backstay_operator_watch_age_seconds",
            "Seconds since the watch of a resource last received an event.",
            labels=["resource"],
        )
        for resource, age in self.ages().items():
            family.add_metric([resource], age)
        yield family
        yield GaugeMetricFamily(
            "backstay_operator_watch_overdue_seconds",
            "Seconds without an event from a watch that has not shown a write of the operator; 0: all were shown.",
            self.owed(),
        )


class OperatorMetrics:
    """The metrics of one operator, in a separate registry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.clock = clock
        self.moved: dict[str, float] = {}
        self._overdue = 0.0
        self.watches = WatchCollector(self.watch_ages, lambda: self._overdue)
        self.registry.register(self.watches)
        to = self.registry
        ProcessCollector(registry=to)
        self.reconciles = Counter("backstay_operator_reconciles_total", "Runs of a job's reconciliation.", registry=to)
        self.reconcile_seconds = Histogram(
            "backstay_operator_reconcile_duration_seconds",
            "Duration of one run, including its API calls.",
            buckets=_FAST,
            registry=to,
        )
        self.errors = Counter(
            "backstay_operator_errors_total",
            "Errors after which the operator tries again, by kind.",
            ["kind"],
            registry=to,
        )
        self.pods_created = Counter(
            "backstay_operator_pods_created_total", "Pods created, by role.", ["role"], registry=to
        )
        self.pods_replaced = Counter(
            "backstay_operator_pods_replaced_total",
            "Pods that were replaced, by role and by cause.",
            ["role", "cause"],
            registry=to,
        )
        self.pod_deaths = Counter(
            "backstay_operator_pod_deaths_total",
            "Pods that died before their job was complete, by role and cause.",
            ["role", "cause"],
            registry=to,
        )
        self.replacement_seconds = Histogram(
            "backstay_operator_replacement_duration_seconds",
            "Time from the observed end of a pod to the creation of its replacement, if nothing delayed the creation.",
            buckets=_FAST,
            registry=to,
        )
        self.api_requests = Counter(
            "backstay_operator_api_requests_total",
            "Requests to the API server (except watches) by verb, resource and status code (0: no answer).",
            ["verb", "resource", "code"],
            registry=to,
        )
        self.api_seconds = Histogram(
            "backstay_operator_api_request_duration_seconds",
            "Time until a request to the API server is answered.",
            ["verb"],
            buckets=_FAST,
            registry=to,
        )
        self.watch_events = Counter(
            "backstay_operator_watch_events_total", "Events that the watches received.", ["resource"], registry=to
        )
        self.ghosts = Counter(
            "backstay_operator_missed_deletions_total",
            "Objects that a list no longer contained, although no watch had reported their deletion.",
            ["resource"],
            registry=to,
        )
        self.progress_calls = Counter(
            "backstay_operator_progress_calls_total", "Calls to servers, by gRPC status code.", ["code"], registry=to
        )
        self.leader = Gauge(
            "backstay_operator_leader", "1 while this operator holds the Lease and acts, else 0.", registry=to
        )
        self.recovery_seconds = Histogram(
            "backstay_operator_recovery_duration_seconds",
            "Time from a pod's observed death until its replacement works: a worker contributed, another pod is ready.",
            ["role"],
            buckets=_SLOW,
            registry=to,
        )
        self.job = JobMetrics(
            clock, wall, recovered=lambda role, seconds: self.recovery_seconds.labels(role).observe(seconds)
        )
        self.registry.register(self.job)
        # `increase` ignores the first increment of a counter whose series begins with it.
        for role in get_args(Role):
            self.pods_created.labels(role)
            self.recovery_seconds.labels(role)
            for cause in Cause:
                self.pod_deaths.labels(role, str(cause))
                self.pods_replaced.labels(role, str(cause))

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request; this is the argument `observe` of `Kube`."""
        self.api_requests.labels(verb, resource, str(code)).inc()
        self.api_seconds.labels(verb).observe(seconds)

    def watch_moved(self, resource: str) -> None:
        """The watch of `resource` received an event."""
        self.moved[resource] = self.clock()
        self.watch_events.labels(resource).inc()

    def watch_ages(self) -> dict[str, float]:
        """Returns the seconds since each watch last received an event."""
        now = self.clock()
        return {resource: now - at for resource, at in list(self.moved.items())}

    async def page(self, overdue: float) -> bytes:
        """Returns the text of a scrape, computed in a thread. At 1,000 jobs it takes one second of CPU time.

        Args:
            overdue: seconds without an event from a watch that has not shown a write of the operator.
        """
        self._overdue = overdue
        return await asyncio.to_thread(generate_latest, self.registry)


def metric_names() -> frozenset[str]:
    """Returns the names of all series that the operator can export, as a query spells them (``_total``,
    ``_bucket``)."""
    metrics = OperatorMetrics()
    names: set[str] = set()
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            continue
        if family.type == "counter":
            names.add(f"{family.name}_total")
        elif family.type == "histogram":
            names.update(f"{family.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        else:
            names.add(family.name)
    return frozenset(names)
