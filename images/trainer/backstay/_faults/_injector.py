"""Carries out a fault script in a pod's process. It changes this process only."""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from .. import _instrument
from ..errors import ConfigurationError
from ._plan import ENV_FAULTS, Fault, faults_of

if TYPE_CHECKING:
    from backstay_rpc.control_pb2 import Frame

    from .._process import Environment

__all__ = ["Injector", "install"]

_LOG = logging.getLogger(__name__)

# The stopped process is the helper's parent as long as it lives: a number that was used again is never signalled.
_CONTINUE: Final = (
    "import os,signal,sys,time; time.sleep(float(sys.argv[2])); pid = int(sys.argv[1]); "
    "os.getppid() == pid and os.kill(pid, signal.SIGCONT)"
)


class Injector:
    """The faults of one process. Thread-safe."""

    def __init__(self, faults: tuple[Fault, ...], role: str, index: int, incarnation: int, member: int = 0) -> None:
        self._lock = threading.Lock()
        self._waiting = [fault for fault in faults if fault.matches(role, index, incarnation, member)]
        self._step = -1
        self._full_until = 0.0
        self._corrupt = 0
        self._nan = False

    def reach(self, point: str, step: int | None) -> None:
        """The process is at `point` of `step`; without a step, of the highest one so far.

        Raises:
            OSError: ENOSPC at the point ``write``, while the disk is full.
        """
        if point == "write" and time.monotonic() < self._full_until:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")
        with self._lock:
            self._step = max(self._step, -1 if step is None else step)
            at = self._step if step is None else step
            due = [fault for fault in self._waiting if fault.point == point and fault.step <= at]
            self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            # First the message: some of these end the process.
            print(f"fault injected at step {at}: {fault}", file=sys.stderr, flush=True)
            _instrument.report("fault", action=fault.action, role=fault.role, where=fault.point, step=at)
            self._inject(fault)

    def alter(self, point: str, value: Any) -> Any:
        """Return `value`, or a replacement if a fault is due.

        At the point ``frame``, `value` is the frame to send: one bit of its announced size is flipped. At the point
        ``params``, `value` is the parameters that a contribution is computed from: all of them become NaN.
        """
        if point == "params" and self._nan:
            self._nan = False
            return [_not_finite(leaf) for leaf in value]
        return self._corrupted(value) if point == "frame" else value

    def _corrupted(self, frame: Frame) -> Frame:
        kind = frame.WhichOneof("kind")
        if not self._corrupt or kind not in ("push_begin", "params_begin"):
            return frame
        with self._lock:
            if not self._corrupt:
                return frame
            self._corrupt -= 1
        damaged = type(frame)()
        damaged.CopyFrom(frame)
        getattr(damaged, kind).bytes ^= 1 << 4
        return damaged

    def _inject(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                _stop(fault.seconds)
            case "delay":
                time.sleep(fault.seconds or 0.0)
            case "hang":
                threading.Event().wait()
            case "cut":
                from .._process import reset_peers

                _LOG.info("%d connections were cut", reset_peers(None, lambda _: True))
            case "corrupt":
                with self._lock:
                    self._corrupt += 1
            case "nan":
                self._nan = True
            case "fill":
                self._full_until = time.monotonic() + (fault.seconds or 0.0)
            case "exit":
                os._exit(fault.code or 0)


def _not_finite(leaf: Any) -> Any:
    import jax.numpy as jnp

    return leaf * leaf.dtype.type(math.nan) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def _stop(seconds: float | None) -> None:
    """Stop all threads of this process; a helper process resumes them."""
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # It inherits nothing that the peers of a dead parent wait for, and does not outlive the pause.
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _CONTINUE, str(os.getpid()), str(seconds)], stdin=subprocess.DEVNULL
    ):
        os.kill(os.getpid(), signal.SIGSTOP)


def install(environment: Environment, variables: Mapping[str, str]) -> None:
    """Read the script in the pod's environment, if there is one, and inject its faults at instrumentation points.

    Raises:
        ConfigurationError: the script is invalid, or names a pod that the job never has.
    """
    text = variables.get(ENV_FAULTS, "")
    try:
        faults = faults_of(text, environment.config)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    pod = environment.role, environment.index, environment.incarnation, environment.member
    found = Injector(faults, *pod) if faults else None
    _instrument.inject_with(found)
