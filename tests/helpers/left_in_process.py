"""A plug-in of pytest that finds the threads and the listening sockets that tests have left in this process.

tests/twice.py loads it in each process of pytest, and so it is imported by pytest alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from typing import Final

import pytest

from backstay_cluster.tests.limits import slack

# A process has one of each of the first three, which ends with it; "forked" forks the pods of all `testing.run`. A
# thread of a library that is not in Python is named "Dummy-1" when it calls Python, and keeps the name after its end.
# The last two are threads of fsspec and tqdm, which begin with their first use.
LASTING: Final = ("backstay-rpc", "backstay-signals", "forked", "Dummy-", "fsspecIO", "tqdm_monitor")
ENDING: Final = 10.0
AFTER_TESTS: Final = "the end of the session"

left: list[tuple[str, str]] = []
"""Texts, each with the first test that the thing was seen after; complete after `pytest_sessionfinish`."""

_seen: dict[object, str] = {}  # a thread, or the number of a socket -> the first test it was seen after; "": before all


def _threads() -> dict[threading.Thread, str]:
    """Returns the threads that a test may have begun, as text."""
    others = (one for one in threading.enumerate() if one is not threading.main_thread())
    return {one: f"the thread {one.name}" for one in others if not one.name.startswith(LASTING)}


def _sockets() -> dict[int, int]:
    """Returns the sockets of this process by their numbers, which are unique: number -> file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  after each test, so it is quick
        with contextlib.suppress(OSError):
            kind, _, number = os.readlink(f"/proc/self/fd/{name}").partition(":")  # noqa: PTH115
            if kind == "socket":
                found[int(number[1:-1])] = int(name)
    return found


def _listening() -> dict[int, str]:
    """Returns the numbers of the sockets that listen, with their address as text."""
    found = {}
    for number, descriptor in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[number] = f"the listening socket {same.getsockname()!r}"
    return found


def _note(nodeid: str) -> None:
    for thing in (*_threads(), *_sockets()):
        _seen.setdefault(thing, nodeid)


def pytest_configure() -> None:
    _note("")


def pytest_collection_finish() -> None:
    _note("")  # libraries that were imported may have a thread


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Wait for threads that are ending, after all fixtures have ended, and keep what remains for tests/twice.py."""
    _note(AFTER_TESTS)
    gc.collect()  # an executor without references ends its threads
    began = time.monotonic()
    while (found := _found()) and time.monotonic() < began + ENDING * slack():
        time.sleep(0.05)
    left[:] = found
    # A process of pytest-xdist has this way to the process that starts it.
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = found


def _found() -> list[tuple[str, str]]:
    things: dict[object, str] = {**_threads(), **_listening()}
    return sorted((text, test) for thing, text in things.items() if (test := _seen.get(thing, AFTER_TESTS)))
