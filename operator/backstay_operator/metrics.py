"""Every metric that the operator exports, in one place, so that a dashboard can be tested against the list.

The label `role` is spelled as in a job's status, `ParameterServer`, `Worker` or `Evaluator`, here and in the pods' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backstay_spec.types_status import Phase

# A second series for each counter, which tells when it was made, and which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

PHASES: Final[tuple[str, ...]] = get_args(Phase)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class WatchCollector(Collector):
    """How long ago each watch last brought something, computed when it is asked for."""

    def __init__(self, ages: Callable[[], Mapping[str, float]]) -> None:
        self.ages = ages

    def collect(self) -> Iterable[Metric]:
        """One sample for each watched resource."""
        family = GaugeMetricFamily(
            "backstay_operator_watch_age_seconds",
            "Seconds since the watch of a resource last brought an event.",
            labels=["resource"],
        )
        for resource, age in self.ages().items():
            family.add_metric([resource], age)
        yield family


class Metrics:
    """The metrics of one operator, in a registry of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.clock = clock
        self.moved: dict[str, float] = {}
        self.registry.register(WatchCollector(self.watch_ages))
        to = self.registry
        self.reconciles = Counter("backstay_operator_reconciles_total", "Runs of a job's reconciliation.", registry=to)
        self.reconcile_seconds = Histogram(
            "backstay_operator_reconcile_duration_seconds",
            "Time that one run took, its API calls included.",
            buckets=_FAST,
            registry=to,
        )
        self.errors = Counter(
            "backstay_operator_errors_total",
            "What went wrong and was tried again, by kind.",
            ["kind"],
            registry=to,
        )
        self.pods_created = Counter(
            "backstay_operator_pods_created_total", "Pods created, by role.", ["role"], registry=to
        )
        self.pods_replaced = Counter(
            "backstay_operator_pods_replaced_total",
            "Pods that were replaced, by role and by what had become of them.",
            ["role", "cause"],
            registry=to,
        )
        self.pod_deaths = Counter(
            "backstay_operator_pod_deaths_total",
            "Pods found dead before their job was done, by role and cause.",
            ["role", "cause"],
            registry=to,
        )
        self.replacement_seconds = Histogram(
            "backstay_operator_replacement_duration_seconds",
            "From a pod's end being seen to its replacement being created, where nothing had to be waited for.",
            buckets=_FAST,
            registry=to,
        )
        self.jobs = Gauge("backstay_operator_jobs", "TrainingJobs by phase.", ["phase"], registry=to)
        self.api_requests = Counter(
            "backstay_operator_api_requests_total",
            "Requests to the API server (watches apart) by verb, resource and status code (0: no answer).",
            ["verb", "resource", "code"],
            registry=to,
        )
        self.api_seconds = Histogram(
            "backstay_operator_api_request_duration_seconds",
            "Time to the answer of a request to the API server.",
            ["verb"],
            buckets=_FAST,
            registry=to,
        )
        self.watch_events = Counter(
            "backstay_operator_watch_events_total", "Events that the watches brought.", ["resource"], registry=to
        )
        self.ghosts = Counter(
            "backstay_operator_missed_deletions_total",
            "Objects that a list no longer had although no watch had told of their deletion.",
            ["resource"],
            registry=to,
        )
        self.progress_calls = Counter(
            "backstay_operator_progress_calls_total", "Calls to servers, by gRPC status code.", ["code"], registry=to
        )
        self.leader = Gauge(
            "backstay_operator_leader", "1 while this operator holds the Lease and acts, else 0.", registry=to
        )
        by_job = ["namespace", "job"]
        self.job_in_phase = Gauge(
            "backstay_job_phase",
            "1 for the phase that a job is in, 0 for each other phase.",
            [*by_job, "phase"],
            registry=to,
        )
        self.job_trains = Gauge(
            "backstay_job_training",
            "1 while updates are applied, 0 while a job that shall train applies none (the condition Training).",
            by_job,
            registry=to,
        )
        self.job_step = Gauge("backstay_job_step", "Updates applied.", by_job, registry=to)
        self.job_rate = Gauge("backstay_job_examples_per_second", "Examples trained on a second.", by_job, registry=to)
        self.job_loss = Gauge("backstay_job_loss", "The newest loss.", by_job, registry=to)
        self.job_redone = Gauge(
            "backstay_job_steps_redone", "Updates that were lost with a server and applied again.", by_job, registry=to
        )
        self.job_standbys = Gauge(
            "backstay_job_standbys_in_sync",
            "Shards whose standby holds all that their server does; only of jobs with standbys.",
            by_job,
            registry=to,
        )
        self.job_pods = Gauge(
            "backstay_job_pods",
            "Pods of a job by role; state is desired or ready.",
            [*by_job, "role", "state"],
            registry=to,
        )
        self.job_restarts = Gauge(
            "backstay_job_restarts", "Restarts charged to a role's budget.", [*by_job, "role"], registry=to
        )
        self.job_disruptions = Gauge(
            "backstay_job_disruptions",
            "Disruptions, which are replaced without charge.",
            [*by_job, "role"],
            registry=to,
        )
        self._phases: dict[tuple[str, str], str] = {}
        self._roles: dict[tuple[str, str], set[str]] = {}

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server; what `Kube` is told to observe with."""
        self.api_requests.labels(verb, resource, str(code)).inc()
        self.api_seconds.labels(verb).observe(seconds)

    def watch_moved(self, resource: str) -> None:
        """The watch of `resource` brought an event."""
        self.moved[resource] = self.clock()
        self.watch_events.labels(resource).inc()

    def watch_ages(self) -> dict[str, float]:
        """Seconds since each watch moved."""
        now = self.clock()
        return {resource: now - at for resource, at in self.moved.items()}

    def job_phase(self, namespace: str, job: str, phase: str) -> None:
        """A job is in `phase` now."""
        before = self._phases.get((namespace, job))
        if before == phase:
            return
        if before is not None:
            self.jobs.labels(before).dec()
        self.jobs.labels(phase).inc()
        self._phases[namespace, job] = phase
        for other in PHASES:
            self.job_in_phase.labels(namespace, job, other).set(other == phase)

    def job_role(
        self, namespace: str, job: str, role: str, *, desired: int, ready: int, restarts: int, lost: int
    ) -> None:
        """A job's pods of one role: how many there should be and are ready, and the deaths on its account."""
        self._roles.setdefault((namespace, job), set()).add(role)
        self.job_pods.labels(namespace, job, role, "desired").set(desired)
        self.job_pods.labels(namespace, job, role, "ready").set(ready)
        self.job_restarts.labels(namespace, job, role).set(restarts)
        self.job_disruptions.labels(namespace, job, role).set(lost)

    def job_standbys_in_sync(self, namespace: str, job: str, count: int | None) -> None:
        """How many of a job's shards would lose nothing with their server; None where it has no standbys."""
        if count is None:
            self._drop(self.job_standbys, namespace, job)
        else:
            self.job_standbys.labels(namespace, job).set(count)

    def job_training(self, namespace: str, job: str, trains: bool) -> None:
        """Whether a job that shall train applies updates."""
        self.job_trains.labels(namespace, job).set(trains)
        if not trains:
            self.job_rate.labels(namespace, job).set(0)

    def job_stopped(self, namespace: str, job: str) -> None:
        """A job shall not train: a rate that has ended must not be shown as if it went on."""
        self._drop(self.job_rate, namespace, job)
        self._drop(self.job_trains, namespace, job)

    def forget_job(self, namespace: str, job: str) -> None:
        """A job is gone, and its series with it."""
        phase = self._phases.pop((namespace, job), None)
        if phase is not None:
            self.jobs.labels(phase).dec()
        for other in PHASES:
            self._drop(self.job_in_phase, namespace, job, other)
        for gauge in (self.job_trains, self.job_step, self.job_rate, self.job_loss, self.job_redone, self.job_standbys):
            self._drop(gauge, namespace, job)
        for role in self._roles.pop((namespace, job), set()):
            for state in ("desired", "ready"):
                self._drop(self.job_pods, namespace, job, role, state)
            self._drop(self.job_restarts, namespace, job, role)
            self._drop(self.job_disruptions, namespace, job, role)

    @staticmethod
    def _drop(gauge: Gauge, *labels: str) -> None:
        try:
            gauge.remove(*labels)
        except KeyError:
            return


def metric_names() -> frozenset[str]:
    """The names of all series that the operator can export, as a query spells them (``_total``, ``_bucket``)."""
    metrics = Metrics()
    metrics.watch_moved("pods")
    names: set[str] = set()
    for family in metrics.registry.collect():
        if family.type == "counter":
            names.add(f"{family.name}_total")
        elif family.type == "histogram":
            names.update(f"{family.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        else:
            names.add(family.name)
    return frozenset(names)
