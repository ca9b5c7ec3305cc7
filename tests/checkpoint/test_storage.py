"""Storage that fails (T7, T8).

A half-written file never counts. No whole checkpoint is skipped because of an error that may pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from backstay._checkpoint import CheckpointStore, Manifest
from backstay._checkpoint._files import RemoteFolder
from backstay.errors import CheckpointError, StorageError


class Flaky:
    """An object store that fails while `down` is set, and truncates what is stored while `tears` is set."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.down: set[str] = set()
        self.tears = False

    def __getattr__(self, name: str) -> Any:
        if name in self.down:
            raise_it = ConnectionResetError(f"503 while calling {name}")

            def fails(*args: Any, **kwargs: Any) -> Any:
                raise raise_it

            return fails
        return getattr(self._real, name)

    def put_file(self, local: str, remote: str) -> None:
        if "put_file" in self.down:
            raise ConnectionResetError("503 while calling put_file")
        if self.tears:
            Path(local).write_bytes(Path(local).read_bytes()[:-3])
        self._real.put_file(local, remote)


@pytest.fixture
def flaky(request: pytest.FixtureRequest) -> Flaky:
    return Flaky(fsspec.filesystem("memory"))


@pytest.fixture
def store(flaky: Flaky, tmp_path: Path) -> CheckpointStore:
    path = f"/{tmp_path.name}-{time.monotonic_ns()}/ckpt"
    return CheckpointStore(f"memory:/{path}", RemoteFolder(f"memory:/{path}", flaky, path))


Make = Callable[[CheckpointStore, int], Manifest]


@pytest.fixture
def make(write: Callable[..., Manifest]) -> Make:
    return lambda store, version: write(store, {"a": np.full(100, version, np.float32)}, version=version)


@pytest.mark.parametrize("call", ["put_file", "pipe_file"])
def test_t7_an_object_store_that_refuses_a_write_leaves_the_last_whole_one(
    make: Make, store: CheckpointStore, flaky: Flaky, call: str
) -> None:
    make(store, 1)
    flaky.down = {call}
    with pytest.raises(CheckpointError, match=f"cannot write .*503 while calling {call}"):
        make(store, 2)
    flaky.down = set()
    newest = store.newest()
    assert newest.manifest is not None
    assert (newest.manifest.version, newest.skipped) == (1, ())
    assert make(store, 2).version == 2


def test_t7_a_file_that_was_truncated_on_its_way_never_gets_a_manifest(
    make: Make, store: CheckpointStore, flaky: Flaky
) -> None:
    make(store, 1)
    flaky.tears = True
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, \d+ bytes were written: the checkpoint is not stored"):
        make(store, 2)
    newest = store.newest()
    assert newest.manifest is not None
    assert newest.manifest.version == 1


@pytest.mark.parametrize("call", ["cat_file", "info", "ls"])
def test_t7_an_error_that_may_pass_never_makes_a_whole_checkpoint_look_damaged(
    make: Make, store: CheckpointStore, flaky: Flaky, call: str
) -> None:
    """Otherwise a short failure of the object store would lose training progress."""
    make(store, 1)
    make(store, 2)
    flaky.down = {call}
    with pytest.raises(StorageError, match=f"503 while calling {call}"):
        store.newest()
    flaky.down = set()
    newest = store.newest()
    assert newest.manifest is not None
    assert newest.manifest.version == 2


def test_t7_a_local_file_that_cannot_be_read_does_not_count_as_damage(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path))
    make(store, 1)

    def broken(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        store.newest()


def test_users_who_may_read_the_manifest_may_read_the_arrays(make: Make, tmp_path: Path) -> None:
    """An evaluator, or a person, may be another user than the server; safetensors would deny them access."""
    umask = os.umask(0o027)
    try:
        make(CheckpointStore(str(tmp_path)), 1)
    finally:
        os.umask(umask)
    assert {path.suffix: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        ".json": 0o640,
        ".safetensors": 0o640,
    }


def test_what_a_killed_server_was_writing_does_not_fill_the_disk(make: Make, tmp_path: Path) -> None:
    """safetensors writes beside the file and renames. The name has no version, so the age decides."""
    store = CheckpointStore(str(tmp_path))
    newest = make(store, 1)
    old, young = tmp_path / ".tmpAb3dE9", tmp_path / ".tmpxxxxxx"
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    store.prune(keep=3, newest=newest)
    assert not old.exists()
    assert young.exists()
