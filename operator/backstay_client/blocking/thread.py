"""Runs coroutines in the event loop of a separate thread, so that a caller may have a loop that runs already."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from backstay_client.jobfiles.jobfile import BadInput

__all__ = ["LoopThread"]

_CANCEL_SECONDS = 25.0
"""How long an interrupted call may take to clean up: an embedded cluster stops its processes within 20 s."""

_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop. It starts at the first call, and ends with `close` or with the process.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: concurrent.futures.Future[asyncio.AbstractEventLoop] | None = None  # of `_thread`, once it runs
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
            return call.future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the client was closed during a call") from None
        except BaseException:
            if call is None:
                coroutine.close()
            elif not call.future.done():  # Ctrl-C, which may come before the loop has the call
                call.cancel_in(loop)
            raise

    def iterate(self, generator: AsyncGenerator[_T]) -> Iterator[_T]:
        """The values of an asynchronous generator, which is closed at the end or when the caller stops."""

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
            started, thread = self._loop, self._thread
            self._loop = self._thread = None
        if started is None or thread is None or os.getpid() != self._pid:
            if last is not None:
                last.close()
            return
        loop = started.result()
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
                started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
                thread = threading.Thread(target=_serve, args=(started,), name="backstay-client", daemon=True)
                try:
                    self._loop, self._thread = started, thread
                    thread.start()
                except BaseException:
                    if thread.ident is None:  # it did not start, so a later call would wait without end
                        self._loop = self._thread = None
                    raise
            if threading.current_thread() is self._thread:
                raise RuntimeError("a call of the blocking client was made in its own thread: use AsyncClient there")
            return self._loop.result()


class _BlockingCall(Generic[_T]):
    """One coroutine that a caller waits for. An interruption of the caller may come at any moment.

    Attributes:
        future: the result of the coroutine.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T], thread: LoopThread) -> None:
        self._coroutine, self._thread = coroutine, thread
        self._task: asyncio.Task[_T] | None = None
        self.future: concurrent.futures.Future[_T] = concurrent.futures.Future()

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
        concurrent.futures.wait([self.future], _CANCEL_SECONDS)

    def _cancel(self) -> None:
        if self._task is None:
            self._abandon()
        else:
            self._task.cancel()

    def _abandon(self) -> None:
        self._coroutine.close()
        self._cancelled()

    def _cancelled(self) -> None:
        self.future.cancel()
        self.future.set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`

    def _ended(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            self._cancelled()
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


async def _end(loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, None] | None) -> None:
    try:
        if last is not None:
            await last
    finally:
        loop.stop()


async def _closed(generator: AsyncGenerator[Any]) -> None:
    await generator.aclose()


def _serve(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:  # cancels what is left
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()
