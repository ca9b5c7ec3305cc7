"""Finds mistakes of the script in contributions, such as leaves that no gradient reaches, and equal batches."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from backstay_rpc.control_pb2 import GradientInfo
from backstay_spec.job_report import JobReport

from ..._coordination import SAME, SameLosses
from ..._data import IMPURE
from ..._update import NON_FINITE_LOSS, TreeSpec, Untrained, unchanged_warning, warning

__all__ = ["Mistakes"]

_LOG = logging.getLogger(__name__)

MOST_NAMES: Final = 20


class Mistakes:
    """Names each mistake once in the log, and keeps it for the report. `examine` is called by one thread.

    Args:
        tree: the model; None: no leaf is named.
    """

    def __init__(self, tree: TreeSpec | None) -> None:
        self._leaves = () if tree is None else tree.leaves
        self._untrained, self._same_losses = Untrained(), SameLosses()
        self._lock = threading.Lock()
        self._untrained_leaves: list[str] = []
        self._unchanged_leaves: list[str] = []
        self._of_batches: set[str] = set()
        self._non_finite_loss: int | None = None
        self._non_finite_metrics: list[str] = []

    def examine(self, step: int, infos: Sequence[GradientInfo]) -> None:
        """Look at the contributions of the update to version `step`, which was not skipped."""
        wrong = next((info.loss for info in infos if not math.isfinite(info.loss)), None)
        if wrong is not None and self._non_finite_loss is None:
            with self._lock:
                self._non_finite_loss = step
            _LOG.warning(NON_FINITE_LOSS, step, wrong)
        if self._same_losses.update([info.loss for info in infos]):
            self._name("SameBatches", SAME)
        if any(info.impure for info in infos):
            self._name("ImpureBatches", IMPURE)
        found = self._untrained.update([info.zero.leaves if info.HasField("zero") else None for info in infos])
        if found:
            names = [self._leaves[leaf].path for leaf in found]
            with self._lock:
                self._untrained_leaves = names
            _LOG.warning("%s", warning(names, sum(leaf.trained for leaf in self._leaves)))
        for info in infos:
            if info.HasField("same"):
                self._unchanged(info.same.leaves)

    def examine_metrics(self, step: int, metrics: Mapping[str, float], source: str) -> None:
        """Look at what `source`, a function of the script, returned for version `step`. Thread-safe."""
        with self._lock:
            new = [
                name
                for name, value in metrics.items()
                if not math.isfinite(value) and name not in self._non_finite_metrics
            ]
            self._non_finite_metrics += new
        if new:
            _LOG.warning(
                "%s returned NaN or infinity for %s at step %d. The status leaves such values out, and "
                "spec.checkpoint.keepBest never keeps their checkpoint",
                source,
                ", ".join(new),
                step,
            )

    def report(self) -> JobReport:
        """Returns the rows about mistakes."""
        with self._lock:
            return JobReport(
                untrained_leaves=list(self._untrained_leaves),
                unchanged_leaves=list(self._unchanged_leaves),
                mistakes_of_batches=sorted(self._of_batches),
                non_finite_loss=self._non_finite_loss,
                non_finite_metrics=self._non_finite_metrics[:MOST_NAMES],
            )

    def _unchanged(self, found: Iterable[int]) -> None:
        """Name leaves that did not change, and are most of what travels. Those without a gradient are known."""
        same = [self._leaves[leaf] for leaf in found]
        nbytes, whole = sum(leaf.nbytes for leaf in same), sum(leaf.nbytes for leaf in self._leaves)
        names = [leaf.name for leaf in same if leaf.name not in self._untrained_leaves]
        if names and not self._unchanged_leaves:
            with self._lock:
                self._unchanged_leaves = names
            _LOG.warning("%s", unchanged_warning(names, nbytes, whole))

    def _name(self, reason: str, text: str) -> None:
        with self._lock:
            if reason in self._of_batches:
                return
            self._of_batches.add(reason)
        _LOG.warning("%s: %s", reason, text)
