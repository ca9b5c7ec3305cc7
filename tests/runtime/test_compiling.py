"""One pod of a machine compiles a program, and the others wait, but not forever (T8)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from between import LONG

from backstay._process._compiling import one_compiles

HOLDER = """
import sys
from backstay._process._compiling import one_compiles
with one_compiles("gradient", b"a" * 32, seconds=600):
    print("inside", flush=True)
    sys.stdin.read()
print("outside", flush=True)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Returns a process that is inside for as long as its standard input is open."""
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


class Clock:
    """Time that passes only during a call of sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


def enter(folder: object, digest: bytes = b"a" * 32, seconds: float = 5.0) -> Clock:
    """Returns the time that it took to get in."""
    clock = Clock()
    environ = {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    with one_compiles("gradient", digest, seconds=seconds, environ=environ, clock=clock, sleep=clock.sleep):
        pass
    return clock


def test_one_is_inside_and_the_next_follows(tmp_path):
    with holder(tmp_path) as first:
        assert first.stdout.readline() == "inside\n"
        with holder(tmp_path) as second:
            first.stdin.close()
            assert first.stdout.readline() == "outside\n"
            assert second.stdout.readline() == "inside\n"
            second.stdin.close()


@pytest.mark.parametrize("number", [None, signal.SIGSTOP])
def test_t8_the_wait_for_a_holder_ends(tmp_path, number):
    """Whether it compiles for long or is stopped."""
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "inside\n"
        if number is not None:
            process.send_signal(number)
        assert enter(tmp_path).now == pytest.approx(5.0, abs=0.1)
        process.kill()


def test_a_dead_holder_holds_nothing(tmp_path):
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "inside\n"
        process.kill()
        process.wait()
        assert enter(tmp_path).slept == 0


def test_another_program_does_not_wait(tmp_path):
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "inside\n"
        assert enter(tmp_path, digest=b"b" * 32).slept == 0
        process.kill()


@pytest.mark.parametrize("folder", ["", "gs://bucket/cache", "/proc/no/such/folder"])
def test_without_a_shared_folder_no_pod_waits(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert enter(folder).slept == 0
    assert not list(tmp_path.iterdir())


def test_the_lock_is_released_when_the_program_fails(tmp_path):
    environ = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        with pytest.raises(KeyError), one_compiles("gradient", b"a" * 32, seconds=600, environ=environ):
            raise KeyError
    with holder(tmp_path) as process:
        assert select.select([process.stdout], [], [], LONG)[0]
        process.kill()
