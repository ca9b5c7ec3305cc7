"""Processes of the spawner have exact exit codes, and none is left behind after any kill."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from backstay_cluster.kubelet.memory import resident_bytes
from backstay_cluster.kubelet.runtime import ProcessRuntime, StartError
from backstay_cluster.tests.limits import LONG

ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    made = ProcessRuntime()
    yield made
    await made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that need not be a child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], LONG)[0], f"process {pid} is still there"
    finally:
        os.close(fd)


def read_pids(fd: int, count: int) -> list[int]:
    data = b""
    while len(data.split()) < count or not data.endswith(b"\n"):
        assert select.select([fd], [], [], LONG)[0], data
        data += os.read(fd, 4096)
    return [int(word) for word in data.split()]


# A child in the group, and one that left the group and the session and whose parent is gone.
FAMILY = "sleep 600 & echo $!; (setsid sh -c 'echo $$; exec sleep 600' &) ; echo $$; exec sleep 600"


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)],
)
async def test_exit_codes(runtime, pipe, script, code):
    process = await runtime.start("a", ["sh", "-c", script], ENV, "/", pipe[1])
    assert await process.exited == code


async def test_output_environment_and_folder(runtime, pipe, tmp_path, monkeypatch):
    """The environment has only the given variables, and it may be larger than a message of the socket."""
    monkeypatch.setenv("SECRET", "not for containers")
    env = {**ENV, "A": "1", **{f"B{i}": "x" * 100_000 for i in range(8)}}
    script = "echo $A ${#B7}; pwd; env | grep -c SECRET; exit 0"
    process = await runtime.start("a", ["sh", "-c", script], env, str(tmp_path), pipe[1])
    assert await process.exited == 0
    assert os.read(pipe[0], 4096).decode().split() == ["1", "100000", str(tmp_path), "0"]


async def test_what_cannot_start_states_the_reason(runtime, pipe, tmp_path):
    with pytest.raises(StartError, match="exec: No such file"):
        await runtime.start("a", ["no-such-program"], ENV, "/", pipe[1])
    with pytest.raises(StartError, match="chdir: No such file"):
        await runtime.start("b", ["sh"], ENV, str(tmp_path / "none"), pipe[1])
    plain = tmp_path / "plain"
    plain.touch()
    with pytest.raises(StartError, match="exec: Permission denied"):
        await runtime.start("c", [str(plain)], ENV, "/", pipe[1])
    with pytest.raises(StartError):
        await runtime.start("d", ["sh", "\0"], ENV, "/", pipe[1])


async def test_a_start_without_a_free_descriptor_fails_and_the_next_one_does_not(runtime, pipe, monkeypatch):
    def full(name):
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", full)
        with pytest.raises(StartError, match="Too many open files"):
            await runtime.start("a", ["true"], ENV, "/", pipe[1])
    process = await runtime.start("a", ["true"], ENV, "/", pipe[1])
    assert await process.exited == 0
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3, "the spawner, and what asyncio has"


@pytest.mark.parametrize("mark", ["", "KUBELET_CONTAINER_ID=b", "KUBELET_CONTAINER_ID=$(printf '\\377')"])
async def test_a_container_ends_with_its_main_process(runtime, pipe, mark):
    """A child may have changed the mark by which it is found, also to bytes that no text has."""
    family = FAMILY.replace("setsid", f"{mark} setsid")
    process = await runtime.start("a", ["sh", "-c", family], ENV, "/", pipe[1])
    spawner = runtime.pid
    pids = await asyncio.to_thread(read_pids, pipe[0], 3)
    assert process.pid in pids
    runtime.kill(process, signal.SIGTERM)
    assert await process.exited == 143
    for pid in pids:
        await asyncio.to_thread(wait_gone, pid)
    assert await (await runtime.start("c", ["true"], ENV, "/", pipe[1])).exited == 0
    assert runtime.pid == spawner


async def test_a_dead_spawner_takes_containers_along_and_is_replaced(runtime, pipe):
    process = await runtime.start("a", ["sleep", "600"], ENV, "/", pipe[1])
    os.kill(runtime.pid, signal.SIGKILL)
    assert await process.exited == 137
    await asyncio.to_thread(wait_gone, process.pid)
    again = await runtime.start("b", ["sh", "-c", "exit 5"], ENV, "/", pipe[1])
    assert await again.exited == 5


PARENT = f"""
import asyncio, os, sys
from backstay_cluster.kubelet.runtime import ProcessRuntime
async def main():
    runtime = ProcessRuntime()
    await runtime.start("a", ["sh", "-c", {FAMILY!r}], dict(PATH=os.environ["PATH"]), "/", 1)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_kubelet_is_killed(number):
    """Children, and what left group and session, end with the process that started the runtime."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        try:
            pids = read_pids(parent.stdout.fileno(), 3)
            assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        finally:
            parent.send_signal(number)
        for pid in pids:
            wait_gone(pid)


def test_memory_counts_descendants():
    script = "import subprocess,sys; b=bytearray(50<<20); b[::4096]=b'x'*len(b[::4096]); print(1, flush=True); input()"
    outer = f"import subprocess,sys; subprocess.run([sys.executable,'-c',{script!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        used = resident_bytes(process.pid)
        process.communicate(b"\n")
    assert 50 << 20 < used < 150 << 20
    assert resident_bytes(process.pid) == 0
