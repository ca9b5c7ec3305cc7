"""T7: a checkpoint is whole or it does not exist; T6: no history deletes a newer one's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._checkpoint import CheckpointStore, Manifest, Origin, Reader, load
from backstay._checkpoint._seal import seal, unseal
from backstay._checkpoint._structure import describe_structure, rebuild
from backstay._update import Entry
from backstay.errors import CheckpointError, StorageError

PARAMS = {
    "w": np.arange(24, dtype=np.float32).reshape(4, 6),
    "layers": [
        {"b": np.arange(5, dtype=ml_dtypes.bfloat16)},
        (np.float64(3.5) * np.ones(()), np.zeros((0, 3), np.float32)),
    ],
    "none": None,
}


Write = Callable[..., Manifest]
SHARD = {"history": "00000000000000aa", "term": 1, "shard": 0, "shards": 1, "incarnation": 0}


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(params=["posix", "file", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "posix":
        return str(tmp_path / "ckpt")
    if request.param == "file":
        return f"file://{tmp_path}/ckpt"
    return f"memory://{tmp_path.name}-{abs(hash(request.node.nodeid))}/ckpt"


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_t7_any_number_of_shards_reads_what_was_written(write: Write, uri: str, shards: int) -> None:
    store = CheckpointStore(uri)
    manifest = write(store, PARAMS, version=7, shards=shards)
    assert_same(load(uri).params, PARAMS)
    assert load(uri).step == 7
    assert_same(load(f"{uri}/{manifest.name}").params, PARAMS)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_t7_another_partition_reads_any_range(
    tmp_path_factory: pytest.TempPathFactory, write: Write, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 50))
    shards = data.draw(st.integers(1, 5))
    array = np.arange(size, dtype=np.int32)
    store = CheckpointStore(str(tmp_path_factory.mktemp("c")))
    manifest = write(store, {"a": array}, version=1, shards=shards)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    reader = Reader(store, manifest, cache=1)
    np.testing.assert_array_equal(reader.read("params/a", start, stop), array[start:stop])
    with pytest.raises(CheckpointError, match="holds only elements"):
        reader.read("params/a", start, size + 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest torn", "manifest of the future"])
def test_t7_a_damaged_checkpoint_is_never_used_and_is_named(write: Write, tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(str(tmp_path))
    write(store, PARAMS, version=5)
    newer = write(store, jax.tree.map(lambda x: x + 1, PARAMS), version=6)
    file = tmp_path / newer.files[0].name
    content = bytearray(file.read_bytes())
    manifest = tmp_path / newer.name
    match damage:
        case "truncated":
            file.write_bytes(content[:-1])
        case "flipped":
            content[-1] ^= 1
            file.write_bytes(content)
        case "missing":
            file.unlink()
        case "manifest torn":
            manifest.write_bytes(manifest.read_bytes()[:100])
        case "manifest of the future":
            manifest.write_bytes(seal({**unseal(manifest.read_bytes(), "it"), "format": 3}))
    found = load(str(tmp_path))
    assert found.step == 5
    assert_same(found.params, PARAMS)
    assert len(found.skipped) == 1
    assert newer.name in found.skipped[0]


def test_t7_files_without_a_manifest_are_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    store.write_shard([Entry("params/a", 0, 2, np.zeros(2))], version=3, **SHARD)
    assert store.newest().manifest is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(str(tmp_path))


def test_t7_a_manifest_is_refused_when_a_file_is_not_there(write: Write, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    manifest = write(store, PARAMS, version=3)
    (tmp_path / manifest.name).unlink()
    (tmp_path / manifest.files[0].name).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.write_manifest(manifest)
    assert store.contents().manifests == ()


def test_t6_the_newest_is_by_term_and_then_version(write: Write, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    write(store, PARAMS, version=90, term=1)
    write(store, PARAMS, version=40, term=2)
    newest = store.newest().manifest
    assert newest is not None
    assert (newest.term, newest.version) == (2, 40)


def test_t6_keep_never_deletes_a_newer_terms_files(write: Write, uri: str) -> None:
    store = CheckpointStore(uri)
    old = [write(store, PARAMS, version=version, term=1) for version in (10, 20, 30)]
    write(store, PARAMS, version=15, term=2)
    store.write_shard([Entry("params/a", 0, 1, np.zeros(1))], version=18, **{**SHARD, "term": 2})
    before = set(store.folder.names())
    assert store.prune(keep=1, newest=old[-1]) == []
    assert set(store.folder.names()) == before
    assert store.newest().manifest is not None


def test_t7_keep_never_deletes_files_of_another_history(
    write: Write, origin_of: Callable[..., Origin], uri: str
) -> None:
    store = CheckpointStore(uri)
    for version in (10, 20, 30):
        write(store, PARAMS, version=version, origin=origin_of("00000000000000bb", "b"))
    theirs = set(store.folder.names())
    for version in (31, 32, 33):
        newest = write(store, PARAMS, version=version, term=2, lease=2)
    deleted = store.prune(keep=1, newest=newest)
    assert len(deleted) == 4
    assert theirs <= set(store.folder.names())
    assert [name.version for name in store.contents().manifests] == [33, 30, 20, 10]


def test_t7_an_error_while_pruning_deletes_nothing_that_is_whole(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that cannot be read now may be whole, so its files stay."""
    store = CheckpointStore(str(tmp_path))
    write(store, PARAMS, version=1)
    newest = write(store, PARAMS, version=2)

    def broken(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", broken)
        with pytest.raises(StorageError):
            store.prune(keep=2, newest=newest)
    assert_same(load(str(tmp_path)).params, PARAMS)
    assert len(store.contents().shards) == 2


def test_t7_a_file_that_exists_is_never_replaced(write: Write, uri: str) -> None:
    store = CheckpointStore(uri)
    first = write(store, PARAMS, version=3)
    content = {name: store.folder.read(name) for name in store.folder.names()}
    second = write(store, jax.tree.map(lambda x: x + 1, PARAMS), version=3)
    assert (first.attempt, second.attempt) == (0, 1)
    assert {name: store.folder.read(name) for name in content} == content
    for name in content:
        with pytest.raises(CheckpointError, match="exist"):
            store.folder.write(name, b"other")
    assert store.folder.read(first.name) == content[first.name]
    newest = store.newest().manifest
    assert newest is not None
    assert newest.name == second.name


def test_t7_a_file_system_without_links_replaces_no_file_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(source: object, target: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", unsupported)
    folder = CheckpointStore(str(tmp_path)).folder
    folder.write("a", b"first")
    with pytest.raises(CheckpointError, match="exist"):
        folder.write("a", b"other")
    assert (folder.read("a"), folder.names()) == (b"first", ["a"])


def test_t7_a_manifest_under_the_name_of_another_is_refused(write: Write, uri: str) -> None:
    """A copy with a valid checksum does not become a newer checkpoint."""
    store = CheckpointStore(uri)
    made = write(store, PARAMS, version=3)
    store.folder.write(str(made.key._replace(version=9)), made.text())
    newest = store.newest()
    assert newest.manifest is not None
    assert newest.manifest.version == 3
    assert "contains the manifest of" in newest.skipped[0]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=8, unique=True), st.integers(1, 4)
)
@settings(max_examples=40, deadline=None)
def test_t7_pruning_leaves_the_newest_whole(
    tmp_path_factory: pytest.TempPathFactory, write: Write, made: list[tuple[int, int]], keep: int
) -> None:
    store = CheckpointStore(str(tmp_path_factory.mktemp("c")))
    manifests = [
        write(store, {"a": np.full(3, version, np.float32)}, version=version, term=term, shards=2)
        for term, version in made
    ]
    store.prune(keep=keep, newest=max(manifests, key=lambda manifest: manifest.key))
    left = store.contents().manifests
    assert len(left) == min(keep, len(made))
    assert [(name.term, name.version) for name in left] == sorted(made, reverse=True)[:keep]
    assert [store.open(str(name)).key for name in left] == list(left)
    assert len(store.folder.names()) == 3 * len(left)


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "file" / "not-a-folder"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        store.write_shard([Entry("params/a", 0, 1, np.zeros(1))], version=1, **SHARD)


class Point(NamedTuple):
    x: Any
    y: Any


def test_other_nodes_need_an_example(write: Write, tmp_path: Path) -> None:
    params = {"p": Point(np.zeros(2, np.float32), [np.ones(3, np.float32)])}
    write(CheckpointStore(str(tmp_path)), params, version=1)
    with pytest.raises(CheckpointError, match="like"):
        load(str(tmp_path))
    assert_same(load(str(tmp_path), like=params).params, params)
    with pytest.raises(CheckpointError, match=r"\(5,\)"):
        load(str(tmp_path), like={"p": Point(np.zeros(5, np.float32), [np.ones(3, np.float32)])})


def test_an_example_with_other_names_is_refused(write: Write, tmp_path: Path) -> None:
    """Arrays were assigned in their order, so that renamed parameters of one shape were exchanged."""
    gate, up = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    write(CheckpointStore(str(tmp_path)), {"gate": gate, "up": up}, version=1)
    with pytest.raises(
        CheckpointError, match=r"`like` has w1_up where the checkpoint .* has gate: must have its names"
    ):
        load(str(tmp_path), like={"w1_up": up, "w2_gate": gate})
    assert_same(load(str(tmp_path), like={"up": up, "gate": gate}).params, {"gate": gate, "up": up})


TREES = st.recursive(
    st.just(np.zeros(1)) | st.none(),
    lambda child: (
        st.lists(child, max_size=3)
        | st.lists(child, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), child, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_structures_come_back_as_they_were(tree: Any) -> None:
    numbered, structure = jax.tree.flatten(tree)
    numbered = [np.full(1, number) for number in range(len(numbered))]
    tree = jax.tree.unflatten(structure, numbered)
    assert_same(rebuild(describe_structure(tree), numbered), tree)
