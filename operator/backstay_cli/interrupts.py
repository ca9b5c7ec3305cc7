"""Ctrl-C while a command imports its modules, which takes up to a second."""

from __future__ import annotations

import signal
import sys

__all__ = ["end_imports_quietly", "restore"]

_PROGRAMS = ("backstay", "kubectl-backstay")


def end_imports_quietly() -> None:
    """From now on, Ctrl-C ends this process without a traceback. Only for a process that is one of the commands."""
    ours = sys.argv and sys.argv[0].rsplit("/", 1)[-1] in _PROGRAMS
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def restore() -> None:
    """Ctrl-C raises `KeyboardInterrupt` again; the commands handle it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
