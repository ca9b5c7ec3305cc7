"""A worker's process after `train` has returned: its exit code, and the reason of a failure, are the job's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ._exit import Stop, write_termination
from ._failure import describe

__all__ = ["AFTER_TRAINING_FAILED", "STOPPED_EARLY", "TRAINED", "hand_over"]

TRAINED: Final = "Trained"
AFTER_TRAINING_FAILED: Final = "AfterTrainingFailed"
STOPPED_EARLY: Final = "StoppedEarly"


def hand_over(path: Path | None, fields: dict[str, Any], stop: Stop) -> None:
    """`train` returns: the process is the script's again.

    The termination message says that training is over, also should the process be killed from now on. An exception
    that nothing catches replaces that message. SIGTERM ends the process, as it does any other Python program.

    Args:
        path: the file of the termination message; None where there is none.
        fields: of the message, besides its result.
        stop: what has handled SIGTERM until now.
    """
    stop.release()
    write_termination(path, {"result": TRAINED, **fields})
    sys.excepthook = _hook(path, sys.excepthook, os.getpid())


def _hook(
    path: Path | None, previous: Callable[..., Any], owner: int
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == owner:  # a process that the script has forked is not the pod's
            write_termination(path, {"result": AFTER_TRAINING_FAILED, **describe(error).fields()})
        previous(kind, error, trace)

    return hook
