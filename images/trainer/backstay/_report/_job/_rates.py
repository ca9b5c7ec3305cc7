"""Counts updates, examples, tokens and bytes of training, and their rates."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

from backstay_spec.job_report import JobReport

from ..._coordination import Rate, Updated
from .._metrics import PodMetrics
from .._traffic import Traffic

__all__ = ["Rates"]

_TOKENS = "tokens"
"""The metric of `loss` that counts the tokens of a batch."""


class Rates:
    """Counts what each update applied. Thread-safe.

    Args:
        batches: number of batches of each contribution.
    """

    def __init__(self, metrics: PodMetrics, batches: int) -> None:
        self._metrics, self._batches = metrics, batches
        self._lock = threading.Lock()
        self._examples, self._updates = Rate(), Rate()
        self._traffic = Traffic()
        self._newest: float | None = None  # examples a second at the newest update
        self._start = math.inf  # when training could begin

    def begin(self, now: float) -> None:
        """Training can begin."""
        with self._lock:
            self._start = now

    def updated(self, now: float, updated: Updated) -> None:
        """An update was decided."""
        commit, infos = updated.commit, updated.infos
        examples = 0 if commit.skip else sum(info.examples for info in infos)
        with self._lock:
            self._examples.add(now, examples)
            self._updates.add(now, 1)
            self._newest = self._examples.per_second(now)
            self._traffic.add(commit, infos)
            traffic = self._traffic.mean()
        self._metrics.updates.inc()
        self._metrics.examples.inc(examples)
        self._metrics.examples_per_second.set(self._newest or 0.0)
        for encoding, nbytes in traffic.items():
            self._metrics.traffic(encoding).set(nbytes)
        if commit.skip:
            self._metrics.skipped.inc()
            return
        counts = (info.metrics.get(_TOKENS, 0.0) for info in infos)
        # The metrics of a contribution are means over its batches.
        tokens = sum(count for count in counts if count > 0 and math.isfinite(count))
        self._metrics.tokens.inc(tokens * self._batches)

    def report(self, now: float) -> JobReport:
        """Returns the rows about rates and traffic."""
        with self._lock:
            return JobReport(
                examples_per_second=self._examples.per_second(now) or 0.0,
                updates_per_second=self._updates.per_second(now) or None,
                traffic=dict(self._traffic.mean()),
            )

    def at_update(self, now: float, *, last: bool = False) -> Mapping[str, float | None]:
        """Returns the rates at the newest update, by their names in event files.

        Args:
            last: whether no update follows. Then the rate is of any time, even of one that is too short while updates
                follow.
        """
        with self._lock:
            examples, updates = self._newest, self._updates.per_second(now)
            if last:
                examples = self._at_end()
                updates = updates or self._updates.at_end(self._start)
            return {"throughput/examples_per_second": examples, "throughput/updates_per_second": updates}

    def last(self) -> JobReport:
        """Returns the row of the rate at the last update. `report` has the present rate."""
        with self._lock:
            return JobReport(examples_per_second=self._at_end())

    def _at_end(self) -> float | None:
        return self._newest or self._examples.at_end(self._start)
