"""The loss and the metrics that `loss` returns, of the newest update."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from backstay_rpc.control_pb2 import GradientInfo
from backstay_spec.job_report import JobReport

from ..._coordination import Updated
from .._metrics import PodMetrics

__all__ = ["LossMeans"]


class LossMeans:
    """The means over the contributions of the newest update. Thread-safe."""

    def __init__(self, metrics: PodMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._loss: float | None = None
        self._of_loss: dict[str, float] = {}

    def updated(self, updated: Updated) -> tuple[float, dict[str, float]]:
        """Returns the loss and the metrics of an update that was decided."""
        loss, found = self.inherit(updated.infos, [one.weight for one in updated.commit.contributions])
        self._metrics.loss.set(loss)
        for name, value in found.items():
            self._metrics.train(name).set(value)
        if updated.norm is not None:
            self._metrics.gradient_norm.set(updated.norm)
        return loss, found

    def inherit(self, infos: Sequence[GradientInfo], weights: Sequence[float] = ()) -> tuple[float, dict[str, float]]:
        """Returns the means of an update's contributions with their weights; without weights, the plain means."""
        weights = weights or [1.0] * len(infos)
        total = sum(weights)

        def mean(values: Iterable[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total

        names = set(infos[0].metrics).intersection(*(info.metrics for info in infos))
        found = {name: mean(info.metrics[name] for info in infos) for name in sorted(names)}
        with self._lock:
            loss = self._loss = mean(info.loss for info in infos)
            self._of_loss = found
        return loss, found

    def report(self) -> JobReport:
        """Returns the rows about the newest update."""
        with self._lock:
            return JobReport(loss=self._loss, train_metrics=dict(self._of_loss))
