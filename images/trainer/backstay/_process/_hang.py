"""Reports a pod that hangs by the stacks of its threads and the end of its output."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Final, TextIO

from backstay_rpc.control_pb2 import HangReport

from ._failure import is_ours, is_script

if TYPE_CHECKING:
    from .._instrument import Doing

__all__ = ["HANGS", "hang_report", "keep_output", "output_end", "script_stacks", "stacks"]

HANGS: Final = 5.0
"""Seconds after which a pod that gets SIGTERM, and whose main thread did nothing else meanwhile, reports its stacks."""

_OUTPUT_CHARS: Final = 16_384
_STACKS_CHARS: Final = 65_536
_SCRIPT_CHARS: Final = 8_192
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
    """Returns the end of what was written, at most 16,384 characters."""
    with contextlib.suppress(RuntimeError):  # another thread writes meanwhile
        return "".join(_written)[-_OUTPUT_CHARS:]
    return ""


def stacks() -> str:
    """Returns the stack of each thread, the main thread's first; the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, names.get(item[0], "")))
    parts = [
        f"Thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in frames
        if thread != threading.get_ident()
    ]
    return "\n".join(parts)[:_STACKS_CHARS]


def script_stacks() -> str:
    """Returns the calls of each thread that runs code of the script; if none does, the main thread's. At most 8,192
    characters.

    A thread in a library that the script called runs code of the script. A thread in Backstay, or in a library that
    Backstay called, does not. Calls outside of the script's are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, frames = threading.main_thread().ident, sys._current_frames()
    found = {thread: _of_script(frame) for thread, frame in frames.items() if thread != threading.get_ident()}
    if not any(found.values()) and main in frames:
        found = {main: traceback.extract_stack(frames[main])}
    parts = [f"Thread {names.get(one, one)}:\n{''.join(stack.format())}" for one, stack in found.items() if stack]
    return "\n".join(parts)[-_SCRIPT_CHARS:]


def _of_script(frame: FrameType) -> traceback.StackSummary:
    """Returns the calls from the one by which Backstay, or Python, entered the script, or none if the thread has left
    it."""
    stack = traceback.extract_stack(frame)
    ours = [at for at, call in enumerate(stack) if is_ours(call.filename)]
    inner = stack[ours[-1] + 1 :] if ours else stack[:]
    first = next((at for at, call in enumerate(inner) if is_script(call.filename)), len(inner))
    return traceback.StackSummary.from_list(inner[first:])


def hang_report(doing: Doing | None, now: float, others: str = "") -> HangReport | None:
    """Returns the state of this pod, which gets SIGTERM, or None if it does not hang.

    Args:
        doing: what the main thread does, or that of another pod of the rank, for which it waits.
        now: seconds of `time.monotonic`.
        others: the stacks of other pods of the rank.
    """
    if doing is None or now - doing.began < HANGS:
        return None
    pod = f"pod {doing.member}: " if doing.member else ""
    step = "" if doing.step is None else f" of step {doing.step}"
    does = f"{pod}{doing.point}{step}, for {now - doing.began:.1f} s"
    return HangReport(stacks="\n".join(filter(None, (others, stacks()))), output=output_end(), doing=does)
