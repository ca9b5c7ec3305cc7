"""Attributes the waits of updates (blame) to a rank or shard, and to the part of its step, from their reports.

An update waits for the contribution that completes its set. The rank of that contribution is charged with the time
since the previous contribution, because the update would have been decided earlier by that time. A contribution may
reach one shard much later than the others. Then the shard is charged. The part of the step is where the rank
takes the longest beyond the median of the other ranks, by the times that heartbeats report.

An asynchronous update waits for no other rank. There, a rank is charged with the time that it takes for a contribution
beyond the median of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Final

__all__ = ["SENDING", "AsyncBlame", "AwaitedContributions", "Blame", "Blamed", "Charge"]

SENDING: Final = "send"
"""The part that no heartbeat reports, because the rest of a step is the time to send its contribution."""

_WINDOW: Final = 300.0
_SHARD_SHARE: Final = 0.5
"""The share of the wait from which the shard is charged: below half of it, the rank delayed the update more (0046)."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The reason why one update waited.

    Attributes:
        rank: the rank whose contribution completed the set.
        shard: the shard that received it much later than the others; None: there was no such shard.
        part: the part of the rank's step.
        seconds: how long the update waited.
    """

    rank: int
    shard: int | None
    part: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Blamed:
    """The charges of the last minutes with the same rank, shard and part.

    Attributes:
        rank, shard, part: as in `Charge`.
        seconds: the sum of the charged seconds.
        updates: the number of updates.
    """

    rank: int
    shard: int | None
    part: str
    seconds: float
    updates: int


@dataclass(frozen=True, slots=True)
class AwaitedContributions:
    """The contributions that the next update waits for.

    Attributes:
        seconds: seconds since the last update; without an update, since the first report.
        missing: the ranks without a complete contribution.
        shards: rank -> the shards that lack its contribution, for each rank whose contribution has reached some shards.
        needed: how many more contributions make the set.
    """

    seconds: float
    missing: tuple[int, ...]
    shards: Mapping[int, tuple[int, ...]]
    needed: int


@dataclass
class _Arrival:
    """A rank's contribution to the next update, with the time when it was complete on each shard."""

    key: tuple[int, int]  # incarnation, attempt
    shards: dict[int, float] = field(default_factory=dict)


class Blame:
    """Not thread-safe; `now` never goes back.

    Args:
        shards: the number of the job's shards.
    """

    def __init__(self, shards: int, *, now: float) -> None:
        self._shards = shards
        self._since = now
        self._at: tuple[int, int] | None = None  # term and version of `_arrivals`
        self._arrivals: dict[int, _Arrival] = {}
        self._parts: dict[int, dict[str, float]] = {}
        self._charges: deque[tuple[float, Charge]] = deque()
        self._sums: dict[tuple[int, int | None, str], list[float]] = {}

    def parts(self, rank: int, seconds: Mapping[str, float]) -> None:
        """Record the times of a heartbeat, which are the mean of each part of the rank's last steps."""
        self._parts.setdefault(rank, {}).update(seconds)

    def staged(self, now: float, shard: int, rank: int, at: tuple[int, int], incarnation: int, attempt: int) -> None:
        """A shard holds a whole contribution to the update `at`, a (term, version)."""
        if self._at is None or at > self._at:
            self._at, self._arrivals = at, {}
        elif at < self._at:
            return
        key = incarnation, attempt
        known = self._arrivals.get(rank)
        if known is None or known.key < key:
            known = self._arrivals[rank] = _Arrival(key)
        if known.key == key:
            known.shards.setdefault(shard, now)

    def updated(self, now: float, term: int, version: int, ranks: Iterable[int]) -> Charge | None:
        """An update was decided. Returns its charge; None when the reports do not show one."""
        found = None
        if self._at == (term, version):
            complete = {rank: self._arrivals[rank] for rank in ranks if rank in self._arrivals}
            found = self._charge({r: a for r, a in complete.items() if len(a.shards) == self._shards})
        if self._at is None or self._at <= (term, version):
            self._at, self._arrivals = (term, version + 1), {}
        self._since = now
        if found is not None:
            self._add(now, found)
        return found

    def _charge(self, complete: Mapping[int, _Arrival]) -> Charge | None:
        if not complete:
            return None
        ends = sorted((max(arrival.shards.values()), rank) for rank, arrival in complete.items())
        end, last = ends[-1]
        before = ends[-2][0] if len(ends) > 1 else self._since
        seconds = max(0.0, end - before)
        arrivals = sorted((when, shard) for shard, when in complete[last].shards.items())
        shard = None
        if len(arrivals) > 1 and seconds > 0:
            late = arrivals[-1][0] - arrivals[-2][0]
            shard = arrivals[-1][1] if late > _SHARD_SHARE * seconds else None
        return Charge(last, shard, SENDING if shard is not None else self._part(last, complete), seconds)

    def _part(self, rank: int, others: Iterable[int]) -> str:
        """Returns the part in which a rank takes the longest beyond the median of the others."""
        own = self._parts.get(rank, {})
        excess = {}
        for part, seconds in own.items():
            theirs = [self._parts[other].get(part, 0.0) for other in others if other != rank and other in self._parts]
            excess[part] = seconds - (median(theirs) if theirs else 0.0)
        worst = max(excess, key=lambda part: excess[part], default=SENDING)
        return worst if excess.get(worst, 0.0) > 0 else SENDING

    def _add(self, now: float, charge: Charge) -> None:
        self._charges.append((now, charge))
        total = self._sums.setdefault((charge.rank, charge.shard, charge.part), [0.0, 0.0])
        total[0] += charge.seconds
        total[1] += 1
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._charges and self._charges[0][0] < now - _WINDOW:
            _, old = self._charges.popleft()
            key = old.rank, old.shard, old.part
            total = self._sums[key]
            total[0] -= old.seconds
            total[1] -= 1
            if total[1] < 1:
                del self._sums[key]

    def worst(self, now: float, most: int = 3) -> list[Blamed]:
        """Returns the charges of the last 5 minutes, the longest first."""
        self._forget(now)
        ordered = sorted(self._sums.items(), key=lambda item: (-item[1][0], item[0][0]))
        return [
            Blamed(rank, shard, part, max(0.0, seconds), int(updates))
            for (rank, shard, part), (seconds, updates) in ordered[:most]
        ]

    def waiting(self, now: float, term: int, version: int, world: int, quorum: int) -> AwaitedContributions:
        """Returns the contributions that the update `version` waits for."""
        arrivals = self._arrivals if self._at == (term, version) else {}
        complete = {rank for rank, arrival in arrivals.items() if len(arrival.shards) == self._shards}
        missing = tuple(rank for rank in range(world) if rank not in complete)
        partly = {
            rank: tuple(shard for shard in range(self._shards) if shard not in arrivals[rank].shards)
            for rank in missing
            if rank in arrivals
        }
        return AwaitedContributions(now - self._since, missing, partly, max(0, quorum - len(complete)))

    def restarted(self, now: float) -> None:
        """Record that the history went back, so that earlier reports do not count for later updates."""
        self._at, self._arrivals, self._since = None, {}, now


class AsyncBlame(Blame):
    """Attributes waits in Async mode; see `Blame`."""

    def __init__(self, shards: int, *, now: float) -> None:
        super().__init__(shards, now=now)
        self._incarnations: dict[int, int] = {}
        self._last: dict[int, float] = {}  # by rank, when its newest contribution was applied
        self._took: dict[int, float] = {}  # by rank, seconds between its newest two
        self._typical: float | None = None
        self._until_typical = 0

    def staged(self, now: float, shard: int, rank: int, at: tuple[int, int], incarnation: int, attempt: int) -> None:
        """A replacement is not charged with the time since the last contribution of its predecessor."""
        del now, shard, at, attempt
        if incarnation != self._incarnations.get(rank, incarnation):
            self._last.pop(rank, None)
        self._incarnations[rank] = incarnation

    def updated(self, now: float, term: int, version: int, ranks: Iterable[int]) -> Charge | None:
        """A contribution was applied. Returns the charge of its rank; None where it is not slower than the others."""
        del term, version
        self._since, found = now, None
        for rank in ranks:
            before = self._last.get(rank)
            self._last[rank] = now
            if before is None:
                continue
            self._took[rank] = now - before
            self._until_typical -= 1
            if self._until_typical <= 0:  # once in a round: its cost does not grow with the ranks
                self._until_typical = len(self._took)
                self._typical = median_low(self._took.values()) if len(self._took) > 1 else None
            if self._typical is not None and now - before > self._typical:
                found = Charge(rank, None, self._part(rank, self._took), now - before - self._typical)
                self._add(now, found)
        return found

    def restarted(self, now: float) -> None:
        """Record that the history went back, so that the time until the next contribution belongs to the rollback."""
        super().restarted(now)
        self._last = {}
