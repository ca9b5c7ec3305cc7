"""How a pod's process ends: its termination message, SIGTERM, and an end that nothing can hold up (T8)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

__all__ = ["SIGTERM_EXIT", "Stop", "end_process", "termination_message", "write_termination"]

_LOG = logging.getLogger(__name__)

SIGTERM_EXIT: Final = 128 + signal.SIGTERM

# https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
_LIMIT: Final = 4096


class Stop:
    """Set by SIGTERM; everything that waits looks at it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._wake: list[threading.Event] = []

    def also(self, event: threading.Event) -> None:
        """Set this event too."""
        self._wake.append(event)

    def install(self) -> None:
        """Take SIGTERM. Only the main thread can; elsewhere the process dies of it as usual."""
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked.set()
        for event in self._wake:
            event.set()


def termination_message(fields: Mapping[str, Any]) -> bytes:
    """JSON within Kubernetes's limit: long texts are cut, then metrics left out."""
    kept = dict(fields)
    for limit in (2000, 500, 100):
        text = json.dumps(kept, default=str).encode()
        if len(text) <= _LIMIT:
            return text
        kept = {
            name: value[:limit] if isinstance(value, str) else value
            for name, value in kept.items()
            if name != "metrics" or limit > 500
        }
    return json.dumps(kept, default=str).encode()[:_LIMIT]


def write_termination(path: Path | None, fields: Mapping[str, Any]) -> None:
    """Leave the message where the kubelet reads it."""
    if path is None:
        return
    try:
        path.write_bytes(termination_message(fields))
    except OSError as error:
        _LOG.warning("the termination message could not be written to %s: %s", path, error)


def end_process(code: int) -> NoReturn:
    """End now, whatever threads there are: a server's process has nothing after this."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
