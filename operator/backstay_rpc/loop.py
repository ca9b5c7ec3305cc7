"""One event loop, in its own thread, for all asynchronous gRPC of a process that has no other loop.

gRPC's asynchronous core delivers its events through one queue for each process. Several loops in one process would
wake each other up without need, so all servers of a process share this one.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["call", "rpc_loop"]

_T = TypeVar("_T")
_LOCK = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop, threading.Thread] | None = None


def rpc_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop; the first call starts its thread. A forked child gets its own loop."""
    global _running  # noqa: PLW0603  # there is one for each process
    with _LOCK:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="backstay-rpc", daemon=True)
            thread.start()
            _running = os.getpid(), loop, thread
        return _running[1]


def call(work: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """Run `work` on the loop and wait for its result, from a thread that is not the loop's.

    Raises:
        TimeoutError: the work did not end within `seconds`, and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, rpc_loop())
    try:
        return future.result(seconds)
    except TimeoutError:
        future.cancel()
        raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


@atexit.register
def _stop() -> None:
    """A thread that still runs while the interpreter is taken down can crash it."""
    if _running is not None and _running[0] == os.getpid():
        _, loop, thread = _running
        loop.call_soon_threadsafe(loop.stop)
        thread.join(2.0)
