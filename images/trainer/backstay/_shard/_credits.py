"""Which contributions a shard may receive now, so that its memory does not grow with the number of workers.

Only shard 0 decides this. A worker that shard 0 admits sends to the other shards too, so shards never wait for each
other.
Not thread-safe: `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .._coordination import Counting, Rules, held_by_shard
from .._update import BRANCHES

__all__ = ["Credits", "Turn"]


@dataclass(eq=False)
class Turn:
    """A push that waits for memory.

    Attributes:
        again: the shard holds a complete contribution of its rank that is not decided: an earlier attempt.
        woken: notified when it may have memory.
    """

    rank: int
    again: bool
    woken: threading.Condition
    granted: bool = False


class Credits:
    """Counts the contributions in memory, and selects the next one.

    Where the sums are made in the order of ranks, low ranks come first, and the lowest `BRANCHES` ranks that are not
    added up never wait. So the contributions in memory can always be completed to a sum. Elsewhere the first one
    that waited is the next.

    A later attempt never waits. The earlier one may lack a part on another shard. It stays in memory until the later
    one is complete.
    """

    def __init__(self, counting: Counting, rules: Rules, lock: threading.Lock) -> None:
        """`lock` is the shard's lock."""
        self._counting, self._rules, self._lock = counting, rules, lock
        self._waiting: list[Turn] = []
        self._taken = self._most = 0
        self._granted = 0  # of those taken: pushes that were woken and have no memory yet
        self._world = 0
        self._summed: set[int] = set()

    @property
    def taken(self) -> int:
        """The contributions in memory, including incomplete ones."""
        return self._taken

    def most(self) -> int:
        """Returns the most contributions that were in memory at the same time since the last call."""
        most, self._most = self._most, self._taken
        return most

    def limit(self, world: int) -> int:
        """Returns the contributions that may be in memory at the same time, or 0 for any number if there are few
        ranks."""
        limit = held_by_shard(self._counting, self._rules, world)
        return limit if world > limit else 0

    @property
    def bound(self) -> int:
        """The most contributions in memory, as long as no rank sends twice."""
        limit = self.limit(self._world)
        ordered = self._counting.ordered(self._rules.backups, self._world)
        return limit + BRANCHES * ordered if limit else self._world

    def begin(self, world: int) -> None:
        """A version of `world` ranks begins: nothing is added up."""
        self._world = world
        self._summed.clear()
        self.wake()  # the version of those pushes may be over
        self._grant()

    def wake(self) -> None:
        """Every push that waits checks again whether it may still be used."""
        for turn in self._waiting:
            turn.woken.notify()

    def take(self) -> None:
        """Count the memory of a contribution."""
        self._taken += 1
        self._most = max(self._most, self._taken - self._granted)

    def give(self) -> None:
        """Record that the memory of a contribution is free again."""
        self._taken -= 1
        self._grant()

    def summed(self, ranks: set[int]) -> None:
        """The contributions of these ranks are added up."""
        self._summed |= ranks
        self._grant()

    def enter(self, rank: int, *, again: bool = False) -> Turn:
        """Register a push; `Turn.granted` is true once it may begin. See `Turn` for the arguments."""
        turn = Turn(rank, again, threading.Condition(self._lock))
        self._waiting.append(turn)
        self._grant()
        return turn

    def leave(self, turn: Turn) -> None:
        """Remove a push that begins, or has ended."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.granted:
            self._taken -= 1  # counted until `take`
            self._granted -= 1
            self._grant()

    def _grant(self) -> None:
        if not self._waiting:
            return
        limit = self.limit(self._world)
        must = range(0)
        if self._counting.ordered(self._rules.backups, self._world):
            self._waiting.sort(key=lambda turn: turn.rank)
            first = next((rank for rank in range(self._world) if rank not in self._summed), 0)
            must = range(first - first % BRANCHES, first - first % BRANCHES + BRANCHES)
        for turn in list(self._waiting):
            if not limit or self._taken < limit or turn.rank in must or turn.again:
                self._waiting.remove(turn)
                self._taken += 1
                self._granted += 1
                turn.granted = True
                turn.woken.notify()
