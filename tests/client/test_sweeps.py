"""A sweep is in its file: nothing is lost, counted twice or left running when its process dies (T3, T8)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import jax.numpy as jnp
import numpy as np
import optuna
import pytest
from between import LONG, put, until

from backstay_client import (
    BadInput,
    Client,
    ClusterUnreachable,
    JobDeleted,
    JobExists,
    JobStatus,
    SweepFailed,
    SweepInUse,
    SweepResult,
    TrainingCurve,
)
from backstay_client.asynchronous.sweep_options import prepared_sweep
from backstay_client.finding.clusters import FoundCluster
from backstay_client.finding.known_runs import KnownRun, ProcessMark
from backstay_client.finding.stored_run import StoredApi
from backstay_client.sweeps.runner import SweepRunner, TrialJobs
from backstay_client.sweeps.space import as_text, distributions_of
from backstay_client.sweeps.store import SweepPlan, SweepStore
from backstay_client.view.follow import JobView
from backstay_spec import contract
from backstay_spec.job_report import JobReport

GOAL = 64


class FakeJob:
    """A job whose loss at each step is its argument `rate`, and which makes 16 steps each time that it is read."""

    def __init__(self, name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        self.name, self.params, self.labels = name, params, labels
        self.step = 0
        self.deleted = False
        self.ends = "Succeeded"
        self.why = "Why"
        self.non_finite = False  # whether `evaluate` returns NaN
        self.evaluations: dict[int, dict[str, float]] = {}  # on the curve
        self.lacks = False  # whether `evaluate` does not return the accuracy
        self.losses: tuple[float, ...] | None = None  # on the curve
        self.every = 1  # steps between two points of the curve
        self.report = JobReport()

    async def status(self) -> JobStatus:
        if self.deleted:
            raise JobDeleted(self.name)
        self.step = min(GOAL, self.step + 16)
        phase = self.ends if self.step == GOAL else "Running"
        loss = self.params["rate"]
        view = JobView(self.name, "default", phase=phase)
        status = JobStatus(self.name, "default", phase, self.why, "because", self.step, loss, view=view)
        reported: dict[str, Any] = {"step": self.step, "goal_steps": GOAL, "loss": loss}
        if self.report != JobReport():
            return replace(status, report=self.report.model_copy(update=reported))
        if self.lacks:
            return replace(status, report=JobReport(**reported))
        if self.non_finite:
            return replace(status, report=JobReport(**reported, non_finite_metrics=["accuracy"]))
        return replace(status, metrics={"accuracy": 1 - loss}, report=JobReport(**reported))

    async def curve(self) -> TrainingCurve:
        evaluations = {step: metrics for step, metrics in self.evaluations.items() if step <= self.step}
        if self.losses is not None:
            losses = self.losses[: self.step]
            return TrainingCurve(tuple(range(1, len(losses) + 1)), losses, {"accuracy": losses}, evaluations)
        steps = tuple(range(self.every, self.step + 1, self.every))
        return TrainingCurve(steps, (self.params["rate"],) * len(steps), evaluations=evaluations)

    async def delete(self, *, wait: bool = True) -> None:
        del wait
        self.deleted = True


class FakeCluster:
    """The jobs on a cluster, which outlive the process of a sweep.

    Attributes:
        started: the names of all jobs that were started, in order.
        unreachable: how many calls fail.
        failing: the calls that fail then.
        every: steps between two points of the curves of new jobs. SQLite takes most of the time of these tests.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.started: list[str] = []
        self.unreachable = 0
        self.most, self.every = 0, 8
        self.failing = {"start", "existing"}

    async def start(self, name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        self._fail("start")
        if name in self.jobs and not self.jobs[name].deleted:
            raise JobExists(name)
        self.started.append(name)
        self.jobs[name] = FakeJob(name, params, labels)
        self.jobs[name].every = self.every
        self.most = max(self.most, sum(not job.deleted and job.step < GOAL for job in self.jobs.values()))
        return self.jobs[name]

    async def existing(self, labels: Mapping[str, str]) -> dict[str, FakeJob]:
        self._fail("existing")
        wanted = set(labels.items())
        return {name: job for name, job in self.jobs.items() if not job.deleted and wanted <= set(job.labels.items())}

    def _fail(self, call: str) -> None:
        if self.unreachable and call in self.failing:
            self.unreachable -= 1
            raise aiohttp.ServerDisconnectedError

    def runner(self, store: SweepStore, **options: Any) -> SweepRunner:
        settings = {"trials": 6, "parallel": 2, "prunes": False, "patience": 60.0, "poll_seconds": 0.0, **options}
        return SweepRunner(store, TrialJobs(self.start, self.existing), **settings)


def plan(**changes: Any) -> SweepPlan:
    settings = {"name": "digits", "objective": "loss", "direction": "minimize", "space": {"rate": (0.0, 1.0)}}
    settings |= changes
    return SweepPlan(
        settings["name"], distributions_of(settings["space"]), settings["objective"], settings["direction"]
    )


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of Optuna without studies. To create its tables takes longer than many of these tests."""
    file = tmp_path_factory.mktemp("tables") / "empty.db"
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    storage.remove_session()
    storage.engine.dispose()
    return file.read_bytes()


@pytest.fixture
def path(tmp_path: Path, tables: bytes) -> Iterator[Path]:
    """The file of a sweep in memory, because each commit of SQLite waits for the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        file = Path(folder) / "sweeps" / "digits.db"
        file.parent.mkdir()
        put(file, tables)
        yield file


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


async def finish(runner: SweepRunner) -> list[Any]:
    return [trials async for trials in runner.run()][-1]


async def test_each_trial_is_a_labelled_job_and_at_most_the_given_number_run(path: Path, cluster: FakeCluster) -> None:
    with SweepStore(plan(), path) as store:
        trials = await finish(cluster.runner(store))
        result = SweepResult.of(store.plan, trials, store.study)
    assert [(one.state, one.step) for one in trials] == [("COMPLETE", GOAL)] * 6
    assert cluster.started == [f"digits-{number}" for number in range(6)]
    assert cluster.most == 2
    assert cluster.jobs["digits-3"].labels == {
        contract.LABEL_SWEEP: "digits",
        contract.LABEL_SWEEP_ID: store.id,
        contract.LABEL_TRIAL: "3",
    }
    assert result.best.value == min(one.value for one in trials)
    frame = result.frame()
    assert list(frame["rate"]) == [one.params["rate"] for one in trials]
    assert frame.index.name == "trial"
    assert "6 complete; best loss" in repr(result)
    assert result._repr_html_().count("<svg") == 1
    result.plot("rate").save(path.with_suffix(".svg"))
    assert path.with_suffix(".svg").read_text().startswith("<svg")
    with pytest.raises(BadInput, match="'width' has no numbers to plot: must be one of rate"):
        result.plot("width")


async def test_a_curve_is_read_when_its_trial_has_moved(path: Path, cluster: FakeCluster) -> None:
    polls, reads = 0, 0

    class Slow(FakeJob):
        async def status(self) -> JobStatus:
            """It moves at every fourth poll."""
            nonlocal polls
            polls += 1
            self.step -= 16 * (self.step > 0 and polls % 4 != 0)
            return await super().status()

        async def curve(self) -> TrainingCurve:
            nonlocal reads
            reads += 1
            return await super().curve()

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        cluster.jobs[name] = Slow(name, params, labels)
        return cluster.jobs[name]

    with SweepStore(plan(), path) as store:
        runner = SweepRunner(
            store,
            TrialJobs(start, cluster.existing),
            trials=1,
            parallel=1,
            prunes=False,
            patience=60.0,
            poll_seconds=0.0,
        )
        (trial,) = await finish(runner)
    assert (trial.state, trial.step) == ("COMPLETE", GOAL)
    assert polls > 10
    assert reads == GOAL / 16, "once for each step that was seen"


@pytest.mark.parametrize("states", range(1, 9))
async def test_a_process_that_died_at_any_moment_is_continued_without_a_second_job(
    path: Path, cluster: FakeCluster, states: int
) -> None:
    """T3: the second process follows the jobs that still run, and counts the trials of the first."""
    with SweepStore(plan(), path) as store:
        running = cluster.runner(store, trials=4).run()
        for _ in range(states):
            with contextlib.suppress(StopAsyncIteration):
                await anext(running)
        # A killed process makes no further call. Closing the generator makes none either.
        await running.aclose()
    with SweepStore(plan(), path) as store:
        trials = await finish(cluster.runner(store, trials=4))
    assert [one.state for one in trials] == ["COMPLETE"] * 4
    assert cluster.started == [f"digits-{number}" for number in range(4)], "each job was started once"


async def test_a_trial_whose_job_was_not_started_or_is_gone_starts_again_with_the_same_arguments(
    path: Path, cluster: FakeCluster
) -> None:
    """The first process died between its choice and the creation. The cluster of another trial is gone."""
    with SweepStore(plan(), path) as store:
        chosen = [store.ask().params for _ in range(2)]
        labels = {contract.LABEL_SWEEP_ID: store.id}
        await (await cluster.start(store.job_of(1), chosen[1], labels)).delete()
    with SweepStore(plan(), path) as store:
        trials = await finish(cluster.runner(store, trials=2))
    assert [one.params for one in trials] == chosen
    assert [one.state for one in trials] == ["COMPLETE"] * 2
    assert cluster.started == ["digits-1", "digits-0", "digits-1"]


async def test_a_job_that_was_to_be_pruned_is_deleted_by_the_next_process(path: Path, cluster: FakeCluster) -> None:
    with SweepStore(plan(), path) as store:
        trial = store.ask()
        job = await cluster.start(store.job_of(0), trial.params, {contract.LABEL_SWEEP_ID: store.id})
        store.prune(trial)
    with SweepStore(plan(), path) as store:
        await finish(cluster.runner(store, trials=1))
    assert job.deleted


async def test_trials_that_are_worse_than_others_at_the_same_steps_are_stopped(
    path: Path, cluster: FakeCluster
) -> None:
    """Trial 5 is worse than the median of the five before it, and is deleted before its end."""
    cluster.every = 1
    with SweepStore(plan(space={"rate": [0.1, 0.9]}), path) as store:
        for value in (0.1, 0.1, 0.1, 0.1, 0.1, 0.9):
            store.study.enqueue_trial({"rate": value})
        trials = await finish(cluster.runner(store, prunes=True, parallel=1))
    assert [one.state for one in trials] == ["COMPLETE"] * 5 + ["PRUNED"]
    pruned = cluster.jobs["digits-5"]
    assert pruned.deleted
    assert pruned.step < GOAL
    reported = store.study.get_trials()[0].intermediate_values
    assert list(reported) == list(range(2, GOAL + 1, 2)), "all trials report multiples of the same power of two"


async def test_answers_that_are_lost_start_no_trial_twice_and_lose_none(path: Path, cluster: FakeCluster) -> None:
    """T8: a trial was chosen, and the cluster did not answer when its job was to be created."""
    cluster.unreachable, cluster.failing = 3, {"start"}
    with SweepStore(plan(), path) as store:
        trials = await finish(cluster.runner(store, trials=3))
    assert [one.state for one in trials] == ["COMPLETE"] * 3
    assert sorted(cluster.started) == ["digits-0", "digits-1", "digits-2"]


async def test_a_dead_api_server_ends_the_sweep_which_can_be_continued(path: Path, cluster: FakeCluster) -> None:
    cluster.unreachable = 10**6
    with (
        SweepStore(plan(), path) as store,
        pytest.raises(ClusterUnreachable, match="the same call continues the sweep"),
    ):
        await finish(cluster.runner(store, patience=0.0))
    cluster.unreachable = 0
    with SweepStore(plan(), path) as store:
        assert len(await finish(cluster.runner(store))) == 6


async def test_a_trial_whose_training_was_complete_and_has_no_value_does_not_end_the_sweep(
    path: Path, cluster: FakeCluster
) -> None:
    """The process died after the last checkpoint, and the job that was started again had nothing left to train."""
    with SweepStore(plan(objective="lost"), path) as store:
        running = cluster.runner(store, trials=2, parallel=2).run()
        await anext(running)
        cluster.jobs["digits-0"].why = "AlreadyComplete"
        with pytest.raises(SweepFailed, match="the objective 'lost' does not exist"):
            trials = [one async for one in running][-1]
        trials = store.results()
    assert trials[0].state == "FAIL"
    assert "the objective 'lost' does not exist" in trials[0].why
    assert trials[1].state == "FAIL", "that one has trained"


async def test_failed_and_deleted_trials_are_counted_with_their_reason(path: Path, cluster: FakeCluster) -> None:
    with SweepStore(plan(), path) as store:
        running = cluster.runner(store, trials=3, parallel=3).run()
        await anext(running)
        cluster.jobs["digits-0"].ends = "Failed"
        cluster.jobs["digits-1"].deleted = True
        trials: list[Any] = [one async for one in running][-1]
        assert [(one.state, one.why) for one in trials] == [
            ("FAIL", "Why: because"),
            ("FAIL", "its job was deleted"),
            ("COMPLETE", ""),
        ]


async def test_a_sweep_whose_first_trials_all_fail_ends_with_the_reason(path: Path, cluster: FakeCluster) -> None:
    """The user's function has a mistake: twenty trials would only repeat it."""
    starts = cluster.start

    async def failing(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await starts(name, params, labels)
        job.ends = "Failed"
        return job

    with SweepStore(plan(), path) as store:
        runner = SweepRunner(
            store,
            TrialJobs(failing, cluster.existing),
            trials=20,
            parallel=1,
            prunes=False,
            patience=60,
            poll_seconds=0,
        )
        with pytest.raises(
            SweepFailed, match=r"the first 3 trials of digits have failed\. The last one: digits-2: Why"
        ):
            await finish(runner)
    assert len(cluster.started) == 3


async def test_metrics_of_evaluate_are_objectives_and_a_wrong_name_lists_the_valid_ones(
    path: Path, cluster: FakeCluster
) -> None:
    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        trials = await finish(cluster.runner(store))
        best = SweepResult.of(store.plan, trials, store.study).best
    assert best.value == pytest.approx(max(1 - one.params["rate"] for one in trials))
    with (
        SweepStore(plan(name="other", objective="acuracy"), path) as store,
        pytest.raises(SweepFailed, match="the objective 'acuracy' does not exist: must be one of accuracy, loss"),
    ):
        await finish(cluster.runner(store, trials=2))
    assert cluster.jobs["other-1"].deleted or cluster.jobs["other-0"].deleted, "the other trial was stopped"


@pytest.mark.parametrize("number", [0, 3])
async def test_a_trial_whose_objective_is_not_finite_fails_alone(path: Path, cluster: FakeCluster, number: int) -> None:
    """The status leaves NaN out, so the objective seemed not to exist, and the whole sweep ended."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.non_finite = name == f"digits-{number}"
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=6, parallel=2, prunes=False, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["FAIL" if one == number else "COMPLETE" for one in range(6)]
    assert trials[number].why == "its last accuracy is not a finite number"


async def test_a_trial_whose_newest_objective_is_not_finite_fails(path: Path, cluster: FakeCluster) -> None:
    """The status keeps the newest metrics that were finite, which are those before the model diverged. Optuna keeps
    the last that was reported as the value of the trial."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.evaluations = {32: {"accuracy": 0.9}, GOAL: {"accuracy": math.nan if name == "digits-1" else 0.8}}
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=3, parallel=2, prunes=False, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert (trials[0].value, str(trials[1].value), trials[2].value) == (0.8, "nan", 0.8)


async def test_a_trial_without_an_objective_that_others_have_fails_alone(path: Path, cluster: FakeCluster) -> None:
    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.lacks = name == "digits-3"
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=5, parallel=1, prunes=False, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert trials[3].why == "evaluate did not return 'accuracy', as in other trials"


async def test_an_objective_of_both_functions_is_that_of_evaluate(path: Path, cluster: FakeCluster) -> None:
    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses, job.evaluations = (0.1,) * GOAL, {GOAL: {"accuracy": 0.8}}
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=2, parallel=2, prunes=False, patience=60, poll_seconds=0))
    assert [(one.state, one.value, one.step) for one in trials] == [("COMPLETE", 0.8, GOAL)] * 2


@pytest.mark.parametrize("first", [GOAL, GOAL - 1])
async def test_a_loss_that_diverges_after_the_last_point_of_the_curve_fails(
    path: Path, cluster: FakeCluster, first: int
) -> None:
    """The curve of a long training leaves out steps, and the last one may be among them."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = (0.1,) * (GOAL - 2)
        if name == "digits-1":
            job.report = JobReport(non_finite_loss=first)
            job.params = {"rate": None} if first < GOAL else job.params
        return job

    with SweepStore(plan(), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=3, parallel=2, prunes=False, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trials[1].why == "its last loss is not a finite number"
    assert (trials[0].value, trials[0].step) == (trials[0].params["rate"], GOAL)


async def test_an_objective_that_a_running_trial_has_exists(path: Path, cluster: FakeCluster) -> None:
    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        if name == "digits-0":
            job.lacks, job.step = True, GOAL - 32
        else:
            job.losses = (0.5,) * GOAL
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=2, parallel=2, prunes=False, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["FAIL", "COMPLETE"]


async def test_values_that_are_not_finite_are_reported_for_pruning(path: Path, cluster: FakeCluster) -> None:
    """A diverged trial had no new values to compare, and ran to its end."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        number = int(name.rpartition("-")[2])
        job.losses = (0.9,) * 10 + (math.nan,) * (GOAL - 10) if number == 6 else (0.1,) * GOAL
        return job

    with SweepStore(plan(), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=7, parallel=1, prunes=True, patience=60, poll_seconds=0))
    assert [one.state for one in trials] == ["COMPLETE"] * 6 + ["PRUNED"]


async def test_a_trial_without_an_evaluation_has_no_value_of_another_metric(path: Path, cluster: FakeCluster) -> None:
    """`loss` returned a metric of the same name, and the trial whose evaluation failed was the best one."""
    failed = JobReport(failed_evaluation=GOAL, evaluation_error="ValueError: no data")

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = (100.0,) * GOAL
        job.report = failed if name == "digits-1" else JobReport(failed_evaluation=GOAL // 2, evaluated_step=GOAL)
        job.evaluations = {} if name in ("digits-1", "digits-2") else {GOAL: {"accuracy": 0.5}}
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=4, parallel=1, prunes=False, patience=60, poll_seconds=0))
    assert [(one.state, one.why) for one in trials] == [
        ("COMPLETE", ""),
        ("FAIL", f"the evaluation of step {GOAL} failed: ValueError: no data"),
        ("FAIL", "evaluate did not return 'accuracy', as in other trials"),
        ("COMPLETE", ""),
    ]
    assert [one.value for one in trials if one.state == "COMPLETE"] == [0.5, 0.5]


async def test_before_its_first_evaluation_a_trial_has_no_value_to_compare(path: Path, cluster: FakeCluster) -> None:
    """A metric of `loss` has the objective's name. Its worst values had the trial pruned."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = ((0.0 if name == "digits-6" else 0.9),) * GOAL
        job.report, job.evaluations = JobReport(evaluated_step=GOAL), {GOAL: {"accuracy": 0.5}}
        return job

    with SweepStore(plan(objective="accuracy", direction="maximize"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=7, parallel=1, prunes=True, patience=60, poll_seconds=0))
    assert [(one.state, one.value) for one in trials] == [("COMPLETE", 0.5)] * 7


@pytest.mark.parametrize("objective", ["loss", "accuracy"])
async def test_an_objective_of_loss_needs_no_evaluation(path: Path, cluster: FakeCluster, objective: str) -> None:
    """Here evaluate returns another metric, or fails."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = (0.5,) * GOAL
        job.report = JobReport(evaluated_step=GOAL // 2)
        job.evaluations = {GOAL // 2: {"other": 1.0}}
        if name != "digits-0" or objective == "loss":
            job.report, job.evaluations = JobReport(failed_evaluation=GOAL, evaluation_error="ValueError: no data"), {}
        return job

    with SweepStore(plan(objective=objective), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=4, parallel=1, prunes=False, patience=60, poll_seconds=0))
    assert [(one.state, one.value) for one in trials] == [("COMPLETE", 0.5)] * 4


@pytest.mark.parametrize("end", ["Succeeded", "Failed", "pruned"])
async def test_the_loss_of_training_is_not_compared_with_the_one_of_evaluate(
    path: Path, cluster: FakeCluster, end: str
) -> None:
    """Only the third trial shows that evaluate returns a `loss`, and it may have no end."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = (0.1,) * GOAL
        if name == "digits-2":
            job.report, job.evaluations = JobReport(evaluated_step=GOAL // 2), {GOAL // 2: {"loss": 0.5}}
            job.ends = "Failed" if end == "Failed" else "Succeeded"
        else:
            job.report = JobReport(failed_evaluation=GOAL, evaluation_error="ValueError: no data")
        return job

    pruner = optuna.pruners.ThresholdPruner(upper=0.4 if end == "pruned" else 1)
    with SweepStore(plan(), path, pruner=pruner) as store:
        jobs = TrialJobs(start, cluster.existing)
        runner = SweepRunner(store, jobs, trials=4, parallel=1, prunes=True, patience=60, poll_seconds=0)
        if end == "Failed":
            with pytest.raises(SweepFailed, match="the first 3 trials of digits have failed"):
                await finish(runner)
            return
        trials = await finish(runner)
        known = [(one.state.name, one.value, one.intermediate_values) for one in store.study.get_trials()[:2]]
    assert known == [("FAIL", None, {})] * 2, "Optuna's sampler and pruner would compare these values with the others"
    why = f"the evaluation of step {GOAL} failed: ValueError: no data"
    assert [(one.state, one.value, one.why) for one in (*trials[:2], trials[3])] == [
        ("FAIL", None, "evaluate did not return 'loss', as in other trials"),
        ("FAIL", None, "evaluate did not return 'loss', as in other trials"),
        ("FAIL", None, why),
    ]
    assert trials[2].state == ("PRUNED" if end == "pruned" else "COMPLETE")


async def test_a_value_of_training_that_may_be_another_number_outlives_the_process(path: Path) -> None:
    """A process died after it had stored an attribute of a trial, and before the trial's end."""
    with SweepStore(plan(), path) as store:
        for _ in range(2):
            store.ask().set_user_attr("backstay:of-loss", 0.25)
    with SweepStore(plan(), path) as store:
        first, second = store.running()
        store.complete(first, 0.5, GOAL)
        second.set_user_attr("backstay:why", "its evaluation failed")
        store.complete(second, 0.25, GOAL, of_loss=True)
        assert [(one.state, one.value, one.why) for one in store.results()] == [
            ("COMPLETE", 0.5, ""),
            ("COMPLETE", 0.25, ""),
        ]
        store.set_evaluated(True)
        assert [(one.state, one.value) for one in store.results()] == [("COMPLETE", 0.5), ("FAIL", None)]


async def test_a_metric_of_the_status_is_not_replaced_by_values_of_training(path: Path, cluster: FakeCluster) -> None:
    """The curve had lost the evaluations with a server, and its loss was the trial's value."""

    async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> FakeJob:
        job = await cluster.start(name, params, labels)
        job.losses = (100.0,) * GOAL
        return job

    with SweepStore(plan(objective="accuracy"), path) as store:
        jobs = TrialJobs(start, cluster.existing)
        trials = await finish(SweepRunner(store, jobs, trials=2, parallel=1, prunes=True, patience=60, poll_seconds=0))
    assert [(one.state, one.value) for one in trials] == [("COMPLETE", 1 - one.params["rate"]) for one in trials]


async def test_a_space_of_lists_is_a_grid_if_the_trials_are_enough(path: Path, cluster: FakeCluster) -> None:
    """Optuna's default sampler repeated some of five learning rates, and left others out."""
    rates, widths = [0.1, 0.2], [1, 2]
    space = {"rate": rates, "width": widths}
    every = sorted((rate, width) for rate in rates for width in widths)

    async def trials_of(trials: int, name: str, sampler: Any = None) -> list[tuple[float, int]]:
        with SweepStore(plan(space=space, name=name), path, sampler=sampler, trials=trials) as store:
            found = await finish(cluster.runner(store, trials=trials))
        return sorted((one.params["rate"], one.params["width"]) for one in found)

    assert await trials_of(4, "exact") == every
    assert await trials_of(7, "more") == every
    assert await trials_of(7, "more") == every, "continued"
    assert len(await trials_of(3, "fewer")) == 3
    assert len(await trials_of(5, "fewer")) == 5, "it began with Optuna's sampler"
    assert len(await trials_of(5, "own", optuna.samplers.RandomSampler(seed=0))) == 5
    assert len(await trials_of(7, "own")) == 7, "it began with the sampler of the user"
    assert await trials_of(4, "changed") == every
    assert len(await trials_of(5, "changed", optuna.samplers.RandomSampler(seed=0))) == 5
    assert len(await trials_of(6, "changed")) == 6, "the sampler of the user may have repeated choices"


async def test_a_sweep_ends_when_its_sampler_has_no_more(path: Path, cluster: FakeCluster) -> None:
    """Optuna's grid stops the loop of Optuna, which raised an error while the other trial ran."""
    rates = {"rate": [0.1, 0.2, 0.3]}
    with SweepStore(plan(space=rates), path, sampler=optuna.samplers.GridSampler(rates)) as store:
        jobs = TrialJobs(cluster.start, cluster.existing)
        trials = await finish(
            SweepRunner(store, jobs, trials=20, parallel=2, prunes=False, patience=60, poll_seconds=0)
        )
    assert {one.value for one in trials} == {0.1, 0.2, 0.3}
    assert {one.state for one in trials} == {"COMPLETE"}


@pytest.mark.parametrize("choices", [[0.1, 0.1], [1, 2, 1.0], [0, False]])
def test_a_choice_is_in_its_list_once(choices: list[Any]) -> None:
    with pytest.raises(BadInput, match=r"space\['rate'\]: is \[.*\]: .* and .* are equal: must be a list of choices"):
        distributions_of({"rate": choices})
    assert len(distributions_of({"rate": [1, "1", None, math.nan]})["rate"].choices) == 4


def test_numbers_of_numpy_and_jax_are_those_of_python() -> None:
    space = distributions_of(
        {
            "whole": (np.int64(2), jnp.asarray(4)),
            "real": (np.float32(0.5), 2),
            "log": (np.int32(1), np.int32(8), "log"),
            "one": [np.int64(3), np.float64(0.5), "a", None, np.bool_(True)],
        }
    )
    assert space["whole"] == optuna.distributions.IntDistribution(2, 4)
    assert space["real"] == optuna.distributions.FloatDistribution(0.5, 2.0)
    assert space["log"] == optuna.distributions.IntDistribution(1, 8, log=True)
    assert [type(one) for one in space["one"].choices] == [int, float, str, type(None), bool]


async def test_a_foreign_job_under_the_name_of_a_trial_is_not_touched(path: Path, cluster: FakeCluster) -> None:
    foreign = await cluster.start("digits-0", {"rate": 0.5}, {})
    with (
        SweepStore(plan(), path) as store,
        pytest.raises(JobExists, match="the TrainingJob digits-0 is not of this sweep"),
    ):
        await finish(cluster.runner(store))
    assert (foreign.deleted, foreign.step) == (False, 0)


def test_two_sweeps_of_one_name_in_one_file_are_refused_while_both_live(path: Path) -> None:
    first = SweepStore(plan(), path)
    with pytest.raises(SweepInUse, match=rf"the sweep digits is run by process {os.getpid()} of "):
        SweepStore(plan(), path)
    with SweepStore(plan(name="letters"), path):
        pass
    first.close()
    with SweepStore(plan(), path):
        pass


def test_a_file_with_another_plan_is_refused_with_the_difference(path: Path) -> None:
    with SweepStore(plan(), path):
        pass
    for changed, error in (
        ({"space": {"rate": (0.0, 2.0)}}, r"space: the sweep digits in .* has .*give this one another name"),
        ({"objective": "accuracy"}, "objective: the sweep digits in .* has loss, and not accuracy"),
        ({"direction": "maximize"}, "direction: the sweep digits in .* has minimize, and not maximize"),
    ):
        with pytest.raises(BadInput, match=error):
            SweepStore(plan(**changed), path)
    damaged = path.with_name("damaged.db")
    put(damaged, b"not a database, but a text" * 100)
    with pytest.raises(BadInput, match="is not a file of Optuna in SQLite"):
        SweepStore(plan(), damaged)
    folder = path.with_name("folder.db")
    folder.mkdir()
    with pytest.raises(BadInput, match="is not a file of Optuna in SQLite"):
        SweepStore(plan(), folder)


def test_the_short_forms_of_a_space() -> None:
    given = {"rate": (1e-4, 1e-1, "log"), "width": (16, 64), "drop": (0, 0.5), "kind": ["a", "b", None]}
    own = {**given, "rate": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)}
    assert as_text(distributions_of(given)) == as_text(distributions_of(own))
    for wrong in (
        (1,),
        (2, 1),
        (0.0, 1.0, "log"),
        (1, 2, "lin"),
        "abc",
        [],
        3,
        (True, False),
        ("0.1", "1"),
        (0.1, math.inf),
    ):
        with pytest.raises(BadInput, match=r"space\['x'\]: is .*must be a list of choices"):
            distributions_of({"x": wrong})
    with pytest.raises(BadInput, match="inf is not a finite number"):
        distributions_of({"x": (0.1, math.inf)})
    with pytest.raises(BadInput, match="space: is empty"):
        distributions_of({})


@pytest.fixture
def ended(tmp_path: Path) -> FoundCluster:
    """An embedded cluster that is not needed: only options are checked."""
    run = KnownRun(tmp_path, "", "default", (), "", 0.0, ProcessMark(0, 0, ""))
    return FoundCluster(StoredApi(run), "default", "a cluster", tmp_path)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"trials": 0}, "trials=0: must be a whole number from 1"),
        ({"parallel": True}, "parallel=True: must be a whole number from 1"),
        ({"direction": "down"}, "direction='down': must be minimize or maximize"),
        ({"args": [1]}, "args: is list: must be a mapping"),
        ({"args": {"rate": 1.0}}, "args: has 'rate', which the space has too"),
        ({"checkpoint": {"volume": {}}}, "must be a folder or a URI, and not a volume"),
        ({"name": "n" * 36}, "a sweep's name has at most 35"),
        ({"workers": 0}, "workers is 0: must be"),
        ({"trails": 3}, "trails= is not an option"),
    ],
)
def test_options_are_checked_before_the_first_trial(
    training: ModuleType, ended: FoundCluster, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(BadInput, match=error):
        prepared_sweep(training.train, {"rate": (0.1, 0.2)}, options, ended, None)
    with pytest.raises(BadInput, match="unexpected keyword argument 'rat'"):
        prepared_sweep(training.train, {"rat": (0.1, 0.2)}, {}, ended, None)
    with pytest.raises(BadInput, match="args: has 'a_b', which the space has too"):  # both are --a-b of a script
        prepared_sweep("train.py", {"a-b": (0.1, 0.2)}, {"args": {"a_b": 0.1}}, ended, None)
    assert not Path(".backstay").exists()


def test_each_trial_has_its_own_checkpoint_folder(training: ModuleType, ended: FoundCluster) -> None:
    """T7: two jobs never write into the same place."""
    made = prepared_sweep(training.train, {"rate": (0.1, 0.2)}, {"checkpoint": "ck", "args": {"steps": 3}}, ended, None)
    found = made.options_of("training-4", {"rate": 0.1}, {})
    assert (found["checkpoint"], found["args"]) == ("ck/training-4", {"steps": 3, "rate": 0.1})
    labels = {contract.LABEL_SWEEP_ID: "a1b2"}
    folder = made.options_of("training-4", {"rate": 0.1}, labels)["checkpoint"]
    assert folder == "ck/training-4-a1b2", "a later sweep of this name would have the values of this one"
    assert made.path == Path(".backstay/sweeps/training.db")


# The process of the sweep imports this one, and only pods import JAX.
LATE = """
def train(**given):
    import training

    training.train(**given)
"""
SWEEP = """
import sys
from backstay_client import Client
from late import train

with Client(sys.argv[1]) as client:
    client.sweep(train, {"rate": [0.1, 0.2, 0.3]}, name=sys.argv[2], storage=sys.argv[3], trials=3, parallel=2,
        workers=1, args={"hold": 3, "gate": sys.argv[4]})
"""


@pytest.mark.e2e
def test_a_sweep_whose_process_is_killed_is_continued_with_its_running_jobs(
    client: Client,
    training: ModuleType,
    written: Callable[[str, str], ModuleType],
    user_folder: Path,
    tmp_path: Path,
) -> None:
    """T3: as when the kernel of a notebook dies, with real jobs and SIGKILL."""
    kubeconfig = Path(repr(client).rpartition(" in ")[2].rstrip(">")) / "backstay.kubeconfig"
    late = written("late", LATE)
    gate, storage = tmp_path / "gate", tmp_path / "sweep.db"
    words = [sys.executable, "-c", SWEEP, str(kubeconfig), "killed", str(storage), str(gate)]
    process = subprocess.Popen(words, cwd=user_folder, env={**os.environ, "PYTHONPATH": str(user_folder)})

    def train() -> bool:
        assert process.poll() is None
        return sum((job.status.step or 0) >= 3 for job in jobs_of(client)) >= 2

    until(train, "two jobs train")
    uids = {job.name: job.uid for job in jobs_of(client)}
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    gate.touch()
    again = client.sweep(  # as the same call in a new kernel; this process has imported Optuna
        late.train,
        {"rate": [0.1, 0.2, 0.3]},
        name="killed",
        storage=storage,
        trials=3,
        parallel=2,
        workers=1,
        args={"hold": 3, "gate": str(gate)},
    )
    assert [one.state for one in again.trials] == ["COMPLETE"] * 3
    found = {job.name: job.uid for job in jobs_of(client)}
    assert set(found) == {"killed-0", "killed-1", "killed-2"}
    assert {name: found[name] for name in uids} == uids, "the same jobs continued"
    for job in jobs_of(client):
        job.delete(wait=False)


def jobs_of(client: Client) -> Iterator[Any]:
    yield from client.list(labels={contract.LABEL_SWEEP: "killed"})
