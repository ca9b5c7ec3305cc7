"""How the process of each role ends: the reason, the processes that it waits for, and its termination message.

`backstay_spec.end_of_job` is the table of these waits and their limits (decision 0062). Here is what waits:

- `Ending`: why a server ends. Each thread reports to it, and the main thread waits for it.
- `ServerEnd`: a server after `Done`; `wait_applied`: its shard applies the last update first.
- `wait_stored`, `LastSave`: a server after SIGTERM, on shard 0 and on the other shards.
- `flush`: the server of another shard, until the coordinator has processed what it sent.
- `WorkerEnd`: a worker with the last version; `raise_end`: why a worker or an evaluator ends before the job is done.
- `outcome`: the termination message of a server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from backstay_rpc.control_pb2 import Done, Written
from backstay_rpc.refusals import JOIN_AGAIN
from backstay_spec.contract import ALREADY_COMPLETE, STOPPED_EARLY

from .. import _instrument
from .._process import end_now
from .._script import Script
from .._transport import ALONE, TEXT, ControlClient, Form, Heartbeats, JobState, Members
from .._watchdog import at_most
from ..errors import JobFailed, PeerLost, Refused, WaitedTooLong

if TYPE_CHECKING:
    from .._coordination import Report
    from .._process import Environment, Stop
    from .._shard import ShardRuntime
    from .._threaded import ThreadedCoordinator
    from .._timeouts import Timeouts
    from .._transport import Link
    from ._observers import SecondsObserver

__all__ = [
    "Ending",
    "EvaluationGivenUp",
    "LastSave",
    "ServerEnd",
    "Stopped",
    "WorkerEnd",
    "begin_evaluation",
    "flush",
    "outcome",
    "raise_end",
    "report_evaluation",
    "wait_applied",
    "wait_stored",
]

_LOG = logging.getLogger(__name__)

_PATIENCE: Final = 15
"""Intervals of heartbeats for which a pod whose `evaluate` raised waits for the other pods of its rank to raise too."""

# ---- Servers ----


class Ending:
    """Any thread of a server reports here why the server ends; the main thread waits for it.

    Attributes:
        error: the exception that ends the process; None: there is none.
        done: how the job ended; None while it has not.
    """

    def __init__(self) -> None:
        self._changed = threading.Event()
        self.error: BaseException | None = None
        self.done: Done | None = None

    def fail(self, error: BaseException) -> None:
        """End the process with this exception, unless an earlier one ends it."""
        if self.error is None:
            self.error = error
        self._changed.set()

    def end(self, done: Done) -> None:
        """The job has ended."""
        self.done = done
        self._changed.set()

    def notice(self) -> None:
        """Wake the main thread because something that it waits for has changed."""
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Return when something has changed, and after `seconds` at the latest."""
        self._changed.wait(seconds)
        self._changed.clear()

    @property
    def complete(self) -> bool:
        """Whether the job has ended, and has not failed."""
        return self.done is not None and not self.done.failed

    @property
    def failed(self) -> str:
        """The reason and the text of the job's failure, or an empty text if it has not failed."""
        return "" if self.done is None or not self.done.failed else f"{self.done.reason}: {self.done.failed}"


class ServerEnd:
    """Decides how long a server stays after the end of the job, and records the incarnation of rank 0 that has the
    result. Thread-safe.
    """

    def __init__(self, times: Timeouts, *, incarnation: int, took_over: float | None = None) -> None:
        """
        Args:
            times: `shutdown` is how long the server stays for peers, `result` how long for a worker of rank 0 without
                the result, where no checkpoint holds it. `newcomer` is how long a promoted server stays at least.
            incarnation: this server's incarnation.
            took_over: when this standby became the active server, in seconds of `time.monotonic`; None for a server
                that starts as one.
        """
        self._times = times
        self._incarnation, self._took_over = incarnation, took_over
        self._lock = threading.Lock()
        self._returned = 0
        self._over = False

    def report(self, incarnation: int) -> bool:
        """Rank 0 reports that it has the result. Returns False if this server's last message is already written."""
        with self._lock:
            if self._over:
                return False
            self._returned = max(self._returned, incarnation, 1)
            return True

    def expects_newcomers(self, now: float) -> bool:
        """Returns whether workers that the previous server of the shard has cut off may connect again."""
        return self._took_over is not None and now < self._took_over + self._times.newcomer

    def expects_rank_0(self, waited: float, *, already_complete: bool) -> bool:
        """Returns whether rank 0 may still evaluate the result of training that a previous server has completed.

        Other workers with the result join such a server again soon, and are not waited for any longer.

        Args:
            waited: seconds since the end.
            already_complete: whether this server found the training complete when it started.
        """
        replaces = already_complete and self._incarnation > 1
        return replaces and waited < (self._times.newcomer if self._returned else self._times.latecomer)

    def stays(self, waited: float, *, stored: bool, awaited: bool) -> bool:
        """Returns whether the server stays longer.

        Args:
            waited: seconds since the end.
            stored: whether a checkpoint holds the result.
            awaited: whether a living peer has not received the end of the job.
        """
        with self._lock:
            lacking = not stored and not self._returned
        return (lacking and waited < self._times.result) or (awaited and waited < self._times.shutdown)

    def wait(self, stopped: threading.Event, awaited: Callable[[float], bool], done: Done) -> None:
        """Return when the server may leave, or when SIGTERM arrives.

        Args:
            stopped: the event of SIGTERM.
            awaited: returns whether a living peer has not received the end of the job.
            done: the end of the job.
        """
        began, stored = time.monotonic(), bool(done.checkpoint or done.failed)
        while not stopped.is_set():
            now = time.monotonic()
            late = self.expects_rank_0(now - began, already_complete=done.already_complete)
            expected = late or self.expects_newcomers(now) or awaited(now)
            if not self.stays(now - began, stored=stored, awaited=expected):
                return
            time.sleep(0.05)

    def end(self, *, already_complete: bool) -> dict[str, Any]:
        """Accept no more reports; returns the part of the server's last message about rank 0.

        ``returned`` is the incarnation of rank 0 that has the result, or 0 if none has it. It is left out where rank 0
        may have reported to a previous server, which has reached the end too.

        Args:
            already_complete: whether this server found the training complete when it started.
        """
        with self._lock:
            self._over = True
            if self._returned:
                return {"returned": self._returned}
        if self._took_over is not None or (already_complete and self._incarnation > 1):
            return {}
        return {"returned": 0}


def wait_applied(runtime: ShardRuntime, version: int, seconds: float) -> None:
    """Wait until the shard has applied the last update, for at most this number of seconds."""
    deadline = time.monotonic() + seconds
    while runtime.version < version and time.monotonic() < deadline and runtime.failed is None:
        time.sleep(0.01)


def outcome(done: Done, term: int, steps: int) -> dict[str, Any]:
    """Return how the job ended, for the termination message of each server. The operator needs one message (O10).

    Args:
        term: the term of the last update; 0: this server received none.
        steps: the number of updates that training was to make.
    """
    if done.failed:
        failed = {"result": "Failed", "reason": done.reason, "message": done.failed, "step": done.version}
        return failed | ({"term": term} if term else {})
    fields: dict[str, Any] = {
        "result": ALREADY_COMPLETE if done.already_complete else "Succeeded",
        "step": done.version,
        "checkpoint": done.checkpoint,
    }
    if term:
        fields["term"] = term
    if done.version < steps and not done.already_complete:
        fields["reason"] = STOPPED_EARLY
    return fields


def wait_stored(threaded: ThreadedCoordinator, is_done: Callable[[], bool], times: Timeouts) -> None:
    """Wait until the checkpoint that shard 0's server has requested after SIGTERM is stored, or cannot be.

    Args:
        is_done: whether the job has ended.
    """
    requested = threaded.unstored()

    def unstored() -> frozenset[int]:
        # Updates continue meanwhile, and may begin further checkpoints.
        return requested & threaded.unstored()

    _wait_until(
        lambda: not unstored() or is_done(),
        lambda: not threaded.unstored_without_server(),
        times.last_save,
        gone=times.gone,
    )
    if not is_done() and (steps := unstored()) and (gone := threaded.unstored_without_server()):
        _LOG.warning("step %d is not stored: the server of shard %d left earlier", max(steps), gone[0])


class LastSave:
    """The checkpoint of the state of a server of another shard than 0, which received SIGTERM. Thread-safe."""

    def __init__(self, link: Link, times: Timeouts, request: Callable[[], None]) -> None:
        """
        Args:
            link: the link to the coordinator.
            request: requests a checkpoint from the coordinator, because this server leaves.
        """
        self._link, self._times, self._request = link, times, request
        self._saved = threading.Event()

    def reported(self, report: Report) -> None:
        """The shard has sent a report to the coordinator."""
        if isinstance(report, Written):
            self._saved.set()

    def wait(self) -> None:
        """Request the checkpoint, and wait until this shard's part is stored or cannot be."""
        self._saved.clear()
        self._request()
        times, began = self._times, time.monotonic()

        def linked() -> bool:
            return self._link.up

        # The wait is short if everything is stored already, or no peer needs the checkpoint.
        _wait_until(lambda: self._saved.is_set() or self._link.storing, linked, 10.0, gone=times.gone)
        left = times.last_save - (time.monotonic() - began)
        _wait_until(lambda: not self._link.storing, linked, left, gone=times.gone)
        deadline = time.monotonic() + times.gone
        while self._link.error is None and (left := deadline - time.monotonic()) > 0:
            if flush(self._link, left):  # the link may break, and another one is opened
                return


def flush(link: Link, seconds: float) -> bool:
    """Wait until the coordinator has processed everything that was sent on the link.

    Returns:
        Whether it did within `seconds`, before the link broke.
    """
    answered = link.flush()
    _wait_until(answered, lambda: link.up, seconds, gone=0.1)
    return answered()


def _wait_until(done: Callable[[], bool], may_succeed: Callable[[], bool], seconds: float, *, gone: float) -> None:
    """Wait until `done`, for at most `seconds`, and for at most `gone` seconds while `may_succeed` returns false."""
    now = time.monotonic()
    deadline, gone_by = now + seconds, now + gone
    while not done() and now < min(deadline, gone_by):
        time.sleep(0.05)
        now = time.monotonic()
        if may_succeed():
            gone_by = now + gone


# ---- Workers and evaluators ----


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


_REPORTING: Final = 10.0
_ATTEMPTS: Final = 3
"""An evaluation is reported for these seconds, and at least so often, because a call may take some seconds."""


class EvaluationGivenUp(Exception):  # noqa: N818
    """Earlier pods have ended while they evaluated the same step."""


def begin_evaluation(control: ControlClient, step: int, checkpoint: str = "") -> None:
    """Report to shard 0 that this pod begins an evaluation; the report may get lost.

    Raises:
        EvaluationGivenUp: this pod must not evaluate.
    """
    if why := refused_evaluation(control, step, checkpoint):
        raise EvaluationGivenUp(why)


def refused_evaluation(control: ControlClient, step: int, checkpoint: str = "") -> str:
    """Report to shard 0 that this pod begins an evaluation. Returns why it must not, or an empty text if it may."""
    with contextlib.suppress(PeerLost, Refused):
        return control.evaluates(step, checkpoint)
    return ""


def report_evaluation(
    control: ControlClient, stop: Stop, step: int, metrics: Mapping[str, float], error: str, checkpoint: str = ""
) -> None:
    """Report an evaluation to shard 0, for some seconds. If its server is lost, the successor gets the evaluation."""
    until = time.monotonic() + _REPORTING
    for attempt in itertools.count():
        if attempt >= _ATTEMPTS and time.monotonic() >= until:
            return
        try:
            control.evaluated(step, metrics, error, checkpoint)
            return
        except (PeerLost, Refused) as failure:
            _LOG.debug("the evaluation could not be reported: %s", failure)
            if stop.requested.wait(0.25):
                return


@dataclass(frozen=True)
class _SeenEnd:
    """How the wait for the end of a job has ended. `stopped`: the pod received SIGTERM."""

    job: JobState | None
    stopped: bool = False


def _seen_end_in(data: bytes) -> _SeenEnd:
    fields = json.loads(data)
    return _SeenEnd(None if fields["job"] is None else JobState(**fields["job"]), fields["stopped"])


_EVALUATED: Final[Form[tuple[dict[str, float], str]]] = Form(
    lambda result: json.dumps(result).encode(), lambda data: tuple(json.loads(data))
)

_SEEN_END: Final[Form[_SeenEnd]] = Form(lambda outcome: json.dumps(asdict(outcome)).encode(), _seen_end_in)


def _first_error(results: Sequence[tuple[dict[str, float], str]]) -> tuple[dict[str, float], str]:
    """Returns the evaluation of a rank, from those of its pods."""
    return next((({}, error) for _, error in results if error), results[0])


class WorkerEnd:
    """A worker after the last update."""

    def __init__(
        self,
        environment: Environment,
        script: Script,
        control: ControlClient,
        heart: Heartbeats,
        seconds: SecondsObserver,
        stop: Stop,
        members: Members = ALONE,
    ) -> None:
        self._members = members
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
        self._seconds.ended("ending")  # a report during a long evaluation must not take it for reading data
        if self._evaluation is not None and self._evaluation[0] == (term, step):
            metrics, error = self._evaluation[1], ""
        elif error := self._members.share("evaluate", TEXT, lambda: refused_evaluation(self._control, step)):
            _LOG.error("step %d is not evaluated: %s", step, error)
            metrics = {}
        else:
            metrics, error = self._evaluated(step, params, state)
            self._evaluation = None if error else ((term, step), metrics)
        if self._members.member == 0:
            report_evaluation(self._control, self._stop, step, metrics, error)
        return metrics

    def _evaluated(self, step: int, params: Any, state: Any) -> tuple[dict[str, float], str]:
        """Returns the metrics of the first member of the rank, or the error of one for which `evaluate` raised."""
        metrics: dict[str, float] = {}
        error = ""
        try:
            with _instrument.span("evaluate", step):
                metrics = self._script.evaluation(params, state)
        except Exception as failure:  # noqa: BLE001  # an error of the script
            _LOG.exception("evaluate raised")
            error = f"{type(failure).__name__}: {failure}"
        alone = partial(self._raised_alone, error)
        with at_most(_PATIENCE * self._env.timeouts.heartbeat, alone) if error else contextlib.nullcontext():
            return self._members.agree("evaluated", _EVALUATED, lambda: (metrics, error), _first_error)

    def _raised_alone(self, error: str) -> None:
        """End this process, because the others may wait for it in a collective of `evaluate`."""
        text = f"evaluate raised in pod {self._members.member} of worker {self._rank}, and not in all others: {error}"
        _LOG.error("%s", text)
        end_now(self._env.termination_log, {"reason": "EvaluateRaised", "message": text}, 1)

    def wait(self, step: int, *, went_back: Callable[[], bool], moved: Callable[[], bool]) -> JobState | None:
        """Returns the result of `_wait` in the first member of the rank. Raises as it does."""

        def outcome() -> _SeenEnd:
            try:
                return _SeenEnd(self._wait(step, went_back=went_back, moved=moved))
            except Stopped:
                return _SeenEnd(None, stopped=True)

        if self._members.member:  # the first one reaches it within `outcome`
            _instrument.reach("done", step)
        ended = self._members.share("end of the job", _SEEN_END, outcome)
        if ended.stopped:
            raise Stopped
        return ended.job

    def _wait(self, step: int, *, went_back: Callable[[], bool], moved: Callable[[], bool]) -> JobState | None:
        """Wait until the servers report the end of the job at `step`. Returns None if this worker must join them again.

        Args:
            went_back: whether training continues at an earlier version.
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
            if went_back():
                self._heart.set_interval(self._env.timeouts.heartbeat)
                return None
            if time.monotonic() > deadline:
                raise WaitedTooLong(f"version {step} is the last, but the servers do not report the end")
            self._seconds.ended(part)
            part = "ending" if job.checkpoint_step >= step else part
        self._seconds.ended(part)
        _instrument.reach("done", step)
        return job if self._rank != 0 or self._confirmed(job, moved) else None

    def _confirmed(self, job: JobState, moved: Callable[[], bool]) -> bool:
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
                if isinstance(error, Refused) and error.code not in JOIN_AGAIN:
                    raise
                if job.already_complete and self._heart.incarnation_of(0) > 1:
                    return True  # the last message of such a server leaves open whether rank 0 has the result (0062)
                if moved():
                    return False
                if time.monotonic() > deadline:
                    raise WaitedTooLong(
                        f"shard 0 did not accept the report that training has ended here: {error}"
                    ) from None
                self._stop.requested.wait(self._env.timeouts.reconnect_pause)
