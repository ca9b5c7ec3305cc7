"""Waits for what other threads and processes do, and writes files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from backstay_cluster.tests.files import put
from backstay_cluster.tests.limits import LONG, slack

__all__ = ["LIMIT", "LONG", "put", "read_until", "slack", "until", "until_async"]

T = TypeVar("T")

LIMIT: Final = 120.0
"""Seconds after which a wait has failed on a machine without other work."""

_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


def until(
    holds: Callable[[], T],
    what: str = "",
    *,
    limit: float | None = None,
    pause: float = _LONGEST_PAUSE,
    ignoring: tuple[type[BaseException], ...] = (),
) -> T:
    """Call `holds` until it returns something true, and return that.

    Args:
        what: the event, for the error.
        limit: seconds, in the place of `LIMIT`. A busy machine has more (`slack`).
        pause: the most seconds between two calls; more where a call is work for several processes.
        ignoring: exceptions of `holds` after which it is called again.

    Raises:
        AssertionError: `holds` returned nothing true within the limit.
    """
    limit = LIMIT if limit is None else limit
    began, after = time.monotonic(), _PAUSE
    while True:
        with contextlib.suppress(*ignoring):
            if found := holds():
                return found
        _check(began, limit, what)
        time.sleep(after)
        after = min(1.2 * after, pause)


async def until_async(holds: Callable[[], T], what: str = "") -> T:
    """`until`, for what another task of this loop does."""
    began, pause = time.monotonic(), _PAUSE
    while not (found := holds()):
        _check(began, LIMIT, what)
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
    return found


def read_until(lines: Iterable[str] | None, pattern: str) -> str:
    """Returns the output of a process up to the first line that has `pattern`.

    Raises:
        AssertionError: the output ended without it, or did not arrive within `LIMIT`. The message has the output.
    """
    said: list[str] = []
    found = threading.Event()

    def read() -> None:
        with contextlib.suppress(ValueError):  # the test has failed, and closed it
            for line in lines or ():
                said.append(line)
                if re.search(pattern, line):
                    found.set()
                    return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        until(lambda: not reader.is_alive(), f"a line has {pattern!r}")
        assert found.is_set(), f"no line has {pattern!r}"
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{''.join(said)}") from None
    return "".join(said)


def _check(began: float, limit: float, what: str) -> None:
    passed = time.monotonic() - began
    if passed > limit:
        assert passed < limit * slack(), f"the wait{f' until {what}' if what else ''} did not end within {passed:.0f} s"
