"""A base in an object store is read by parts, and each part once on a node. The cache never gives other bytes (T7)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import fsspec
import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay import StartFrom
from backstay._checkpoint import CheckpointStore, Manifest, _files, open_folder
from backstay._checkpoint._formats import _arrays, _node_cache
from backstay._checkpoint._formats._node_cache import cached
from backstay._checkpoint._reader import Reader
from backstay.errors import CheckpointError, ConfigurationError, StorageError

Write = Callable[..., Manifest]
NAMED = {"head": np.arange(6, dtype=np.float32), "body": np.arange(40_000, dtype=np.float32).reshape(200, 200)}


class Counted(MemoryFileSystem):  # type: ignore[misc]
    """An object store that counts the bytes of each object that are read.

    Attributes:
        read: (name, number of bytes) of each read.
    """

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012  # as the base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    read: list[tuple[str, int]] = []  # noqa: RUF012

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        self.read.append((path.rpartition("/")[2], len(data)))
        return data

    def cat_ranges(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("not used")


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The URI of a folder of the counted object store."""
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.store.clear()
    Counted.read.clear()
    yield f"counted://{tmp_path.name}"
    Counted.store.clear()


def put(uri: str, named: dict[str, Any] = NAMED) -> str:
    """Write a base, and return the place of its file."""
    files, path = fsspec.core.url_to_fs(f"{uri}/model.safetensors")
    files.pipe_file(path, safetensors.numpy.save(named))
    Counted.read.clear()
    return f"{uri}/model.safetensors"


def read_bytes() -> int:
    """Returns the bytes that were read since the last call."""
    found = sum(count for _, count in Counted.read)
    Counted.read.clear()
    return found


def arrays_of(place: str, cache: Path | str = "") -> dict[str, Any]:
    with _arrays.open_arrays(_arrays.fix(place), cache=str(cache)) as arrays:
        return {name: arrays[name].copy() for name in arrays}


def same(found: dict[str, Any], named: dict[str, Any] = NAMED) -> bool:
    return found.keys() == named.keys() and all(np.array_equal(found[name], named[name]) for name in named)


def test_only_the_arrays_that_are_needed_are_read_from_an_object_store(remote: str) -> None:
    place = put(remote)
    with _arrays.open_arrays(_arrays.fix(place)) as arrays:
        read_bytes()
        assert np.array_equal(arrays["head"], NAMED["head"])
        assert read_bytes() == NAMED["head"].nbytes


def test_each_part_is_read_once_on_a_node(remote: str, tmp_path: Path) -> None:
    place, size = put(remote), sum(array.nbytes for array in NAMED.values())
    assert same(arrays_of(place, tmp_path / "cache"))
    assert read_bytes() > size
    assert same(arrays_of(place, tmp_path / "cache"))
    samples = 2 * (len(Counted.store) + 1) * _arrays._SAMPLE  # fingerprints
    assert read_bytes() <= 2 * samples
    other = {name: array + 1 for name, array in NAMED.items()}
    put(remote, other)
    assert same(arrays_of(place, tmp_path / "cache"), other), "the base has changed, and the cache is of the other one"


Put = Callable[[int], None]


@pytest.fixture(params=["marked", "listed", "unmarked", "local"])
def changing(
    request: pytest.FixtureRequest, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Put]:
    """A place, and a function that puts the first (0) or the second (1) of two bases there.

    They have the same size, beginning and end. An object store marks each object, or answers from its last listing of a
    folder, or has no marks. A local file always has the same time.
    """
    first = {name: np.full(60_000, at, np.float32) for at, name in enumerate("abcd")}
    bases = [safetensors.numpy.save(named) for named in (first, first | {"b": first["b"] + 10, "c": first["c"] + 10})]
    file, listed = tmp_path / "model.safetensors", dict[str, Any]()
    files, path = fsspec.core.url_to_fs(f"{remote}/model.safetensors")

    def put(number: int) -> None:
        if request.param != "local":
            files.pipe_file(path, bases[number])
            return
        beside = file.with_suffix(".new")
        beside.write_bytes(bases[number])
        os.utime(beside, (1, 1))
        beside.replace(file)

    def info(self: Any, path: str, **options: Any) -> dict[str, Any]:
        found = {**MemoryFileSystem.info(self, path, **options)}
        if found["type"] == "file" and request.param == "unmarked":
            return {key: found[key] for key in ("name", "size", "type")}
        if found["type"] == "file":
            found["ETag"] = hashlib.sha256(MemoryFileSystem.cat_file(self, path)).hexdigest()
        return listed.setdefault(path, found) if request.param == "listed" else found

    def ls(self: Any, path: str, detail: bool = True, **options: Any) -> Any:
        return [info(self, name) for name in MemoryFileSystem.ls(self, path, detail=False)]

    monkeypatch.setattr(Counted, "info", info)
    monkeypatch.setattr(Counted, "ls", ls)
    monkeypatch.setattr(Counted, "find", lambda self, path, **options: {one["name"]: one for one in ls(self, path)})
    monkeypatch.setattr(Counted, "invalidate_cache", lambda self, path=None: listed.clear())
    put(0)
    return {"local": str(file), "listed": remote}.get(request.param, f"{remote}/model.safetensors"), put


def beginnings(fixed: str, names: str, cache: str = "", put: Callable[[], None] | None = None) -> list[float]:
    """Returns the first number of each array; the base is replaced before the last array is read."""
    found = []
    with _arrays.open_arrays(fixed, cache=cache) as arrays:
        for name in names:
            if put is not None and name == names[-1]:
                put()
            found.append(float(arrays[name][0]))
    return found


def test_a_base_that_is_replaced_while_it_is_read_is_refused(changing: tuple[str, Put]) -> None:
    """The arrays would be of two bases."""
    place, put = changing
    fixed = _arrays.fix(place)
    with pytest.raises(CheckpointError, match=r"has changed \(fingerprint .* while its arrays were read"):
        beginnings(fixed, "bc", put=lambda: put(1))
    with pytest.raises(CheckpointError, match=r"has changed \(fingerprint .* since the job began with it"):
        beginnings(fixed, "b")


def test_a_base_that_is_replaced_before_its_first_array_is_refused(
    changing: tuple[str, Put], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its fingerprint was compared."""
    place, put = changing
    fixed, listed = _arrays.fix(place), _arrays._listed

    def replaced(uri: str) -> Any:
        put(1)
        return listed(uri)

    monkeypatch.setattr(_arrays, "_listed", replaced)
    with pytest.raises(CheckpointError, match=r"has changed \(fingerprint .* while its arrays were read"):
        beginnings(fixed, "abcd")


def test_a_cache_has_no_part_of_another_base(changing: tuple[str, Put], tmp_path: Path) -> None:
    """Even if the first was read in part only, was replaced while it was read, or is there again."""
    place, put = changing
    cache, fixed = str(tmp_path / "cache"), _arrays.fix(place)
    assert beginnings(fixed, "a", cache) == [0]
    with pytest.raises(CheckpointError, match="while its arrays were read"):
        beginnings(fixed, "bc", cache, lambda: put(1))
    assert beginnings(_arrays.fix(place), "abcd", cache) == [0, 11, 12, 3]
    put(0)
    assert beginnings(fixed, "abcd", cache) == [0, 1, 2, 3]


def test_a_cache_does_not_write_through_a_link(remote: str, tmp_path: Path) -> None:
    place = put(remote)
    assert same(arrays_of(place, tmp_path / "cache"))
    part = max((tmp_path / "cache").rglob("*.*-*"), key=lambda file: file.stat().st_size)
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    part.unlink()
    part.with_name(f"{part.name}.part").symlink_to(outside)
    assert same(arrays_of(place, tmp_path / "cache"))
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("cause", "missing"),
    [
        (None, True),
        (FileNotFoundError(), True),
        (SimpleNamespace(status=404), True),
        (SimpleNamespace(status=503), False),
        (TimeoutError(), False),
        (aiohttp.ServerDisconnectedError(), False),
    ],
)
def test_a_file_is_missing_only_if_the_server_answers_that_it_is(cause: Any, missing: bool) -> None:
    """The file system of HTTP raises FileNotFoundError for any failure."""
    error = FileNotFoundError("http://a/b")
    if isinstance(cause, SimpleNamespace):
        cause = type("Answered", (Exception,), vars(cause))()
    error.__cause__ = cause
    assert _files.is_missing(error) == missing


def test_a_server_that_never_answers_is_a_storage_error_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a request waits for five minutes, and its error has no text."""
    monkeypatch.setattr(_files, "_SILENT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and reads nothing
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StorageError, match=r"cannot read .*model.safetensors: .*[Tt]ime"):
            open_folder(place).read_into("model.safetensors", 0, memoryview(bytearray(8)))
        with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
            open_folder(place).size("model.safetensors")
        with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
            _arrays.fix(f"{place}/model.safetensors")


def test_what_the_user_has_configured_for_http_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"headers": {"Authorization": "token"}}})
    files, _ = _files.filesystem_of("https://127.0.0.1:1/model.safetensors")
    assert files.client_kwargs["headers"] == {"Authorization": "token"}
    assert files.client_kwargs["timeout"].sock_read == _files._SILENT_SECONDS


@given(st.integers(0, 10**7), st.booleans())
def test_samples_are_in_the_file_and_at_its_ends(size: int, marked: bool) -> None:
    ranges = sorted(_arrays._samples(size, marked=marked))
    assert all(0 <= start <= end <= size for start, end in ranges)
    assert ranges[0][0] == 0
    assert max(end for _, end in ranges) == size
    gaps = [after[0] - before[1] for before, after in pairwise(ranges)]
    if not marked:
        assert max(gaps, default=0) <= max(0, size // (_arrays._SAMPLES - 1) - _arrays._SMALL_SAMPLE + 1)


def test_a_checkpoint_of_backstay_comes_from_the_cache_too(
    remote: str, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"w": np.arange(4_000, dtype=np.float32), "b": np.arange(3, dtype=np.float32)}
    manifest = write(CheckpointStore(f"{remote}/ckpt"), params, version=3, shards=2)
    for attempt in range(2):
        read_bytes()
        assert same(arrays_of(f"{remote}/ckpt/{manifest.name}", tmp_path / "cache"), params)
        read = {name for name, _ in Counted.read}
        assert (read == {manifest.name}) is (attempt == 1), read
    data = tmp_path.glob("cache/*/*.safetensors.*")
    damaged = next(iter(sorted(data)))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert same(arrays_of(f"{remote}/ckpt/{manifest.name}", tmp_path / "cache"), params)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "empty", "part of a dead process"])
def test_a_damaged_file_of_the_cache_is_replaced(remote: str, tmp_path: Path, damage: str) -> None:
    place, cache = put(remote), tmp_path / "cache"
    arrays_of(place, cache)
    files = [file for file in cache.glob("*/*") if file.is_file()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        match damage:
            case "flipped":
                content[0] ^= 1
            case "truncated":
                del content[-1]
            case "longer":
                content += b"x"
            case "empty":
                content = bytearray()
            case _:
                file.rename(f"{file}.part")
                continue
        file.write_bytes(content)
    assert same(arrays_of(place, cache))
    read_bytes()
    assert same(arrays_of(place, cache))
    assert not {count for _, count in Counted.read} & {array.nbytes for array in NAMED.values()}
    assert not list(cache.glob("*/*.part"))


@pytest.mark.parametrize("why", ["a file", "the disk is full", "locked"])
def test_a_cache_that_cannot_be_used_costs_time_only(
    remote: str, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, cache = put(remote), tmp_path / "cache"
    if why == "a file":
        cache.write_text("")
    if why == "the disk is full":
        # A process may write no more to /dev/full than to a full disk, and its files are synchronised.
        monkeypatch.setattr(_node_cache, "_digest", lambda buffer: (_ for _ in ()).throw(OSError(28, "No space left")))
    with caplog.at_level("WARNING", "backstay"):
        if why == "locked":
            monkeypatch.setattr(_node_cache, "_PATIENCE", 0.0)
            arrays_of(place, cache)
            with contextlib.ExitStack() as locks:
                for file in list(cache.glob("*/*")):
                    file.rename(f"{file}.part")
                    fcntl.flock(locks.enter_context(Path(f"{file}.part").open("ab")), fcntl.LOCK_EX)
                assert same(arrays_of(place, cache))
        else:
            assert same(arrays_of(place, cache))
    assert sum("is not used" in line for line in caplog.messages) == 1, caplog.messages
    assert why != "the disk is full" or not list(cache.glob("*/*"))


def test_pods_that_start_together_read_each_part_once(remote: str, tmp_path: Path) -> None:
    place, found = put(remote), list[bool]()
    pods = [threading.Thread(target=lambda: found.append(same(arrays_of(place, tmp_path / "cache")))) for _ in range(4)]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join()
    assert found == [True] * 4
    assert [count for _, count in Counted.read].count(NAMED["body"].nbytes) == 1


def test_a_local_folder_has_no_cache(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    with cached(folder, str(tmp_path / "cache"), "x") as read_into:
        assert read_into == folder.read_into
    with pytest.raises(ConfigurationError, match=r"cache is 's3://b': must be the path of a folder on the node"):
        StartFrom("s3://a", cache="s3://b")


@pytest.mark.parametrize("how", ["an error", "a short answer"])
def test_one_part_is_read_again_if_the_storage_fails(remote: str, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """All arrays were read again, so a storage that fails at each fourth of them never delivered the fifth one."""
    place, size, failed = put(remote), NAMED["body"].nbytes, list[int]()
    answer = Counted.cat_file

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data = answer(self, path, start, end, **options)
        if len(data) == size and not failed:
            failed.append(size)
            if how == "an error":
                raise ConnectionResetError(104, "Connection reset by peer")
            return data[:-1]
        return data

    monkeypatch.setattr(Counted, "cat_file", cat_file)
    assert same(arrays_of(place))
    counts = [count for _, count in Counted.read]
    assert (counts.count(size), counts.count(NAMED["head"].nbytes), failed) == (2, 1, [size])


def test_a_file_is_not_listed(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec lists an HTTP address by reading all of it."""
    place = put(remote)
    monkeypatch.setattr(Counted, "find", lambda self, path, **options: pytest.fail("it was listed"))
    assert same(arrays_of(place))
    monkeypatch.setattr(Counted, "info", lambda self, path, **options: {"name": path, "size": None, "type": "file"})
    with pytest.raises(CheckpointError, match="the server does not answer with the size of"):
        _arrays.fix(place)


@pytest.mark.parametrize("damage", ["truncated", "longer", "header", "no header", "nested", "missing"])
def test_a_damaged_file_of_an_object_store_is_refused(remote: str, damage: str) -> None:
    place = put(remote)
    files, path = fsspec.core.url_to_fs(place)
    content = bytearray(files.cat_file(path))
    match damage:
        case "truncated":
            del content[-1]
        case "longer":
            content += b"x"
        case "header":
            content[:8] = (1 << 62).to_bytes(8, "little")
        case "no header":
            content = bytearray(b"abc")
        case "nested":
            text = b"[" * 5000
            content = bytearray(len(text).to_bytes(8, "little") + text)
    fixed = _arrays.fix(place)
    files.pipe_file(path, bytes(content))
    if damage == "missing":
        fixed, place = f"{remote}/other.safetensors#0", ""
    else:
        fixed = _arrays.fix(place)
    refused = pytest.raises(CheckpointError, match=r"is not a safetensors file|is not a checkpoint of Backstay")
    with refused, _arrays.open_arrays(fixed):
        pass


def test_the_state_of_the_optimizer_takes_no_memory_in_a_base(tmp_path: Path, write: Write) -> None:
    store = CheckpointStore(str(tmp_path))
    params = {"w": np.arange(50, dtype=np.float32)}
    manifest = write(store, params, version=1, state={"mean": np.ones(3, np.float32)})
    reader = Reader(store, manifest, keep=("params/",))
    first, second = reader.parameter(0), reader.parameter(0)
    assert np.array_equal(first, params["w"])
    assert np.shares_memory(first, second), "without a copy"
    assert not np.shares_memory(reader.read("params/w", 0, 50), first), "a caller may change it"
    with pytest.raises(CheckpointError, match="holds no tensor"):
        reader.state_leaf(0)


def test_a_base_from_an_object_store_trains(remote: str, tmp_path: Path) -> None:
    def run() -> Any:
        return backstay.train(
            init=lambda key: jax.tree.map(np.zeros_like, NAMED),
            loss=lambda params, batch: (params["head"] ** 2).sum() + 0 * params["body"].sum(),
            batches=lambda key: np.zeros(1),
            optimizer=optax.sgd(0.5),
            steps=1,
            frozen=lambda name: name == "body",
            start_from=StartFrom(place, cache=str(tmp_path / "cache")),
        ).params

    place = put(remote)
    for _ in range(2):
        found = run()
        assert np.array_equal(found["body"], NAMED["body"])
        assert np.array_equal(found["head"], np.zeros(6))
