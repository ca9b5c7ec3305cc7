"""Keeps loss and metrics over the steps, for the page `/curve` and for a record beside the checkpoints."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..._checkpoint import Records, record_name
from ..._result import POINTS, History

__all__ = ["CurveRecord", "JobCurve"]

STORE_SECONDS: Final = 30.0
"""Seconds between two writes of the record."""


class JobCurve:
    """The losses and metrics of updates and evaluations, with at most 1,000 points of each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates = History()
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self.changes = 0

    def updated(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Update `step` was made, with the weighted means over its contributions."""
        with self._lock:
            self._updates.add(step, lambda: (loss, metrics))
            self.changes += 1

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The parameters of `step` were evaluated."""
        with self._lock:
            self._evaluations[step] = dict(metrics)
            if len(self._evaluations) > POINTS:
                newest = max(self._evaluations)
                kept = sorted(self._evaluations)[::2]
                self._evaluations = {step: self._evaluations[step] for step in {*kept, newest}}
            self.changes += 1

    def restarted(self, step: int) -> None:
        """The history continues from `step`: later points belong to updates that are made again."""
        with self._lock:
            self._updates.drop_after(step)
            self._evaluations = {at: found for at, found in self._evaluations.items() if at <= step}
            self.changes += 1

    def page(self) -> bytes:
        """Returns the curve as JSON, in which a value that is not finite is null."""
        with self._lock:
            updates = self._updates
            found: dict[str, Any] = {
                "steps": list(updates.steps),
                "loss": _finite(updates.loss),
                "metrics": {name: _finite(values) for name, values in updates.metrics.items()},
                "evaluations": [
                    {"step": step, "metrics": dict(zip(metrics, _finite(list(metrics.values())), strict=True))}
                    for step, metrics in sorted(self._evaluations.items())
                ],
            }
        return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


class CurveRecord:
    """Stores the curve of one server, about every 30 s and at its end, so that it is known after the job."""

    def __init__(
        self,
        curve: JobCurve,
        records: Records,
        server: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            records: writes the record.
            server: the uid of the job and the incarnation of this server, for the name of the record.
        """
        self._curve, self._records, self._clock = curve, records, clock
        self._name = record_name("curve", unix_clock(), server)
        self._stored, self._changes = clock(), 0

    def tick(self) -> None:
        """Call it about once a second."""
        if self._clock() - self._stored >= STORE_SECONDS:
            self.store()

    def store(self) -> None:
        """Store the curve soon, unless the record has it already."""
        self._stored = self._clock()
        if self._curve.changes != self._changes:
            self._changes = self._curve.changes
            self._records.update("curve", self._name, lambda before: self._curve.page())
