"""T6, T7, T8: the table of docs/checkpoints.md about damaged files is true, and has a row for each file of a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from between import LONG

from backstay._checkpoint import (
    Best,
    CheckpointStore,
    Claim,
    Contents,
    Evaluation,
    FolderLease,
    Holder,
    JobIdentity,
    LeaseTimes,
    Manifest,
    Origin,
    PosixFolder,
    probe,
    record_name,
)
from backstay.errors import CheckpointError, CheckpointFolderUnusable, StorageError

Write = Callable[..., Manifest]
OriginOf = Callable[..., Origin]

PAGE: Final = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
SECTION: Final = PAGE.partition("\n## Damaged files\n")[2].partition("\n## ")[0]
DAMAGES: Final = ("damaged", "unreadable", "of another job")
CELLS: Final = {
    name: dict(zip(DAMAGES, cells[1:], strict=True))
    for line in SECTION.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    for name in cells[0].split(", ")
    if name != "file"
}
ANY_OTHER: Final = "any other file"

PARAMS: Final = {"a": np.arange(4, dtype=np.float32)}
TIMES: Final = LeaseTimes(renew=100.0, silence=500.0, settle=1000.0, closing=9000.0, confirm=1000.0)
OTHER: Final = "00000000000000bb"
EXAMPLES: Final = {
    "report-….json": record_name("report", 1e9, "worker-0"),
    "history-….json": record_name("history", 1e9, "uid"),
    "curve-….json": record_name("curve", 1e9, "uid-1"),
    "trace-….pb.gz": record_name("trace", 1e9, "uid-1"),
    "events.out.tfevents.…": "events.out.tfevents.1000000000.a.1.1.000001.backstay",
    ".tmp…": ".tmpAb3dE9",
    ".probe-…": ".probe-0123456789abcdef",
    ANY_OTHER: "model-00001-of-00002.safetensors",
}
"""Names of files whose content no process reads."""


def rows_of(name: str) -> list[str]:
    """Returns the rows of the table whose pattern fits the name of a file."""
    patterns = {row: re.escape(row.strip("`")).replace("…", r"[\w.-]+") for row in CELLS if row != ANY_OTHER}
    return [row for row, pattern in patterns.items() if re.fullmatch(pattern, name)]


class Run:
    """The next run of the job, as its server of shard 0 with its own clock."""

    def __init__(self, folder: Path, storage_of: Callable[..., Any]) -> None:
        self.store = CheckpointStore(str(folder))
        self.now = 0.0
        job = JobIdentity(namespace="default", name="a", uid="2")
        self.lease = FolderLease(
            self.store,
            Holder(job, 1),
            lost=lambda error: None,
            wait=self._wait,
            times=TIMES,
            clock=lambda: self.now,
        )
        self.storage = storage_of(self.store, self.lease, job, keep=5)

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def outcome(self) -> str:
        """Returns the word of the table for the start of this run, and the reason of a failure."""
        try:
            state, _ = self.storage.newest(0)
        except CheckpointError as error:
            return f"fails with {type(error).__name__}"
        if state.version < 20:
            return "older checkpoint"
        return "waits" if self.now >= TIMES.silence else "no effect"


@pytest.fixture
def folder(write: Write, origin_of: OriginOf) -> Iterator[Path]:
    """A folder with two checkpoints and one file of each kind, in a place that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="backstay-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        store = CheckpointStore(name)
        store.write_claim(Claim(origin=origin_of(), lease=1, term=1, incarnation=1, base=""))
        for version in (10, 20):
            manifest = write(store, PARAMS, version=version)
            rule = Best(metric="loss", mode="Min")
            store.write_evaluation(Evaluation(manifest=manifest.name, metrics={"loss": 1.0}, best=rule, unix_seconds=1))
        lease = FolderLease(
            store, Holder(origin_of().job, 1), lost=lambda error: None, wait=lambda seconds: False, times=TIMES
        )
        lease.acquire()
        lease.release()
        for example in (*EXAMPLES.values(), f".{manifest.name}.0123abcd.tmp"):
            (folder / example).write_bytes(b"any content")
        yield folder


def file_of(folder: Path, row: str) -> Path:
    """Returns the newest file of a row."""
    if row == ANY_OTHER:
        return folder / EXAMPLES[row]
    return max(path for path in folder.iterdir() if rows_of(path.name) == [f"`{row}`"])


def flip(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


HARM: Final[dict[str, Callable[[bytes], bytes]]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 10],
    "changed": flip,
    "zeros": lambda content: bytes(len(content)),
    "huge": lambda content: content + bytes(3 << 20),
}


def expected(row: str, damage: str) -> str:
    """Returns the outcome in the table, with the bold words and the reason of a failure."""
    cell = CELLS[row if row == ANY_OTHER else f"`{row}`"][damage]
    words = re.match(r"\*\*([a-z ]+)\*\*(?: with `(\w+)`)?", cell)
    assert words is not None, cell
    return words[1] if words[2] is None else f"{words[1]} with {words[2]}"


Start = Callable[[], Run]


@pytest.fixture
def start(folder: Path, storage_of: Callable[..., Any]) -> Iterator[Start]:
    """Makes the next run of the job in `folder`. Its lease is not renewed after the test."""
    runs: list[Run] = []

    def make() -> Run:
        runs.append(Run(folder, storage_of))
        return runs[-1]

    yield make
    for run in runs:
        run.lease._stopped.set()  # as if it was killed: the test may have made the folder unusable


def trains_on(run: Run, write: Write, origin_of: OriginOf, start: Start) -> None:
    """The run stores a checkpoint, deletes old ones, and the next run finds it."""
    assert run.lease.number > 0
    term = run.store.contents().newest_term
    manifest = write(run.store, PARAMS, version=30, term=term, lease=run.lease.number, origin=origin_of(uid="2"))
    run.store.prune(keep=2, newest=manifest)
    run.storage.close()
    state, _ = start().storage.newest(0)
    assert state.version == 30


ROWS: Final = [row.strip("`") for row in CELLS]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("row", ROWS)
def test_t7_a_damaged_file_does_what_the_table_says(
    folder: Path, start: Start, write: Write, origin_of: OriginOf, row: str, harm: str
) -> None:
    path = file_of(folder, row)
    if row == "lease-….json":
        folder.joinpath("lease-00000009-0123456789abcdef.json").write_bytes(path.read_bytes())
        path = folder / "lease-00000009-0123456789abcdef.json"
    path.write_bytes(HARM[harm](path.read_bytes()))
    run = start()
    assert run.outcome() == expected(row, "damaged")
    if row == "lease-….json":
        assert len(run.storage.taken_over()) == 1
        assert f"the lease {path.name} cannot be read" in run.storage.taken_over()[0]
    trains_on(run, write, origin_of, start)


@pytest.fixture
def another_user() -> Iterator[Callable[[Path], None]]:
    """Makes a file unreadable for this process."""
    root = os.geteuid() == 0

    def hide(path: Path) -> None:
        path.chmod(0o600 if root else 0o000)
        if root:
            for other in path.parent.iterdir():
                if other != path:
                    os.chown(other, 65534, 65534)
            os.seteuid(65534)

    yield hide
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("row", ROWS)
def test_t8_an_unreadable_file_does_what_the_table_says(
    folder: Path,
    start: Start,
    write: Write,
    origin_of: OriginOf,
    another_user: Callable[[Path], None],
    row: str,
) -> None:
    """No retry helps here, so the job does not repeat the read for a minute, and the message names file and owner."""
    path = file_of(folder, row)
    another_user(path)
    run = start()
    assert run.outcome() == expected(row, "unreadable")
    if expected(row, "unreadable") == "no effect":
        trains_on(run, write, origin_of, start)
        return
    with pytest.raises(CheckpointFolderUnusable) as caught:
        run.storage.newest(0)
    assert str(path) in str(caught.value)
    assert f"this process has uid {os.geteuid()} and gid " in str(caught.value)
    assert "has the owner " in str(caught.value)


@pytest.mark.parametrize("row", ROWS)
def test_t6_a_file_of_another_job_does_what_the_table_says(
    folder: Path, start: Start, write: Write, origin_of: OriginOf, row: str
) -> None:
    theirs = origin_of(OTHER, "b")
    store = CheckpointStore(str(folder))
    match row:
        case "step-….safetensors" | "step-….manifest.json" | "step-….evaluation.json":
            manifest = write(store, PARAMS, version=40, lease=8, term=8, origin=theirs)
            store.write_evaluation(Evaluation(manifest=manifest.name, metrics={}, best=None, unix_seconds=1))
            if row != "step-….manifest.json":
                kept = file_of(folder, row)
                for other in folder.glob(f"step-*{OTHER}*"):
                    if other != kept:
                        other.unlink()
        case "claim-….json":
            store.write_claim(Claim(origin=theirs, lease=8, term=8, incarnation=1, base=""))
        case "lease-….json":
            lease = FolderLease(
                store, Holder(theirs.job, 1), lost=lambda error: None, wait=lambda seconds: False, times=TIMES
            )
            lease.acquire()
            lease._stopped.set()  # killed: the lease stays as it is
        case _:
            path = file_of(folder, row)
            path.rename(folder / path.name.replace("00000000000000aa", OTHER))
    run = start()
    assert run.outcome() == expected(row, "of another job")
    if not expected(row, "of another job").startswith("fails"):
        trains_on(run, write, origin_of, start)


def test_each_name_fits_one_row(folder: Path) -> None:
    """T7: every kind of file that the code can name has a row; `test_one_folder.py` checks the files of a real job."""
    found = {path.name: rows_of(path.name) for path in folder.iterdir() if path.name != EXAMPLES[ANY_OTHER]}
    assert {name for name, rows in found.items() if len(rows) != 1} == set()
    assert {rows[0] for rows in found.values()} == CELLS.keys() - {ANY_OTHER}
    kinds = {"names", "format_1", "unknown"} ^ vars(Contents.of([])).keys()
    assert kinds == {"manifests", "claims", "leases", "shards", "evaluations"}
    assert rows_of(EXAMPLES[ANY_OTHER]) == []


def test_t7_an_unreadable_evaluation_costs_only_the_deletion_of_old_checkpoints(
    folder: Path, write: Write, origin_of: OriginOf, another_user: Callable[[Path], None]
) -> None:
    another_user(file_of(folder, "step-….evaluation.json"))
    store = CheckpointStore(str(folder))
    newest = write(store, PARAMS, version=30, lease=2)
    before = store.folder.names()
    with pytest.raises(StorageError, match="Permission denied"):
        store.prune(keep=1, newest=newest, best=Best(metric="loss", mode="Min"))
    assert store.folder.names() == before
    assert store.newest().manifest == newest


# Places that are full or read-only

WRITER: Final = """
import contextlib, resource, signal, sys
import numpy as np
from backstay._checkpoint import CheckpointStore, FolderLease, Holder, JobIdentity, probe
from backstay._update import Entry
from backstay.errors import BackstayError, StorageError

folder, limit = sys.argv[1], int(sys.argv[2])
store = CheckpointStore(folder)
lease = FolderLease(store, Holder(JobIdentity(namespace="default", name="a", uid="1"), 1),
                    lost=lambda error: print("lost", error), wait=lambda seconds: False)
lease.acquire()
array = np.zeros(1 << 20, np.uint8)
shape = dict(history="00000000000000aa", term=1, shard=0, shards=1, incarnation=0)

def store_shard(version, size):
    try:
        store.write_shard([Entry("params/a", 0, size, array[:size])], version=version, **shape)
        print("stored", version)
    except BackstayError as error:
        print("refused", version)

store_shard(0, 10_000)
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
else:
    with contextlib.suppress(OSError), open(f"{folder}/foreign.log", "wb", buffering=0) as foreign:
        while foreign.write(bytes(4096)):
            pass
before = store.folder.names()
store_shard(1, array.size)
print("left behind", sorted(set(store.folder.names()) - set(before)))
if not limit:
    try:
        probe(store.folder)
    except StorageError:
        print("full")
lease.check()
print("renewed", lease._renew())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
store.folder.delete("foreign.log")
if not limit:
    store_shard(2, 10_000)
lease.release()
print("released", any(b'"released"' in store.folder.read(name) for name in before if name.startswith("lease-")))
"""


@pytest.mark.parametrize("limit", [0, 65_536], ids=["full", "limit"])
def test_t7_a_full_disk_loses_one_checkpoint_and_neither_the_lease_nor_the_older_ones(
    tmp_path: Path, limit: int
) -> None:
    """A file system of 512 KiB that another file fills, and a limit of the size of a file."""
    if not limit and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", tmp_path]).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        done = subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path), str(limit)], capture_output=True, text=True, timeout=LONG
        )
    finally:
        if not limit:
            subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert done.returncode == 0, done.stderr
    in_full = [] if limit else ["full"]
    again = [] if limit else ["stored 2"]
    assert done.stdout.splitlines() == [
        "stored 0",
        "refused 1",
        "left behind []",
        *in_full,
        "renewed True",
        *again,
        "released True",
    ]


def test_t8_a_folder_that_is_read_only_is_refused_immediately(
    folder: Path, another_user: Callable[[Path], None]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.chmod(0o555)
    another_user(file_of(folder, ANY_OTHER))
    with pytest.raises(CheckpointFolderUnusable, match=r"Permission denied.*has the owner .* and the mode 0555"):
        probe(PosixFolder(folder))
    os.seteuid(os.getuid())
    folder.chmod(0o777)
    (folder / EXAMPLES[ANY_OTHER]).chmod(0o600)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
