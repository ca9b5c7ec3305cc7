"""Records where the term began, what it makes again, and how this run differs from the one that it continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from backstay_rpc.control_pb2 import GradientInfo, Rollback
from backstay_spec.job_report import JobReport, TermStart

from ..._coordination import CoordinatorState
from .._metrics import PodMetrics

__all__ = ["Terms"]

_LOG = logging.getLogger(__name__)


class Terms:
    """The rows about the current term. Thread-safe."""

    def __init__(self, metrics: PodMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._redone = 0  # in this term
        self._redone_before = 0  # in all terms
        self._examples: int | None = None  # of each contribution of the newest update
        self._examples_before: int | None = None  # the same, of the run that is continued; None once it is compared
        self._changes: list[str] = []
        self._taken_over: tuple[str, ...] = ()

    def begin(self, state: CoordinatorState) -> None:
        """The history begins here."""
        self._redone_before = state.redone
        self._metrics.term.set(state.term)

    def restarted(self, state: CoordinatorState) -> int:
        """Record a higher term, which began because a shard was lost. Returns the number of updates that are redone."""
        with self._lock:
            lost = self._redone = state.redone - self._redone_before
            self._redone_before = state.redone
        self._metrics.redone.inc(lost)
        self._metrics.term.set(state.term)
        _LOG.warning(
            "a shard was lost: back to step %d in term %d: %d updates are redone", state.version, state.term, lost
        )
        return lost

    def redo(self, updates: int) -> None:
        """The previous coordinator was lost with these updates."""
        with self._lock:
            self._redone += updates
            self._redone_before += updates
        self._metrics.redone.inc(updates)
        _LOG.warning("the previous coordinator was lost with its newest updates: %d updates are redone", updates)

    def takes_over(self, leases: Sequence[str]) -> None:
        """Record the leases that were not renewed, so that this run took the checkpoint folder over, as text."""
        with self._lock:
            self._taken_over = tuple(leases)

    def continues(self, changes: Sequence[str], examples: int | None) -> None:
        """Take over how this run differs from the run that stored the checkpoint.

        Args:
            changes: the differences, as text.
            examples: number of examples of each contribution of that run; None: unknown.
        """
        with self._lock:
            self._changes, self._examples_before = list(changes), examples

    def updated(self, infos: Sequence[GradientInfo]) -> None:
        """An update was decided; the first one shows whether the batch size is another one."""
        counts = {info.examples for info in infos}
        with self._lock:
            self._examples = counts.pop() if len(counts) == 1 else None
            before, self._examples_before = self._examples_before, None
            if before is not None and self._examples not in (None, before):
                now = self._examples
                change = f"a contribution had {before} examples and has {now} now: the batch size has changed"
                _LOG.warning("changed since the checkpoint was stored: %s", change)
                self._changes.append(change)

    def examples(self) -> int | None:
        """Returns the examples of each contribution of the newest update, or None if they differ, or there was no
        update."""
        with self._lock:
            return self._examples

    def report(self, state: CoordinatorState, start: Rollback | None) -> JobReport:
        """Returns the rows about the position of the history; `start` is where the term of `state` began."""
        return JobReport(
            step=state.version,
            term=state.term or None,
            world=state.world,
            steps_redone=state.redone,
            term_start=None if start is None else self._start(start),
        )

    def _start(self, start: Rollback) -> TermStart:
        with self._lock:
            # Only the first update shows whether the batch size changed: the changes are reported after it.
            changes = self._changes if self._examples_before is None else []
            texts = tuple(changes), self._taken_over
            return TermStart(start.term, start.version, start.checkpoint, self._redone, *texts)
