"""Waits for what other threads and processes do, and writes files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

LIMIT: Final = 120.0
"""Seconds after which a wait has failed. It is a limit and no expectation: a busy machine takes tenfold."""

_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


def until(holds: Callable[[], T], what: str = "") -> T:
    """Call `holds` until it returns something true, and return that.

    Args:
        what: the event, for the error.

    Raises:
        AssertionError: `holds` did not within `LIMIT`.
    """
    deadline, pause = time.monotonic() + LIMIT, _PAUSE
    while not (found := holds()):
        assert time.monotonic() < deadline, _late(what)
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
    return found


async def until_async(holds: Callable[[], T], what: str = "") -> T:
    """`until`, for what another task of this loop does."""
    deadline, pause = time.monotonic() + LIMIT, _PAUSE
    while not (found := holds()):
        assert time.monotonic() < deadline, _late(what)
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE)
    return found


def put(path: Path, content: str | bytes) -> None:
    """Write a file that another process may read at any time: it finds the old content or the new one."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


def _late(what: str) -> str:
    return f"waited {LIMIT:.0f} s in vain" + (f" until {what}" if what else "")
