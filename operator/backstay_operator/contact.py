"""Records which pods answer this operator. Only calls that prove something are counted.

A call proves something if this process was awake from its start to its end. When a process was stopped, or got no
processor for a while, its calls time out, although their answers may have arrived in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from backstay_spec.observed import Contact, Silence
from backstay_spec.silence import MISSED_CALLS

__all__ = ["TICK", "Attention", "Calls"]

TICK: Final = 0.2
# A tick that is later than this shows that this process could not have noticed an answer in time.
LATE: Final = 0.5
# After this time without a tick, the counts are reset: the pods may have been paused together with this process.
PAUSE: Final = 3.0
# After this many calls that no pod of a job has answered, the first answer resets the counts of the others.
TOGETHER: Final = MISSED_CALLS - 1


class Attention:
    """Whether this process was awake. Call `tick` every `TICK` seconds.

    Args:
        clock: seconds, monotonic; it continues while this process is stopped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked = clock()
        self._late = float("-inf")
        self._paused = float("-inf")

    def tick(self) -> None:
        """Record that this process is awake now."""
        now = self._clock()
        overdue = now - self._ticked - TICK
        self._ticked = now
        if overdue >= LATE:
            self._late = now
        if overdue >= PAUSE:
            self._paused = now

    def start(self) -> None:
        """Ticks begin, or begin again. The time without ticks is not a pause."""
        self._ticked = self._clock()

    def awake_since(self, began: float) -> bool:
        """Returns whether this process was never late since `began`."""
        self.tick()
        return self._late < began

    def paused_since(self, began: float) -> bool:
        """Returns whether this process was paused since `began`."""
        self.tick()
        return self._paused >= began


@dataclass
class _PodCalls:
    """The calls to one pod."""

    first: datetime
    answered_at: datetime | None = None
    unanswered: bool = True
    calls: int = 0
    long_calls: int = 0


class Calls:
    """The results of the calls to the servers of one job.

    Pods that were silent together may have been paused together. They continue one after the other, so the misses
    before the first answer prove nothing.

    Attributes:
        generation: grows when the counts of pods that are still silent are reset.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _PodCalls] = {}
        self.generation = 0

    def keep(self, uids: Iterable[str]) -> None:
        """Drop all pods except those in `uids`."""
        kept = set(uids)
        self._lines = {uid: line for uid, line in self._lines.items() if uid in kept}

    def reset(self) -> None:
        """Forget the counted misses, because a pause of this process may have caused them."""
        self._lines.clear()
        self.generation += 1

    def answered(self, uid: str, at: datetime) -> None:
        """The pod answered a progress call."""
        line = self._lines.get(uid)
        if line is not None and line.calls >= TOGETHER and len(self.silent()) == len(self._lines):
            for other in self._lines.values():
                other.calls = other.long_calls = 0
            self.generation += 1
        self._lines[uid] = _PodCalls(at, at, unanswered=False)

    def missed(self, uid: str, at: datetime, *, proves: bool) -> None:
        """The pod did not answer a progress call; `proves`: this process was awake during the call."""
        line = self._lines.setdefault(uid, _PodCalls(at))
        line.unanswered = True
        line.calls += proves

    def long_answered(self, uid: str) -> None:
        """The pod answered a health request, though late."""
        if (line := self._lines.get(uid)) is not None:
            line.long_calls = 0

    def long_missed(self, uid: str, generation: int) -> None:
        """The pod did not answer a health request, and this process was awake during the request.

        Args:
            generation: the generation of these calls when the request began.
        """
        if generation == self.generation and (line := self._lines.get(uid)) is not None:
            line.long_calls += 1

    def silent(self) -> set[str]:
        """Returns the pods that did not answer the newest call."""
        return {uid for uid, line in self._lines.items() if line.unanswered}

    def contact(
        self,
        now: datetime,
        reachable: frozenset[int],
        unreachable: frozenset[int],
        hung_workers: frozenset[str] = frozenset(),
    ) -> Contact:
        """Returns the facts for the planner; `reachable` and `unreachable` are what workers report."""
        return Contact(
            taken=now,
            answered_at={uid: line.answered_at for uid, line in self._lines.items() if line.answered_at is not None},
            silent={
                uid: Silence(line.answered_at or line.first, line.calls, line.long_calls)
                for uid, line in self._lines.items()
                if line.unanswered
            },
            reachable=reachable,
            unreachable=unreachable,
            hung_workers=hung_workers,
        )
