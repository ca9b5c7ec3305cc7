"""Connects the kubelet to the spawner, which starts a process, signals it, and reports its end immediately.

The kubelet uses it only through `Runtime`, so that a pod can be tested without processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backstay_cluster.kubelet.preload import Preload

logger = logging.getLogger(__name__)
SPAWNER = Path(__file__).with_name("spawner.py")
FORKSERVER = Path(__file__).with_name("forkserver.py")


class StartError(Exception):
    """A process could not be started.

    Attributes:
        number: the errno.
        what: `exec` (the command), `chdir` (its working directory) or `start`.
    """

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"{what}: {os.strerror(number)}")
        self.number = number
        self.what = what


@dataclass(eq=False)
class Process:
    """A running process; the result of `exited` is its exit code, or 128+n if signal n ended it."""

    id: str
    pid: int
    exited: asyncio.Future[int] = field(repr=False)


class Runtime(Protocol):
    """Starts and signals processes."""

    async def start(self, container: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int) -> Process:
        """Start `argv` under a unique id, with stdout and stderr going to the descriptor `out`; raises `StartError`."""

    def kill(self, process: Process, signal: int, *, group: bool = False) -> None:
        """Send a signal to the main process, or to its whole group; no effect if it has ended."""


class ProcessRuntime:
    """Starts real processes through `spawner.py`.

    Args:
        keep_open: descriptors that stay open as long as any process: the claim of the cluster's addresses.
        on_lost: called when the spawner itself died. All processes have ended then; the next start starts a new
            spawner.
        preload: the modules to import once for all containers that run Python scripts; None: no modules.
        base_env: the environment for these imports: the part that every container has.
    """

    def __init__(
        self,
        keep_open: Sequence[int] = (),
        on_lost: Callable[[], None] | None = None,
        *,
        preload: Preload | None = None,
        base_env: Mapping[str, str] | None = None,
    ) -> None:
        self._keep_open = tuple(keep_open)
        self._on_lost = on_lost
        self._preload = preload
        self._base_env = dict(base_env or {})
        self._sock: socket.socket | None = None
        self._spawner: subprocess.Popen[bytes] | None = None
        self._starting: dict[str, asyncio.Future[Process]] = {}
        self._running: dict[str, Process] = {}
        self._outbox: deque[tuple[bytes, list[int]]] = deque()

    def open(self) -> None:
        """Start the spawner. `start` calls this if necessary; an earlier call saves the first pod some 20 ms."""
        if self._sock is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._spawner = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SPAWNER), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), *self._keep_open),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath},
            )
        ours.setblocking(False)
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)
        if self._preload is not None:
            # Not resolved: in a virtual environment the interpreter is a link.
            argv = [sys.executable, str(FORKSERVER)]
            environ = {**self._base_env, **self._preload.started_with}
            self._send_file({"op": "preload"}, {"argv": argv, "env": environ, "preload": asdict(self._preload)})

    @property
    def pid(self) -> int | None:
        """The spawner's process id."""
        return None if self._spawner is None else self._spawner.pid

    async def start(self, container: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int) -> Process:
        """See `Runtime.start`."""
        future: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        try:
            self.open()
            self._starting[container] = future
            self._send_file({"op": "start", "id": container}, {"argv": list(argv), "env": dict(env), "cwd": cwd}, out)
        except OSError as error:  # such as too many open files
            self._starting.pop(container, None)
            raise StartError(error.errno or errno.EIO, "start") from error
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The process may start later: it would have no owner.
            future.add_done_callback(self._disown)
            raise

    def _disown(self, future: asyncio.Future[Process]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.kill(future.result(), 9, group=True)

    def kill(self, process: Process, signal: int, *, group: bool = False) -> None:
        """See `Runtime.kill`."""
        if process.id in self._running:
            self._send({"op": "kill", "id": process.id, "signal": signal, "group": group}, [])

    async def close(self) -> None:
        """End every remaining process, and the spawner."""
        spawner = self._spawner
        self._lost()
        if spawner is not None:
            await asyncio.to_thread(spawner.wait)

    def _send_file(self, message: dict[str, Any], content: dict[str, Any], *fds: int) -> None:
        """Send a message with its longer part as a memory file, and descriptors."""
        memory = os.memfd_create("message")
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(json.dumps(content).encode())
            self._send(message, [memory, *fds])
        finally:
            os.close(memory)

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        # Descriptors are duplicated: the caller closes its own immediately, but sending may have to wait.
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))  # noqa: PERF401  # those before one that fails are closed
        except OSError:
            for copy in copies:
                os.close(copy)
            raise
        self._outbox.append((json.dumps(message).encode(), copies))
        self._flush()

    def _flush(self) -> None:
        if self._sock is None:
            return
        loop = asyncio.get_running_loop()
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                if fds:
                    socket.send_fds(self._sock, [data], fds)
                else:
                    self._sock.send(data)
            except BlockingIOError:
                loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self._spawner_died()
                return
            for fd in fds:
                os.close(fd)
            self._outbox.popleft()
        loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._spawner_died()
                return
            self._handle(json.loads(data))

    def _handle(self, message: dict[str, Any]) -> None:
        container = message["id"]
        if message["op"] == "started":
            process = Process(container, message["pid"], asyncio.get_running_loop().create_future())
            self._running[container] = process
            self._starting.pop(container).set_result(process)
        elif message["op"] == "failed":
            self._starting.pop(container).set_exception(StartError(message["errno"], message["what"]))
        elif message["op"] == "exited":
            code = os.waitstatus_to_exitcode(message["status"])
            self._running.pop(container).exited.set_result(code if code >= 0 else 128 - code)

    def _spawner_died(self) -> None:
        logger.error("the process that starts containers has died, and all containers with it; a new one is started")
        spawner = self._spawner
        self._lost()
        if spawner is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                spawner.wait(timeout=1)
        if self._on_lost is not None:
            self._on_lost()

    def _lost(self) -> None:
        if self._sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock.fileno())
            loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
        self._spawner = None
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        starting, self._starting = self._starting, {}
        running, self._running = self._running, {}
        for future in starting.values():
            future.set_exception(StartError(errno.EPIPE, "start"))
        for process in running.values():
            process.exited.set_result(137)
