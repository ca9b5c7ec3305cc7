"""`from_dataset` accepts each kind of source, with and without a transform, read by several threads.

The tests that need libraries of data sets import them. Each process of pytest-xdist imports this module, and these
libraries take as long as JAX.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from between import LONG, put
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey, TokenFile, from_dataset
from backstay._data import _order
from backstay._data._order import SampleOrder
from backstay._data._prefetch import Prefetcher
from backstay.errors import ConfigurationError

SIZE = 10
X = np.arange(SIZE * 3, dtype=np.float32).reshape(SIZE, 3)
Y = np.arange(SIZE, dtype=np.int64)


def hugging_face(columns: dict[str, Any]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


def grain_source() -> Any:
    import grain

    class Samples(grain.sources.RandomAccessDataSource):  # type: ignore[misc]
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": X[index], "y": Y[index]}

    return Samples()


def grain_map_dataset() -> Any:
    import grain

    return grain.MapDataset.source(grain_source())


def mapped(tmp_path: Path) -> dict[str, Any]:
    np.save(tmp_path / "x.npy", X)
    return {"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": Y}


SOURCES: dict[str, Any] = {
    "columns": lambda path: {"x": X, "y": Y},
    "mapped columns": mapped,
    "list": lambda path: [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
    "hugging face": lambda path: hugging_face({"x": X, "y": Y}),
    "hugging face with a format": lambda path: hugging_face({"x": X, "y": Y}).with_format("numpy"),
    "grain source": lambda path: grain_source(),
    "grain map dataset": lambda path: grain_map_dataset().map(lambda sample: sample),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("transformed", [False, True])
def test_each_kind_of_source_gives_the_same_batches(tmp_path: Path, kind: str, transformed: bool) -> None:
    transform = (lambda sample: {"x": np.asarray(sample["x"]) * 2, "y": sample["y"]}) if transformed else None
    batches = from_dataset(SOURCES[kind](tmp_path), batch_size=4, transform=transform, seed=1)
    assert (batches.size, batches.batch_size) == (SIZE, 4)
    for step in range(6):
        key = BatchKey(step, 0, 1)
        batch = batches(key)
        numbers = batches.indices(key)
        np.testing.assert_array_equal(batch["y"], numbers)
        np.testing.assert_array_equal(batch["x"], X[numbers] * (2 if transformed else 1))
        assert batch["x"].shape == (4, 3)
        part = batches.rows(key, slice(1, 3))  # for a pod of a rank
        np.testing.assert_array_equal(part["x"], batch["x"][1:3])
        np.testing.assert_array_equal(part["y"], batch["y"][1:3])


class OnDisk:
    """A source like an array of h5py or zarr, whose rows are read by number, and which `numpy.asarray` reads whole."""

    shape, dtype, chunks = X.shape, X.dtype, (1, 3)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        assert isinstance(row, int)
        return X[row]

    def __array__(self, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("the whole file is read")


def test_an_array_on_disk_is_read_row_by_row() -> None:
    batch = from_dataset({"x": OnDisk(), "y": Y}, batch_size=4)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(batch["x"], X[batch["y"]])
    np.testing.assert_array_equal(from_dataset(OnDisk(), batch_size=4, shuffle=False)(BatchKey(0, 0, 1)), X[:4])


def test_lists_and_jax_arrays_are_columns() -> None:
    batch = from_dataset({"x": X.tolist(), "y": jnp.asarray(Y)}, batch_size=4)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(batch["x"], X[batch["y"]])
    rows = from_dataset(jnp.asarray(X), batch_size=4, shuffle=False)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(rows, X[:4])
    with pytest.raises(ConfigurationError, match="must be arrays of one length"):
        from_dataset({"x": X, "y": [1, 2]}, batch_size=1)


def test_a_data_frame_is_a_dict_of_its_columns() -> None:
    import pandas

    frame = pandas.DataFrame({"x": X[:, 0], "y": Y}).iloc[::-1]
    batch = from_dataset(frame, batch_size=4)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(batch["x"], X[batch["y"], 0])
    np.testing.assert_array_equal(from_dataset(frame["y"], batch_size=4, shuffle=False)(BatchKey(0, 0, 1)), Y[:-5:-1])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": np.ones(3)}, {"x": np.ones(4)}], r"\['x'\] has the shapes \(3,\) and \(4,\) in two samples"),
        ([{"x": 1}, {"y": 1}], r"two samples of a batch are PyTreeDef\(\{'x': \*\}\) and PyTreeDef\(\{'y': \*\}\)"),
        ([("a", 1), ("b", 2)], r"\[0\] is of dtype <U1 in a batch: must be numbers"),
        (np.asarray(["2026-11-22", "2026-11-23"], "datetime64[D]"), "it is of dtype datetime64"),
        (
            np.zeros(2, [("x", np.float32), ("y", np.int32)]),
            r"it is of dtype \[\('x', '<f4'\), \('y', '<i4'\)\] in a batch",
        ),
        ([{"x": None}, {"x": None}], r"a sample is \{'x': None\}: must have arrays or numbers"),
    ],
)
def test_samples_that_make_no_batch_are_refused_with_the_place(samples: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        from_dataset(samples, batch_size=2)(BatchKey(0, 0, 1))


def test_a_transform_that_changes_its_sample_in_place_does_not_change_the_data() -> None:
    def halve(sample: Any) -> Any:
        sample["x"] /= 2
        return sample

    x = X.copy()
    batches = from_dataset({"x": x, "y": Y}, batch_size=SIZE, transform=halve)
    for step in range(3):
        batch = batches(BatchKey(step, 0, 1))
        np.testing.assert_array_equal(batch["x"], X[batch["y"]] / 2)
    np.testing.assert_array_equal(x, X)
    names = from_dataset(np.asarray(["a", "bc"], object), batch_size=2, transform=len, shuffle=False)
    assert names(BatchKey(0, 0, 1)).tolist() == [1, 2]


def test_nested_columns_and_pairs() -> None:
    batch = from_dataset({"a": {"x": X}, "y": Y}, batch_size=4)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(batch["a"]["x"], X[batch["y"]])
    x, y = from_dataset((X, Y), batch_size=4)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(x, X[y])


def test_sources_that_cannot_be_used_state_what_to_do() -> None:
    import datasets

    texts = hugging_face({"text": ["a", "bc"], "n": [1, 2]})
    with pytest.raises(ConfigurationError, match="the columns text are not numbers of one shape"):
        from_dataset(texts, batch_size=1)(BatchKey(0, 0, 1))
    tokens = from_dataset(texts, batch_size=2, transform=lambda sample: len(sample["text"]), shuffle=False)
    assert tokens(BatchKey(0, 0, 1)).tolist() == [1, 2]
    with pytest.raises(ConfigurationError, match="choose one of its splits, 'train'"):
        from_dataset(datasets.DatasetDict(train=texts), batch_size=1)
    with pytest.raises(ConfigurationError, match=r"has no length.*use from_iterator"):
        from_dataset(texts.to_iterable_dataset(), batch_size=1)
    grained = grain_map_dataset()
    with pytest.raises(ConfigurationError, match=r"has no length.*use from_iterator"):
        from_dataset(grained.to_iter_dataset(), batch_size=1)
    with pytest.raises(ConfigurationError, match="leave out repeat"):
        from_dataset(grained.repeat(), batch_size=1)
    some = from_dataset(grained.filter(lambda sample: sample["y"] % 2 == 0), batch_size=4)
    with pytest.raises(ConfigurationError, match="is None: a source cannot leave out samples"):
        some(BatchKey(0, 0, 1))
    with pytest.raises(ConfigurationError, match="has_rng is True without a transform"):
        from_dataset(X, batch_size=1, has_rng=True)
    with pytest.raises(ConfigurationError, match="workers is 0"):
        from_dataset(X, batch_size=1, workers=0)
    with pytest.raises(ConfigurationError, match="seed is -1, must be a whole number of 0 or more"):
        from_dataset(X, batch_size=1, seed=-1)
    with pytest.raises(ConfigurationError, match="transform is int, must be a function"):
        from_dataset(X, batch_size=1, transform=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the column \['x'\] is not an array: .*inhomogeneous"):
        from_dataset({"x": [[1], [1, 2]]}, batch_size=1)
    with pytest.raises(ConfigurationError, match="set has no items by number"):
        from_dataset({1, 2}, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the source is 'x.npy': must be the data"):
        from_dataset("x.npy", batch_size=1)

    def fail(sample: Any) -> Any:
        raise KeyError("label")

    with pytest.raises(KeyError) as caught:
        from_dataset(X, batch_size=1, transform=fail, shuffle=False)(BatchKey(3, 0, 1))
    assert caught.value.__notes__ == ["raised by the transform of from_dataset for sample 3"]


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_windows_of_tokens_begin_anywhere_and_no_token_is_used_twice_in_an_epoch(tmp_path: Path, suffix: str) -> None:
    """The value of a token is its place, so a window says where it begins."""
    lengths, window, paths = (1000, 130, 64), 64, []
    for number, length in enumerate(lengths):
        tokens = (np.arange(length) + 2000 * number).astype(np.uint16)
        paths.append(tmp_path / f"{number}.{suffix}")
        np.save(paths[-1], tokens) if suffix == "npy" else tokens.tofile(paths[-1])
    source = TokenFile(paths, window)
    assert len(source) == 14 + 1 + 1
    batches = from_dataset(source, batch_size=4)
    starts = set()
    for epoch in range(30):
        seen = np.concatenate([batches(BatchKey(4 * epoch + step, 0, 1)) for step in range(4)])
        assert seen.shape == (16, window)
        assert seen.dtype == np.int32
        assert len(np.unique(seen)) == seen.size
        np.testing.assert_array_equal(np.diff(seen, axis=1), 1)
        starts |= {int(start) % window for start in seen[:, 0] if start < 1000}
    assert len(starts) > 20, "windows begin at many places"
    again = from_dataset(TokenFile(paths, window), batch_size=4)
    np.testing.assert_array_equal(again(BatchKey(7, 0, 1)), batches(BatchKey(7, 0, 1)))
    halves = from_dataset(source, batch_size=4, transform=lambda row: {"in": row[:-1], "out": row[1:]})
    np.testing.assert_array_equal(halves(BatchKey(7, 0, 1))["out"], batches(BatchKey(7, 0, 1))[:, 1:])


def test_token_files_that_cannot_be_used(tmp_path: Path) -> None:
    odd = tmp_path / "odd.bin"
    put(odd, b"abc")
    with pytest.raises(ConfigurationError, match="has 3 bytes: must be whole tokens of uint16"):
        TokenFile(odd, 4)
    with pytest.raises(ConfigurationError, match="has 3 tokens, fewer than one window of 4"):
        TokenFile(odd, 4, dtype=np.uint8)
    with pytest.raises(ConfigurationError, match="cannot be mapped"):
        TokenFile(tmp_path / "none.bin", 4)
    np.save(tmp_path / "floats.npy", np.zeros(9))
    with pytest.raises(ConfigurationError, match="must be one row of integers"):
        TokenFile(tmp_path / "floats.npy", 4)
    for window in (2.5, "4", True, 0):
        with pytest.raises(ConfigurationError, match=f"window is {window!r}, must be a whole number"):
            TokenFile(odd, window, dtype=np.uint8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "outside"), [(np.uint32, 2**31), (np.int64, -(2**31) - 1)])
def test_a_token_outside_int32_is_refused_with_its_place(tmp_path: Path, dtype: Any, outside: int) -> None:
    path = tmp_path / "tokens.bin"
    tokens = np.asarray([0, 1, 2**31 - 1, 3], dtype)
    tokens.tofile(path)
    np.testing.assert_array_equal(
        from_dataset(TokenFile(path, 4, dtype=dtype), batch_size=1)(BatchKey(0, 0, 1)), [tokens]
    )
    tokens[2] = outside
    tokens.tofile(path)
    with pytest.raises(ConfigurationError, match=r"token outside int32 at one of the positions 0 to 3"):
        from_dataset(TokenFile(path, 4, dtype=dtype), batch_size=1)(BatchKey(0, 0, 1))


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_t9_an_order_that_is_computed_place_by_place_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    walked = _order._walk(np.arange(size), size, np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64))
    assert sorted(walked.tolist()) == list(range(size))


def test_an_order_of_a_billion_samples_takes_no_memory_and_is_mixed() -> None:
    order = SampleOrder(10**9, shuffle=True)
    places = np.arange(10_000)
    first, second = order(0, 0, places), order(0, 1, places)
    assert len(np.unique(first)) == 10_000
    assert not np.array_equal(first, second)
    # Of a fair order, neighbours are a third of the range apart on average.
    assert 0.3e9 < np.abs(np.diff(first)).mean() < 0.37e9
    assert abs(first.mean() / 1e9 - 0.5) < 0.02


def test_several_threads_prepare_batches_and_no_more_than_requested() -> None:
    """Each batch waits until all three threads prepare one: with fewer, none would ever be ready."""
    together = threading.Barrier(3, timeout=LONG)
    begun: list[int] = []

    def slow(sample: Any) -> Any:
        begun.append(int(sample))
        if len(begun) <= 3:
            together.wait()
        return sample

    batches = from_dataset(np.arange(1000), batch_size=1, transform=slow, workers=3, ahead=3, shuffle=False)
    ahead = Prefetcher(batches)
    try:
        assert ahead.get(BatchKey(0, 0, 1)).tolist() == [0]
        assert ahead.get(BatchKey(1, 0, 1)).tolist() == [1]
        assert max(begun) <= 1 + 3, "what is ready or in preparation is bounded"
    finally:
        ahead.close()


def test_large_batches_are_not_prepared_far_ahead() -> None:
    prepared = threading.Event()
    begun: list[int] = []

    def record(sample: Any) -> Any:
        begun.append(int(sample[0]))
        if len(begun) > 1:
            prepared.set()
        return sample

    rows = np.repeat(np.arange(100.0), 1000).reshape(100, 1000)
    ahead = Prefetcher(from_dataset(rows, batch_size=1, transform=record, shuffle=False, ahead=50, ahead_bytes=9000))
    try:
        ahead.get(BatchKey(0, 0, 1))
        assert prepared.wait(LONG)
        assert ahead._ahead == 1
        ahead.get(BatchKey(1, 0, 1))
        assert max(begun) <= 3
    finally:
        ahead.close()
