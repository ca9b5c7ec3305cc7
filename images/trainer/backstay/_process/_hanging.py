"""The state of a pod that hangs: the stacks of its threads, and the end of its output."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import deque
from typing import Final, TextIO

__all__ = ["keep_output", "output_end", "stacks"]

_OUTPUT_CHARS: Final = 16_384
_STACKS_CHARS: Final = 65_536
_WRITES: Final = 1_000

_written: deque[str] = deque(maxlen=_WRITES)


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
