"""The blocking client runs its coroutines in a thread: from a running loop, through Ctrl-C, after a fork (T8)."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from between import LONG

from backstay_client.blocking.thread import LoopThread
from backstay_client.errors import BadInput


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_a_call_works_while_the_caller_has_a_running_loop(thread: LoopThread) -> None:
    """The cell of a notebook is such a caller."""
    assert asyncio.get_running_loop() is not None
    assert thread.run(answer(3)) == 3


def test_an_exception_of_the_coroutine_reaches_the_caller(thread: LoopThread) -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread.run(fails())
    assert thread.run(answer(1)) == 1


def test_a_thread_that_cannot_start_does_not_hang_later_calls(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:

        def fails(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        full.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            thread.run(answer(1))
    assert thread.run(answer(2)) == 2


def test_a_generator_is_closed_when_its_reader_stops(thread: LoopThread) -> None:
    closed = threading.Event()

    async def numbers() -> AsyncGenerator[int]:
        try:
            for number in range(100):
                yield number
        finally:
            closed.set()

    values = thread.iterate(numbers())
    assert [next(values), next(values)] == [0, 1]
    del values
    gc.collect()
    assert closed.is_set()
    assert list(thread.iterate(numbers())) == list(range(100))


def test_a_call_in_the_thread_itself_is_refused_and_does_not_hang(thread: LoopThread) -> None:
    async def nested() -> None:
        thread.run(answer(1))

    with pytest.raises(RuntimeError, match="use AsyncClient there"):
        thread.run(nested())


def test_t8_closing_in_the_thread_itself_ends_it() -> None:
    """The garbage collector closes a client in any thread, also in the one that would have to wait for itself."""
    thread, closed, ended = LoopThread(), threading.Event(), threading.Event()

    async def last() -> None:
        closed.set()

    async def collects() -> None:
        loop_thread = threading.current_thread()
        threading.Thread(target=lambda: (loop_thread.join(), ended.set())).start()
        thread.close(last())

    thread.run(collects())
    assert closed.wait(LONG)
    assert ended.wait(LONG)


def test_t8_a_call_after_the_end_starts_no_other_thread(thread: LoopThread) -> None:
    before = threading.active_count()
    thread.run(answer(1))
    assert threading.active_count() == before + 1
    thread.close()
    with pytest.raises(BadInput, match="this client is closed"):
        thread.run(answer(2))
    assert threading.active_count() == before


FORKS = """
import os
from backstay_client.blocking.thread import LoopThread

async def answer():
    return 1

thread = LoopThread()
thread.run(answer())
child = os.fork()
if child == 0:
    try:
        thread.run(answer())
    except RuntimeError as error:
        os._exit(0 if "make a new client here" in str(error) else 1)
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_was_forked_gets_an_error_and_does_not_hang() -> None:
    """T8. The process that forks has only the client: one with JAX must not fork."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr


def test_close_ends_calls_of_other_threads() -> None:
    thread = LoopThread()
    begun, ends = threading.Event(), []

    async def waits() -> None:
        begun.set()
        await asyncio.sleep(600)

    def call() -> None:
        try:
            thread.run(waits())
        except RuntimeError as error:
            ends.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(LONG)
    thread.close()
    caller.join(LONG)
    assert ends == ["the client was closed during a call"]


INTERRUPTED = """
import asyncio
from backstay_client.blocking.thread import LoopThread

thread = LoopThread()

async def waits():
    print("begun", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.05)
        print("cleaned up", flush=True)

try:
    thread.run(waits())
except KeyboardInterrupt:
    print("interrupted", flush=True)

async def one():
    return 1

print(thread.run(one()), flush=True)
"""


def test_ctrl_c_cancels_the_call_waits_for_its_clean_up_and_leaves_a_working_thread() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LONG)[0] == "cleaned up\ninterrupted\n1\n"


EARLY = """
import asyncio, os, signal
from backstay_client.blocking.thread import LoopThread

thread, cleaned, interrupted = LoopThread(), 0, 0

async def waits():
    global cleaned
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        cleaned += 1

async def one():
    return 1

for _ in range(3000):
    try:
        thread.run(waits())
    except KeyboardInterrupt:
        interrupted += 1
print(interrupted, cleaned, thread.run(one()))
"""


def test_ctrl_c_may_come_while_the_call_is_being_made() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.stdout, done.stderr) == ("3000 3000 1\n", "")


def test_an_unused_thread_costs_nothing() -> None:
    before = threading.active_count()
    LoopThread().close()
    assert threading.active_count() == before
