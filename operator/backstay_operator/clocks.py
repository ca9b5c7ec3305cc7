"""The clocks of the operator's parts, as one value that tests replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Clocks"]


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Clocks:
    """Two clocks.

    Attributes:
        seconds: returns the seconds of a clock that never goes back.
        now: returns the time of day, aware.
    """

    seconds: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = _now
