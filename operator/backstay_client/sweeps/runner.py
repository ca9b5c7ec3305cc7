"""Runs the trials of a sweep: starts jobs, reports their values to Optuna, stops those that are worse than others.

Each decision is in the file before its effect is on the cluster, or can be repeated. The next process finds the job of
a trial without an end by its labels. If there is none, it starts the trial again with the same arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from backstay_client.errors import ClusterUnreachable, JobDeleted, JobExists, SweepFailed
from backstay_client.kube import ApiRequestError, is_transient
from backstay_client.reading.curve import TrainingCurve
from backstay_client.sweeps.store import SweepStore, TrialResult, not_evaluated
from backstay_client.view.status import JobStatus
from backstay_client.words import duration, on_one_line
from backstay_spec import contract

__all__ = ["SweepRunner", "TrialJob", "TrialJobs"]

_POLL_SECONDS = 1.0
_REPORTS = 32
"""About as many values of a trial are compared with those of others."""
_FIRST_FAILURES = 3


class TrialJob(Protocol):
    """The job of a trial."""

    name: str

    async def status(self) -> JobStatus:
        """Returns the state of the job."""

    async def curve(self) -> TrainingCurve:
        """Returns the values over the steps."""

    async def delete(self, *, wait: bool = True) -> None:
        """Delete the job."""


@dataclass(frozen=True)
class TrialJobs:
    """The jobs on the cluster.

    Attributes:
        start: starts a job by its name, arguments and labels.
        existing: returns the jobs with these labels by their names.
    """

    start: Callable[[str, Mapping[str, Any], Mapping[str, str]], Awaitable[TrialJob]]
    existing: Callable[[Mapping[str, str]], Awaitable[Mapping[str, TrialJob]]]


@dataclass
class _Trial:
    """A trial that runs.

    Attributes:
        trial: Optuna's trial.
        reported: the last step that was reported.
        evaluates: whether `evaluate` returned the objective.
        evaluated: the newest values that were read of those that `evaluate` returned, with their steps.
        trained: the newest values that `loss` returned.
        curve: the newest curve that was read.
        read_at: the position of the job then; the curve is read again when the job has another one.
    """

    trial: Any
    job: TrialJob
    reported: int
    evaluates: bool = False
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    trained: list[tuple[int, float]] = field(default_factory=list)
    curve: TrainingCurve = field(default_factory=TrainingCurve)
    read_at: tuple[Any, ...] | None = None

    def read(self, status: JobStatus, curve: TrainingCurve, objective: str) -> None:
        """Keep the values of a curve, which is empty while no server answers."""
        self.evaluated = curve.evaluated(objective) or self.evaluated
        self.trained = curve.trained(objective) or self.trained
        self.evaluates = self.evaluates or bool(self.evaluated) or objective in status.metrics


class SweepRunner:
    """Runs one sweep."""

    def __init__(
        self,
        store: SweepStore,
        jobs: TrialJobs,
        *,
        trials: int,
        parallel: int,
        prunes: bool,
        patience: float,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """
        Args:
            trials: the number of trials, those of earlier processes included.
            parallel: the most trials at the same time.
            prunes: whether trials that are worse than others are stopped.
            patience: seconds without an answer of the API server after which the sweep ends with an error.
        """
        self._store, self._jobs = store, jobs
        self._trials = trials if store.most is None else min(trials, store.most)
        self._parallel, self._prunes = parallel, prunes
        self._patience, self._poll_seconds = patience, poll_seconds
        self._active: dict[int, _Trial] = {}
        self._exists = any(one.state in ("COMPLETE", "PRUNED") for one in store.results())  # the objective

    async def run(self) -> AsyncGenerator[list[TrialResult]]:
        """Run all trials.

        Yields:
            The trials so far, about once a second.

        Raises:
            SweepFailed: the first trials failed, or the objective does not exist. The other trials are stopped.
            ClusterUnreachable: the API server does not answer.
            JobExists: a job that is not of this sweep has the name of a trial.
            ApiRequestError: the cluster refuses.
        """
        answered = time.monotonic()
        resumed = False
        while True:
            try:
                if not resumed:
                    await self._resume()
                    resumed = True
                await self._start_new()
                for running in list(self._active.values()):
                    await self._follow(running)
                answered = time.monotonic()
            except SweepFailed:
                await self._stop_all()
                raise
            except (ApiRequestError, aiohttp.ClientError, OSError) as error:
                if not is_transient(error):
                    raise
                resumed = False  # a trial may have been chosen without a job
                silent = time.monotonic() - answered
                if silent >= self._patience:
                    raise ClusterUnreachable(
                        f"the API server has not answered for {duration(silent)}: {error or type(error).__name__}. The "
                        f"trials of {self._store.plan.name} may still run: the same call continues the sweep"
                    ) from error
            yield self._store.results()
            if resumed and not self._active and (self._store.exhausted or self._store.count() >= self._trials):
                return
            await asyncio.sleep(self._poll_seconds)

    async def _resume(self) -> None:
        """Follow the trials that an earlier process left, and delete the jobs of those that it has pruned."""
        found = await self._jobs.existing({contract.LABEL_SWEEP_ID: self._store.id})
        for result in self._store.results():
            if result.state == "PRUNED" and result.job in found:
                await found[result.job].delete(wait=False)
        for trial in self._store.running():
            if trial.number not in self._active:
                await self._add(trial, found.get(self._store.job_of(trial.number)))

    async def _start_new(self) -> None:
        while len(self._active) < self._parallel and not self._store.exhausted and self._store.count() < self._trials:
            await self._add(self._store.ask(), None)

    async def _add(self, trial: Any, job: TrialJob | None) -> None:
        if job is None:
            labels = {
                contract.LABEL_SWEEP: self._store.plan.name,
                contract.LABEL_SWEEP_ID: self._store.id,
                contract.LABEL_TRIAL: str(trial.number),
            }
            name = self._store.job_of(trial.number)
            try:
                job = await self._jobs.start(name, dict(trial.params), labels)
            except JobExists:
                self._store.fail(trial, "its job's name is in use")
                raise JobExists(
                    f"the TrainingJob {name} is not of this sweep, and has the name of its trial {trial.number}: give "
                    "the sweep another name, or delete the job"
                ) from None
        self._active[trial.number] = _Trial(trial, job, self._store.reported(trial))

    async def _follow(self, running: _Trial) -> None:
        trial, job = running.trial, running.job
        try:
            status = await job.status()
            at = (status.report.reached, status.report.evaluated_step, status.phase)
            if status.ended or at != running.read_at:
                running.curve = await job.curve()
            running.read_at = at if running.curve.steps else None  # no server has answered yet
            curve = running.curve
        except JobDeleted:
            self._end(running)
            self._store.fail(trial, "its job was deleted")
            return
        objective = self._store.plan.objective
        running.read(status, curve, objective)
        if running.evaluates or status.metrics or curve.evaluations:
            self._store.set_evaluated(running.evaluates)  # now, because this trial may be pruned or fail
        elif status.succeeded and status.report.failed_evaluation is None:
            self._store.set_evaluated(False)  # its script has no `evaluate`
        self._exists = self._exists or bool(self._values(running))
        if not status.ended:
            if self._report(running, status.report.goal_steps, prunes=self._prunes):
                self._end(running)
                self._store.prune(trial)
                await job.delete(wait=False)
            return
        self._report(running, status.report.goal_steps, prunes=False)
        self._end(running)
        self._conclude(running, status, curve)

    def _values(self, running: _Trial) -> list[tuple[int, float]]:
        """Returns the values of the objective. A number that `loss` returns under the name of one of `evaluate` is
        another."""
        return running.evaluated if running.evaluates or self._store.evaluated else running.trained

    def _report(self, running: _Trial, goal: int | None, *, prunes: bool) -> bool:
        """Report the new values; if it `prunes`, return whether others were better at one of these steps.

        Values are compared step by step, so all trials report the same steps: multiples of a power of two.
        """
        if not goal or self._store.evaluated is None:
            return False  # or values of `loss` would be compared with values of `evaluate`
        every = 1 << max(0, (goal // _REPORTS).bit_length() - 1)
        for step, value in self._values(running):
            if step > running.reported and (step % every == 0 or step == goal):
                running.trial.report(value, step)
                running.reported = step
                if prunes and running.trial.should_prune():  # which reads all trials from the file
                    return True
        return False

    async def _stop_all(self) -> None:
        """Stop the trials that still run, because the sweep has failed."""
        for running in list(self._active.values()):
            self._end(running)
            self._store.fail(running.trial, "the sweep failed")
            with contextlib.suppress(ApiRequestError, aiohttp.ClientError, OSError):
                await running.job.delete(wait=False)

    def _end(self, running: _Trial) -> None:
        del self._active[running.trial.number]

    def _conclude(self, running: _Trial, status: JobStatus, curve: TrainingCurve) -> None:
        """Report to Optuna how a trial ended.

        Raises:
            SweepFailed: the first trials failed, or the objective does not exist.
        """
        objective, trial = self._store.plan.objective, running.trial
        why = self._why_failed(status, running.evaluates)
        if why:
            step, value = None, None
        elif running.evaluates:
            step, value = _last_evaluated(running.evaluated, status, objective)
        else:
            step, value = _last_trained(running.trained, status, objective)
        if value is not None and math.isfinite(value):
            self._exists = True
            self._store.complete(trial, value, step, of_loss=not running.evaluates)
            return
        if value is not None:
            why = _not_finite(objective)
        elif not why:
            found = {"loss", *status.report.train_metrics, *status.metrics, *curve.metrics}
            names = sorted(found.union(*curve.evaluations.values()))
            why = f"the objective {objective!r} does not exist: must be one of {', '.join(names)}"
            # Otherwise it is a fault of this trial, or the objective of an earlier job of it is lost.
            if not self._exists and status.reason != contract.ALREADY_COMPLETE:
                self._store.fail(trial, why)
                raise SweepFailed(why)
        self._store.fail(trial, why)
        self._refuse_first_failures()

    def _why_failed(self, status: JobStatus, evaluates: bool) -> str:
        """Returns the reason why a job that has ended has no value to compare, or an empty text if it may have one."""
        objective, report = self._store.plan.objective, status.report
        if not status.succeeded:
            return f"{status.reason or status.phase}: {on_one_line(status.message)}"
        # If no evaluation has succeeded yet, a metric of `loss` may have the name of one of `evaluate`.
        of_evaluate = self._store.evaluated
        needed = of_evaluate or (of_evaluate is None and objective != "loss")
        failed = report.failed_evaluation
        if needed and failed is not None and failed > (report.evaluated_step or -1):
            error = on_one_line(report.evaluation_error)
            return f"the evaluation of step {failed} failed{error and ': '}{error}"
        if not of_evaluate or evaluates:
            return ""
        is_nan = objective in report.non_finite_metrics
        return _not_finite(objective) if is_nan else not_evaluated(objective)

    def _refuse_first_failures(self) -> None:
        ended = [one for one in self._store.results() if one.state != "RUNNING"]
        if len(ended) == _FIRST_FAILURES and all(one.state == "FAIL" for one in ended):
            raise SweepFailed(
                f"the first {_FIRST_FAILURES} trials of {self._store.plan.name} have failed. The last one: "
                f"{ended[-1].job}: {ended[-1].why}"
            )


def _not_finite(objective: str) -> str:
    return f"its last {objective} is not a finite number"


def _last_evaluated(
    values: Sequence[tuple[int, float]], status: JobStatus, objective: str
) -> tuple[int | None, float | None]:
    """Returns the last value that `evaluate` returned, after its step. It is NaN if it was not finite.

    Args:
        values: the values of the curve, which may be lost with a server.
    """
    known, step = status.metrics.get(objective), status.report.evaluated_step or status.step
    return values[-1] if values and (known is None or values[-1][0] >= (step or 0)) else (step, known)


def _last_trained(
    values: Sequence[tuple[int, float]], status: JobStatus, objective: str
) -> tuple[int | None, float | None]:
    """Returns the last value of a number that `loss` returned, after its step.

    It is NaN if it was not finite, and None if there is none.

    Args:
        values: the values of the curve, which leaves out steps of a long training, and may be lost with a server.
    """
    report = status.report
    step, value = values[-1] if values else (None, None)
    if value is not None and (step or 0) >= (status.step or 0):
        return step, value
    if objective == "loss":
        last = report.newest_loss
    else:
        last = report.train_metrics.get(objective, math.nan if objective in report.non_finite_metrics else None)
    return (step, value) if last is None else (status.step, last)
