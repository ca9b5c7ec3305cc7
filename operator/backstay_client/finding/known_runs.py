"""The runs of this user on this machine: a record for each, so that every command finds them from every folder.

The folder of a run has the record `run.json`, and after its end `result.json`. The user's state folder has a small
file for each run that names its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from backstay_client.errors import BadInput
from backstay_client.words import current_folder, shortened

__all__ = [
    "RESULT",
    "STATE_ENV",
    "KnownRun",
    "ProcessMark",
    "known_runs",
    "read_json",
    "register",
    "state_folder",
    "write_json",
]

STATE_ENV: Final = "BACKSTAY_STATE"
"""The variable that replaces the user's state folder, for example in tests."""
RUN: Final = "run.json"
RESULT: Final = "result.json"
_POINTERS: Final = "runs"


@dataclass(frozen=True)
class ProcessMark:
    """Identifies a process, even if its id was given to another one later.

    Attributes:
        pid: the process id.
        started: when it was started, in clock ticks since the machine was started.
        system: the start of the machine, and the namespace of process ids.
    """

    pid: int
    started: int
    system: str

    @classmethod
    def current(cls) -> Self:
        """Returns the mark of this process."""
        return cls(os.getpid(), _start_of(os.getpid()) or 0, _system())

    def lives(self) -> bool:
        """Returns whether the process still runs on this machine."""
        return self.system == _system() and self.started == _start_of(self.pid)


def _start_of(pid: int) -> int | None:
    """Returns the start time of a process, or None if there is no such process, or it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def _system() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115  # the link leads nowhere
    return ""


@dataclass(frozen=True)
class KnownRun:
    """A run of `backstay run`, `backstay up` or `Client.local`.

    Attributes:
        folder: the folder with its logs and volumes.
        job: the job's name; empty: a cluster of `backstay up`.
        namespace: the job's namespace.
        command: the words of the command.
        cwd: the folder in which the command was called.
        started: Unix time.
        owner: the process of the command or of the client.
    """

    folder: Path
    job: str
    namespace: str
    command: tuple[str, ...]
    cwd: str
    started: float
    owner: ProcessMark

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig while the run's cluster runs."""
        return self.folder / "backstay.kubeconfig"

    @property
    def lives(self) -> bool:
        """Whether the run continues. A process may have ended it and live on, such as a notebook."""
        return self.owner.lives() and not (self.folder / RESULT).exists()

    def is_of(self, folder: Path) -> bool:
        """Returns whether the run was started in a folder, or has its files in ``.backstay/runs`` there."""
        return self.cwd == str(folder) or self.folder.parent == folder / ".backstay" / "runs"

    def result(self) -> dict[str, Any]:
        """Returns the object that the command stored at its end. It is empty if the command has not ended, or was
        killed."""
        return read_json(self.folder / RESULT)

    def as_record(self) -> dict[str, Any]:
        """Returns the content of `run.json`."""
        return {
            "job": self.job or None,
            "namespace": self.namespace,
            "command": list(self.command),
            "cwd": self.cwd,
            "startTime": self.started,
            "process": vars(self.owner),
        }


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the user's state, which is `BACKSTAY_STATE`, else `backstay` in `XDG_STATE_HOME`."""
    if own := environ.get(STATE_ENV):
        return Path(own)
    base = environ.get("XDG_STATE_HOME") or ""
    if os.path.isabs(base):  # noqa: PTH117
        return Path(base) / "backstay"
    try:
        return Path("~/.local/state").expanduser() / "backstay"
    except RuntimeError:  # no HOME, and no entry of this user in the system's list
        return Path(tempfile.gettempdir()) / f"backstay-{os.getuid()}"


def register(folder: Path, job: Mapping[str, Any] | None, argv: Sequence[str] | None = None) -> KnownRun:
    """Record a run that begins; the record stays after its end.

    Without a state folder that can be written, other commands find the run only from the folder above
    ``.backstay/runs``.

    Args:
        folder: the run's folder.
        job: the TrainingJob; None: a cluster of `backstay up`.
        argv: the words of the command; None: those of this process.

    Raises:
        BadInput: the folder is in use by another run, or cannot be written.
    """
    meta = {} if job is None else job["metadata"]
    before = read_run(folder)
    if before is not None and before.lives:
        what = f"the job {before.job}" if before.job else "another cluster"
        raise BadInput(
            f"the folder {shortened(str(folder))} is in use by {what} (process {before.owner.pid}): name another one"
        )
    run = KnownRun(
        folder,
        meta.get("name", ""),
        meta.get("namespace", "default"),
        tuple(["backstay", *sys.argv[1:]] if argv is None else argv),
        str(current_folder() or ""),
        time.time(),
        ProcessMark.current(),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)  # of an earlier run in this folder
        write_json(folder / RUN, run.as_record())
    except OSError as error:
        raise BadInput(f"the folder {folder} cannot be written: {error.strerror or error}") from None
    with contextlib.suppress(OSError, RuntimeError):  # a RuntimeError: the user has no home
        write_json(_pointer(folder), {"folder": str(folder)})
    return run


def _pointer(folder: Path) -> Path:
    return state_folder() / _POINTERS / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"


def known_runs(here: Path | None = None) -> list[KnownRun]:
    """Returns all runs of this user, and those below ``.backstay/runs`` in `here`, the newest first.

    The files that name a deleted folder are removed.
    """
    folders = dict.fromkeys(_recorded())
    if here is not None:
        folders |= dict.fromkeys(path.parent for path in (here / ".backstay" / "runs").glob(f"*/{RUN}"))
    found = (read_run(folder) for folder in folders)
    return sorted((run for run in found if run is not None), key=lambda run: run.started, reverse=True)


def _recorded() -> list[Path]:
    found = []
    try:
        pointers = list((state_folder() / _POINTERS).glob("*.json"))
    except (OSError, RuntimeError):
        return []
    for pointer in pointers:
        folder = read_json(pointer).get("folder")
        if not isinstance(folder, str):
            continue
        if (Path(folder) / RUN).exists():
            found.append(Path(folder))
        else:
            with contextlib.suppress(OSError):
                pointer.unlink()
    return found


def read_run(folder: Path) -> KnownRun | None:
    """Returns the run that a folder is of, or None if it has no record that can be read."""
    found = read_json(folder / RUN)
    try:
        owner = found["process"]
        return KnownRun(
            folder,
            str(found["job"] or ""),
            str(found["namespace"]),
            tuple(str(word) for word in found["command"]),
            str(found["cwd"]),
            float(found["startTime"]),
            ProcessMark(int(owner["pid"]), int(owner["started"]), str(owner["system"])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one if the file does not exist, or is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file completely or not at all; only its owner may read it, because commands contain secrets.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(value, file, allow_nan=False)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
