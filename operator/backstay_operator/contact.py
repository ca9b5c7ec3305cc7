"""Which pods answer this operator: it counts calls that prove something, and no others.

A call proves something when this process was awake from its start to its end. A process that was stopped, or that got
no processor for a while, finds its calls timed out though their answers may have been there all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from backstay_spec.observed import Contact, Silence

__all__ = ["TICK", "Attention", "Calls"]

TICK: Final = 0.2
# So much later than it is due, a tick shows that this process could not have noticed an answer in time.
LATE: Final = 0.5
# After so long without a tick, what was counted before is forgotten: the pods may have been paused together with us.
PAUSE: Final = 3.0


class Attention:
    """Whether this process was awake. Call `tick` every `TICK` seconds.

    Args:
        clock: seconds, monotonic; it goes on while this process is stopped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked = clock()
        self._late = float("-inf")
        self._paused = float("-inf")

    def tick(self) -> None:
        """This process is awake now."""
        now = self._clock()
        overdue = now - self._ticked - TICK
        self._ticked = now
        if overdue >= LATE:
            self._late = now
        if overdue >= PAUSE:
            self._paused = now

    def start(self) -> None:
        """Ticks begin, or begin again: how long there were none says nothing."""
        self._ticked = self._clock()

    def awake_since(self, began: float) -> bool:
        """Whether this process was never late since `began`."""
        self.tick()
        return self._late < began

    def paused_since(self, began: float) -> bool:
        """Whether this process was paused since `began`."""
        self.tick()
        return self._paused >= began


@dataclass
class _Line:
    """The calls to one pod."""

    first: datetime
    heard: datetime | None = None
    unanswered: bool = True
    calls: int = 0
    long_calls: int = 0


class Calls:
    """What the calls to the servers of one job have shown."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def keep(self, uids: Iterable[str]) -> None:
        """Forget all pods but these."""
        kept = set(uids)
        self._lines = {uid: line for uid, line in self._lines.items() if uid in kept}

    def reset(self) -> None:
        """This process was paused: whatever was counted may be its own silence."""
        self._lines.clear()

    def answered(self, uid: str, at: datetime) -> None:
        """The pod answered a progress call."""
        self._lines[uid] = _Line(at, at, unanswered=False)

    def missed(self, uid: str, at: datetime, *, proves: bool) -> None:
        """The pod left a progress call unanswered; `proves`: this process was awake meanwhile."""
        line = self._lines.setdefault(uid, _Line(at))
        line.unanswered = True
        line.calls += proves

    def long_answered(self, uid: str) -> None:
        """The pod answered a health request, though late."""
        if (line := self._lines.get(uid)) is not None:
            line.long_calls = 0

    def long_missed(self, uid: str) -> None:
        """The pod left a health request unanswered, and this process was awake meanwhile."""
        if (line := self._lines.get(uid)) is not None:
            line.long_calls += 1

    def silent(self) -> set[str]:
        """The pods that did not answer the newest call."""
        return {uid for uid, line in self._lines.items() if line.unanswered}

    def contact(
        self,
        now: datetime,
        reachable: frozenset[int],
        unreachable: frozenset[int],
        hung_workers: frozenset[str] = frozenset(),
    ) -> Contact:
        """The facts for the planner; `reachable` and `unreachable` are what workers report."""
        return Contact(
            taken=now,
            heard={uid: line.heard for uid, line in self._lines.items() if line.heard is not None},
            silent={
                uid: Silence(line.heard or line.first, line.calls, line.long_calls)
                for uid, line in self._lines.items()
                if line.unanswered
            },
            reachable=reachable,
            unreachable=unreachable,
            hung_workers=hung_workers,
        )
