"""The time of a worker's pod, in parts that add up to the age of its process: the basis of goodput."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["PARTS", "WorkerSeconds", "process_age"]

PARTS: Final = (
    "starting",
    "compiling",
    "data",
    "applied",
    "dropped",
    "send",
    "wait",
    "receive",
    "reconnecting",
    "ending",
)
"""`applied` and `dropped` are computation, by the outcome of the contribution. A contribution is `dropped` when it was
late, stale or not finite, or when a server was lost before the worker received the outcome. `starting`: from the start
of the process to the first parameters. `reconnecting`: from the loss of a server to new parameters. `ending`: after the
last update. The others are `STEP_PARTS`."""


class WorkerSeconds:
    """Divides the time of one process into `PARTS`, without a gap and without overlap.

    Each method assigns the time since the previous call. The seconds of a computation wait until its outcome is known.
    """

    def __init__(
        self, count: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic, age: float = 0.0
    ) -> None:
        """
        Args:
            count: receives a part and seconds to add to it.
            clock: seconds, monotonic.
            age: seconds that the process has existed already.
        """
        self._count, self._clock = count, clock
        self._at = clock() - age
        self._computing = 0.0

    def ended(self, part: str) -> None:
        """The time since the previous call belongs to `part`."""
        self._count(part, self._passed())

    def computed(self) -> None:
        """The time since the previous call is computation of a contribution whose outcome is not known yet."""
        self._computing += self._passed()

    def exchanged(self, sent: float, answered: float, *, applied: bool) -> None:
        """The time since the previous call was the exchange of the contribution.

        Args:
            sent: seconds from the beginning of the exchange until the contribution was sent.
            answered: seconds from its beginning until the first new parameters came from every shard.
            applied: whether the contribution is part of an update.
        """
        passed = self._passed()
        send = min(max(0.0, sent), passed)
        wait = min(max(0.0, answered - sent), passed - send)
        for part, seconds in (("send", send), ("wait", wait), ("receive", passed - send - wait)):
            self._count(part, seconds)
        self._resolve("applied" if applied else "dropped")

    def abandoned(self) -> None:
        """The outcome of the computation in hand will not be known."""
        self._resolve("dropped")

    def _resolve(self, part: str) -> None:
        self._count(part, self._computing)
        self._computing = 0.0

    def _passed(self) -> float:
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), max(now, self._at)
        return passed


def process_age(proc: Path = Path("/proc")) -> float:
    """Seconds since this process started; 0 where the system does not say."""
    try:
        fields = (proc / "self" / "stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf(
            "SC_CLK_TCK"
        )  # https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
