"""How a pod's process ends: its termination message, SIGTERM, and an exit that nothing can delay (T8)."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from backstay_spec.job_report import LEAST_NEEDED

__all__ = [
    "SIGTERM_EXIT",
    "Stop",
    "end_after_script",
    "end_now",
    "end_process",
    "exit_status",
    "termination_message",
    "write_termination",
]

_LOG = logging.getLogger(__name__)

SIGTERM_EXIT: Final = 128 + signal.SIGTERM

# https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
_LIMIT: Final = 4096
_NEEDED: Final = ("result", "reason", "step", "term", "checkpoint", "returned")

_WRITES: Final = threading.RLock()
_written: Final[dict[str, Mapping[str, Any]]] = {}  # the newest message
_SCRIPT_SECONDS: Final = 5.0
"""The time of a script's own clean-up in a pod in which `train` does not return."""


class Stop:
    """Set by SIGTERM; every wait of the process checks it.

    A thread receives the signal, because the main thread may be inside a call that a signal handler cannot interrupt.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._before: Any = None  # what handled SIGTERM before `install`
        self._woken = -1  # the script's descriptor of `signal.set_wakeup_fd`
        self._came = False  # SIGTERM has arrived; the thread may not have read that yet
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    def then(self, what: Callable[[], None]) -> None:
        """Call `what` in another thread when the signal arrives; now if it has arrived already."""
        with self._lock:
            self._then.append(what)
            late = self.requested.is_set()
        if late:
            what()

    def install(self) -> None:
        """Handle SIGTERM. Only the main thread can; in another thread SIGTERM ends the process as usual."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        try:
            self._before = signal.signal(signal.SIGTERM, self._handle)
            self._woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        except ValueError:
            ours.close()
            theirs.close()
            return
        threading.Thread(target=self._listen, args=(ours, theirs), name="backstay-signals", daemon=True).start()

    def release(self) -> None:
        """Restore the handler of SIGTERM from before `install`. A signal that has arrived already is sent again."""
        with self._lock:
            self._then.clear()
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGTERM, self._before)
        self._before = None
        if self._came or self.requested.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def call_script(self) -> None:
        """Call the script's own handler of SIGTERM, if it has one, as the signal would have. For the main thread, when
        the pod has done its part. The handler may raise `SystemExit`."""
        handler, self._before = self._before, None
        if callable(handler):
            handler(signal.SIGTERM, None)

    def request(self) -> None:
        """Do what SIGTERM does."""
        with self._lock:
            if self.requested.is_set():
                return
            self.requested.set()
            then = list(self._then)
        for what in then:
            what()

    def _listen(self, ours: socket.socket, theirs: socket.socket) -> None:
        with ours, theirs:
            while numbers := ours.recv(64):
                if self._woken != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._woken, numbers)  # an event loop of the script waits for them
                if signal.SIGTERM in numbers:
                    self.request()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Prevent that the signal ends the process; `_listen` does the rest."""
        self._came = True


def termination_message(fields: Mapping[str, Any]) -> bytes:
    """Returns JSON within Kubernetes's limit, for which long texts are cut, and then rows left out, those that are
    needed least first. Of a traceback the end is kept."""
    kept = {name: _cut(name, value, 2000) if isinstance(value, str) else value for name, value in fields.items()}
    for names in ((), *LEAST_NEEDED):
        for name in names:
            kept.pop(name, None)
        text = _encoded(kept)
        if len(text) <= _LIMIT:
            return text
    for limit in (1000, 500, 100):
        kept = {name: _cut(name, value, limit) if isinstance(value, str) else value for name, value in kept.items()}
        text = _encoded(kept)
        if len(text) <= _LIMIT:
            return text
    return _encoded({name: kept[name] for name in _NEEDED if name in kept})


def _encoded(fields: Mapping[str, Any]) -> bytes:
    # Characters beyond ASCII as themselves: escaped, a text that is not English takes twice the room or more.
    return json.dumps(fields, default=str, ensure_ascii=False).encode(errors="backslashreplace")


def _cut(name: str, value: str, limit: int) -> str:
    if len(value) <= limit:
        return value
    return "...\n" + value[-limit:] if name == "traceback" else value[:limit]


def write_termination(path: Path | None, fields: Mapping[str, Any]) -> None:
    """Write the message to the file that the kubelet reads."""
    if path is None:
        return
    with _WRITES:
        _written.update(last=fields)
        try:
            path.write_bytes(termination_message(fields))
        except OSError as error:
            _LOG.warning("the termination message could not be written to %s: %s", path, error)


def end_now(path: Path | None, fields: Mapping[str, Any], code: int) -> NoReturn:
    """End the process from any thread, so that no other thread replaces the message.

    A result that was written before stays: a worker that has it may be lost afterwards.
    """
    with _WRITES:
        before = _written.get("last", {})
        write_termination(path, {**(before if "result" in before else {}), **fields})
        end_process(code)


def end_after_script(code: int, stop: Stop) -> NoReturn:
    """End a pod in which `train` does not return, after the clean-up of its script.

    That is the handler of SIGTERM, if the pod ends for this signal, and then the functions of `atexit`. They have five
    seconds together.
    """
    late = threading.Timer(_SCRIPT_SECONDS, os._exit, (code,))
    late.daemon = True
    late.start()
    try:
        if code == SIGTERM_EXIT:
            stop.call_script()
    except SystemExit as end:
        code = exit_status(end)
    except BaseException:  # noqa: BLE001  # any that a script raises
        _LOG.exception("the script's handler of SIGTERM failed, and the process ends")
    atexit._run_exitfuncs()
    end_process(code)


def exit_status(end: SystemExit) -> int:
    """Returns the exit status of a process that ends with this exception: the lowest byte of a number, and 1 for a
    text.

    Python uses -1 for a number outside the range of a C long.
    """
    if end.code is None:
        return 0
    if not isinstance(end.code, int):
        return 1
    return (end.code if abs(end.code) < 1 << 63 else -1) & 0xFF


def end_process(code: int) -> NoReturn:
    """End now, without waiting for threads: a server's process has nothing to do after this."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with _WRITES:  # another thread may be writing the message with which it ends this process
        os._exit(code)
