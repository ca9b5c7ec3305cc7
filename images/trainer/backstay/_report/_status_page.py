"""Makes the page `/status` of shard 0's server, which has the activity of the job and each of its pods."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backstay_rpc.control_pb2 import Activity, HeartbeatRequest, Peer

from .._instrument import Doing
from ._job import JobObserver

__all__ = ["StatusPage"]

_FORGET_SECONDS = 600.0
"""A pod without a heartbeat for this time is left out."""


@dataclass(frozen=True)
class _PodBeat:
    peer: Peer
    activity: Activity
    doing: Doing
    at: float


class StatusPage:
    """Keeps the newest heartbeat of each worker and evaluator. Thread-safe."""

    def __init__(
        self,
        observer: JobObserver | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            observer: the source of the job's part; None: there is none.
        """
        self._observer, self._clock = observer, clock
        self._lock = threading.Lock()
        self._beats: dict[tuple[str, int], _PodBeat] = {}

    def beat(self, request: HeartbeatRequest) -> None:
        """A heartbeat; one of an older incarnation is ignored."""
        now, peer = self._clock(), request.peer
        if self._observer is not None:
            self._observer.beat(now, request)
        key = peer.role, peer.index
        doing = Doing.read(request.doing, now) if request.HasField("doing") else Doing("", None, now)
        with self._lock:
            known = self._beats.get(key)
            if known is not None and known.peer.incarnation > peer.incarnation:
                return
            self._beats[key] = _PodBeat(peer, request.activity, doing, now)

    def left(self, peer: Peer) -> None:
        """Remove a pod that left."""
        with self._lock:
            known = self._beats.get((peer.role, peer.index))
            if known is not None and known.peer.incarnation == peer.incarnation:
                del self._beats[peer.role, peer.index]

    def page(self) -> dict[str, Any]:
        """Returns the page as JSON, in which NaN is null, and an infinity the text ``Infinity`` or ``-Infinity``."""
        now = self._clock()
        with self._lock:
            beats = sorted(self._beats.items())
        pods = [_pod(now, one) for _, one in beats if now - one.at < _FORGET_SECONDS]
        page: dict[str, Any] = _in_json(
            {**({} if self._observer is None else self._observer.status(now)), "pods": pods}
        )
        return page


def _pod(now: float, beat: _PodBeat) -> dict[str, Any]:
    return {
        "role": beat.peer.role,
        "index": beat.peer.index,
        "incarnation": beat.peer.incarnation,
        "pod": beat.peer.pod,
        "activity": Activity.Name(beat.activity),
        "doing": beat.doing.point,
        "member": beat.doing.member,
        "step": beat.doing.step,
        "seconds": round(max(0.0, now - beat.doing.began), 3),
        "heartbeatSeconds": round(max(0.0, now - beat.at), 3),
    }


def _in_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _in_json(inner) for key, inner in value.items()}
    return [_in_json(inner) for inner in value] if isinstance(value, list) else value
