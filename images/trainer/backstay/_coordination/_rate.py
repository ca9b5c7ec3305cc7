"""How much was done a second, over a sliding window."""

from __future__ import annotations

from collections import deque

__all__ = ["Rate"]


class Rate:
    """Amounts over the last `window` seconds; since the first one while there are fewer."""

    def __init__(self, window: float = 30.0) -> None:
        self._window = window
        self._amounts: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """`amount` was done since the one before."""
        self._amounts.append((now, amount))
        self._sum += amount
        # The oldest one only says when the window began: what it did took place before.
        while len(self._amounts) > 2 and self._amounts[1][0] <= now - self._window:
            self._sum -= self._amounts.popleft()[1]

    def per_second(self, now: float) -> float:
        """0 until there are two amounts."""
        if len(self._amounts) < 2:
            return 0.0
        began, first = self._amounts[0]
        ended = self._amounts[-1][0]
        # What stands still slows down the rate, but not the moment after an amount.
        seconds = max(ended, now - self._window / 2) - began
        return (self._sum - first) / seconds if seconds > 0 else 0.0
