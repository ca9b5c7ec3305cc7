"""Divides the time of a worker's process into parts that add up to its age, for the account of goodput."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final

from backstay_rpc import control_pb2
from backstay_spec.goodput import MEASURED

__all__ = ["WorkerSeconds", "process_age"]

_MOST: Final = 4096
"""Versions that are remembered; of more, every second one is forgotten, which makes a rollback's share less precise."""

_NEXT: Final = {
    "data": "computing",
    "starting": "compiling",
    "compiling": "starting",
    "checkpoint": "ending",
    "ending": "ending",
}
"""The likely part of a worker's time after each part, until a method names the part."""


class WorkerSeconds:
    """Divides the time of one process into `MEASURED`, without a gap and without overlap. Thread-safe.

    Each method but `report` assigns the time since the previous call. The seconds of a computation wait until its
    outcome is known. With `overlap`, the computation after it may begin before that: its seconds are those of the
    next one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, age: float = 0.0) -> None:
        """
        Args:
            clock: a monotonic clock in seconds.
            age: seconds that the process has existed already.
        """
        self._clock, self._lock = clock, threading.Lock()
        self._at = clock() - age
        self._seconds = dict.fromkeys(MEASURED, 0.0)
        self._next = 0.0  # computation of the contribution after the one in hand
        self._doing = "starting"
        self._versions, self._applied = [0], [0.0]  # what was applied up to each of these versions
        self._saved = 0

    def ended(self, part: str) -> None:
        """The time since the previous call belongs to `part`."""
        with self._lock:
            self._seconds[part] += self._passed()
            self._doing = _NEXT.get(part, "data")

    def computed(self) -> None:
        """The time since the previous call is computation of a contribution whose outcome is not known yet."""
        with self._lock:
            self._seconds["computing"] += self._passed()
            self._doing = "wait"

    def began_next(self) -> None:
        """The time since the previous call is computation of the next contribution, which was begun early."""
        with self._lock:
            self._next += self._passed()
            self._doing = "wait"

    def exchanged(self, sent: float, answered: float, *, applied_at: int | None, beside: float = 0.0) -> None:
        """The time since the previous call was the exchange of the contribution.

        Args:
            sent: seconds from the beginning of the exchange until the contribution was sent.
            answered: seconds from its beginning until the first new parameters came from every shard.
            applied_at: the version that contains the contribution; None: it is not part of an update.
            beside: seconds from its beginning in which the next contribution was computed. They are computation, and
                not a part of the exchange.
        """
        with self._lock:
            passed = self._passed()
            at = computed = min(max(0.0, beside), passed)
            self._next += computed
            for part, end in (("send", sent), ("wait", answered), ("receive", passed)):
                seconds = min(max(at, end), passed) - at
                self._seconds[part] += seconds
                at += seconds
            self._resolve("dropped" if applied_at is None else "applied")
            if applied_at is not None:
                self._remember(applied_at)
            self._doing = "data"

    def applied(self, version: int) -> None:
        """Count the current computation as applied: the update that made `version` contains it."""
        with self._lock:
            self._resolve("applied")
            self._remember(version)

    def abandoned(self) -> None:
        """Count the current computation as dropped: no update will contain it, or that is not known."""
        with self._lock:
            self._resolve("dropped")

    def rolled_back(self, version: int) -> None:
        """The updates from `version` on were discarded: what they applied is computed again."""
        with self._lock:
            kept = bisect_right(self._versions, version)
            lost = self._applied[-1] - self._applied[max(0, kept - 1)]
            self._seconds["applied"] -= lost
            self._seconds["redone"] += lost
            del self._versions[kept:], self._applied[kept:]
            self._saved = min(self._saved, version)
            if not self._versions:
                self._versions, self._applied = [version], [self._seconds["applied"]]

    def report(self, saved: int = 0) -> control_pb2.WorkerSeconds:
        """Returns the seconds until now; what is being done counts as what it most likely is.

        Args:
            saved: the version of the newest complete checkpoint.
        """
        with self._lock:
            self._saved = max(saved, self._saved)
            at = max(0, bisect_right(self._versions, self._saved) - 1)
            del self._versions[:at], self._applied[:at]
            seconds = self._seconds | {"computing": self._seconds["computing"] + self._next}
            seconds[self._doing] += max(0.0, self._clock() - self._at)
            return control_pb2.WorkerSeconds(
                seconds=[seconds[part] for part in MEASURED],
                version=self._versions[-1],
                unsaved=max(0.0, self._applied[-1] - self._applied[0]),
            )

    @property
    def rounded(self) -> list[float]:
        """The seconds of each of `MEASURED` until now, to milliseconds, for the termination message."""
        return [round(value, 3) for value in self.report().seconds]

    def _remember(self, version: int) -> None:
        if version > self._versions[-1]:
            self._versions.append(version)
            self._applied.append(0.0)
        self._applied[-1] = self._seconds["applied"]
        if len(self._versions) > _MOST:
            # The first one is where the newest checkpoint is, the last one is now.
            del self._versions[1:-1:2], self._applied[1:-1:2]

    def _resolve(self, part: str) -> None:
        self._seconds[part] += self._seconds["computing"]
        self._seconds["computing"], self._next = self._next, 0.0

    def _passed(self) -> float:
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), max(now, self._at)
        return passed


def process_age(proc: Path = Path("/proc")) -> float:
    """Returns the seconds since this process started; 0 where the system does not say."""
    try:
        fields = (proc / "self" / "stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf(
            "SC_CLK_TCK"
        )  # https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
