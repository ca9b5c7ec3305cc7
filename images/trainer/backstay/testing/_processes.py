"""Processes that are forked from one that has imported JAX, as the embedded cluster starts its pods.

Importing JAX and its companions takes two seconds of processor time in each process otherwise. The processes have the
interface of `subprocess.Popen`, with the exit codes of a container: 128+n when signal n ended the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from backstay_client.embedded.preload import PREFIXES, TRAINER, imports_of, preload
from backstay_cluster.kubelet.forkable import Program, Sensitive, unsafe_reason
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.kubelet.runtime import Process, ProcessRuntime
from backstay_cluster.load import slack

_T = TypeVar("_T")
KILLED, TERMINATED = 137, 143
"""Exit codes of SIGKILL and SIGTERM."""
_LIMIT = 60.0
"""Seconds within which a process starts, or all end, on a machine without other work."""
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)


class PodProcess:
    """One process.

    Attributes:
        pid: its number.
        signalled: whether this object has sent it a signal that ends it, so that its end is expected.
        killed: whether that was SIGKILL, so that it ends soon.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.signalled = self.killed = False

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.exited.result() if self._process.exited.done() else None

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        """Raises `TimeoutError` when it has not ended by then."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (code := self.returncode) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        if self.returncode is None:
            self.signalled = self.signalled or number in _ENDING
            self.killed = self.killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(9)


class Forker:
    """Starts processes; `close` ends those that still run.

    Attributes:
        imports: the modules of scripts that are imported once.
        environ: the environment of each process, before its own variables.
    """

    def __init__(self, environ: Mapping[str, str], script: Path | None = None, more: Iterable[str] = ()) -> None:
        """
        Args:
            script: modules that it imports are imported once, too.
            environ: what JAX and the other modules are imported with. A process in which one of their variables
                differs is executed, and imports them itself.
            more: further modules that are imported once, such as those of an earlier script.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forked", daemon=True)
        self._thread.start()
        modules = _modules(environ)
        self.imports = frozenset((*more, *(() if script is None else imports_of(script))))
        modules = replace(modules, modules=(*modules.modules, *sorted(self.imports), "backstay.testing._program"))
        self.use(environ)
        self._imported_with = self.environ
        self._runtime = ProcessRuntime(preload=modules, base_env=environ)

    def use(self, environ: Mapping[str, str]) -> None:
        """Give the processes that start from now on this environment."""
        self.environ = {**environ, **_modules(environ).started_with}

    def forks(self, environ: Mapping[str, str]) -> bool:
        """Returns whether processes with this environment are forked, as far as the names of variables show it."""
        given = {**environ, **_modules(environ).started_with}
        return not Sensitive((), PREFIXES).differ(self._imported_with, given)

    def has_imported(self, script: Path) -> bool:
        """Returns whether it has the modules that the script imports, except further ones of packages that it always
        has.

        A process imports such a submodule itself in less time than another parent needs to import JAX.
        """
        always = {name.partition(".")[0] for name in TRAINER}
        return all(name in self.imports or name.partition(".")[0] in always for name in imports_of(script))

    def command(self, program: Path, script: Path) -> list[str]:
        """Returns the command line that starts `program` for a script.

        A script that acts on later imports, such as one that sets ``XLA_FLAGS``, gets a process that imports them
        itself.
        """
        of_script = Program(sys.executable, (), str(script.parent), file=str(script))
        options = ["-u"] if unsafe_reason(of_script, Sensitive((), PREFIXES)) is not None else []
        return [sys.executable, *options, str(program)]

    def start(self, argv: Sequence[str], environ: Mapping[str, str], output: Path) -> PodProcess:
        """Start a command in this folder; its standard output and errors go to a file."""
        with output.open("wb") as file:
            process = self._run(self._runtime.start(uuid.uuid4().hex, argv, environ, str(Path.cwd()), file.fileno()))
        return PodProcess(process)

    def close(self) -> None:
        """End every process, and the thread."""
        self._run(self._runtime.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LIMIT * slack())


def _modules(environ: Mapping[str, str]) -> Preload:
    return Preload.of_json(preload(environ=environ))
