"""The delay before the next try, which doubles with each failure, has random jitter, and is reset by a success."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Curve:
    """Returns the seconds before try n, ``first * 2**n``, at most `most`, times a factor drawn from [1 - jitter, 1]."""

    first: float = 0.2
    most: float = 30.0
    jitter: float = 0.5

    def seconds(self, attempt: int, draw: Callable[[], float]) -> float:
        """Returns the delay after failed try `attempt` (from 0); `draw` returns a random number in [0, 1)."""
        raw = min(self.most, self.first * 2.0 ** min(attempt, 60))
        return raw * (1.0 - self.jitter * draw())


@dataclass
class _Failures:
    attempts: int
    not_before: float


@dataclass
class Backoffs(Generic[K]):
    """One back-off for each key. The caller passes the time."""

    curve: Curve
    draw: Callable[[], float]
    _entries: dict[K, _Failures] = field(default_factory=dict)

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """Record a failure. Returns the seconds to wait, not less than `at_least`, which the server requested."""
        entry = self._entries.setdefault(key, _Failures(0, now))
        wait = max(at_least, self.curve.seconds(entry.attempts, self.draw))
        entry.attempts += 1
        entry.not_before = now + wait
        return wait

    def succeeded(self, key: K) -> None:
        """Reset the back-off of `key`."""
        self._entries.pop(key, None)

    def remaining(self, key: K, now: float) -> float:
        """Returns the seconds until `key` may be tried again; 0 if it may be tried now."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else max(0.0, entry.not_before - now)

    def forget_where(self, dead: Callable[[K], bool]) -> None:
        """Drop the keys of deleted objects, so that the memory does not grow without limit."""
        for key in [key for key in self._entries if dead(key)]:
            del self._entries[key]
