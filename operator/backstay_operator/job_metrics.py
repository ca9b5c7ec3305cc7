"""The metrics that the operator exports of each job. The series are made at each scrape, and end with the job.

Counters that come from a job's status survive the operator. Those that are counted here (deaths by cause, seconds)
begin at 0 when another operator takes over; `increase` and `rate` allow for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic.alias_generators import to_camel

from backstay_operator.watching import JobKey
from backstay_spec import contract, status
from backstay_spec.actions import FoundDead
from backstay_spec.causes import condition_of
from backstay_spec.goodput import PARTS
from backstay_spec.job_report import NO_RATES, exported_rows
from backstay_spec.names import ROLE_OF_LABEL
from backstay_spec.observed import Progress
from backstay_spec.quorum import backups_of
from backstay_spec.types import TrainingJobSpec
from backstay_spec.types_status import Phase

Json = Mapping[str, Any]
PHASES: Final[tuple[str, ...]] = get_args(Phase)
_TO_TRAIN: Final = ("Starting", "Running")
_OVER: Final = ("Succeeded", "Failed")
#: Reasons of the condition Training after the last update.
_ENDS: Final = ("Ending", "Trained")
STATES: Final = ("pending", "starting", "training", "stopped", "ending", "suspended")
_JOB: Final = ("namespace", "training_job")


class _Family(NamedTuple):
    """One metric, with `labels` beside the job's."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...] = ()


_G, _C = GaugeMetricFamily, CounterMetricFamily
_REPORTED: Final = exported_rows()
FAMILIES: Final = (
    _Family(_G, "info", "Always 1; the labels describe the job.", ("mode",)),
    _Family(_G, "phase", "1 for the phase that a job is in, 0 for each other phase.", ("phase",)),
    _Family(
        _G,
        "training",
        "1 while updates are applied, 0 while a job that should train applies none (the condition Training). No series "
        "after the last update.",
    ),
    *(_Family(_C if row.counts else _G, name, row.metric) for name, row in _REPORTED.items()),
    _Family(
        _G,
        "last_update_timestamp_seconds",
        "Unix time at which the operator last saw the step grow. No series before the first update.",
    ),
    _Family(
        _G,
        "first_update_timestamp_seconds",
        "Unix time at which the operator first saw the step grow after the start. An operator that began later has the "
        "time of the start.",
    ),
    _Family(_G, "standbys", "Desired standbys; only of jobs with standbys."),
    _Family(
        _G, "standbys_in_sync", "Shards whose standby holds all that their server does; only of jobs with standbys."
    ),
    _Family(_G, "pods", "Pods of a job by role, of workers ranks; state is desired or ready.", ("role", "state")),
    _Family(_C, "restarts", "Pods, or ranks, replaced after a crash, charged to their role's budget.", ("role",)),
    _Family(_G, "restarts_limit", "The budget: crashes of a role before the job fails.", ("role",)),
    _Family(_C, "disruptions", "Pods, or ranks, replaced after a disruption, without charge.", ("role",)),
    _Family(_C, "deaths", "Pods found dead before their job was done, by role and cause.", ("role", "cause")),
    _Family(
        _G, "last_death_timestamp_seconds", "Unix time of the newest death of a role by a cause.", ("role", "cause")
    ),
    _Family(_G, "backups", "Workers that a synchronous update does not wait for."),
    _Family(_G, "checkpoint_step", "The step of the newest complete checkpoint."),
    _Family(
        _G,
        "checkpoint_timestamp_seconds",
        "Unix time at which the newest complete checkpoint was stored. No series before the first.",
    ),
    _Family(
        _G,
        "checkpoint_interval_seconds",
        "spec.checkpoint.everySeconds; no series for a job that stores nothing, or not by time.",
    ),
    _Family(_G, "start_timestamp_seconds", "Unix time at which the job began to run; after a suspension, again."),
    _Family(_G, "completion_timestamp_seconds", "Unix time at which the job ended."),
    _Family(
        _C,
        "state_seconds",
        "Seconds by state. stopped: it trained, and applies no updates now. ending: after the last update. A job that "
        "has ended does not count.",
        ("state",),
    ),
    _Family(_C, "pod_seconds", "Seconds of pods that had a node and had not ended, by role.", ("role",)),
    _Family(_G, "goodput_ratio", "The share of the seconds of all worker pods whose computation was applied."),
    _Family(
        _G,
        "worker_seconds",
        "Seconds of all worker pods, and of slots without one, by part (status.workerSeconds). A part "
        "may decrease: a rollback makes applied seconds redone.",
        ("part",),
    ),
)


class Pods(NamedTuple):
    """The pods of one role."""

    desired: int
    ready: int
    restarts: int
    limit: int
    disruptions: int


@dataclass
class _Deaths:
    count: int = 0
    at: float = 0.0


@dataclass
class _Missing:
    """A slot whose pod died, where `incarnation` is the dead pod's."""

    incarnation: int
    at: float


@dataclass
class JobSeries:
    """The series of one job.

    Attributes:
        values: name of a metric without further labels -> its value.
        roles: the pods by role.
        deaths: (role, cause) -> how many, and when the newest was seen.
        missing: (role label, index) -> the death whose replacement does not work yet.
        state: one of `STATES`; None: the job has ended.
        seconds: state -> seconds up to `since`, monotonic.
        holding: role -> pods that have a node and have not ended.
        pod_seconds: role -> seconds up to `since`.
        worker_seconds: the seconds by part, as in the status.
    """

    phase: str = "Pending"
    mode: str = ""
    values: dict[str, float] = field(default_factory=dict)
    roles: dict[str, Pods] = field(default_factory=dict)
    deaths: dict[tuple[str, str], _Deaths] = field(default_factory=dict)
    missing: dict[tuple[str, int], _Missing] = field(default_factory=dict)
    state: str | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    holding: dict[str, int] = field(default_factory=dict)
    pod_seconds: dict[str, float] = field(default_factory=dict)
    worker_seconds: Mapping[str, float] = field(default_factory=dict)
    since: float = 0.0

    def set(self, name: str, value: float | None) -> None:
        """Set a value of the job. `None` removes its series."""
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = float(value)

    def passed(self, now: float) -> None:
        """Count the time since the last call, and continue from `now`."""
        elapsed, self.since = max(0.0, now - self.since), now
        if self.state is not None:
            self.seconds[self.state] += elapsed
        for role, count in self.holding.items():
            self.pod_seconds[role] = self.pod_seconds.get(role, 0.0) + count * elapsed


class JobMetrics(Collector):
    """The series of all jobs of one operator. Only the operator that leads exports any."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], float],
        recovered: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        """
        Args:
            clock: a monotonic clock in seconds.
            wall: returns the Unix time.
            recovered: receives a role, and the seconds between the observed death of a pod and its recovery.
        """
        self._clock, self._wall, self._recovered = clock, wall, recovered
        self._jobs: dict[JobKey, JobSeries] = {}
        self._lock = threading.Lock()  # a scrape of many jobs runs in a thread; held for one job at a time

    def _job(self, key: JobKey) -> JobSeries:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = JobSeries(since=self._clock())
        return job

    def report(
        self,
        key: JobKey,
        job: Json,
        spec: TrainingJobSpec | None,
        pods: Sequence[Json],
        progress: Progress | None,
        in_sync: int | None,
    ) -> None:
        """Update the series after a reconciliation.

        Args:
            key: namespace and name.
            job: the TrainingJob; its status is the newest.
            spec: the job's spec; None: the spec is invalid.
            pods: the job's pods.
            progress: what its servers answered last.
            in_sync: shards whose standby holds all that their server does; None without standbys.
        """
        series = self._job(key)
        with self._lock:
            series.passed(self._clock())
            self._know(series, job, spec, pods, progress, in_sync)

    def _know(
        self,
        series: JobSeries,
        job: Json,
        spec: TrainingJobSpec | None,
        pods: Sequence[Json],
        progress: Progress | None,
        in_sync: int | None,
    ) -> None:
        reported = job.get("status") or {}
        series.phase = reported.get("phase") or "Pending"
        trains, lives = training(job), series.phase in _TO_TRAIN
        reason = condition_of(job, status.TRAINING).get("reason")
        ends, updated = lives and reason in _ENDS, reported.get("step") and reason != "NotStarted"
        if "last_update_timestamp_seconds" not in series.values and updated:
            # An earlier operator observed the updates of this job.
            series.set("last_update_timestamp_seconds", _stopped(job) or self._wall())
            series.set("first_update_timestamp_seconds", _unix(reported.get("startTime")))
        for name, row in _REPORTED.items():  # of a job whose servers have not answered this operator
            if not row.is_rate and name not in series.values:
                series.set(name, reported.get(to_camel(name)))
        series.set("goodput_ratio", reported.get("goodput"))
        series.worker_seconds = reported.get("workerSeconds") or {}
        series.set("training", bool(trains) if lives and not ends else None)
        if not lives or not trains:
            for name in NO_RATES:
                series.set(name, 0 if lives else None)
        series.set("standbys_in_sync", in_sync)
        stored = reported.get("checkpoint") or {}
        series.set("checkpoint_step", stored.get("step"))
        series.set("checkpoint_timestamp_seconds", _unix(stored.get("time")))
        series.set("start_timestamp_seconds", _unix(reported.get("startTime")))
        series.set("completion_timestamp_seconds", _unix(reported.get("completionTime")))
        if spec is not None:
            self._specify(series, spec)
        limits = _limits(spec)
        series.roles = {
            role: Pods(
                desired=counts.get("desired", 0),
                ready=counts.get("ready", 0),
                restarts=counts.get("restarts", 0),
                limit=limits.get(role, 0),
                disruptions=counts.get("disruptions", 0),
            )
            for role, counts in (reported.get("roles") or {}).items()
        }
        began = bool(reported.get("step"))
        series.state = "ending" if ends else _state(series.phase, trains, started=began)
        uid = job["metadata"].get("uid")
        own = [pod for pod in pods if any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or ())]
        series.holding = _holding(own)
        ranks = 0 if spec is None else spec.workers.replicas
        for role, index in list(series.missing):
            if series.phase in _OVER or (role == contract.ROLE_WORKER and index >= ranks):
                del series.missing[role, index]
        self._recover(series, own, progress)

    def progress(self, key: JobKey, progress: Progress, *, trains: bool) -> None:
        """Update the series after an answer of the servers; `trains`: the condition Training is not False."""
        series, report = self._job(key), progress.report
        with self._lock:
            # A job that continues from a checkpoint has made no update before the first one of its term.
            begins = 0 if report.term_start is None else report.term_start.step
            if (report.step or 0) > max(series.values.get("step", 0), begins):
                now, first = self._wall(), series.values.get("first_update_timestamp_seconds", -1.0)
                series.set("last_update_timestamp_seconds", now)
                if first < series.values.get("start_timestamp_seconds", 0.0):
                    series.set("first_update_timestamp_seconds", now)
            for name, row in _REPORTED.items():
                value = getattr(report, name)
                if value is not None:
                    series.set(name, 0.0 if row.is_rate and not trains else value)

    def died(self, key: JobKey, death: FoundDead) -> None:
        """Count a pod that was found dead."""
        series = self._job(key)
        with self._lock:
            deaths = series.deaths.setdefault((ROLE_OF_LABEL[death.role], str(death.cause)), _Deaths())
            deaths.count += 1
            deaths.at = self._wall()
            missing = series.missing.setdefault((death.role, death.index), _Missing(death.incarnation, self._clock()))
            missing.incarnation = max(missing.incarnation, death.incarnation)

    def forget(self, key: JobKey) -> None:
        """Remove the series of a deleted job."""
        self._jobs.pop(key, None)

    def clear(self) -> None:
        """Remove all series, because another operator acts for the jobs now, and exports them."""
        self._jobs.clear()

    # The export.

    def describe(self) -> Iterable[Metric]:
        """Yields every metric, without a sample."""
        yield self._phases()
        for family in FAMILIES:
            yield family.kind(f"backstay_job_{family.name}", family.text, labels=[*_JOB, *family.labels])

    def collect(self) -> Iterable[Metric]:
        """Yields every metric, with the samples of now."""
        now = self._clock()
        yield self._phases()
        made = {f.name: f.kind(f"backstay_job_{f.name}", f.text, labels=[*_JOB, *f.labels]) for f in FAMILIES}
        for key, series in list(self._jobs.items()):
            with self._lock:
                series.passed(now)
                samples = list(_samples(series))
            for name, labels, value in samples:
                made[name].add_metric([*key, *labels], value)
        yield from made.values()

    def _phases(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("backstay_operator_jobs", "TrainingJobs by phase.", labels=["phase"])
        phases = [series.phase for series in list(self._jobs.values())]
        for phase in PHASES:
            family.add_metric([phase], phases.count(phase))
        return family

    # The reports.

    @staticmethod
    def _specify(series: JobSeries, spec: TrainingJobSpec) -> None:
        series.mode = spec.update.mode
        standbys = spec.parameter_servers.replicas * spec.parameter_servers.standbys
        series.set("standbys", standbys or None)
        sync = spec.update.mode == "Sync"
        series.set("backups", backups_of(spec.update.backups, spec.workers.replicas) if sync else None)
        stores = spec.checkpoint.uri is not None or spec.checkpoint.volume is not None
        series.set("checkpoint_interval_seconds", spec.checkpoint.every_seconds or None if stores else None)

    def _recover(self, series: JobSeries, pods: Sequence[Json], progress: Progress | None) -> None:
        """Find dead pods whose replacement is at work: it has contributed, or is ready where it contributes nothing."""
        newest = {} if progress is None else progress.contributed
        for slot, missing in list(series.missing.items()):
            role, index = slot
            if role == contract.ROLE_WORKER:
                works = newest.get(index, -1)
            else:
                works = max((i for i in (_ready(pod, role, index) for pod in pods) if i is not None), default=-1)
            if works > missing.incarnation:
                self._recovered(ROLE_OF_LABEL[role], self._clock() - missing.at)
                del series.missing[slot]


def training(job: Json) -> bool | None:
    """Returns the status of the condition Training, or None if there is no such condition yet."""
    found = condition_of(job, status.TRAINING)
    return found.get("status") == "True" if found else None


def _stopped(job: Json) -> float | None:
    """Returns the Unix time from which the condition Training has been False; None if it is not."""
    return None if training(job) is not False else _unix(condition_of(job, status.TRAINING).get("lastTransitionTime"))


def _samples(series: JobSeries) -> Iterator[tuple[str, tuple[str, ...], float]]:
    if series.mode:
        yield "info", (series.mode,), 1
    for phase in PHASES:
        yield "phase", (phase,), series.phase == phase
    for name, value in series.values.items():
        yield name, (), value
    for role, pods in series.roles.items():
        yield "pods", (role, "desired"), pods.desired
        yield "pods", (role, "ready"), pods.ready
        yield "restarts", (role,), pods.restarts
        yield "disruptions", (role,), pods.disruptions
        if pods.limit:
            yield "restarts_limit", (role,), pods.limit
    for (role, cause), deaths in series.deaths.items():
        yield "deaths", (role, cause), deaths.count
        yield "last_death_timestamp_seconds", (role, cause), deaths.at
    for state, seconds in series.seconds.items():
        yield "state_seconds", (state,), seconds
    for role, seconds in series.pod_seconds.items():
        yield "pod_seconds", (role,), seconds
    if series.worker_seconds:
        for part in PARTS:
            yield "worker_seconds", (part,), series.worker_seconds.get(part, 0.0)


def _state(phase: str, trains: bool | None, *, started: bool) -> str | None:
    match phase:
        case "Pending":
            return "pending"
        case "Suspended":
            return "suspended"
        case "Starting" | "Running":
            return "training" if trains else "stopped" if started else "starting"
        case _:
            return None


def _limits(spec: TrainingJobSpec | None) -> dict[str, int]:
    if spec is None:
        return {}
    return {
        "ParameterServer": spec.parameter_servers.max_restarts,
        "Worker": spec.workers.max_restarts,
        "Evaluator": spec.evaluator.max_restarts if spec.evaluator is not None else 0,
    }


def _unix(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()


def _holding(pods: Sequence[Json]) -> dict[str, int]:
    """Returns the pods that occupy a node, by role."""
    found = dict.fromkeys(ROLE_OF_LABEL.values(), 0)
    for pod in pods:
        role = ROLE_OF_LABEL.get((pod["metadata"].get("labels") or {}).get(contract.LABEL_ROLE, ""))
        phase = (pod.get("status") or {}).get("phase")
        if role is not None and (pod.get("spec") or {}).get("nodeName") and phase not in ("Succeeded", "Failed"):
            found[role] += 1
    return {role: count for role, count in found.items() if count}


def _ready(pod: Json, role: str, index: int) -> int | None:
    """Returns the incarnation of a pod that is ready in this slot. Of a rank of several pods, the first one counts."""
    labels = pod["metadata"].get("labels") or {}
    own = labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX), labels.get(contract.LABEL_MEMBER, "0")
    if own != (role, str(index), "0"):
        return None
    ready = condition_of(pod, "Ready").get("status") == "True"
    incarnation = labels.get(contract.LABEL_INCARNATION, "")
    return int(incarnation) if ready and incarnation.isdigit() else None
