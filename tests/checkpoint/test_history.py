"""T6, T7: leases and claims, and never a clock, decide which manifests are in the history of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._checkpoint import CheckpointStore, Claim, Manifest, Origin, load, parse_manifest, probe
from backstay._checkpoint._files import PosixFolder, RemoteFolder
from backstay._checkpoint._names import ClaimName, ManifestName
from backstay._checkpoint._store import excluded
from backstay.errors import CheckpointError, CheckpointFolderUnusable, StorageError

Write = Callable[..., Manifest]
PARAMS = {"a": np.arange(4, dtype=np.float32)}


class ObjectStore:
    """An object store with few operations, without rename, copy, append, folders and locks."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.denied: set[str] = set()

    def _may(self, what: str) -> None:
        if what in self.denied:
            raise PermissionError(f"403: not allowed to {what}")

    def invalidate_cache(self) -> None: ...

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        assert detail
        self._may("list")
        return [{"name": name, "type": "file"} for name in self.objects if name.startswith(f"{path}/")]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self._may("read")
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def info(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"size": len(self.objects[path])}

    def pipe_file(self, path: str, value: bytes) -> None:
        self._may("write")
        self.puts.append(path)
        self.objects[path] = value

    def put_file(self, local: str, path: str) -> None:
        self.pipe_file(path, Path(local).read_bytes())

    def rm_file(self, path: str) -> None:
        self._may("delete")
        del self.objects[path]


@pytest.fixture(params=["posix", "posix without links", "memory", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    match request.param:
        case "memory":
            path = f"/{tmp_path.name}/c"
            yield CheckpointStore(f"memory:/{path}", RemoteFolder(f"memory:/{path}", fsspec.filesystem("memory"), path))
        case "object store":
            yield CheckpointStore("strict://c", RemoteFolder("strict://c", ObjectStore(), "c"))
        case _:
            if "without" in request.param:

                def unsupported(source: object, target: object) -> None:
                    raise OSError(95, "Operation not supported")

                monkeypatch.setattr("os.link", unsupported)
            yield CheckpointStore(str(tmp_path / "c"))


def claim(store: CheckpointStore, origin: Origin, *, lease: int, term: int, base: Manifest | None) -> None:
    store.write_claim(
        Claim(origin=origin, lease=lease, term=term, incarnation=1, base="" if base is None else base.name)
    )


def test_t6_what_a_process_stores_after_it_lost_the_folder_is_not_in_the_history(
    store: CheckpointStore, write: Write, origin_of: Callable[..., Origin]
) -> None:
    """Incarnation 1 is paused at step 10. It resumes with step 20 after incarnation 2 has begun its term."""
    claim(store, origin_of(), lease=1, term=1, base=None)
    ten = write(store, PARAMS, version=10)
    claim(store, origin_of(), lease=2, term=2, base=ten)
    late = write(store, PARAMS, version=20)
    found = store.newest()
    assert found.manifest == ten
    assert [line.split(":")[0] for line in found.skipped] == [late.name]
    newer = write(store, PARAMS, version=12, term=2, lease=2)
    assert store.newest().manifest == newer
    store.prune(keep=5, newest=newer)
    assert [str(name) for name in store.contents().manifests] == [newer.name, ten.name]


def test_t6_the_same_after_a_promotion_in_the_middle_of_a_term(
    store: CheckpointStore, write: Write, origin_of: Callable[..., Origin]
) -> None:
    ten = write(store, PARAMS, version=10, term=3, lease=4)
    claim(store, origin_of(), lease=5, term=3, base=ten)
    write(store, PARAMS, version=15, term=3, lease=4)
    assert store.newest().manifest == ten
    newer = write(store, PARAMS, version=11, term=3, lease=5)
    assert store.newest().manifest == newer


def test_t7_a_history_that_begins_at_the_seed_has_none_of_the_older_checkpoints(
    store: CheckpointStore, write: Write, origin_of: Callable[..., Origin]
) -> None:
    write(store, PARAMS, version=10)
    claim(store, origin_of("00000000000000bb"), lease=2, term=2, base=None)
    assert store.newest().manifest is None


def test_t7_a_damaged_claim_excludes_nothing(
    store: CheckpointStore, write: Write, origin_of: Callable[..., Origin]
) -> None:
    ten = write(store, PARAMS, version=10)
    claim(store, origin_of(), lease=2, term=2, base=None)
    name = str(store.contents().claims[0])
    content = store.folder.read(name)
    store.folder.rewrite(name, content.replace(b'"term": 2', b'"term": 9'))
    fresh = CheckpointStore(store.uri, store.folder)
    assert fresh.newest().manifest == ten


def test_t7_pruning_keeps_the_claims_that_are_still_needed(
    store: CheckpointStore, write: Write, origin_of: Callable[..., Origin]
) -> None:
    bases: list[Manifest] = []
    for number in range(1, 6):
        claim(store, origin_of(), lease=number, term=number, base=bases[-1] if bases else None)
        bases.append(write(store, PARAMS, version=number, term=number, lease=number))
        store.prune(keep=2, newest=bases[-1])
    contents = store.contents()
    assert [name.version for name in contents.manifests] == [5, 4]
    assert [name.lease for name in contents.claims] == [5, 4, 1]  # the first one has no base
    late = write(store, PARAMS, version=99, term=4, lease=4)
    assert store.newest().manifest == bases[-1]
    assert excluded(late.key, store._readable_claims(store.contents())) is not None


KEYS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))


@given(st.sets(KEYS, min_size=1), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 40))))
@settings(deadline=None)
def test_t6_the_history_is_one_line(made: set[tuple[int, int, int]], begun: list[tuple[int, int, int]]) -> None:
    """For any order of writes and claims: a manifest after the base of a later claim is not in the history."""
    history = "00000000000000aa"
    manifests = sorted(ManifestName(*key, 0, history) for key in made)
    claims = []
    for lease, term, which in begun:
        earlier = [name for name in manifests if (name.lease, name.term) < (lease, term)]
        base = str(earlier[which % len(earlier)]) if earlier and which else ""
        origin = Origin(history=history, job={"name": "a"}, seed=0)
        name = ClaimName(lease, term, f"{len(claims):016x}", history)
        claims.append((name, Claim(origin=origin, lease=lease, term=term, incarnation=1, base=base)))
    inside = [name for name in manifests if excluded(name, claims) is None]
    for name, each in claims:
        base = parse_manifest(each.base)
        before = [m for m in inside if (m.lease, m.term) < (name.lease, name.term)]
        assert all(base is not None and m <= base for m in before)


def test_t8_a_place_that_can_be_used_is_left_as_it_was(store: CheckpointStore) -> None:
    probe(store.folder)
    assert store.folder.names() == []


@pytest.mark.parametrize("denied", ["write", "read", "list", "delete"])
def test_t8_an_object_store_that_denies_something_is_found(denied: str) -> None:
    objects = ObjectStore()
    objects.denied = {denied}
    with pytest.raises(
        (CheckpointFolderUnusable, StorageError), match=r"strict://c.*this process has uid \d+"
    ) as caught:
        probe(RemoteFolder("strict://c", objects, "c"))
    assert isinstance(caught.value, CheckpointFolderUnusable)
    assert f"not allowed to {denied}" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (13, CheckpointFolderUnusable),
        (30, CheckpointFolderUnusable),
        (28, StorageError),
        (5, StorageError),
        (17, StorageError),
    ],
    ids=["EACCES", "EROFS", "ENOSPC", "EIO", "EEXIST"],
)
def test_t8_errors_that_may_pass_and_permanent_errors_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[CheckpointError]
) -> None:
    def fails(self: Path, content: bytes) -> int:
        raise OSError(number, "it fails")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(kind, match=f"cannot write {tmp_path}/.probe-.*has the owner .* and the mode"):
        probe(PosixFolder(tmp_path))


def test_t8_a_file_with_the_name_of_the_folder_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    path.write_bytes(b"")
    with pytest.raises(CheckpointFolderUnusable, match="File exists"):
        probe(PosixFolder(path))


def test_t8_a_file_system_without_rename_and_links_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", unsupported)
    monkeypatch.setattr(Path, "rename", unsupported)
    with pytest.raises(CheckpointFolderUnusable, match="Operation not supported"):
        probe(PosixFolder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_t7_load_takes_the_newest_of_the_history(
    tmp_path: Path, write: Write, origin_of: Callable[..., Origin]
) -> None:
    store = CheckpointStore(str(tmp_path))
    ten = write(store, PARAMS, version=10)
    claim(store, origin_of(), lease=2, term=2, base=ten)
    write(store, PARAMS, version=20)
    assert load(str(tmp_path)).step == 10
