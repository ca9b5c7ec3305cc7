"""How much was done per second, over a sliding window."""

from __future__ import annotations

from collections import deque

__all__ = ["Rate"]

_LEAST_SECONDS = 1.0
"""A shorter time gives the rate of a burst: gradients that wait when training begins are applied together."""

_LEAST_AMOUNTS = 10
"""Fewer could all be such a burst."""


class Rate:
    """Amounts over the last `window` seconds; since the first amount while there are fewer."""

    def __init__(self, window: float = 30.0) -> None:
        self._window = window
        self._amounts: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """`amount` was done since the previous call."""
        self._amounts.append((now, amount))
        self._sum += amount
        # The oldest amount only marks when the window began: its work was done before.
        while len(self._amounts) > 2 and self._amounts[1][0] <= now - self._window:
            self._sum -= self._amounts.popleft()[1]

    def per_second(self, now: float) -> float | None:
        """Returns the rate at `now`; None until the amounts span a second."""
        if not self._amounts:
            return None
        began, first = self._amounts[0]
        ended = self._amounts[-1][0]
        if ended - began < _LEAST_SECONDS:
            return None
        # A standstill lowers the rate, but not right after an amount.
        seconds = max(ended, now - self._window / 2) - began
        return (self._sum - first) / seconds

    def at_end(self, start: float) -> float | None:
        """Returns the rate at the end of training, where no longer time follows.

        It is the one from the first amount of the window to the last one, even if that time is short. With few amounts,
        it is the mean since `start`, because a burst of them has no rate. It is None without an amount, or without time
        since `start`.

        Args:
            start: when training could begin.
        """
        if not self._amounts:
            return None
        (began, first), (ended, _) = self._amounts[0], self._amounts[-1]
        if len(self._amounts) < _LEAST_AMOUNTS or ended <= began:
            return self._sum / (ended - start) if ended > start else None
        return (self._sum - first) / (ended - began)
