"""Runs coroutines in the event loop of a separate thread, so that a caller may have a loop that runs already."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from backstay_client.jobfiles.jobfile import BadInput

__all__ = ["LoopThread"]

_CANCEL_SECONDS = 25.0
"""How long an interrupted call may take to clean up: an embedded cluster stops its processes within 20 s."""

_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop. It starts at the first call, and ends with `close` or with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False
        self._ending: asyncio.Task[None] | None = None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end, and return its result. An interruption cancels it, and waits until it has ended.

        Raises:
            RuntimeError: this process was forked from the one that made the thread, or the call is made in it.
            BadInput: the thread has ended.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the client was closed during a call") from None
        except BaseException:
            if not future.done():  # Ctrl-C
                future.cancel()
                self._settle()
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
            self._closed = True
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
            if self._closed:  # a new thread would have no end
                raise BadInput("this client is closed")
            if self._loop is None:
                started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
                self._thread = threading.Thread(target=_serve, args=(started,), name="backstay-client", daemon=True)
                self._thread.start()
                self._loop = started.result()
            if threading.current_thread() is self._thread:
                raise RuntimeError("a call of the blocking client was made in its own thread: use AsyncClient there")
            return self._loop

    def _settle(self) -> None:
        """Wait until cancelled work has cleaned up. A second interruption ends the wait."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return

        async def others() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task.cancelling()]
            if tasks:
                await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

        asyncio.run_coroutine_threadsafe(others(), loop).result()


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
