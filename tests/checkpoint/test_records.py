"""Records beside the checkpoints have a bounded number of each kind, and none is read as a part of a checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

from between import LONG

from backstay._checkpoint import Contents, PosixFolder, Records, record_name
from backstay._checkpoint._records import KEPT


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_records_are_deleted_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "step-1.manifest.json").write_text("mine")
    (tmp_path / "trace-notes.txt").write_text("mine")
    records = Records([PosixFolder(tmp_path)])
    for number in range(KEPT["trace"] + 3):
        records.put("trace", record_name("trace", number, "u"), lambda: b"x")
        written = threading.Event()  # the queue has room for a few records only
        name = record_name("report", 1, "worker-1")  # the same name: written once
        records.put("report", name, lambda: b"x", stored=lambda uri, written=written: written.set())
        assert written.wait(LONG)
    records.close(10)
    found = names(tmp_path)
    assert "trace-notes.txt" in found
    assert "step-1.manifest.json" in found
    assert sum(name.endswith(".pb.gz") for name in found) == KEPT["trace"]
    assert f"trace-{KEPT['trace'] + 2:012d}-u.pb.gz" in found
    assert sum(name.startswith("report-") for name in found) == 1


def test_a_folder_that_fails_loses_only_its_own_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    records = Records([PosixFolder(tmp_path / "file" / "below"), PosixFolder(tmp_path / "good")])
    records.put("trace", record_name("trace", 1, "../U!"), lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    records.put("trace", record_name("trace", 2, "../U!"), lambda: b"x")
    records.close(10)
    assert names(tmp_path / "good") == ["trace-000000000002-u.pb.gz"]


def test_no_record_is_read_as_a_part_of_a_checkpoint() -> None:
    found = Contents.of([record_name(kind, 1.0, "worker-3-inc-000002") for kind in KEPT])
    kinds = (found.manifests, found.claims, found.leases, found.shards, found.format_1, found.unknown)
    assert not any(kinds)
