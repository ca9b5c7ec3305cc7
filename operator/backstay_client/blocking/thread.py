"""Runs coroutines in the event loop of a separate thread, so that a caller may have a loop that runs already."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from backstay_client.errors import BadInput

__all__ = ["LoopThread"]

_CANCEL_SECONDS = 25.0
"""How long an interrupted call may take to clean up: an embedded cluster stops its processes within 20 s."""

_LOOK_SECONDS = 0.5
"""The longest time until a call notices an interruption."""

_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop. It starts at the first call, and ends with `close` or with the process.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # of `_thread`
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.closed = False
        self._ending: asyncio.Task[None] | None = None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end, and return its result. An interruption cancels it, and waits until it has ended.

        Raises:
            RuntimeError: this process was forked from the one that made the thread, or the call is made in it.
            BadInput: the thread has ended.
        """
        call: _BlockingCall[_T] | None = None
        try:
            loop = self._running()
            call = _BlockingCall(coroutine, self)
            loop.call_soon_threadsafe(call.begin)
            return call.result()
        except BaseException:
            if call is None:
                coroutine.close()
            elif not call.over:  # Ctrl-C, which may come before the loop has the call
                call.cancel_in(loop)
            raise

    def iterate(self, generator: AsyncGenerator[_T]) -> Iterator[_T]:
        """Yields the values of an asynchronous generator, which is closed at the end or when the caller stops."""

        async def following() -> tuple[bool, Any]:
            try:
                return True, await anext(generator)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, value = self.run(following())
                if not more:
                    return
                yield value
        finally:
            with contextlib.suppress(RuntimeError, BadInput):
                self.run(_closed(generator))

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Run `last`, and end the thread."""
        with self._lock:
            self.closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or os.getpid() != self._pid:
            if last is not None:
                last.close()
            return
        if threading.current_thread() is thread:  # the garbage collector runs in any thread, and this one cannot wait
            self._ending = loop.create_task(_end(loop, last))
            return
        if last is not None:
            with contextlib.suppress(concurrent.futures.CancelledError):
                asyncio.run_coroutine_threadsafe(last, loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked from the one with the client: make a new client here")
        with self._lock:
            if self.closed:  # a new thread would have no end
                raise BadInput("this client is closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name="backstay-client", daemon=True)
                try:
                    self._loop, self._thread = loop, thread
                    thread.start()
                except BaseException:
                    if thread.ident is None:  # it did not start, so a later call would wait without end
                        self._loop = self._thread = None
                        loop.close()
                    raise
            if threading.current_thread() is self._thread:
                raise RuntimeError("a call of the blocking client was made in its own thread: use AsyncClient there")
            return self._loop


class _BlockingCall(Generic[_T]):
    """One coroutine that a caller waits for. An interruption of the caller may come at any moment.

    So the caller waits at a `SimpleQueue`. A `concurrent.futures.Future` has a lock in Python code, which the caller
    would keep if the interruption came right after it took the lock. The loop would then wait for it without end.

    Attributes:
        over: whether the coroutine has ended.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T], thread: LoopThread) -> None:
        self._coroutine, self._thread = coroutine, thread
        self._task: asyncio.Task[_T] | None = None
        self._ends: queue.SimpleQueue[asyncio.Task[_T] | None] = queue.SimpleQueue()
        self.over = False

    def result(self) -> _T:
        """Wait for the result of the coroutine; called by the caller. Raises what the coroutine raises.

        Raises:
            RuntimeError: the client was closed during the call.
        """
        while True:
            # A signal that the system gives to another thread does not end a wait: Python acts on it in between.
            with contextlib.suppress(queue.Empty):
                task = self._ends.get(timeout=_LOOK_SECONDS)
                break
        if task is None or task.cancelled():
            raise RuntimeError("the client was closed during a call")
        return task.result()

    def begin(self) -> None:
        """Run the coroutine; called in the loop."""
        if self._thread.closed:  # the loop is about to end
            self._abandon()
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._ended)

    def cancel_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the coroutine, and wait until it has cleaned up. A second interruption ends the wait."""
        try:
            loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop has ended
            self._abandon()
            return
        with contextlib.suppress(queue.Empty):
            self._ends.get(timeout=_CANCEL_SECONDS)

    def _cancel(self) -> None:
        if self._task is None:
            self._abandon()
        else:
            self._task.cancel()

    def _abandon(self) -> None:
        self._coroutine.close()
        self._ended(None)

    def _ended(self, task: asyncio.Task[_T] | None) -> None:
        if task is not None and not task.cancelled():
            task.exception()  # an interrupted caller does not read it
        self.over = True
        self._ends.put(task)


async def _end(loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, None] | None) -> None:
    try:
        if last is not None:
            await last
    finally:
        loop.stop()


async def _closed(generator: AsyncGenerator[Any]) -> None:
    await generator.aclose()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what is left
        runner.get_loop().run_forever()
