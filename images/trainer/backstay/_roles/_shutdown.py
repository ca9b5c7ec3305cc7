"""The end of a server's pod: whether the worker of rank 0 has the result, and how long the server stays for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._shard import ShardRuntime
    from .._timeouts import Timeouts

__all__ = ["Shutdown", "wait_applied"]


class Shutdown:
    """Records in which incarnation of rank 0 `train` has returned. Thread-safe."""

    def __init__(self, times: Timeouts, *, incarnation: int, took_over: bool) -> None:
        """
        Args:
            times: `shutdown` is how long the server stays for peers, `result` how long for a worker of rank 0 without
                the result, where no checkpoint holds it.
            incarnation: this server's incarnation.
            took_over: whether this server was the standby of another one.
        """
        self._times = times
        self._incarnation, self._took_over = incarnation, took_over
        self._lock = threading.Lock()
        self._returned = 0
        self._over = False

    def report(self, incarnation: int) -> bool:
        """Rank 0 reports that it has the result; False: too late, this server's last message is written."""
        with self._lock:
            if self._over:
                return False
            self._returned = max(self._returned, incarnation, 1)
            return True

    def stays(self, waited: float, *, stored: bool, awaited: bool) -> bool:
        """Whether the server stays longer.

        Args:
            waited: seconds since the end.
            stored: whether a checkpoint holds the result.
            awaited: whether a living peer has not received the end of the job.
        """
        with self._lock:
            lacking = not stored and not self._returned
        return (lacking and waited < self._times.result) or (awaited and waited < self._times.shutdown)

    def wait(self, stopped: threading.Event, awaited: Callable[[], bool], *, stored: bool) -> None:
        """Return when the server may leave; the arguments are those of `stays`, and the event of SIGTERM."""
        began = time.monotonic()
        while not stopped.is_set() and self.stays(time.monotonic() - began, stored=stored, awaited=awaited()):
            time.sleep(0.05)

    def end(self, *, already_complete: bool) -> dict[str, Any]:
        """Accept no more reports; returns the part of the server's last message about rank 0.

        ``returned`` is the incarnation of rank 0 that has the result, 0: none has it. It is left out where rank 0 may
        have reported to a previous server, which has reached the end too.

        Args:
            already_complete: whether this server found the training complete when it started.
        """
        with self._lock:
            self._over = True
            if self._returned:
                return {"returned": self._returned}
        if self._took_over or (already_complete and self._incarnation > 1):
            return {}
        return {"returned": 0}


def wait_applied(runtime: ShardRuntime, version: int, seconds: float) -> None:
    """Wait until the shard has applied the last update, for at most this number of seconds."""
    deadline = time.monotonic() + seconds
    while runtime.version < version and time.monotonic() < deadline and runtime.failed is None:
        time.sleep(0.01)
