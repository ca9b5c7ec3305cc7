"""The state of a pod that hangs: the stacks of its threads, and the end of its output."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import traceback
from collections import deque
from typing import Final, TextIO

__all__ = ["alive", "asleep", "keep_output", "output_end", "stacks", "watch"]

_OUTPUT_CHARS: Final = 16_384
_STACKS_CHARS: Final = 65_536
_WRITES: Final = 1_000
_HANG_SECONDS: Final = 10.0
"""A process in which no Python code has run for so long prints its stacks: a thread holds the interpreter's lock."""

_written: deque[str] = deque(maxlen=_WRITES)
_watched = False


def keep_output() -> None:
    """Keep the end of what this process writes to `sys.stdout` and `sys.stderr`, from now on."""
    for stream in (sys.stdout, sys.stderr):
        _keep(stream)


def _keep(stream: TextIO) -> None:
    write = stream.write

    def kept(text: str, /) -> int:
        if isinstance(text, str):
            _written.append(text[-_OUTPUT_CHARS:])
        return write(text)

    with contextlib.suppress(AttributeError):  # a stream of the script's that has no room for it
        stream.write = kept  # type: ignore[method-assign]


def output_end() -> str:
    """The end of what was written, at most 16,384 characters."""
    with contextlib.suppress(RuntimeError):  # another thread writes meanwhile
        return "".join(_written)[-_OUTPUT_CHARS:]
    return ""


def stacks() -> str:
    """The stack of each thread, the main thread's first; the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, names.get(item[0], "")))
    parts = [
        f"Thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in frames
        if thread != threading.get_ident()
    ]
    return "\n".join(parts)[:_STACKS_CHARS]


def watch() -> None:
    """From now on, the process prints its stacks to standard error when `alive` was not called for 10 s.

    The watchdog is a thread without Python code, so it also runs while another thread holds the interpreter's lock.
    https://docs.python.org/3/library/faulthandler.html#faulthandler.dump_traceback_later
    """
    global _watched  # noqa: PLW0603  # one process, one pod
    _watched = True


def asleep() -> None:
    """`alive` may not be called for longer: stop the watchdog."""
    faulthandler.cancel_dump_traceback_later()


def alive() -> None:
    """Python code runs here; the first call after `watch` starts the watchdog."""
    if _watched:
        with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):  # standard error has no file
            faulthandler.dump_traceback_later(_HANG_SECONDS, file=sys.__stderr__ or sys.stderr)
