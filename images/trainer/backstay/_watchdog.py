"""Bounds the time of calls that have no timeout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["at_most"]


@contextlib.contextmanager
def at_most(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` from another thread if the block has not ended after this time.

    Args:
        seconds: the time that the block may take.
        end: ends the call that waits in the block, such as by closing its connection.
    """
    watchdog = threading.Timer(seconds, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
