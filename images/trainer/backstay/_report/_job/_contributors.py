"""Records which of the ranks have contributed, are slow, or are hung."""

from __future__ import annotations

import logging
import threading

from backstay_rpc.control_pb2 import ProgressReply, Staged

from ... import _instrument
from ..._coordination import Counted, Outcome, PeerTable
from .._metrics import PodMetrics

__all__ = ["Contributors"]

_LOG = logging.getLogger(__name__)

_SLOW_LOG_SECONDS = 60.0
"""A rank that is slow is named in the log at most this often."""


class Contributors:
    """Follows the contributions on shard 0. Thread-safe.

    Args:
        peers: the workers and evaluators of this server.
    """

    def __init__(self, peers: PeerTable, metrics: PodMetrics) -> None:
        self._peers, self._metrics, self._lock = peers, metrics, threading.Lock()
        self._contributed: dict[int, int] = {}
        self._first_staged: float | None = None
        self._slow_logged: dict[int, float] = {}

    def staged(self, now: float, staged: Staged) -> None:
        """Shard 0 holds a gradient."""
        gradient = staged.id
        self._peers.handed_in(now, gradient.rank, gradient.incarnation, gradient.version)
        with self._lock:
            self._contributed[gradient.rank] = max(gradient.incarnation, self._contributed.get(gradient.rank, 0))
            if self._first_staged is None:
                self._first_staged = now

    def counted(self, counted: Counted) -> None:
        """The outcome of a contribution."""
        self._metrics.contributions(counted.outcome.value).inc()
        _instrument.report(
            "contribution",
            term=counted.id.term,
            rank=counted.id.rank,
            incarnation=counted.id.incarnation,
            step=counted.id.key_step,
            attempt=counted.id.attempt,
            outcome=counted.outcome.value,
            staleness=counted.staleness,
        )
        if counted.outcome is Outcome.APPLIED:
            self._metrics.staleness.observe(counted.staleness)

    def updated(self, now: float, version: int) -> None:
        """The update of this version was decided."""
        with self._lock:
            began, self._first_staged = self._first_staged, None
        self._peers.moved(now, version + 1)
        if began is not None:
            self._metrics.quorum_seconds.observe(max(0.0, now - began))
            _instrument.record("quorum_wait", began, now, version)

    def restarted(self, now: float, version: int) -> None:
        """The history began again at this version."""
        self._peers.moved(now, version)

    def fill(self, now: float, reply: ProgressReply, stall_seconds: float) -> None:
        """Add the state of the ranks of `reply.world` to the reply to the operator, and report slow ranks."""
        stalled, delays = self._peers.slow(now, stall_seconds, reply.world)
        with self._lock:
            reply.contributed.update(self._contributed)
        reply.stalled.extend(stalled)
        self._metrics.stragglers(delays)
        for rank, delay in delays.items():
            if now - self._slow_logged.get(rank, -_SLOW_LOG_SECONDS) >= _SLOW_LOG_SECONDS:
                self._slow_logged[rank] = now
                _LOG.warning("rank %d is slow: its gradient takes %.3g s longer than the others' median", rank, delay)
