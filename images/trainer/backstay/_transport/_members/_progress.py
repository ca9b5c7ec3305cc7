"""Finds the member of a rank that the others wait for.

A collective of XLA has no name for a member that is late. But each member reports what its main thread does, with
its pings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from backstay_spec import contract

from ..._instrument import Doing

__all__ = ["LONG", "SCRIPT", "MemberActivity", "MemberProgress"]

LONG: Final = 10
"""The number of pings after which a member that does the same thing also reports its stacks."""

SCRIPT: Final = "script"
"""The activity of a member without an open span. It runs code of the script before or after training."""

_LIMITS: Final = {"batch_wait": LONG, "evaluate": 90, "compute": LONG, "compile": 90, SCRIPT: 90}
"""The number of pings after which a point is reported. The first ones are more likely to be what others wait for: a
batch needs no other member, and a collective waits within a computation."""

_TIMES: Final = 3.0
"""A point is reported only after this multiple of its longest duration so far."""

_SHOWN: Final = 2  # members whose stacks a complaint has
_APART: Final = 2.0  # seconds


class MemberActivity(NamedTuple):
    """The activity of a member.

    Attributes:
        point: the innermost open span of its main thread, or `SCRIPT`; empty: it is not known.
        step: the step of the span; None: the span has no step.
        began: when that began, in seconds of `time.monotonic` of this process.
        waits: whether it waits for the other members; `point` is then the name of a decision.
        stacks: the stacks of the threads that run code of the script; empty: this has not lasted for long.
    """

    point: str = ""
    step: int | None = None
    began: float = 0.0
    waits: bool = False
    stacks: str = ""


class MemberProgress:
    """The newest report of each member. Thread-safe."""

    def __init__(self, count: int, interval: float, longest: Callable[[str], float]) -> None:
        """
        Args:
            count: the number of members.
            interval: the seconds between two pings of a member.
            longest: returns the seconds that the longest visit of a point has taken until now.
        """
        self._count, self._interval, self._longest = count, interval, longest
        self._lock = threading.Lock()
        self._members: dict[int, MemberActivity] = {}
        self._received: dict[int, float] = {}
        self._named: Doing | None = None

    def reports(self, member: int, activity: MemberActivity, now: float) -> None:
        """A member has sent what it does. `now`: seconds of `time.monotonic`."""
        with self._lock:
            self._members[member], self._received[member] = activity, now

    def held_up_by(self, since: float) -> Doing | None:
        """Returns the activity of the member that the others wait for, as far as it is known.

        Members in the same part of the same step compute together. Then it is the activity of the first of them.

        Args:
            since: reports that were received before this time do not count, because their members may have continued.
        """
        with self._lock:
            found = [one for one in self._suspects() if self._received[one.member] >= since]
        together = [one for one in found if one.step == found[0].step]
        return min(together, key=lambda one: one.member, default=None)

    def stacks(self, but: int) -> str:
        """Returns the stacks that members have reported, except for one."""
        with self._lock:
            return self._stacks(member for member in sorted(self._members) if member != but)

    def complaint(self, now: float) -> str:
        """Describes each member, once, when nothing has changed for long; otherwise empty.

        Args:
            now: seconds of `time.monotonic`.
        """
        with self._lock:
            began = [one.began for one in self._members.values() if one.point]
            found = self._suspects()
            if len(began) < self._count or not found or _is_same(found[0], self._named):
                return ""
            first, unchanged = found[0], now - max(began)
            if unchanged < LONG * self._interval or now - first.began < _LIMITS[first.point] * self._interval:
                return ""
            if now - first.began < _TIMES * self._longest(first.point):
                return ""
            self._named = first
            does = "\n".join(f"  {line}" for line in self._described(now))
            stacks = self._stacks(doing.member for doing in found[:_SHOWN])
            return f"nothing has changed in the pods of this rank for {unchanged:.0f} s:\n{does}\n{stacks}".rstrip()

    def deadlock(self, now: float) -> str:
        """Describes each member if all of them wait for each other; otherwise empty. This is a defect of Backstay.

        Args:
            now: seconds of `time.monotonic`.
        """
        with self._lock:
            every = list(self._members.values())
            waits = len(every) == self._count and all(one.waits for one in every)
            if not waits or now - max(one.began for one in every) < LONG * self._interval:
                return ""
            return "all pods of the rank wait for each other: " + "; ".join(self._described(now))

    def _suspects(self) -> Sequence[Doing]:
        """Returns the activities that the others may wait for, the oldest first."""
        doing = [Doing(one.point, one.step, one.began, at) for at, one in self._members.items() if not one.waits]
        for point in _LIMITS:
            if found := [one for one in doing if one.point == point]:
                return sorted(found, key=lambda one: one.began)
        return ()

    def _described(self, now: float) -> Iterator[str]:
        """Yields a line for each activity."""
        lines: dict[str, list[str]] = {}
        for member, one in sorted(self._members.items()):
            step = "" if one.step is None else f" (step {one.step})"
            does = contract.DOES.get(one.point, one.point) + step
            does = f"waits for the others at {one.point!r}" if one.waits else does
            lines.setdefault(f"{does}, for {now - one.began:.0f} s", []).append(str(member))
        for does, members in lines.items():
            yield f"pod {', '.join(members)}: {does}"

    def _stacks(self, members: Iterable[int]) -> str:
        found = ((member, self._members[member].stacks) for member in members)
        return "\n".join(f"Pod {member}:\n{stacks}" for member, stacks in found if stacks)


def _is_same(one: Doing, other: Doing | None) -> bool:
    """Returns whether both are the same activity. A member's clock is not that of another one."""
    if other is None or (one.member, one.point, one.step) != (other.member, other.point, other.step):
        return False
    return abs(one.began - other.began) < _APART
