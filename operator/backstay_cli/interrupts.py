"""Handles Ctrl-C and other signals while a command imports its modules, which takes a second, and while it works."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

__all__ = ["end_imports_quietly", "on_signals", "restore"]

_PROGRAMS = ("backstay", "kubectl-backstay")


def end_imports_quietly() -> None:
    """From now on, Ctrl-C ends this process without a traceback. Only for a process that is one of the commands."""
    ours = sys.argv and sys.argv[0].rsplit("/", 1)[-1] in _PROGRAMS
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_signals(numbers: tuple[int, ...], call: Callable[[], object]) -> None:
    """Call `call` when one of these signals arrives, in the running event loop.

    A signal that this process ignores stays ignored: `nohup` and a shell in the background want that.
    """
    import asyncio  # later than the modules that Ctrl-C may interrupt

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, call)


def restore() -> None:
    """Ctrl-C raises `KeyboardInterrupt` again; the commands handle it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
