"""Keeps the workers and evaluators that call a server, for all of its threads."""

from __future__ import annotations

import threading

from backstay_rpc.control_pb2 import Activity, Peer, Stalled
from backstay_spec import contract

from ..._timeouts import Timeouts
from .._state import Mode
from ._liveness import Liveness

__all__ = ["PeerTable"]


class PeerTable:
    """The peers of one server, by `Liveness`. Thread-safe. `now` is the time in seconds."""

    def __init__(self, mode: Mode, timeouts: Timeouts | None = None) -> None:
        self._lock, self._liveness = threading.Lock(), Liveness(mode, timeouts)

    # ---- Calls of peers ----

    def joined(self, now: float, peer: Peer) -> bool:
        """See `Liveness.joined`."""
        with self._lock:
            return self._liveness.joined(now, peer)

    def beat(self, now: float, peer: Peer, activity: Activity, step_seconds: float) -> None:
        """See `Liveness.beat`."""
        with self._lock:
            self._liveness.beat(now, peer, activity, step_seconds)

    def left(self, peer: Peer) -> None:
        """See `Liveness.left`."""
        with self._lock:
            self._liveness.left(peer)

    # ---- Decisions ----

    def handed_in(self, now: float, rank: int, incarnation: int, version: int) -> None:
        """See `Liveness.handed_in`."""
        with self._lock:
            self._liveness.handed_in(now, rank, incarnation, version)

    def moved(self, now: float, version: int) -> None:
        """See `Liveness.moved`."""
        with self._lock:
            self._liveness.moved(now, version)

    # ---- Readers ----

    def tick(self, now: float, stall_seconds: float, world: int) -> tuple[int, set[int]]:
        """Returns the number of living workers, and the ranks that are silent or stalled. Call it about once a
        second."""
        with self._lock:
            self._liveness.tick(now)
            live = self._liveness.live(now, contract.ROLE_WORKER)
            silent = {peer.index for peer in self._liveness.lost(now) if peer.role == contract.ROLE_WORKER}
            return len(live), silent | {hung.rank for hung in self._liveness.stalled(now, stall_seconds, world)}

    def beating(self, now: float) -> dict[int, int]:
        """Returns the ranks of the living workers, with their incarnations."""
        with self._lock:
            return self._liveness.live(now, contract.ROLE_WORKER)

    def slow(self, now: float, stall_seconds: float, world: int) -> tuple[list[Stalled], dict[int, float]]:
        """Returns the workers that are stalled, and `Liveness.stragglers`."""
        with self._lock:
            return self._liveness.stalled(now, stall_seconds, world), self._liveness.stragglers(now, world)

    def any_lives(self, now: float) -> bool:
        """Returns whether a worker or an evaluator lives that has not left."""
        with self._lock:
            return any(self._liveness.live(now, role) for role in (contract.ROLE_WORKER, contract.ROLE_EVALUATOR))
