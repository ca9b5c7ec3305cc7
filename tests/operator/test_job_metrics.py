"""The series of each job agree with its status, count time without gaps, and end with the job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prometheus_client import generate_latest

from backstay_operator.job_metrics import PHASES
from backstay_operator.metrics import OperatorMetrics, metric_names
from backstay_spec.actions import FoundDead
from backstay_spec.causes import Cause
from backstay_spec.goodput import PARTS
from backstay_spec.job_report import JobReport, TermStart
from backstay_spec.observed import Progress
from backstay_spec.types import TrainingJobSpec
from backstay_spec.validation import parse_job

KEY = ("ns", "a")
UID = "1"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spec_of(**more: Any) -> TrainingJobSpec:
    given = {"image": "x", "workers": {"replicas": 4, "maxRestarts": 7}, "parameterServers": {"replicas": 2}, **more}
    kind = {"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    return parse_job({**kind, "spec": given}).spec


def job_of(phase: str, *, training: bool | None = None, reason: str = "", **status: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"phase": phase, **status}
    if training is not None:
        said["conditions"] = [{"type": "Training", "status": str(training), "reason": reason}]
    return {"metadata": {"name": "a", "namespace": "ns", "uid": UID}, "status": said}


def pod_of(role: str, index: int, incarnation: int, *, ready: bool = True, phase: str = "Running") -> dict[str, Any]:
    labels = {
        "backstay.dev/role": role,
        "backstay.dev/index": str(index),
        "backstay.dev/incarnation": str(incarnation),
    }
    return {
        "metadata": {"name": f"{role}-{index}-{incarnation}", "labels": labels, "ownerReferences": [{"uid": UID}]},
        "spec": {"nodeName": "n"},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class Watched:
    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = OperatorMetrics(self.clock, lambda: 1000.0 + self.clock.now)

    def value(self, name: str, **labels: str) -> float | None:
        of_job = {"namespace": "ns", "training_job": "a"} if name.startswith("backstay_job_") else {}
        return self.metrics.registry.get_sample_value(name, {**of_job, **labels})

    def report(self, job: dict[str, Any], *pods: dict[str, Any], contributed: dict[int, int] | None = None) -> None:
        progress = None
        if contributed is not None:
            progress = Progress(datetime.now(UTC), contributed=contributed)
        self.metrics.job.report(KEY, job, spec_of(), pods, progress, None)


def test_every_series_of_a_job_names_it_in_one_way_and_goes_away_with_it() -> None:
    watched = Watched()
    for name in ("a", "b"):
        job = job_of("Running", training=True, roles={"Worker": {"desired": 2, "ready": 1, "restarts": 3}}, step=7)
        watched.metrics.job.report(("ns", name), job, spec_of(), [], None, 2)
    watched.metrics.job.progress(
        KEY,
        Progress(datetime.now(UTC), report=JobReport(step=7, loss=0.5, examples_per_second=9, steps_redone=4)),
        trains=True,
    )
    assert watched.value("backstay_job_restarts_total", role="Worker") == 3
    assert watched.value("backstay_job_restarts_limit", role="Worker") == 7
    assert watched.value("backstay_job_steps_redone_total") == 4
    assert watched.value("backstay_job_loss") == 0.5
    assert watched.value("backstay_operator_jobs", phase="Running") == 2
    for family in watched.metrics.job.collect():
        for sample in family.samples:
            if sample.name.startswith("backstay_job_"):
                assert {"namespace", "training_job"} <= sample.labels.keys()
    watched.metrics.job.forget(KEY)
    watched.metrics.job.forget(("ns", "never-seen"))
    text = generate_latest(watched.metrics.registry).decode()
    assert 'training_job="a"' not in text
    assert 'training_job="b"' in text
    assert watched.value("backstay_operator_jobs", phase="Running") == 1
    assert watched.value("backstay_operator_jobs", phase="Pending") == 0
    exported = {sample.name for family in watched.metrics.registry.collect() for sample in family.samples}
    assert {name for name in exported - metric_names() if not name.startswith("process_")} == set()


def test_a_job_is_in_one_phase_and_its_rate_is_zero_while_it_does_not_train() -> None:
    """Each phase has a series, 1 or 0, because alerts query the phase and training by job."""
    watched = Watched()
    watched.report(job_of("Running", training=True))
    progress = Progress(datetime.now(UTC), report=JobReport(examples_per_second=48.5))
    watched.metrics.job.progress(KEY, progress, trains=True)
    assert watched.value("backstay_job_training") == 1
    assert watched.value("backstay_job_examples_per_second") == 48.5
    watched.report(job_of("Starting", training=False))
    assert watched.value("backstay_job_training") == 0
    assert watched.value("backstay_job_examples_per_second") == 0
    watched.metrics.job.progress(KEY, progress, trains=False)
    assert watched.value("backstay_job_examples_per_second") == 0
    phases = {phase: watched.value("backstay_job_phase", phase=phase) for phase in PHASES}
    assert phases == {**dict.fromkeys(PHASES, 0), "Starting": 1}
    for reason in ("Ending", "Trained"):  # the script of worker 0 may run for hours after the last update
        watched.report(job_of("Running", training=False))
        assert watched.value("backstay_job_training") == 0
        watched.report(job_of("Running", training=False, reason=reason))
        assert watched.value("backstay_job_training") is None, reason
        assert watched.value("backstay_job_examples_per_second") == 0
    watched.report(job_of("Succeeded"))
    assert watched.value("backstay_job_training") is None
    assert watched.value("backstay_job_examples_per_second") is None


def test_the_last_update_is_the_last_growth_of_the_step_and_the_first_one_is_of_this_start() -> None:
    watched, name = Watched(), "backstay_job_last_update_timestamp_seconds"
    first = "backstay_job_first_update_timestamp_seconds"

    def after(seconds: float, step: int) -> float | None:
        watched.clock.now += seconds
        progress = Progress(datetime.now(UTC), report=JobReport(step=step))
        watched.metrics.job.progress(KEY, progress, trains=True)
        return watched.value(name)

    watched.report(job_of("Starting", training=False, startTime="1970-01-01T00:10:00Z"))
    assert after(1, 0) is None, "an answer is no update"
    assert watched.value(first) is None
    assert [after(1, step) for step in (5, 5, 6)] == [1002, 1002, 1004]
    assert watched.value(first) == 1002
    assert [after(1, step) for step in (3, 3, 4)] == [1004, 1004, 1007], "a rollback is no update"
    watched.report(job_of("Running", training=False, startTime="1970-01-01T00:20:00Z"))
    assert after(1000, 7) == 2007
    assert watched.value(first) == 2007, "it resumed"


def test_a_job_that_continues_from_a_checkpoint_has_no_update_before_its_own_first_one() -> None:
    watched, name = Watched(), "backstay_job_last_update_timestamp_seconds"

    def after(step: int) -> float | None:
        watched.clock.now += 1
        report = JobReport(step=step, term_start=TermStart(1, 1000, "s3://x"))
        watched.metrics.job.progress(KEY, Progress(datetime.now(UTC), report=report), trains=True)
        return watched.value(name)

    for step in (None, 1000):
        watched.report(
            job_of("Starting", training=False, reason="NotStarted", **({} if step is None else {"step": step}))
        )
        assert after(1000) is None
    assert after(1001) == 1003


def test_a_later_operator_exports_the_time_at_which_a_job_stopped() -> None:
    """Otherwise an alert would end, and fire again, whenever another operator takes over."""
    for trains, last in ((False, 940), (True, 1000)):
        watched, name = Watched(), "backstay_job_last_update_timestamp_seconds"
        job = job_of("Running", training=trains, step=7)
        job["status"]["conditions"][0]["lastTransitionTime"] = "1970-01-01T00:15:40Z"
        job["status"]["startTime"] = "1970-01-01T00:10:00Z"
        watched.report(job)
        watched.clock.now = 50
        watched.metrics.job.progress(KEY, Progress(datetime.now(UTC), report=JobReport(step=7)), trains=trains)
        assert watched.value(name) == last
        assert watched.value("backstay_job_first_update_timestamp_seconds") == 600


def test_the_seconds_of_a_jobs_states_add_up_to_its_time() -> None:
    watched = Watched()

    def seconds() -> dict[str, float | None]:
        states = ("pending", "starting", "training", "stopped", "ending", "suspended")
        return {state: watched.value("backstay_job_state_seconds_total", state=state) for state in states}

    steps = (
        (1, job_of("Pending")),
        (2, job_of("Starting")),
        (4, job_of("Running", training=True, step=1)),
        (8, job_of("Running", training=False, step=1)),
        (16, job_of("Suspended", step=1)),
        (32, job_of("Running", training=False, reason="Trained", step=1)),
        (64, job_of("Failed", step=1)),
    )
    for lasts, job in steps:
        watched.report(job)
        watched.clock.now += lasts
    assert seconds() == {"pending": 1, "starting": 2, "training": 4, "stopped": 8, "suspended": 16, "ending": 32}
    assert seconds()["training"] == 4  # a scrape changes nothing


def test_pods_cost_seconds_from_a_node_to_their_end() -> None:
    watched = Watched()
    waiting = pod_of("worker", 2, 0)
    waiting["spec"] = {}
    ended = pod_of("worker", 1, 0, phase="Failed")
    watched.report(job_of("Running"), pod_of("worker", 0, 0), ended, waiting, pod_of("parameter-server", 0, 0))
    watched.clock.now += 10
    assert watched.value("backstay_job_pod_seconds_total", role="Worker") == 10
    assert watched.value("backstay_job_pod_seconds_total", role="ParameterServer") == 10
    watched.report(job_of("Running"))
    watched.clock.now += 10
    assert watched.value("backstay_job_pod_seconds_total", role="Worker") == 10


def test_goodput_is_what_the_status_states() -> None:
    watched = Watched()
    watched.report(job_of("Pending"))
    assert watched.value("backstay_job_worker_seconds", part="applied") is None
    watched.report(job_of("Running", goodput=0.75, workerSeconds={"applied": 6.0, "wait": 2.0}))
    assert watched.value("backstay_job_goodput_ratio") == 0.75
    assert {part: watched.value("backstay_job_worker_seconds", part=part) for part in PARTS} == (
        dict.fromkeys(PARTS, 0) | {"applied": 6, "wait": 2}
    )


def test_a_death_is_counted_and_recovered_when_its_replacement_works() -> None:
    """A worker's replacement works when it has contributed; a server's when it is ready."""
    watched = Watched()

    def recovered(role: str) -> tuple[float | None, float | None]:
        name = "backstay_operator_recovery_duration_seconds"
        return watched.value(f"{name}_count", role=role), watched.value(f"{name}_sum", role=role)

    running = job_of("Running", training=True, step=3)
    watched.clock.now = 5
    watched.metrics.job.died(KEY, FoundDead("worker", 1, 0, "w", Cause.CRASHED, True))
    watched.metrics.job.died(KEY, FoundDead("parameter-server", 0, 0, "s", Cause.CRASHED, True))
    assert watched.value("backstay_job_deaths_total", role="Worker", cause="Crashed") == 1
    assert watched.value("backstay_job_last_death_timestamp_seconds", role="Worker", cause="Crashed") == 1005
    watched.clock.now = 6
    watched.report(running, pod_of("worker", 1, 1), pod_of("parameter-server", 0, 1, ready=False), contributed={1: 0})
    assert recovered("Worker") == recovered("ParameterServer") == (0, 0)
    watched.clock.now = 8
    watched.report(running, pod_of("worker", 1, 1), pod_of("parameter-server", 0, 1), contributed={1: 0})
    assert recovered("ParameterServer") == (1, 3)
    watched.clock.now = 9
    watched.report(running, pod_of("worker", 1, 1), pod_of("parameter-server", 0, 1), contributed={1: 1})
    watched.report(running, pod_of("worker", 1, 1), pod_of("parameter-server", 0, 1), contributed={1: 1})
    assert recovered("Worker") == (1, 4)


def test_the_settings_of_a_job_are_exported_for_alerts() -> None:
    watched = Watched()
    spec = spec_of(
        parameterServers={"replicas": 2, "standbys": 1},
        update={"backups": "25%"},
        checkpoint={"uri": "/x", "everySeconds": 30},
    )
    stored = {"step": 40, "time": "2026-01-31T12:00:00Z"}
    watched.metrics.job.report(KEY, job_of("Running", checkpoint=stored), spec, [], None, 1)
    asked = {
        name: watched.value(f"backstay_job_{name}") for name in ("standbys", "standbys_in_sync", "checkpoint_step")
    }
    assert asked == {"standbys": 2, "standbys_in_sync": 1, "checkpoint_step": 40}
    assert watched.value("backstay_job_backups") == 1
    assert watched.value("backstay_job_checkpoint_interval_seconds") == 30
    assert watched.value("backstay_job_checkpoint_timestamp_seconds") == 1769860800
    assert watched.value("backstay_job_info", mode="Sync") == 1
    watched.metrics.job.report(KEY, job_of("Running"), spec_of(), [], None, None)
    assert watched.value("backstay_job_checkpoint_interval_seconds") is None
    assert watched.value("backstay_job_standbys") is None


def test_an_operator_that_does_not_lead_exports_no_job() -> None:
    """Two operators run; a query must not count a job twice."""
    watched = Watched()
    watched.report(job_of("Running"))
    watched.metrics.job.clear()
    assert 'training_job="a"' not in generate_latest(watched.metrics.registry).decode()


async def test_a_page_is_made_while_jobs_change() -> None:
    watched = Watched()
    watched.report(job_of("Running"))
    page = (await watched.metrics.page(overdue=3.0)).decode()
    assert 'backstay_job_phase{namespace="ns",phase="Running",training_job="a"} 1.0' in page
    assert "backstay_operator_watch_overdue_seconds 3.0" in page
