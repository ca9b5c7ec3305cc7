"""The process that is the parent of every container, so that none can outlive the kubelet.

A kubelet killed by SIGKILL cannot clean up after itself, and `PR_SET_PDEATHSIG` alone reaches only direct children and
follows the *thread* that forked. So this small program is forked off once: single-threaded (forking is safe and takes
about a millisecond), in a session of its own, and a child subreaper, so whatever a container leaves behind becomes its
child. It ends with its kubelet (seen through a pidfd and the end of the socket) and takes every process down with it.
Should it be killed itself, the containers' own `PR_SET_PDEATHSIG` ends them.

It is run as a file by ``python -I -S`` and imports the standard library only. Over the sequenced-packet socket it gets
``{"op": "start", "id"}`` with two descriptors (a memory file holding ``{"argv", "env", "cwd"}``; what becomes stdout
and stderr) and ``{"op": "kill", "id", "signal", "group"}``, and answers ``{"op": "started", "id", "pid"}``,
``{"op": "failed", "id", "errno", "what"}`` and ``{"op": "exited", "id", "status"}`` (a wait status).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

MARK = "KUBELET_CONTAINER_ID"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Spawner:
    """Forks containers, reports their ends, and leaves no process behind."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self.sock = sock
        self.parent = parent
        self.pids: dict[str, int] = {}  # container id -> pid of its main process
        self.ids: dict[int, str] = {}

    def run(self) -> None:
        """Serve until the kubelet is gone, then end every process below."""
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(wake_r, select.POLLIN)
        poll.register(self.sock, select.POLLIN)
        parent_fd = -1
        with contextlib.suppress(OSError):
            parent_fd = os.pidfd_open(self.parent)
            poll.register(parent_fd, select.POLLIN)
        try:
            while os.getppid() == self.parent:
                ready = {fd for fd, _ in poll.poll()}
                if wake_r in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    self.reap()
                if parent_fd in ready:
                    return
                if self.sock.fileno() in ready and not self.serve_one():
                    return
        finally:
            self.end_all()

    def serve_one(self) -> bool:
        """Handle one request; False when the kubelet closed the socket."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 65536, 4)
        except ConnectionError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["op"] == "start":
            spec_fd, out_fd = fds
            try:
                self.start(request["id"], spec_fd, out_fd)
            finally:
                os.close(spec_fd)
                os.close(out_fd)
        elif request["op"] == "kill":
            pid = self.pids.get(request["id"])
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.killpg if request["group"] else os.kill)(pid, request["signal"])
        return True

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(json.dumps(message).encode())

    def start(self, container: str, spec_fd: int, out_fd: int) -> None:
        with os.fdopen(os.dup(spec_fd), "rb") as file:
            file.seek(0)
            spec = json.load(file)
        err_r, err_w = os.pipe()  # closed by a successful exec, else carries why not
        pid = os.fork()
        if pid == 0:
            self.become(container, spec, out_fd, err_w)
        os.close(err_w)
        with os.fdopen(err_r, "rb") as file:
            failure = file.read()
        if failure:
            os.waitpid(pid, 0)
            number, what = struct.unpack("<i", failure[:4])[0], failure[4:].decode()
            self.say({"op": "failed", "id": container, "errno": number, "what": what})
            return
        self.pids[container] = pid
        self.ids[pid] = container
        self.say({"op": "started", "id": container, "pid": pid})

    def become(self, container: str, spec: dict[str, Any], out_fd: int, err_fd: int) -> None:
        """In the child: turn into the container's command. Never returns."""
        what = "start"
        try:
            spawner = os.getppid()
            os.setsid()
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != spawner:
                os._exit(137)
            signal.set_wakeup_fd(-1)
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(out_fd, 1)
            os.dup2(out_fd, 2)
            os.umask(0o022)
            what = "chdir"
            os.chdir(spec["cwd"])
            what = "exec"
            env = {**spec["env"], MARK: container}
            os.execvpe(spec["argv"][0], spec["argv"], env)  # noqa: S606
        except OSError as error:
            os.write(err_fd, struct.pack("<i", error.errno or errno.EIO) + what.encode())
        except BaseException as error:  # noqa: BLE001  # a forked child must never go on as a second spawner
            os.write(err_fd, struct.pack("<i", errno.EINVAL) + f"{what}: {error}".encode()[:200])
        finally:
            os._exit(127)

    def reap(self) -> None:
        """Collect the ended; a container ends with its main process, so what that left behind is killed."""
        while True:
            try:
                # WNOWAIT keeps the zombie, and with it the group's number, until the group is killed.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                break
            pid = ended.si_pid
            container = self.ids.pop(pid, None)
            if container is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if container is not None:
                del self.pids[container]
                self.say({"op": "exited", "id": container, "status": status})
        self.end_strays()

    def end_strays(self) -> None:
        """Kill what changed its session and was left by a container that has ended."""
        for pid in children(os.getpid()):
            if pid in self.ids:
                continue
            mark = f"{MARK}=".encode()
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if entry.startswith(mark) and entry[len(mark) :].decode() not in self.pids:
                        os.kill(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill layer by layer: whoever loses its parent becomes our child and is met in the next round."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if pid in self.ids:
                        os.killpg(pid, signal.SIGKILL)
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            self.ids.pop(pid, None)


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, a process of one thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # The name, in parentheses, may hold spaces; the parent is the second field after it.
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == pid:
                        found.append(int(entry.name))
        return found


if __name__ == "__main__":
    Spawner(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
