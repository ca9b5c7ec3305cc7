"""A Python process that has imported modules already, and forks containers that run Python scripts.

Importing JAX and related packages takes seconds of processor time in every container; a fork takes milliseconds. The
spawner starts this program once. It imports the modules of a `Preload`, and checks that they left no thread, child or
open file behind. Then it forks on request. A forked process becomes a container exactly as an executed one does. If a
process cannot run a command in this way (see `forkable`), it executes the command instead.

Each container is forked twice, so that the spawner, a child subreaper, becomes its parent and reaps it. So the
containers do not depend on this program after the fork. Requests arrive over a sequenced-packet socket: a container's
id with three descriptors (the command, as for the spawner; the output; a channel). Over the channel, the new process
sends ``{"pid"}``, waits for one answer, and closes it when the script begins. ``{"errno", "what"}`` reports why a start
failed, and ``{"note"}`` why a new Python is executed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: its modules must not be importable as top-level modules

import atexit
import builtins
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import resource
import signal
import socket
import types
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from backstay_cluster.kubelet.forkable import Program, Sensitive, program_of, shadowed, unsafe_reason
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.kubelet.spawner import MARK, PLACEHOLDER, ROOM, become_leader, read_json, redirect

STALE_EXIT = 3
_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NAME = 15


class UnfitError(Exception):
    """A module cannot be shared by forked processes, or a command cannot run in one."""


class ForkServer:
    """Imports the modules, then forks until the spawner has ended.

    Args:
        sock: the connection to the spawner.
        keep: descriptors that containers inherit, besides 0 to 2.
    """

    def __init__(self, sock: socket.socket, keep: frozenset[int]) -> None:
        self._sock = sock
        self._keep = keep
        self._spawner = os.getppid()
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._area = _title_area()
        for name in (MARK, ROOM):
            os.environ.pop(name, None)
        given = _given_environment()
        self._imported_with = {name: value for name, value in os.environ.items() if name in given}
        # In the C locale the interpreter sets LC_CTYPE itself; it would do so in a container as well.
        self._written: dict[str, str | None] = {name: value for name, value in os.environ.items() if name not in given}
        self._files: dict[str, tuple[int, int, int]] = {}
        self._tops: frozenset[str] = frozenset()
        self._sensitive = Sensitive((), ())
        self._after_fork: tuple[str, ...] = ()
        self._finders: frozenset[str] = frozenset()
        self._imported: frozenset[str] = frozenset()
        self._ended: dict[str, Any] = {}
        # Functions that a `sitecustomize` has registered run last, and may need the modules.
        if not getattr(atexit, "_ncallbacks", bool)():
            # The last functions at the end, as those that the modules will register need them. A function of C is not
            # interrupted, so no thread of the script finds a module missing.
            atexit.register(sys.modules.update, self._ended)
            atexit.register(self._keep_modules)

    def load(self, preload: Preload) -> None:
        """Import the modules.

        Raises:
            UnfitError: a module failed, or left a thread, a child or an open file; the message has its name.
        """
        read: set[str] = set()
        before = dict(os.environ)
        for name, value in preload.environ.items():
            os.environ.setdefault(name, value)
        started = dict(os.environ)
        usual = gc.get_threshold()
        gc.set_threshold(1_000_000)  # hardly anything that imports make is garbage
        rare = gc.get_threshold()
        with _recorded_lookups(read, frozenset(preload.copying)):
            for name in preload.modules:
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    if isinstance(error, ModuleNotFoundError) and error.name == name:
                        continue
                    raise UnfitError(name) from error
                if _descriptors() != {0, 1, 2, self._sock.fileno(), *self._keep} or not _alone():
                    raise UnfitError(name)
        after = dict(os.environ)
        self._written |= {name: after.get(name) for name in {*started, *after} if after.get(name) != started.get(name)}
        os.environ.clear()
        os.environ.update(before)
        self._after_fork = preload.after_fork
        self._finders = frozenset(preload.finders)
        self._sensitive = Sensitive(read, preload.prefixes)
        self._tops = frozenset(name.partition(".")[0] for name in sys.modules) - {"__main__"}
        self._files = _module_files()
        self._imported = frozenset(sys.modules) - {"__main__", "builtins", "sys", "threading"}  # the end uses them
        if gc.get_threshold() == rare:  # no module has set its own
            gc.set_threshold(*usual)
        gc.collect()
        gc.freeze()  # a collection in a forked process must not copy the pages of the imported modules

    def serve(self) -> Program:
        """Fork on request. Returns only in forked processes, which then run the program."""
        _show(self._area, ["backstay: preloaded Python, forks containers"], {MARK: PLACEHOLDER})
        self._sock.sendall(b'{"op": "ready"}')
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 4)
            if not data:
                os._exit(0)
            if self._stale():
                os._exit(STALE_EXIT)
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                for fd in fds:
                    os.close(fd)
                continue
            try:
                if os.fork():
                    os._exit(0)
                return self._become(data.decode(), *fds)
            except BaseException:  # noqa: BLE001  # a forked process must never serve requests
                os._exit(127)

    def _keep_modules(self) -> None:
        """Exempt the imported modules from the end of a forked process, in which Python clears each one.

        This would copy most of the memory that the process shares with this one. It takes a fifth of the processor time
        of a pod that trains for a second. All other modules are cleared, so the objects of a script are deleted.
        """
        kept = {name: module for name in self._imported if (module := sys.modules.get(name)) is not None}
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._ended.update(dict.fromkeys(kept))  # as Python does: an import fails from then on

    def _stale(self) -> bool:
        """Returns whether an imported file was replaced: a new Python would import the new file."""
        return any(_identity(path) != seen for path, seen in self._files.items())

    def _become(self, container: str, spec_fd: int, out_fd: int, channel_fd: int) -> Program:
        """Become the container, in the new process. Returns the program, or executes the command."""
        channel = socket.socket(fileno=channel_fd)
        channel.set_inheritable(False)
        what = "start"
        try:
            self._sock.close()
            become_leader(self._spawner)
            spec = read_json(spec_fd)
            argv: list[str] = spec["argv"]
            environ = {**spec["env"], MARK: container}
            _show(self._area, argv, environ)
            _LIBC.prctl(PR_SET_NAME, os.path.basename(argv[0]).encode()[:15], 0, 0, 0)  # noqa: PTH119
            channel.sendall(json.dumps({"pid": os.getpid()}).encode())
            if not channel.recv(16):
                os._exit(0)  # the spawner has started the container itself
            redirect(out_fd)
            what = "chdir"
            os.chdir(spec["cwd"])
            what = "exec"
            for number, limits in self._limits.items():
                if resource.getrlimit(number) != limits:
                    resource.setrlimit(number, limits)
            _close_all_but({0, 1, 2, channel.fileno(), *self._keep})
            try:
                program = self._program(argv, spec["env"])
                self._enter(program, environ)
                channel.close()
                return program
            except Exception as error:  # noqa: BLE001  # a new Python reports the error of a broken script best
                note = f"{argv} starts slowly, because it is executed, not forked: {error}"
                channel.sendall(json.dumps({"note": note[:2000]}).encode())
            _execute(argv, environ)
        except OSError as error:
            channel.sendall(json.dumps({"errno": error.errno or errno.EIO, "what": what}).encode())
        except BaseException as error:  # noqa: BLE001
            channel.sendall(json.dumps({"errno": errno.EINVAL, "what": f"{what}: {error}"[:200]}).encode())
        os._exit(127)

    def _program(self, argv: list[str], environ: Mapping[str, str]) -> Program:
        """Returns the program to run in this process.

        Raises:
            Exception: a new Python has to run it; the message has the reason.
        """
        if differing := self._sensitive.differ(self._imported_with, environ):
            raise UnfitError(f"its environment differs in {', '.join(differing)}")
        program = program_of(argv, environ, sys.executable)
        if program is None:
            raise UnfitError("it is not a script or a module of this Python")
        if name := shadowed(program.path0, self._tops):
            raise UnfitError(f"{program.path0} has {name}, which is also a module that was imported")
        if reason := unsafe_reason(program, self._sensitive, self._finders):
            raise UnfitError(f"it may act on later imports at {reason}")
        return program

    def _enter(self, program: Program, environ: Mapping[str, str]) -> None:
        """Change this process to look like a newly started Python."""
        os.environ.clear()
        os.environ.update(environ)
        for name, value in self._written.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ.setdefault(name, value)
        sys.executable = program.executable
        sys.orig_argv = list(program.argv)
        sys.argv = ["-m", *program.argv[3:]] if program.module else list(program.argv[1:])
        if not sys.flags.safe_path:
            sys.path.insert(0, program.path0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "backstay_cluster"]:
            del sys.modules[name]
        main = types.ModuleType("__main__")
        main.__doc__ = None
        vars(main).update(__builtins__=builtins, __annotations__={})
        if program.file:
            vars(main).update(__file__=program.file, __cached__=None)
            main.__loader__ = SourceFileLoader("__main__", program.file)
        sys.modules["__main__"] = main
        process = sys.modules.get("multiprocessing.process")
        if process is not None:
            process.current_process().authkey = os.urandom(32)
        for hook in self._after_fork:
            module, _, function = hook.partition(":")
            if module in sys.modules:
                getattr(sys.modules[module], function)()


def _execute(argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    # Python ignores these signals, and its children would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(argv[0], argv, environ)  # noqa: S606


@contextlib.contextmanager
def _recorded_lookups(read: set[str], copying: frozenset[str]) -> Iterator[None]:
    """Collect the names of environment variables that are read in this context, except by the `copying` modules."""
    kind = type(os.environ)
    lookup = kind.__getitem__

    def recorded(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in {"collections.abc", "os"}:
            frame = frame.f_back
        if frame.f_globals.get("__name__") not in copying:
            read.add(name)
        return lookup(self, name)

    kind.__getitem__ = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__ = lookup  # type: ignore[method-assign]


def _alone() -> bool:
    """Returns whether this process has one thread and no children."""
    tasks = Path("/proc/self/task")
    if len(list(tasks.iterdir())) > 1:
        # OpenBLAS ends its threads before a fork, and starts them again at its next use.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if len(list(tasks.iterdir())) > 1:
        return False
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def _given_environment() -> set[str]:
    """Returns the names of the variables that this process was started with."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries if entry}


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def _close_all_but(keep: set[int]) -> None:
    for fd in _descriptors() - keep:
        with contextlib.suppress(OSError):
            os.close(fd)


def _identity(path: str) -> tuple[int, int, int]:
    try:
        seen = os.stat(path)  # noqa: PTH116
    except OSError:
        return (0, 0, 0)
    return (seen.st_mtime_ns, seen.st_size, seen.st_ino)


def _module_files() -> dict[str, tuple[int, int, int]]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _identity(path) for path in files if isinstance(path, str)}


def _title_area() -> tuple[int, int, int, int]:
    """Returns the two ranges of addresses where the kernel reads this process's arguments and environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46]), int(fields[47]), int(fields[48])


def _show(area: tuple[int, int, int, int], argv: list[str], environ: Mapping[str, str]) -> None:
    """Make ``ps`` and ``/proc`` show this command line and environment; the text is cut to the size of the area."""
    arguments = b"".join(os.fsencode(word) + b"\0" for word in argv)
    # The mark first: the spawner searches for it in the processes that a container leaves behind.
    names = [MARK, *(name for name in environ if name != MARK)]
    variables = b"".join(os.fsencode(f"{name}={environ[name]}") + b"\0" for name in names)
    for start, end, data in ((area[0], area[1], arguments), (area[2], area[3], variables)):
        room = end - start
        if len(data) > room:
            data = data[: room - 1] + b"\0"  # noqa: PLW2901
        ctypes.memset(start, 0, room)
        ctypes.memmove(start, data, len(data))


def load(server: ForkServer, sock: socket.socket) -> None:
    """Receive the `Preload` and import it; if a module is unfit, print its name and end."""
    _, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    preload = Preload(**read_json(fds[0]))
    os.close(fds[0])
    try:
        server.load(preload)
    except UnfitError as error:
        print(f"not preloaded: {error} ({error.__cause__!r})", file=sys.stderr, flush=True)
        sock.sendall(json.dumps({"op": "unfit", "module": str(error)}).encode())
        os._exit(1)


def prepare() -> Program:
    """Import the modules, and serve; returns in forked processes."""
    inherited = _descriptors() - {0, 1, 2}
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    server = ForkServer(sock, frozenset(inherited - {sock.fileno()}))
    load(server, sock)
    return server.serve()


if __name__ == "__main__":
    _program = prepare()
    try:
        if _program.module:
            import runpy

            runpy._run_module_as_main(_program.module)  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            exec(_program.code, vars(sys.modules["__main__"]))  # type: ignore[arg-type]  # noqa: S102
    except BaseException as error:
        error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next
        raise
