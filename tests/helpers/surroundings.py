"""Finds what a run of tests leaves on the machine: processes, files, mounts and network namespaces (tests/twice.py)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backstay_cluster.tests.limits import slack

PR_SET_CHILD_SUBREAPER: Final = 36
SHARED: Final = Path("/tmp")
"""Where tests that need a public place have temporary files."""

OTHER_RUNS: Final = ("pytest", "twice.py", "backstay")
MOST_SHOWN: Final = 120  # characters of a command line
_COARSE = 0.01  # seconds by which the times of processes and files may be too early
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class Surroundings:
    """The processes, mounts, network namespaces and temporary files of the tests.

    Each process below this one is known, with any environment: one whose parent has ended becomes a child of this
    process. So nothing else in this process may start a process meanwhile.

    Attributes:
        variables: the environment of pytest, by which its temporary files are known.
    """

    def __init__(self, ending: float, shared: Path = SHARED) -> None:
        """Let processes end after the tests within `ending` seconds."""
        self._ending = ending
        self._shared = shared

    def __enter__(self) -> Surroundings:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot become the parent of processes whose parent has ended")
        self._folder = Path(tempfile.mkdtemp(prefix="bs-"))  # short, because names of sockets have 107 bytes
        # Folders of pytest itself stay where they are: it keeps those of the last three runs.
        root = os.environ.get("PYTEST_DEBUG_TEMPROOT", str(self._folder.parent))
        self.variables = {"TMPDIR": str(self._folder), "PYTEST_DEBUG_TEMPROOT": root}
        self._state = self._folder / "state"  # of the runs that tests start; a process that dies leaves its folder
        self._state.mkdir()
        self.variables["BACKSTAY_TEST_STATE"] = str(self._state)
        self._before = self._of_machine()
        return self

    def __exit__(self, *_: object) -> None:
        end_children()
        for place in sorted(mounts(), reverse=True):
            if Path(place).is_relative_to(self._folder):
                subprocess.run(["umount", "-l", place], check=False)
        if not any(Path(place).is_relative_to(self._folder) for place in mounts()):  # else it has the files of others
            shutil.rmtree(self._folder, ignore_errors=True)

    def left(self) -> dict[str, str]:
        """Returns the things that the tests have left, as text: key, as in `begun` -> text."""
        began = time.monotonic()
        while living() or (self._more() and not other_runs()):
            if time.monotonic() >= began + self._ending * slack():
                break
            time.sleep(0.05)
        found = {
            key_of(pid, ticks): f"the process {command(pid)[:MOST_SHOWN] or pid}"
            for pid, ticks in descendants(os.getpid()).items()
        }
        if self._folder.is_dir():
            names = sorted(path for path in self._folder.iterdir() if path != self._state)
            found |= {str(path): f"the file {path.name} in the temporary folder" for path in names}
        else:
            found[str(self._folder)] = "no temporary folder: a test has deleted it"
        if (more := self._more()) and (others := other_runs()):
            seen = f"{len(others)} processes of other runs, such as {others[0]}"
            print(f"not judged: {'; '.join(more.values())}. They may be of {seen}")
            return found
        return found | more

    def _more(self) -> dict[str, str]:
        """Returns what the machine did not have before the tests."""
        return {key: text for key, text in self._of_machine().items() if key not in self._before}

    def _of_machine(self) -> dict[str, str]:
        """Returns what all runs on the machine share: key -> text."""
        found = {f"mount {place}": f"the mount {place}" for place in mounts()}
        found |= {f"namespace {name}": f"the network namespace {name}" for name in namespaces()}
        return found | {str(path): f"the file {path}" for path in _public(self._shared)}


def begun(root: int, folder: Path, since: float) -> list[str]:
    """Returns keys of the processes below `root`, and of the temporary files in `folder`, that began since a time.

    Tests in other processes may have begun them: a process whose parent has ended may be of any of them.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = [key_of(pid, ticks) for pid, ticks in descendants(root).items() if boot + ticks * _TICK > since - _COARSE]
    for path in (*folder.glob("*"), *_public(SHARED)):
        with contextlib.suppress(OSError):
            if path.lstat().st_ctime > since - _COARSE:
                found.append(str(path))
    return found


def _public(folder: Path) -> Iterator[Path]:
    """Yields the files and folders that tests make there. Other programs of Backstay have other names."""
    return folder.glob("backstay-test-*")


def living(kept: int = 0) -> bool:
    """Returns whether this process has a child, after it has taken the exit status of each that has ended.

    The status of the child `kept` is for another caller. While that child has ended, others may wait.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != kept:
            os.waitpid(ended.si_pid, 0)
        return True
    return False


def end_children(limit: float = 10.0) -> None:
    """Kill all processes below this one, and those that they start until they are dead."""
    began = time.monotonic()
    while living() and time.monotonic() < began + limit * slack():
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def descendants(root: int) -> dict[int, int]:
    """Returns the processes below one, without those that have ended: process -> when it began, in ticks."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, (state, parent, ticks) in _all_processes():
        children.setdefault(parent, []).append((pid, 0 if state in "ZX" else ticks))
    found: dict[int, int] = {}
    parents = [root]
    while parents:
        for pid, ticks in children.get(parents.pop(), []):
            found[pid] = ticks
            parents.append(pid)
    return {pid: ticks for pid, ticks in found.items() if ticks}


def _all_processes() -> Iterator[tuple[int, tuple[str, int, int]]]:
    """Yields each process with its state, its parent, and when it began in ticks since the start of the machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield int(entry.name), (fields[0], int(fields[1]), int(fields[19]))


def key_of(pid: int, ticks: int) -> str:
    """Returns a text that no other process of this machine has."""
    return f"process {pid} of {ticks}"


def command(pid: int) -> str:
    """Returns the command line of a process, or an empty text if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def other_runs() -> list[str]:
    """Returns the command lines of runs of tests, and of Backstay, that neither started this process nor are of it."""
    parents = {pid: parent for pid, (_, parent, _) in _all_processes()}
    ours = set(descendants(os.getpid()))
    pid = os.getpid()
    while pid in parents:
        ours.add(pid)
        pid = parents[pid]
    commands = (command(pid) for pid in parents if pid not in ours)
    # The program, or the script or module of an interpreter.
    return [
        one[:MOST_SHOWN] for one in commands if any(Path(word).name.startswith(OTHER_RUNS) for word in one.split()[:3])
    ]


def mounts() -> set[str]:
    """Returns the places where file systems are mounted."""
    with contextlib.suppress(OSError):
        return {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return set()


def namespaces() -> set[str]:
    """Returns the network namespaces with a name."""
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
