"""The process that is the parent of every container, so that no container can outlive the kubelet.

A kubelet that SIGKILL ended cannot clean up, and `PR_SET_PDEATHSIG` alone reaches only direct children and follows the
*thread* that forked. So the kubelet starts this small program once. It has a single thread, so forking is safe and
takes about a millisecond. It has its own session and is a child subreaper, so all processes that a container leaves
behind become its children. It ends with its kubelet, which it detects by a pidfd and by the end of the socket, and then
ends every process below it. If this program is killed, the containers' own `PR_SET_PDEATHSIG` ends them.

It is run as a file by ``python -I -S`` and imports the standard library only. Over the sequenced-packet socket it gets
``{"op": "start", "id"}`` with two descriptors (a memory file with ``{"argv", "env", "cwd"}``; the stdout and stderr of
the container) and ``{"op": "kill", "id", "signal", "group"}``. It answers ``{"op": "started", "id", "pid"}``,
``{"op": "failed", "id", "errno", "what"}`` and ``{"op": "exited", "id", "status"}`` (a wait status).

``{"op": "preload"}`` with one descriptor (a memory file with ``{"argv", "env", "preload"}``) starts a `forkserver`.
From then on the forkserver forks the containers that run Python. This program executes them itself while the forkserver
is dead, unfit or slow to answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

MARK = "KUBELET_CONTAINER_ID"
PLACEHOLDER = "0" * 32
"""The mark of a process that is not a container yet; it has the length of a container's id."""
ROOM = "KUBELET_ROOM"
"""Reserves the memory in which a forked container shows its own arguments and environment."""
ARGUMENT_ROOM, ENVIRONMENT_ROOM = 4 << 10, 96 << 10
IMPORT_SECONDS = 60.0
"""How long a container waits for the forkserver's imports; an executed one would have to import the same modules."""
ANSWER_SECONDS = 15.0
FAILURES = 3
"""The number of losses of a forkserver, without a container in between, after which it is not started again."""
MAX_REQUESTS = 200
"""Containers that wait for the forkserver. Each needs four descriptors here, and space in the forkserver's socket."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
_LIBC = ctypes.CDLL(None, use_errno=True)
_MARKS = re.compile(rb"\0" + MARK.encode() + rb"=([^\0]*)")  # the environment of a forkserver is long


class Request:
    """A request to the forkserver to fork a container.

    Attributes:
        channel: the channel to the new process; None until the request was sent to the forkserver.
        pid: the id of the new process; 0 until the process has reported it.
        deadline: a time on the monotonic clock, after which the spawner executes the container itself.
    """

    def __init__(self, container: str, spec_fd: int, out_fd: int, deadline: float) -> None:
        self.container = container
        self.fds = (os.dup(spec_fd), os.dup(out_fd))
        self.channel: socket.socket | None = None
        self.pid = 0
        self.deadline = deadline

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        if self.channel is not None:
            self.channel.close()


class Forkserver:
    """The spawner's state of the forkserver process.

    Attributes:
        pid: 0 while it does not run.
        ready: whether it has imported the modules.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.pid = 0
        self.sock: socket.socket | None = None
        self.ready = False
        self.failures = 0

    @property
    def usable(self) -> bool:
        """Whether it runs, or is importing."""
        return self.sock is not None

    def start(self) -> None:
        """Fork and execute it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        preload = os.memfd_create("preload")
        os.write(preload, json.dumps(self.spec["preload"]).encode())
        pid = os.fork()
        if pid == 0:
            try:
                become_leader(os.getppid())
                reset_signals()
                redirect(2 if not os.isatty(2) else os.open(os.devnull, os.O_WRONLY))
                theirs.set_inheritable(True)
                environ = {**self.spec["env"], MARK: PLACEHOLDER, ROOM: "-" * ENVIRONMENT_ROOM}
                argv = [*self.spec["argv"], str(theirs.fileno()), "-" * ARGUMENT_ROOM]
                os.execve(argv[0], argv, environ)  # noqa: S606
            finally:
                os._exit(127)
        theirs.close()
        try:
            socket.send_fds(ours, [b"preload"], [preload])
        except OSError:
            pass  # it has ended already; the end of its socket will show that
        finally:
            os.close(preload)
        self.pid, self.sock, self.ready = pid, ours, False

    def send(self, request: Request) -> bool:
        """Send a request. Returns False if the forkserver cannot accept it."""
        assert self.sock is not None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return False
        with theirs:
            try:
                fds = [*request.fds, theirs.fileno()]
                socket.send_fds(self.sock, [request.container.encode()], fds, socket.MSG_DONTWAIT)
            except OSError:
                ours.close()
                return False
        request.channel, request.deadline = ours, time.monotonic() + ANSWER_SECONDS
        return True

    def lose(self) -> None:
        """Kill it, and count the loss."""
        if self.sock is not None:
            self.sock.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid, self.sock, self.ready = 0, None, False
        self.failures += 1


class Spawner:
    """Forks containers, reports their ends, and ends all remaining processes at the end."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self.sock = sock
        self.parent = parent
        self.pids: dict[str, int] = {}  # container id -> pid of its main process
        self.ids: dict[int, str] = {}
        self.noted: set[str] = set()
        self.forkserver: Forkserver | None = None
        self.requests: dict[str, Request] = {}

    def run(self) -> None:
        """Serve until the kubelet has ended, then end every process below this one."""
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.sock.set_inheritable(False)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        parent_fd = -1
        with contextlib.suppress(OSError):
            parent_fd = os.pidfd_open(self.parent)
        try:
            while os.getppid() == self.parent:
                ready = self.wait([fd for fd in (wake_r, self.sock.fileno(), parent_fd) if fd >= 0])
                if wake_r in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    self.reap()
                if parent_fd in ready:
                    return
                if self.sock.fileno() in ready and not self.serve_one():
                    return
                self.serve_forkserver()
        finally:
            self.end_all()

    def wait(self, fds: list[int]) -> set[int]:
        """Wait until one of `fds` or the descriptor of a request is readable, or a deadline has passed."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self.forkserver is not None and self.forkserver.sock is not None:
            poll.register(self.forkserver.sock, select.POLLIN)
        deadlines = []
        for request in self.requests.values():
            if request.channel is not None:
                poll.register(request.channel, select.POLLIN)
            if not request.pid:
                deadlines.append(request.deadline)
        timeout = None if not deadlines else max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1
        return {fd for fd, _ in poll.poll(timeout)}

    def serve_one(self) -> bool:
        """Handle one request. Returns False if the kubelet closed the socket."""
        try:
            data, fds = receive(self.sock)
        except ConnectionError:
            return False
        if not data:
            return False
        request = json.loads(data)
        try:
            if request["op"] == "start":
                try:
                    if len(fds) < 2:  # the kernel drops descriptors that this process has no space for
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    self.start(request["id"], *fds)
                except OSError as error:  # affects only this container
                    self.fail(request["id"], error)
            elif request["op"] == "preload":
                self.forkserver = Forkserver(read_json(fds[0]))
                self.forkserver.start()
            elif request["op"] == "kill":
                pid = self.pids.get(request["id"])
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        (os.killpg if request["group"] else os.kill)(pid, request["signal"])
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(json.dumps(message).encode())

    def fail(self, container: str, error: OSError) -> None:
        """Report a container that this process could not start."""
        self.send({"op": "failed", "id": container, "errno": error.errno or errno.EIO, "what": "start"})

    def start(self, container: str, spec_fd: int, out_fd: int) -> None:
        spec = read_json(spec_fd)
        server = self.forkserver
        room = len(self.requests) < min(MAX_REQUESTS, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64) // 4)
        if server is not None and server.usable and room and runs_python(spec["argv"]):
            # The deadline changes when the request is sent to the forkserver.
            request = Request(container, spec_fd, out_fd, time.monotonic() + IMPORT_SECONDS)
            self.requests[container] = request
            if server.ready and not server.send(request):
                self.lose_forkserver("it accepts no requests")
            return
        self.execute(container, spec, out_fd)

    def execute(self, container: str, spec: dict[str, Any], out_fd: int) -> None:
        """Start a container from this process."""
        try:
            err_r, err_w = os.pipe()  # closed by a successful exec; otherwise it carries the error
        except OSError as error:
            self.fail(container, error)
            return
        try:
            pid = os.fork()
        except OSError as error:
            os.close(err_r)
            os.close(err_w)
            self.fail(container, error)
            return
        if pid == 0:
            self.become(container, spec, out_fd, err_w)
        os.close(err_w)
        with os.fdopen(err_r, "rb") as file:
            failure = file.read()
        if failure:
            os.waitpid(pid, 0)
            number, what = struct.unpack("<i", failure[:4])[0], failure[4:].decode()
            self.send({"op": "failed", "id": container, "errno": number, "what": what})
            return
        self.own(container, pid)
        self.send({"op": "started", "id": container, "pid": pid})

    def own(self, container: str, pid: int) -> None:
        self.pids[container] = pid
        self.ids[pid] = container

    def become(self, container: str, spec: dict[str, Any], out_fd: int, error_fd: int) -> None:
        """Become the container's command, in the child process. Never returns."""
        what = "start"
        try:
            become_leader(os.getppid())
            reset_signals()
            redirect(out_fd)
            what = "chdir"
            os.chdir(spec["cwd"])
            what = "exec"
            env = {**spec["env"], MARK: container}
            os.execvpe(spec["argv"][0], spec["argv"], env)  # noqa: S606
        except OSError as error:
            os.write(error_fd, struct.pack("<i", error.errno or errno.EIO) + what.encode())
        except BaseException as error:  # noqa: BLE001  # a forked child must never continue as a second spawner
            os.write(error_fd, struct.pack("<i", errno.EINVAL) + f"{what}: {error}".encode()[:200])
        finally:
            os._exit(127)

    # --- containers that the forkserver forks

    def serve_forkserver(self) -> None:
        """Read the messages of the forkserver and of new processes; execute containers that have waited too long."""
        server = self.forkserver
        if server is not None and server.sock is not None and readable(server.sock):
            try:
                data = server.sock.recv(4096)
            except ConnectionError:
                data = b""
            self.handle_forkserver(server, json.loads(data) if data else {"op": "ended"})
        for request in list(self.requests.values()):
            if request.channel is not None and readable(request.channel):
                self.settle(request)
        now = time.monotonic()
        if any(not request.pid and request.deadline <= now for request in self.requests.values()):
            self.lose_forkserver("it does not answer")

    def handle_forkserver(self, server: Forkserver, message: dict[str, Any]) -> None:
        if message["op"] == "ready":
            server.ready = True
            for request in list(self.requests.values()):
                if request.channel is None and not server.send(request):
                    self.lose_forkserver("it accepts no requests")
                    return
        elif message["op"] == "unfit":
            modules = server.spec["preload"]["modules"]
            server.spec["preload"]["modules"] = [name for name in modules if name != message["module"]]
            server.lose()
            server.failures -= 1  # each failure leaves one module out
            server.start()
        elif message["op"] == "ended":
            self.lose_forkserver("it has ended")

    def settle(self, request: Request) -> None:
        """Handle a message of a new process, which is its id, the error of its start, or the end of the channel (it
        runs)."""
        assert request.channel is not None
        data = b""
        with contextlib.suppress(ConnectionError, BlockingIOError):
            data = request.channel.recv(4096, socket.MSG_DONTWAIT)
        message = json.loads(data) if data else {}
        if "pid" in message and is_child(message["pid"]):
            request.pid = message["pid"]
            self.own(request.container, request.pid)
            if self.forkserver is not None:
                self.forkserver.failures = 0
            with contextlib.suppress(OSError):
                request.channel.sendall(b"go")
            return
        if "note" in message:
            if message["note"] not in self.noted:  # a job has many pods with one command
                self.noted.add(message["note"])
                print(message["note"], file=sys.stderr, flush=True)
            return
        del self.requests[request.container]
        if "errno" in message:
            self.pids.pop(request.container, None)
            self.ids.pop(request.pid, None)
            self.send({"op": "failed", "id": request.container, **message})
        elif request.pid:
            self.send({"op": "started", "id": request.container, "pid": request.pid})
        else:  # it died before it could report
            self.execute(request.container, read_json(request.fds[0]), request.fds[1])
        request.close()

    def lose_forkserver(self, why: str) -> None:
        """Start another forkserver, unless it was lost too often, and execute the containers that wait for this one."""
        server = self.forkserver
        assert server is not None
        server.lose()
        if server.failures < FAILURES:
            print(f"starting the forkserver again: {why}", file=sys.stderr, flush=True)
            try:
                server.start()
            except OSError as error:
                print(f"no forkserver is started again: {error}", file=sys.stderr, flush=True)
        else:
            print(f"no forkserver is started again: {why}", file=sys.stderr, flush=True)
        for request in list(self.requests.values()):
            # A process that has reported no longer depends on the forkserver.
            if request.channel is not None and not request.pid and readable(request.channel):
                self.settle(request)
            if not request.pid and self.requests.pop(request.container, None) is not None:
                # If the new process exists, it ends when it finds the channel closed.
                self.execute(request.container, read_json(request.fds[0]), request.fds[1])
                request.close()

    # --- ends

    def reap(self) -> None:
        """Reap ended processes. A container ends with its main process, so its remaining processes are killed."""
        while True:
            try:
                # WNOWAIT keeps the zombie, and with it the group's number, until the group is killed.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                break
            pid = ended.si_pid
            if self.forkserver is not None and pid == self.forkserver.pid:
                self.forkserver.pid = 0  # the end of its socket triggers the rest
            # Its messages come first: a note, and then the start. Without another one, `settle` removes the request.
            while (request := self.requests.get(self.ids.get(pid, ""))) is not None:
                self.settle(request)
            container = self.ids.pop(pid, None)
            if container is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if container is not None:
                del self.pids[container]
                self.send({"op": "exited", "id": container, "status": status})
        self.end_strays()

    def end_strays(self) -> None:
        """Kill processes of ended containers that changed their session."""
        for pid in children(os.getpid()):
            if pid in self.ids:
                continue
            with contextlib.suppress(OSError):
                environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
                for mark in _MARKS.findall(environ):
                    if not self.lives(mark.decode(errors="replace")):
                        os.kill(pid, signal.SIGKILL)

    def lives(self, container: str) -> bool:
        """Returns whether a process with this mark has a container, or is becoming one."""
        return container == PLACEHOLDER or container in self.pids or container in self.requests

    def end_all(self) -> None:
        """Kill layer by layer, because a process whose parent ends becomes a child of this one, for the next round."""
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


def become_leader(parent: int) -> None:
    """Lead a session, and end with `parent`. Called in a new process; waits until `parent` is its parent."""
    os.setsid()
    deadline = time.monotonic() + 1.0
    while os.getppid() != parent and time.monotonic() < deadline:
        os.sched_yield()  # the process between the two is ending
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)


def reset_signals() -> None:
    """Reset the signals that the spawner handles or ignores to their defaults. Called in a new process."""
    signal.set_wakeup_fd(-1)
    for number in RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def redirect(out_fd: int) -> None:
    """Empty standard input, one target for output and errors, and the usual umask."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out_fd, 1)
    os.dup2(out_fd, 2)
    os.close(null)
    os.umask(0o022)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message and its descriptors, which no container inherits."""
    data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


def readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def is_child(pid: int) -> bool:
    """Returns whether a process is a child of this one, running or not reaped yet."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def read_json(fd: int) -> Any:
    """Returns the content of a memory file; the descriptor stays open."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return json.load(file)


def runs_python(argv: list[str]) -> bool:
    """Returns whether a forkserver may be able to run this command; it checks more."""
    plain = len(argv) > 1 and (argv[1] == "-m" or argv[1].endswith(".py"))
    return plain and os.path.basename(argv[0]).startswith("python")  # noqa: PTH119


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, a process of one thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # The name, in parentheses, may contain spaces; the parent is the second field after it.
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == pid:
                        found.append(int(entry.name))
        return found


if __name__ == "__main__":
    Spawner(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
