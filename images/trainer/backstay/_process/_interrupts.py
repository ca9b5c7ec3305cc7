"""Stops training after the present update at Ctrl-C, SIGTERM and SIGHUP in a single process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, Final

__all__ = ["Interrupts"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context that keeps the first of these signals for `arrived`. A second one has its usual effect.

    Only the main thread handles signals. In another thread, and for a signal that the process ignores, nothing changes.
    """

    def __init__(self, notice: str) -> None:
        """`notice` is the text that the process writes to stderr when the signal arrives."""
        self._notice = f"\n{notice}\n".encode()
        self._before: dict[int, Any] = {}
        self.arrived = 0  # the signal's number

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self.arrived = number
        with contextlib.suppress(OSError):
            os.write(2, self._notice)  # a log line could wait for a lock that this thread holds

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
