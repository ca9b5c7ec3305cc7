"""Which pods are alive, stalled or slow: bookkeeping over heartbeats, with the time passed in.

This module only reports pods; the operator replaces them (O5). A worker that waits for other workers is not stalled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from backstay_rpc.control_pb2 import COMPILING, STARTING, Activity, Peer, Stalled
from backstay_spec import contract, silence

from ..._timeouts import Timeouts
from .._modes import MODES, Contributor, Waiting
from .._state import Mode

__all__ = ["Liveness"]

_PREPARING = {STARTING, COMPILING}
_SAMPLES = 16
_MEDIANS = 20
"""A worker may take this many of its usual steps: an evaluation or a slow read is not a hang."""
_SLOW = 1.5
"""A straggler takes this many times the median of the others: smaller differences are common on busy nodes."""


@dataclass
class _KnownPeer:
    peer: Peer
    joined: float
    beat: float
    activity: Activity = STARTING
    activity_since: float = 0.0
    ready_since: float = 0.0  # when it last ended starting or compiling
    handed_in: float | None = None  # when
    handed_version: int = -1
    periods: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


class Liveness:
    """The peers of one server, by role and index; the newest incarnation of each."""

    def __init__(self, mode: Mode, timeouts: Timeouts | None = None) -> None:
        self._waiting: Waiting = MODES[mode]
        self._times = timeouts or Timeouts()
        self._peers: dict[tuple[str, int], _KnownPeer] = {}
        self._version = 0
        self._version_since = 0.0
        self._ticked: float | None = None

    def tick(self, now: float) -> None:
        """Call it about once a second. After a pause of this process, it does not count the pause as silence."""
        self._ticked = self._wake(now)

    def _wake(self, now: float) -> float:
        """Correct all times after a pause of this process.

        Returns:
            The time of the call: `now`, or the newest time of a tick. A thread may have read `now` before the pause.
        """
        if self._ticked is None or (still := now - self._ticked) < self._times.paused_after:
            return now if self._ticked is None else max(now, self._ticked)
        self._ticked = now
        self._version_since += still
        for known in self._peers.values():
            known.joined += still
            known.beat += still
            known.activity_since += still
            known.ready_since += still
            if known.handed_in is not None:
                known.handed_in += still
        return now

    def joined(self, now: float, peer: Peer) -> bool:
        """Record that a peer has introduced itself. Returns whether this incarnation of it is new here."""
        now = self._wake(now)
        key = peer.role, peer.index
        old = self._peers.get(key)
        if old is not None and old.peer.incarnation == peer.incarnation:
            old.beat = now
            return False
        self._peers[key] = _KnownPeer(peer, joined=now, beat=now, activity_since=now)
        return True

    def beat(self, now: float, peer: Peer, activity: Activity, step_seconds: float) -> None:
        """A heartbeat arrived. The heartbeat of a peer that did not join is ignored."""
        now = self._wake(now)
        known = self._known(peer)
        if known is None:
            return
        known.beat = now
        if activity != known.activity:
            if known.activity in _PREPARING:
                known.ready_since = now
            known.activity, known.activity_since = activity, now
        if step_seconds > 0:
            known.step_seconds.append(step_seconds)

    def left(self, peer: Peer) -> None:
        """A peer left on purpose."""
        if self._known(peer) is not None:
            del self._peers[peer.role, peer.index]

    def moved(self, now: float, version: int) -> None:
        """An update was decided: from now on, workers of a Sync job owe the next gradient."""
        now = self._wake(now)
        self._version, self._version_since = version, now

    def handed_in(self, now: float, rank: int, incarnation: int, version: int) -> None:
        """A gradient arrived."""
        now = self._wake(now)
        known = self._peers.get(("worker", rank))
        if known is None or known.peer.incarnation != incarnation:
            return
        since = self._owing_since(known)
        known.handed_in, known.handed_version = now, version
        if since is not None:
            known.periods.append(now - since)

    def stalled(self, now: float, stall_seconds: float, world: int) -> list[Stalled]:
        """Workers of the world that hang."""
        now = self._wake(now)
        found = []
        for (role, index), known in sorted(self._peers.items()):
            if role != "worker" or index >= world:
                continue
            reason = self._why_stalled(now, known, stall_seconds)
            if reason:
                found.append(Stalled(rank=index, incarnation=known.peer.incarnation, reason=reason))
        return found

    def stragglers(self, now: float, world: int) -> dict[int, float]:
        """Returns the ranks whose gradient takes more than `_SLOW` times the median of the others, with the seconds
        that it takes longer. They live, and are below `world`."""
        now = self._wake(now)
        times = {
            index: median(known.step_seconds)
            for (role, index), known in self._peers.items()
            if role == "worker"
            and index < world
            and now - known.beat < self._times.silent
            and len(known.step_seconds) >= 3
        }
        found = {}
        for rank, own in sorted(times.items()):
            others = [seconds for other, seconds in times.items() if other != rank]
            if others and own > _SLOW * median(others):
                found[rank] = own - median(others)
        return found

    def lost(self, now: float) -> list[Peer]:
        """Peers that are silent and did not leave."""
        now = self._wake(now)
        return [known.peer for _, known in sorted(self._peers.items()) if now - known.beat >= self._times.silent]

    def live(self, now: float, role: str) -> dict[int, int]:
        """Returns the indices of the living peers of a role, with their incarnations."""
        now = self._wake(now)
        return {
            index: known.peer.incarnation
            for (of_role, index), known in self._peers.items()
            if of_role == role and now - known.beat < self._times.silent
        }

    def _known(self, peer: Peer) -> _KnownPeer | None:
        known = self._peers.get((peer.role, peer.index))
        return known if known is not None and known.peer.incarnation == peer.incarnation else None

    def _owing_since(self, known: _KnownPeer) -> float | None:
        worker = Contributor(known.joined, known.handed_in, known.handed_version)
        return self._waiting.owed_since(worker, self._version, self._version_since)

    def _silent_after(self, stall_seconds: float) -> float:
        """Returns the silence that is reported; the operator verifies it (decision 0073). Tests shorten it."""
        return silence.worker_silence(stall_seconds).reported * self._times.silent / silence.LOST

    def _why_stalled(self, now: float, known: _KnownPeer, stall_seconds: float) -> str:
        if now - known.beat >= self._silent_after(stall_seconds):
            return f"{contract.NO_HEARTBEAT} for {now - known.beat:.0f} s"
        if known.activity in _PREPARING:
            limit, since, what = max(stall_seconds, self._times.compile), known.activity_since, "starting or compiling"
        else:
            own = median(known.periods) if known.periods else 0.0
            owing = self._owing_since(known)
            if owing is None:
                return ""
            # Compiling has its own limit, so its time does not count for the gradient after it.
            limit, since, what = max(stall_seconds, _MEDIANS * own), max(owing, known.ready_since), "no gradient"
        return f"{what} for {now - since:.0f} s" if now - since >= limit else ""
