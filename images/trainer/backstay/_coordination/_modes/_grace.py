"""How long a synchronous update waits for more contributions after its quorum is complete (T2).

The wait ends immediately when every rank that can still contribute has contributed. The update does not wait for ranks
that are dead, replaced or stalled: a rank counts only if its newest incarnation has contributed before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median
from typing import Final

from backstay_rpc.control_pb2 import GradientId

__all__ = ["NO_WAIT", "Choice", "Grace", "best_wait", "replay"]

_SAMPLES: Final = 16
_LEAST_SAMPLES: Final = 3
_CANDIDATES: Final = 16
_VERSIONS: Final = 256
_UPDATES: Final = 8
"""Auto chooses the wait again after this number of updates."""


@dataclass(frozen=True)
class Choice:
    """A wait that `Auto` chose.

    Attributes:
        wait: the wait in seconds.
        per_second: the estimate of applied contributions per second with this wait; None: there is no estimate.
    """

    wait: float
    per_second: float | None = None


NO_WAIT: Final = Choice(0.0)


class Grace:
    """The grace of one job. For `Auto` it records how long each rank takes from a version to its contribution.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self, seconds: float | None, now: float, version: int) -> None:
        """
        Args:
            seconds: `update.grace`; None is `Auto`.
            version: the version at which the history begins.
        """
        self._seconds = seconds
        self._choice = Choice(seconds or 0.0)
        self._decided = {version: now}  # when the newest versions were decided
        self._complete_since: float | None = None  # since when the quorum of the next update is complete
        self._arrived: dict[int, tuple[int, float]] = {}  # by rank, the version of its newest contribution, and when
        self._durations: dict[int, deque[float]] = {}
        self._contributed: dict[int, int] = {}  # by rank, the newest incarnation that has contributed
        self._newest: dict[int, int] = {}  # by rank, the newest incarnation that is known
        self._absent: frozenset[int] = frozenset()
        self._updates = 0

    @property
    def choice(self) -> Choice:
        """The current wait."""
        return self._choice

    @property
    def waits(self) -> bool:
        """Whether an update may contain more contributions than its quorum."""
        return self._seconds != 0.0

    def change(self, seconds: float | None) -> None:
        """Use this value of `update.grace` from now on."""
        if seconds != self._seconds:
            self._seconds, self._choice, self._updates = seconds, Choice(seconds or 0.0), 0

    # ---- What happens ----

    def joined(self, rank: int, incarnation: int) -> None:
        """Record that a worker joined, whose older incarnations no longer contribute."""
        self._newest[rank] = max(incarnation, self._newest.get(rank, -1))

    def gone(self, rank: int, incarnation: int) -> None:
        """Do not count an incarnation that left or whose connection ended, until it contributes again."""
        if self._contributed.get(rank, -1) <= incarnation:
            self._contributed.pop(rank, None)

    def absent(self, ranks: Iterable[int]) -> bool:
        """Record that these ranks, and no others, are silent or stalled. Returns whether that is new."""
        before, self._absent = self._absent, frozenset(ranks)
        return self._absent != before

    def begin(self, now: float, version: int) -> None:
        """A new term begins."""
        self._decided, self._complete_since = {version: now}, None
        self._arrived.clear()

    def arrived(self, now: float, gradient: GradientId) -> None:
        """Record that a contribution is complete, or arrived too late to be used."""
        rank = gradient.rank
        self.joined(rank, gradient.incarnation)
        self._contributed[rank] = max(gradient.incarnation, self._contributed.get(rank, -1))
        version, before = self._arrived.get(rank, (-1, 0.0))
        if gradient.version <= version:
            return  # sent again
        self._arrived[rank] = gradient.version, now
        decided = self._decided.get(gradient.version)
        # A rank that was late began with its version only when its previous contribution had arrived.
        if decided is not None and now > (began := max(decided, before)):
            self._durations.setdefault(rank, deque(maxlen=_SAMPLES)).append(now - began)

    def decided(self, now: float, version: int, quorum: int, world: int) -> None:
        """An update was decided.

        Args:
            version: the version that the update makes.
            quorum, world: the quorum and the world of the next update.
        """
        self._decided[version], self._complete_since = now, None
        self._decided.pop(version - _VERSIONS, None)
        self._updates += 1
        if self._seconds is None and self._updates % _UPDATES == 0:
            durations = {rank: tuple(self._durations.get(rank, ())) for rank in self._expected(world)}
            self._choice = best_wait(durations, quorum)

    # ---- Queries ----

    def has_ended(self, now: float, complete: AbstractSet[int], world: int) -> bool:
        """Returns whether an update whose quorum is complete is decided now.

        Args:
            complete: the ranks with complete contributions.
            world: ranks 0 .. world - 1 can contribute.
        """
        if self._complete_since is None:
            self._complete_since = now
        return now >= self._complete_since + self._choice.wait or not self._expected(world) - complete

    def incomplete(self) -> None:
        """Record that the quorum is not complete, or no longer complete."""
        self._complete_since = None

    @property
    def until(self) -> float | None:
        """The latest end of the current wait, or None if no update waits."""
        return None if self._complete_since is None else self._complete_since + self._choice.wait

    def _expected(self, world: int) -> set[int]:
        return {
            rank
            for rank, incarnation in self._contributed.items()
            if rank < world and rank not in self._absent and incarnation >= self._newest.get(rank, -1)
        }


def best_wait(durations: Mapping[int, Sequence[float]], quorum: int) -> Choice:
    """Returns the wait that gives the most applied contributions per second, at most one median duration.

    Args:
        durations: rank -> seconds that each of its newest contributions took, oldest first.
        quorum: fewest contributions of an update.
    """
    known = {rank: seconds for rank, seconds in durations.items() if len(seconds) >= _LEAST_SAMPLES}
    if not known or len(known) < quorum:
        return Choice(0.0)
    limit = median(seconds for of_rank in known.values() for seconds in of_rank)
    best = Choice(0.0, replay(known, quorum, 0.0))
    for wait in _candidates(known, quorum, limit):
        per_second = replay(known, quorum, wait)
        # A longer wait must be clearly better: the estimates of equally good waits differ in the last digits.
        if best.per_second is None or per_second > best.per_second * 1.001:
            best = Choice(wait, per_second)
    return best


def _candidates(durations: Mapping[int, Sequence[float]], quorum: int, limit: float) -> list[float]:
    """Returns the shortest wait for each possible set of ranks, if all ranks begin at the same time."""
    rounds = min(len(seconds) for seconds in durations.values())
    found: set[float] = set()
    for k in range(1, rounds + 1):
        times = sorted(seconds[-k] for seconds in durations.values())
        found.update(time - times[quorum - 1] for time in times[quorum:])
    inside = sorted(wait for wait in found if 0.0 < wait <= limit)
    if len(inside) <= _CANDIDATES:
        return inside
    return [inside[round(i * (len(inside) - 1) / (_CANDIDATES - 1))] for i in range(_CANDIDATES)]


def replay(durations: Mapping[int, Sequence[float]], quorum: int, wait: float) -> float:
    """Applied contributions per second, if ranks need these durations and each update waits this long.

    A late rank finishes its computation, and continues with the newest version.
    """
    ranks = sorted(durations)
    busy_until = dict.fromkeys(ranks, 0.0)
    drawn = dict.fromkeys(ranks, 0)
    start, applied = 0.0, 0
    for _ in range(_SAMPLES):
        ends = {}
        for rank in ranks:
            own = durations[rank]
            ends[rank] = max(start, busy_until[rank]) + own[drawn[rank] % len(own)]
        order = sorted(ends.values())
        decided = min(order[quorum - 1] + wait, order[-1])
        for rank in ranks:
            if busy_until[rank] < decided:  # else it has not seen this version
                drawn[rank] += 1
                busy_until[rank] = max(decided, ends[rank])
                applied += ends[rank] <= decided
        start = decided
    return applied / start if start > 0 else 0.0
