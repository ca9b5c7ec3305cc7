"""How a worker ends: it evaluates the last version, waits until the job is done, and reports that it has the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .. import _instrument
from .._control import ControlClient, Heartbeats, JobState
from ..errors import JobFailed, PeerLost, Refused, WaitedTooLong
from ._script import Script, evaluation_of

if TYPE_CHECKING:
    from .._process import Environment, Stop
    from .._report import WorkerSeconds

__all__ = ["FIXED_BY_JOINING", "Stopped", "WorkerEnd", "raise_end", "report_evaluation"]

_LOG = logging.getLogger(__name__)

# Refusals that a new join fixes: the server was replaced, restarted its history, or still holds an older attempt.
FIXED_BY_JOINING = {"FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "UNAVAILABLE", "INTERNAL"}


class Stopped(Exception):  # noqa: N818
    """The pod received SIGTERM."""


def raise_end(heart: Heartbeats, job: JobState, stop: Stop) -> None:
    """Raise the error that ends a pod before the job is done, if there is one.

    Raises:
        Superseded: the pod was replaced.
        JobFailed: the job has failed.
        Stopped: the pod received SIGTERM.
    """
    if heart.superseded is not None:
        raise heart.superseded
    if job.failed:
        raise JobFailed.from_text(job.failed)
    if stop.requested.is_set():
        raise Stopped


def report_evaluation(
    control: ControlClient, stop: Stop, step: int, metrics: Mapping[str, float], error: str, checkpoint: str = ""
) -> None:
    """Report an evaluation to shard 0, for at most 10 s. If its server is lost, the successor gets the evaluation."""
    for _ in range(40):
        try:
            control.evaluated(step, metrics, error, checkpoint)
            return
        except (PeerLost, Refused) as failure:
            _LOG.debug("the evaluation could not be reported: %s", failure)
            if stop.requested.wait(0.25):
                return


class WorkerEnd:
    """A worker after the last update."""

    def __init__(
        self,
        environment: Environment,
        script: Script,
        control: ControlClient,
        heart: Heartbeats,
        seconds: WorkerSeconds,
        stop: Stop,
    ) -> None:
        self._env, self._script, self._stop = environment, script, stop
        self._control, self._heart, self._seconds = control, heart, seconds
        self._rank = environment.index
        self._evaluation: tuple[tuple[int, int], dict[str, float]] | None = None

    def evaluate(self, term: int, step: int, params: Any, state: Any) -> dict[str, float]:
        """Evaluate and report, if this worker does that: a version once. A failure costs the metrics, not the training.

        Returns:
            The metrics; empty: another pod evaluates, no pod does, or it failed.
        """
        if self._script.evaluate is None or self._rank != 0 or self._env.config.evaluator:
            return {}
        metrics: dict[str, float] = {}
        error = ""
        at = (term, step)
        try:
            if self._evaluation is None or self._evaluation[0] != at:
                with _instrument.span("evaluate", step):
                    found = evaluation_of(self._script.evaluate, params, state, has_state=self._script.has_state)
                self._evaluation = at, found
            metrics = self._evaluation[1]
        except Exception as failure:  # noqa: BLE001  # an error of the script
            _LOG.exception("evaluate raised")
            error = f"{type(failure).__name__}: {failure}"
        report_evaluation(self._control, self._stop, step, metrics, error)
        return metrics

    def wait(self, step: int, moved: Callable[[], bool]) -> JobState | None:
        """Wait until the servers report the end of the job at `step`; None: a server was lost meanwhile.

        Args:
            moved: whether a joined server was lost.

        Raises:
            WaitedTooLong: the servers do not report the end, or shard 0 does not accept the report of this worker.
            Superseded, JobFailed, Stopped: see `raise_end`.
        """
        self._heart.set_interval(0.1)
        deadline = time.monotonic() + self._env.timeouts.end
        self._seconds.ended("ending")
        part = "checkpoint" if self._env.config.checkpoint else "ending"
        while not (job := self._heart.wait(lambda job: job.done or bool(job.failed), 0.5)).done:
            raise_end(self._heart, job, self._stop)
            if moved():
                self._heart.set_interval(self._env.timeouts.heartbeat)
                return None
            if time.monotonic() > deadline:
                raise WaitedTooLong(f"version {step} is the last, but the servers do not report the end")
            self._seconds.ended(part)
            part = "ending" if job.checkpoint_step >= step else part
        self._seconds.ended(part)
        _instrument.reach("done", step)
        return job if self._rank != 0 or self._confirmed(moved) else None

    def _confirmed(self, moved: Callable[[], bool]) -> bool:
        """Report to shard 0 that this worker has the result; False when another server took over meanwhile.

        Shard 0's last message names for the operator the incarnation of rank 0 that returned from `train`. One that
        could not report it must not return: the operator replaces it, and the code after training would run twice.
        """
        deadline = time.monotonic() + self._env.timeouts.confirm
        while True:
            try:
                self._control.confirm()
                return True
            except (PeerLost, Refused) as error:
                raise_end(self._heart, JobState(), self._stop)
                if isinstance(error, Refused) and error.code not in FIXED_BY_JOINING:
                    raise
                if moved():
                    return False
                if time.monotonic() > deadline:
                    raise WaitedTooLong(
                        f"shard 0 did not accept the report that training has ended here: {error}"
                    ) from None
                self._stop.requested.wait(self._env.timeouts.reconnect_pause)
