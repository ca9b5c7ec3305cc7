"""Measures a worker: the parts of its time, its rates, its outcomes, and the values of its contributions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import GradientInfo
from backstay_spec import contract
from backstay_spec.goodput import MEASURED

from .. import _instrument
from .._coordination import Rate
from .._process import Reporter
from ._overlap import OverlapTimer
from ._traffic import Carried
from ._utilization import Utilization
from ._worker_seconds import WorkerSeconds, process_age

if TYPE_CHECKING:
    from .._roles import Fate
    from .._script import Script, ScriptPlan
    from .._transport import Pulled
    from ._metrics import PodMetrics

__all__ = ["WorkerMeasurements"]

_LOG = logging.getLogger(__name__)


class WorkerMeasurements:
    """A `WorkerObserver`. Only `carried` may be called by several threads.

    Attributes:
        seconds: the parts of the time of this process.
    """

    def __init__(self, script: Script, plan: ScriptPlan, metrics: PodMetrics, *, leads: bool = True) -> None:
        """
        Args:
            leads: whether this pod counts the contributions of its rank. The other pods of a rank send parts of them.
        """
        self._metrics, self._steps, self._leads = metrics, script.steps, leads
        self.seconds = WorkerSeconds(age=process_age())
        self._utilization, self._overlap = Utilization(metrics), OverlapTimer()
        self._rate, self._carried = Rate(), Carried(plan.wires)
        self._reporter = Reporter(script.log_every, script.steps, script.batches_of_update)

    def start(self) -> None:
        """Observe the parts of a step."""
        for point, part in contract.STEP_PARTS.items():
            _instrument.observe(point, self._metrics.step_part(part).observe)

    def measured(self) -> GradientInfo:
        """See `WorkerObserver`."""
        carried, exact = self._carried.totals()
        return GradientInfo(carried=carried, exact=exact)

    def carried(self, sent: int, received: int) -> None:
        """See `WorkerObserver`."""
        self._carried.add(sent, received)
        self._metrics.carried(sent, received)

    def compiled(self, flops: float | None) -> None:
        """See `WorkerObserver`."""
        self._utilization.compiled(flops)

    def computed(self, seconds: float) -> None:
        """See `WorkerObserver`."""
        self.seconds.computed()
        self._metrics.gradient_seconds.observe(seconds)

    def began_next(self, wait: Callable[[], object]) -> None:
        """See `WorkerObserver`."""
        self._overlap.begin(wait)
        self.seconds.began_next()

    def began_beside(self, wait: Callable[[], object]) -> None:
        """See `WorkerObserver`."""
        self._overlap.begin(wait)

    def answered(self, fate: Fate, pulled: Pulled, info: GradientInfo, *, began: float, ended: float) -> None:
        """See `WorkerObserver`."""
        self._count(fate, info.examples)
        beside = self._overlap.seconds(began, ended)
        sent, answered = pulled.pushed_at - began, pulled.answered_at - began
        self.seconds.exchanged(sent, answered, applied_at=fate.applied_at, beside=beside)
        now = time.monotonic()
        self._rate.add(now, info.examples)
        self._utilization.contributed(now)
        self._metrics.step.set(pulled.version)
        self._metrics.worker_loss.set(info.loss)
        rate, last = self._rate.per_second(now), pulled.version >= self._steps
        self._reporter.report(now, pulled.version, info.loss, rate, info.metrics, force=last)

    def lost(self, fate: Fate) -> None:
        """See `WorkerObserver`."""
        if fate.applied_at is not None:
            self.seconds.applied(fate.applied_at)
        else:
            self.seconds.abandoned()
        self._count(fate, 0)

    def _count(self, fate: Fate, examples: int) -> None:
        if self._leads:
            self._metrics.worker_contributions(fate.label).inc()
            self._metrics.worker_examples.inc(examples)

    def reconnects(self, why: Exception) -> None:
        """See `WorkerObserver`."""
        self._metrics.reconnects.inc()
        _LOG.info("connecting again: %s", why)

    def close(self) -> None:
        """See `WorkerObserver`. The log has the parts of the time."""
        measured = {part: seconds for part, seconds in zip(MEASURED, self.seconds.rounded, strict=True) if seconds}
        shown = "  ".join(f"{part} {seconds:.3g}" for part, seconds in measured.items())
        _LOG.info("seconds of this worker: %s", shown, extra={"fields": {"workerSeconds": measured}})
        _instrument.report("worker_seconds", **measured)
        self._overlap.close()
