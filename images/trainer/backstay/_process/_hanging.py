"""Reports a pod that hangs by the stacks of its threads and the end of its output."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Final, TextIO

from backstay_rpc.control_pb2 import HangReport

if TYPE_CHECKING:
    from .._instrument import Doing

__all__ = ["HANGS", "hang_report", "keep_output", "output_end", "stacks"]

HANGS: Final = 5.0
"""Seconds after which a pod that gets SIGTERM, and whose main thread did nothing else meanwhile, reports its stacks."""

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


def hang_report(doing: Doing | None, now: float) -> HangReport | None:
    """The state of this pod, which gets SIGTERM; None: it does not hang.

    Args:
        doing: what the main thread does.
        now: seconds of `time.monotonic`.
    """
    if doing is None or now - doing.began < HANGS:
        return None
    step = "" if doing.step is None else f" of step {doing.step}"
    return HangReport(stacks=stacks(), output=output_end(), doing=f"{doing.point}{step}, for {now - doing.began:.1f} s")
