"""Measures how long the next contribution was computed during the exchange of the last one, for goodput."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["OverlapTimer"]


class OverlapTimer:
    """Notes when a computation has ended that the worker does not wait for yet. One at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: a monotonic clock in seconds.
        """
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None  # most workers need none
        self._ended: Future[float] | None = None

    def begin(self, wait: Callable[[], object]) -> None:
        """Record that a computation has begun.

        Args:
            wait: returns when it has ended; another thread calls it. An error of it is also an end.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "backstay-beside")
        self._ended = self._thread.submit(self._end_of, wait)

    def seconds(self, since: float, until: float) -> float:
        """Returns how long the computation ran between these two times; 0 if none has begun since the last call."""
        ended, self._ended = self._ended, None
        if ended is None:
            return 0.0
        return max(0.0, (min(until, ended.result()) if ended.done() else until) - since)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _end_of(self, wait: Callable[[], object]) -> float:
        with contextlib.suppress(Exception):  # the worker raises it when it needs the result
            wait()
        return self._clock()
