"""Workers' reports of their time. Shard 0's server keeps them for the operator, which has the account of goodput."""

from __future__ import annotations

import threading

from backstay_rpc.control_pb2 import HeartbeatRequest, ProgressReply, WorkerSeconds

__all__ = ["WorkerReports"]

_KEPT = 2
"""Incarnations of each rank whose reports are kept. The operator may not have read the last one of a dead worker."""


class WorkerReports:
    """The newest reports of each rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_rank: dict[int, dict[int, tuple[float, WorkerSeconds]]] = {}

    def beat(self, now: float, request: HeartbeatRequest) -> None:
        """A heartbeat."""
        if not request.HasField("worker_seconds"):
            return
        with self._lock:
            reports = self._of_rank.setdefault(request.peer.index, {})
            reports[request.peer.incarnation] = now, request.worker_seconds
            for old in sorted(reports)[:-_KEPT]:
                del reports[old]

    def fill(self, now: float, reply: ProgressReply) -> None:
        """Add the newest report of each process."""
        with self._lock:
            for rank, reports in self._of_rank.items():
                for incarnation, (at, seconds) in reports.items():
                    added = reply.worker_seconds.add()
                    added.CopyFrom(seconds)
                    added.rank, added.incarnation, added.ago = rank, incarnation, now - at
