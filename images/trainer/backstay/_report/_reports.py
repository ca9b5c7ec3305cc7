"""Reports while training to `on_update` of the script, as scalars for TensorBoard, and about epochs in the log.

`Reports` runs in a separate thread, because neither the script nor the storage may delay an update.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .._coordination import EpochEnded
    from .._script import OnUpdate, StopWhen
    from ._event_files import EventFiles

__all__ = ["EpochLines", "Reports", "Throttle"]

_LOG = logging.getLogger(__name__)

SECONDS: Final = 1.0
"""Seconds between two reports of updates."""

FLUSH_SECONDS: Final = 5.0
FLUSH_REMOTE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 10.0


class Throttle:
    """Lets one call through in each interval."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._last: float | None = None

    def due(self, now: float, *, force: bool = False) -> bool:
        """Returns whether enough time has passed since the last call that was let through."""
        if not force and self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


class EpochLines:
    """Writes a line about an epoch at most every `seconds`: a small dataset has many epochs in a second.

    The next line adds up the epochs that have no line, so that each dropped sample is counted in one.
    """

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: the shortest time between two lines, in seconds.
        """
        self._throttle = Throttle(seconds)
        self._omitted: list[EpochEnded] = []

    def ended(self, now: float, epoch: EpochEnded, step: int) -> None:
        """Write a line about an epoch that ended with update `step`, or keep it for the next line.

        Args:
            now: any monotonic time in seconds.
            epoch: the account of the epoch.
            step: the number of updates.
        """
        if not self._throttle.due(now):
            self._omitted.append(epoch)
            return
        before = f"; since the last line, {_sum(self._omitted)}" if self._omitted else ""
        self._omitted = []
        _LOG.info("%s (step %d)%s", epoch, step, before, extra={"fields": {"epoch": asdict(epoch)}})

    def close(self) -> None:
        """Write a line about the epochs that have none yet."""
        if self._omitted:
            _LOG.info("since the last line, %s", _sum(self._omitted))
            self._omitted = []


def _sum(omitted: list[EpochEnded]) -> str:
    used, dropped, repeated = (sum(getattr(one, name) for one in omitted) for name in ("used", "dropped", "repeated"))
    more = "1 other epoch has" if len(omitted) == 1 else f"{len(omitted)} other epochs have"
    return f"{more} ended: {used} samples used, {dropped} dropped, {repeated} repeated"


@dataclass(frozen=True)
class _QueuedReport:
    step: int
    scalars: Mapping[str, float]
    loss: float | None = None  # None: not an update
    metrics: Mapping[str, float] = field(default_factory=dict)
    begins: bool = False


class Reports:
    """Thread-safe; no method waits for the script or for the storage, except `close`."""

    def __init__(
        self,
        on_update: OnUpdate | None,
        files: EventFiles | None,
        stop_when: StopWhen | None = None,
        *,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_update: see `train`.
            files: the writer of the scalars; None: nothing is stored.
            stop_when: see `train`; when it returns true, `stop` is called.
        """
        self._on_update, self._files, self._flush_seconds, self._clock = on_update, files, flush_seconds, clock
        self._stop_when = stop_when
        self.stop: Callable[[], None] = lambda: None
        self._throttle = Throttle()
        self._changed = threading.Condition()
        self._newest: _QueuedReport | None = None  # a slow `on_update` misses updates, and delays none
        self._queue: list[_QueuedReport] = []
        self._closed = False
        self._raised = False
        self._stopped: int | None = None  # the step of the evaluation for which `stop_when` returned true
        self._evaluated: dict[int, str] = {}  # by step: the scalars that `files` has
        self._thread: threading.Thread | None = None
        if on_update is not None or files is not None or stop_when is not None:
            self._thread = threading.Thread(target=self._run, name="backstay-reports", daemon=True)
            self._thread.start()

    def begin(self, step: int) -> None:
        """A term begins: reports after `step` belong to updates that are made again."""
        with self._changed:
            if self._newest is not None and self._newest.step > step:
                self._newest = None  # it would be stored after the beginning that discards it
        self._put(_QueuedReport(step + 1, {}, begins=True))

    def update(
        self,
        now: float,
        step: int,
        loss: float,
        metrics: Mapping[str, float],
        rates: Mapping[str, float | None],
        *,
        last: bool = False,
    ) -> None:
        """An update was made. At most one a second is reported, and the last one in any case.

        Args:
            rates: the rates by the name of a scalar; None: not known yet.
        """
        if self._thread is None or not self._throttle.due(now, force=last):
            return
        known = {name: value for name, value in rates.items() if value is not None}
        scalars = {"loss": loss, **{f"train/{name}": value for name, value in metrics.items()}, **known}
        with self._changed:
            self._newest = _QueuedReport(step, scalars, loss, dict(metrics))
            self._changed.notify_all()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The parameters of `step` were evaluated."""
        self._put(
            _QueuedReport(step, {f"evaluation/{name}": value for name, value in metrics.items()}, metrics=dict(metrics))
        )

    def close(self) -> None:
        """Write the remaining reports, for at most `CLOSE_SECONDS`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _put(self, report: _QueuedReport) -> None:
        if self._thread is not None:
            with self._changed:
                self._queue.append(report)
                self._changed.notify_all()

    def _run(self) -> None:
        flushed = self._clock()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newest or self._queue, self._flush_seconds)
                newest, self._newest = self._newest, None
                queue, self._queue = self._queue, []
                closed = self._closed
            for report in queue:
                self._store(report)
                self._judge(report)
            if newest is not None:
                self._store(newest)
            if newest is not None and self._on_update is not None:
                self._call(newest)
            if self._files is not None and (closed or self._clock() - flushed >= self._flush_seconds):
                self._files.flush()
                flushed = self._clock()
            if closed and self._newest is None and not self._queue:
                return

    def _store(self, report: _QueuedReport) -> None:
        if self._files is None:
            return
        try:
            if report.begins:
                self._files.begin(report.step)
                self._evaluated = {step: found for step, found in self._evaluated.items() if step < report.step}
                return
            if report.loss is None:  # after a lost connection, an evaluator reports its newest evaluation again
                found = repr(report.scalars)  # in which NaN is equal to NaN
                if self._evaluated.get(report.step) == found:
                    return
                self._evaluated[report.step] = found
            self._files.add(report.step, report.scalars)
        except ImportError as error:
            _LOG.warning("no scalars for TensorBoard are written: %s: pip install tensorboardX", error)
            self._files = None
        except Exception:  # noqa: BLE001  # such as of another protobuf; this thread also calls `stop_when`
            _LOG.exception("no more scalars for TensorBoard are written")
            self._files = None

    def _judge(self, report: _QueuedReport) -> None:
        if report.begins:
            # The evaluation of a step before the updates that are made again counts. The end may have been withdrawn.
            if self._stopped is not None and self._stopped < report.step:
                self.stop()
            else:
                self._stopped = None
            return
        if self._stop_when is None or self._stopped is not None:
            return
        try:
            stops = bool(self._stop_when(report.metrics))
        # An error of the script. `sys.exit` would end this thread, and with it all later reports.
        except (Exception, SystemExit):  # noqa: BLE001
            _LOG.exception("stop_when raised for the evaluation of step %d; training continues", report.step)
            return
        if stops:
            _LOG.info("stop_when ends training: the evaluation of step %d", report.step)
            self._stopped = report.step
            self.stop()

    def _call(self, report: _QueuedReport) -> None:
        assert self._on_update is not None
        assert report.loss is not None
        try:
            self._on_update(report.step, report.loss, report.metrics)
        except (Exception, SystemExit):  # noqa: BLE001  # an error of the script costs a report, not the training
            if not self._raised:
                _LOG.exception("on_update raised at step %d; training continues", report.step)
            self._raised = True
