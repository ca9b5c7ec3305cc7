"""The newest complete checkpoint, and the newest failure to store one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import UTC, datetime

from backstay_spec.job_report import CheckpointStatus, JobReport

from ..._coordination import CheckpointFailed, WriteManifest
from .._metrics import PodMetrics

__all__ = ["Checkpoints"]

_LOG = logging.getLogger(__name__)


class Checkpoints:
    """The rows about checkpoints. Thread-safe."""

    def __init__(self, metrics: PodMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._rows = JobReport()

    def begin(self, uri: str, step: int, stored: float) -> None:
        """The history continues this checkpoint; `stored` is its Unix time, and 0 if that is not known."""
        with self._lock:
            self._rows = JobReport(checkpoint=_status(uri, step, stored))
        if stored:
            self._metrics.checkpoint_timestamp.set(stored)

    def restarted(self, uri: str, step: int, stored: float) -> None:
        """The history continues from this checkpoint, which may be older than the newest that was stored: the files of
        that one may be damaged. An empty `uri`: it begins again."""
        with self._lock:
            self._rows = self._rows.model_copy(update={"checkpoint": _status(uri, step, stored) if uri else None})
        if stored:
            self._metrics.checkpoint_timestamp.set(stored)

    def stored(self, order: WriteManifest, uri: str) -> None:
        """A checkpoint is complete."""
        self._metrics.checkpoints.inc()
        _LOG.info("checkpoint of step %d: %s", order.version, uri)
        self.begin(uri, order.version, time.time())

    def failed(self, failed: CheckpointFailed) -> None:
        """A checkpoint could not be stored."""
        self._metrics.checkpoint_failures.inc()
        _LOG.error("the checkpoint of step %d could not be stored: %s", failed.version, failed.error)
        with self._lock:
            self._rows = self._rows.model_copy(update={"checkpoint_error": failed.error})

    def newest(self) -> CheckpointStatus:
        """Returns the newest complete checkpoint; of step 0 and without a URI before the first."""
        return self.report().checkpoint or CheckpointStatus(step=0)

    def report(self) -> JobReport:
        """Returns the rows about checkpoints."""
        with self._lock:
            return self._rows


def _status(uri: str, step: int, stored: float) -> CheckpointStatus:
    at = None
    if stored:
        with contextlib.suppress(ValueError, OverflowError, OSError):  # of a machine without a clock
            at = datetime.fromtimestamp(stored, UTC)
    return CheckpointStatus(step=step, uri=uri, time=at)
