"""T6, T7: a folder whose files cannot be used is an error with its reason, and never a new start from the seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay._checkpoint import CheckpointStore, FolderLease, Holder, JobIdentity, Manifest
from backstay._checkpoint._names import HIGHEST, ClaimName, LeaseName
from backstay.errors import CheckpointError

Write = Callable[..., Manifest]
PARAMS = {"a": np.arange(4, dtype=np.float32)}
JOB = JobIdentity(namespace="default", name="a", uid="1")


Open = Callable[[Path], Any]


@pytest.fixture
def open_storage(storage_of: Callable[..., Any]) -> Open:
    """Makes the storage of a run in a folder."""

    def make(folder: Path) -> Any:
        store = CheckpointStore(str(folder))
        lease = FolderLease(store, Holder(JOB, 1), lost=lambda error: None, wait=lambda seconds: False)
        return storage_of(store, lease, JOB)

    return make


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


@pytest.mark.parametrize("damage", ["manifest", "later format", "format 1", "size", "content"])
def test_t7_a_folder_without_a_usable_checkpoint_is_refused(
    tmp_path: Path, write: Write, open_storage: Open, damage: str
) -> None:
    manifest = write(CheckpointStore(str(tmp_path)), PARAMS, version=10)
    path, arrays = tmp_path / manifest.name, tmp_path / manifest.files[0].name
    match damage:
        case "manifest":
            flip(path)
        case "later format":
            path = path.rename(tmp_path / "step-10.history-7.manifest.json")
        case "format 1":
            path = path.rename(tmp_path / "step-000000000010-term-00000001-inc-000001.manifest.json")
        case "size":
            arrays.write_bytes(arrays.read_bytes()[:-1])
        case "content":
            flip(arrays)
    before = names_in(tmp_path)
    storage = open_storage(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=r"can use none of them. Restore the files, use another") as caught:
            storage.newest(0)
    finally:
        storage.close()
    assert path.name in str(caught.value)
    # The content is read under the lease, as before; all other damage is found before anything is written.
    left = [name for name in names_in(tmp_path) if not name.startswith("lease-")]
    assert left == before
    assert damage == "content" or names_in(tmp_path) == before


def test_t7_an_older_checkpoint_that_can_be_used_is_used(tmp_path: Path, write: Write, open_storage: Open) -> None:
    store = CheckpointStore(str(tmp_path))
    for version in (10, 20):
        newest = write(store, PARAMS, version=version)
    flip(tmp_path / newest.name)
    (tmp_path / "step-30.history-7.manifest.json").write_text("{}")
    storage = open_storage(tmp_path)
    try:
        state, _ = storage.newest(0)
    finally:
        storage.close()
    assert state.version == 10


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (ClaimName(1, HIGHEST, "0" * 16, "0" * 16), "term"),
        (ClaimName(HIGHEST, 1, "0" * 16, "0" * 16), "lease"),
        (LeaseName(HIGHEST, "0" * 16), "lease"),
    ],
    ids=["term", "claim's lease", "lease"],
)
def test_t6_numbers_that_are_used_up_are_refused_before_anything_is_written(
    tmp_path: Path, open_storage: Open, name: object, what: str
) -> None:
    (tmp_path / str(name)).write_bytes(b"")
    storage = open_storage(tmp_path)
    with pytest.raises(CheckpointError, match=f"has the highest {what} number {HIGHEST}"):
        storage.newest(0)
    storage.close()
    assert names_in(tmp_path) == [str(name)]


@pytest.mark.parametrize("lost", ["link", "unlink"])
def test_t7_a_lost_answer_of_nfs_does_not_lose_the_file(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The client repeats the request, and the server answers that it is done already."""
    link, unlink = os.link, Path.unlink

    def link_twice(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    def unlink_twice(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        unlink(path, missing_ok)

    if lost == "link":
        monkeypatch.setattr(os, "link", link_twice)
    else:
        monkeypatch.setattr(Path, "unlink", unlink_twice)
    store = CheckpointStore(str(tmp_path))
    manifest = write(store, PARAMS, version=10)
    assert store.newest().manifest == manifest
    assert len(names_in(tmp_path)) == 2
    with pytest.raises(CheckpointError, match="File exists"):
        store.folder.write(manifest.name, b"another content")
