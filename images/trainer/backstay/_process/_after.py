"""A worker's process after `train` has returned: its exit code, and the reason of a failure, are the job's.

An exception is written into the termination message. `SystemExit` is none to Python: it prints its text and calls no
hook. So the end of what the script writes to `sys.stderr` goes into the message too, when the process ends in order.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TextIO

from backstay_spec.contract import AFTER_TRAINING_FAILED, TRAINED

from ._exit import Stop, write_termination
from ._failure import describe

__all__ = ["hand_over"]

_KEPT: Final = 1000
_PATIENCE: Final = 10.0  # seconds
_LOG = logging.getLogger(__name__)


def hand_over(path: Path | None, fields: dict[str, Any], stop: Stop, settle: Callable[[BaseException], None]) -> None:
    """Prepare the process for the code after `train`, which returns now.

    The termination message states that training has ended, even if the process is killed from now on. An exception
    that nothing catches replaces that message. SIGTERM ends the process, as it does any other Python program.

    Args:
        path: the file of the termination message; None where there is none.
        fields: the message's fields, besides its result.
        stop: what has handled SIGTERM until now.
        settle: called with an exception of the script before it is written; it may end the process for the cause.
    """
    write_termination(path, {"result": TRAINED, **fields})
    stop.release()  # a SIGTERM that has come already may end the process here
    threading.Thread(target=_name_what_remains, name="backstay-remains", daemon=True).start()
    if path is not None:
        end = _ScriptEnd(path, fields, settle)
        end.previous, sys.excepthook = sys.excepthook, end.raised
        atexit.register(end.ended)


def _name_what_remains() -> None:
    """Log what Python waits for at the end of the script, such as a thread that never ends."""
    threading.main_thread().join()  # it ends with the script's last line, before the threads that are not daemons
    time.sleep(_PATIENCE)
    waited_for = [
        f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon and thread.is_alive()
    ]
    if (processes := sys.modules.get("multiprocessing")) is not None:
        waited_for += [f"child process {child.name}" for child in processes.active_children() if not child.daemon]
    if waited_for:
        _LOG.warning(
            "train has returned and the script has ended, but this process waits for: %s. End them, or make them "
            "daemons. The job ends with its scripts, and fails if that takes too long (afterTrainingSeconds)",
            ", ".join(waited_for),
        )


class _ScriptEnd:
    """Writes how the script ended.

    Args:
        path: the file of the termination message.
        fields: the message's fields for a script that has not ended yet.
        settle: see `hand_over`.
    """

    previous: Callable[..., Any]

    def __init__(self, path: Path, fields: dict[str, Any], settle: Callable[[BaseException], None]) -> None:
        self._path, self._fields, self._settle = path, fields, settle
        self._owner = os.getpid()
        self._raised = False
        self._errors = _Tail(sys.stderr)

    def raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handle an exception that ends the script, as `sys.excepthook`."""
        if os.getpid() == self._owner:  # a process that the script has forked is not the pod's
            self._raised = True
            self._settle(error)
            said = {**self._fields, **describe(error).fields()}  # a failure of the script leaves the result where it is
            write_termination(self._path, {"result": AFTER_TRAINING_FAILED, **said})
        self.previous(kind, error, trace)

    def ended(self) -> None:
        """Runs at `atexit`, when Python has printed the text of a `SystemExit`."""
        text = self._errors.text.strip()
        # A second call of `train` has written why it failed, and ends the process with SystemExit too.
        if os.getpid() == self._owner and text and not self._raised and self._says_trained():
            write_termination(self._path, {"result": TRAINED, **self._fields, "stderr": text})

    def _says_trained(self) -> bool:
        try:
            return bool(json.loads(self._path.read_bytes()).get("result") == TRAINED)
        except (OSError, ValueError, AttributeError):
            return False


class _Tail:
    """Keeps the end of what is written to a stream.

    Attributes:
        text: the last characters, `_KEPT` at most.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.text = ""
        if stream is not None:
            self._write = stream.write
            stream.write = self.write  # type: ignore[method-assign]  # the stream itself stays what it is

    def write(self, text: str) -> int:
        """Write `text` to the stream and keep its end. Replaces the stream's method."""
        self.text = (self.text + text)[-_KEPT:]
        return self._write(text)
