"""The newest evaluation, by an evaluator or by worker 0."""

from __future__ import annotations

import logging
import threading
from typing import Final

from backstay_rpc.control_pb2 import EvaluatedRequest
from backstay_spec.job_report import JobReport

from .._metrics import PodMetrics

__all__ = ["Evaluations"]

_LOG = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""The number of pods that may end while they evaluate a step. A pod that is lost for another reason is one of them."""


class Evaluations:
    """The result of the newest evaluation. Thread-safe."""

    def __init__(self, metrics: PodMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._of: int | None = None  # the step of these; None: there are none, or training went back before it
        self._step: int | None = None  # the same, and kept when training goes back
        self._failed: int | None = None  # the newest step whose evaluation failed
        self._error = ""  # of the newest evaluation; empty: it did not fail
        self._begun: tuple[int, set[tuple[str, int]]] = 0, set()  # the step, and roles and incarnations of pods

    def begins(self, request: EvaluatedRequest) -> str:
        """Record that a pod begins an evaluation.

        Returns:
            Why it must not begin, because earlier pods have ended while they evaluated the same step; empty: it may.
        """
        peer = request.peer
        with self._lock:
            if self._begun[0] != request.step:
                self._begun = request.step, set()
            pods = self._begun[1]
            pods.add((peer.role, peer.incarnation))
            earlier = len(pods) - 1
        if earlier < ATTEMPTS:
            return ""
        return (
            f"{earlier} pods have ended while they evaluated this step. evaluate must return, and must not end its "
            "process"
        )

    def evaluated(self, request: EvaluatedRequest) -> dict[str, float]:
        """Record an evaluation; returns its metrics, which are empty if it failed."""
        with self._lock:
            self._begun[1].discard((request.peer.role, request.peer.incarnation))
        if request.error:
            _LOG.error("the evaluation of step %d failed: %s", request.step, request.error)
            with self._lock:
                self._error, self._failed = request.error, request.step
            return {}
        found = dict(request.metrics)
        with self._lock:
            self._error = ""
            self._newest, self._of, self._step = found, request.step, request.step
        for name, value in found.items():
            self._metrics.evaluation(name).set(value)
        self._metrics.evaluation_step.set(request.step)
        shown = "  ".join(f"{name} {value:.6g}" for name, value in found.items())
        _LOG.info("evaluation of step %d  %s", request.step, shown, extra={"fields": {"evaluation": found}})
        return found

    def newest(self) -> tuple[int | None, dict[str, float]]:
        """Returns the step and the metrics of the newest evaluation that did not fail; None and no metrics before the
        first."""
        with self._lock:
            return self._of, {} if self._of is None else dict(self._newest)

    def restarted(self, version: int) -> None:
        """Training continues at `version`: no manifest has a newer evaluation, whose parameters no longer count."""
        with self._lock:
            if self._of is not None and self._of > version:
                self._of = None

    def of(self, step: int) -> dict[str, float]:
        """Returns the result of the evaluation of this step; empty if it failed or is not the newest one."""
        with self._lock:
            has_failed = self._error and self._failed == step
            return dict(self._newest) if self._step == step and not has_failed else {}

    def report(self) -> JobReport:
        """Returns the rows about evaluations."""
        with self._lock:
            return JobReport(
                metrics=dict(self._newest),
                evaluated_step=self._step,
                failed_evaluation=self._failed,
                evaluation_error=self._error,
            )
