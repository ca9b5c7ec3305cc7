"""T4 for data: a batch is a pure function of its key, and a sample is used once an epoch over all ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._data._batch_key import BatchKey
from backstay._data._dataset import from_dataset, from_iterator
from backstay._data._sources import TokenFile
from backstay.errors import ConfigurationError


@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    world=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(deadline=None)
def test_t4_every_sample_is_used_once_an_epoch_over_all_ranks(
    size: int, batch_size: int, world: int, epochs: int, seed: int
) -> None:
    """T9: also the last ones of an epoch, which share a batch with the first ones of the next."""
    if size < batch_size:
        with pytest.raises(ConfigurationError, match="at least batch_size"):
            from_dataset(np.arange(size), batch_size=batch_size)
        return
    batches = from_dataset(np.arange(size), batch_size=batch_size)
    assert batches.batches_per_epoch == size / batch_size
    numbers = range(-(-epochs * size // batch_size))
    drawn = np.concatenate([batches(BatchKey(number // world, number % world, world, seed)) for number in numbers])
    assert len(drawn) == len(numbers) * batch_size
    orders = [tuple(drawn[epoch * size : (epoch + 1) * size]) for epoch in range(epochs)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(set(orders)) == epochs or size < 8


@given(
    version=st.integers(0, 10**6),
    rank=st.integers(0, 6),
    spare=st.integers(1, 5),
    offset=st.integers(-(10**9), 10**9),
    batches=st.integers(1, 30),
)
def test_t9_the_batches_of_a_contribution_have_successive_numbers(
    version: int, rank: int, spare: int, offset: int, batches: int
) -> None:
    """The numbers of the next rank follow. Without local steps, a number is ``offset + step * world + rank``."""
    world = rank + spare

    def numbers(version: int, rank: int) -> list[int]:
        steps = range(version * batches, (version + 1) * batches)
        return [BatchKey(step, rank, world, 0, offset, batches).number for step in steps]

    first = offset + (version * world + rank) * batches
    following = numbers(version, rank + 1) if rank + 1 < world else numbers(version + 1, 0)
    assert numbers(version, rank) + following == list(range(first, first + 2 * batches))
    assert BatchKey(version, rank, world, 0, offset).number == offset + version * world + rank


def test_t4_with_local_steps_a_stream_of_one_rank_has_no_gaps() -> None:
    stream = from_iterator(lambda rank, world: iter(range(rank, 100, world)))
    assert [stream(BatchKey(step, 1, 3, batches=4)) for step in range(9)] == [1 + 3 * step for step in range(9)]


def test_t4_the_same_key_gives_the_same_batch_in_a_new_process_state() -> None:
    rows = {"x": np.arange(40.0).reshape(20, 2), "y": np.arange(20)}
    keys = [BatchKey(step, rank, 3, 5) for step in range(9) for rank in range(3)]
    first = from_dataset(rows, batch_size=4)
    there = [first(key) for key in keys]
    again = from_dataset(rows, batch_size=4)
    back = [again(key) for key in reversed(keys)][::-1]
    for a, b in zip(there, back, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["y"], b["y"])
        np.testing.assert_array_equal(a["x"][:, 0], a["y"] * 2.0)


def test_each_seed_and_epoch_has_another_order() -> None:
    batches = from_dataset(np.arange(100), batch_size=100)
    orders = [tuple(batches(BatchKey(epoch, 0, 1, seed))) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(100)) for order in orders)
    fixed = from_dataset(np.arange(100), batch_size=100, seed=9)
    np.testing.assert_array_equal(fixed(BatchKey(0, 0, 1, 0)), fixed(BatchKey(0, 0, 1, 1)))
    plain = from_dataset(np.arange(100), batch_size=10, shuffle=False)
    np.testing.assert_array_equal(plain(BatchKey(1, 1, 2)), np.arange(30, 40))


class Files:
    """A source with a length and items and nothing else, like a Grain source or a list of files."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 10:
            raise IndexError(index)
        return {"n": index, "v": np.full(3, index, np.float32)}


def test_sources_of_samples_are_stacked_and_transformed() -> None:
    batch = from_dataset(Files(), batch_size=5)(BatchKey(0, 0, 1))
    assert batch["v"].shape == (5, 3)
    np.testing.assert_array_equal(batch["v"][:, 0], batch["n"])
    doubled = from_dataset(Files(), batch_size=5, transform=lambda s: s["v"] * 2)(BatchKey(0, 0, 1))
    np.testing.assert_array_equal(doubled, batch["v"] * 2)
    noisy = from_dataset(Files(), batch_size=5, transform=lambda s, rng: s["v"] + rng.normal(size=3), has_rng=True)
    np.testing.assert_array_equal(noisy(BatchKey(1, 0, 1)), noisy(BatchKey(1, 0, 1)))
    assert not np.array_equal(noisy(BatchKey(0, 0, 1)), noisy(BatchKey(2, 0, 1)))
    pairs = from_dataset((np.arange(8.0), np.arange(8)), batch_size=4)(BatchKey(0, 1, 2))
    np.testing.assert_array_equal(pairs[0], pairs[1])


def test_bad_sources_are_refused_clearly() -> None:
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        from_dataset(np.arange(3), batch_size=0)
    with pytest.raises(ConfigurationError, match="one length"):
        from_dataset({"x": np.zeros(3), "y": np.zeros(4)}, batch_size=1)


def test_the_arrays_of_a_file_of_numpy_are_columns(tmp_path: Path) -> None:
    """The names of the arrays were the samples."""
    np.savez(tmp_path / "all.npz", x=np.arange(10), y=np.arange(20).reshape(10, 2))
    batch = from_dataset(np.load(tmp_path / "all.npz"), batch_size=3, shuffle=False)(BatchKey(1, 0, 1))
    assert batch["x"].tolist() == [3, 4, 5]
    assert batch["y"].tolist() == [[6, 7], [8, 9], [10, 11]]


def test_files_of_tokens_that_cannot_be_read_are_refused_clearly(tmp_path: Path) -> None:
    empty = tmp_path / "empty.npy"
    empty.touch()
    with pytest.raises(ConfigurationError, match=r"empty\.npy cannot be mapped: No data left in file"):
        TokenFile(empty, 4)
    with pytest.raises(ConfigurationError, match="dtype is 'nope', must be a dtype"):
        TokenFile(empty, 4, dtype="nope")
    with pytest.raises(ConfigurationError, match="paths is 5, must be a path"):
        TokenFile(5, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the column \['k'\] is not an array"):
        from_dataset({"k": jax.random.split(jax.random.key(0), 4)}, batch_size=2)


def test_t4_a_stream_skips_ahead_for_a_replacement_and_goes_back_when_asked() -> None:
    made: list[tuple[int, int]] = []

    def make(rank: int, world: int) -> Iterator[int]:
        made.append((rank, world))
        return iter(range(rank, 12, world))

    stream = from_iterator(make)
    run = [stream(BatchKey(step, 1, 3)) for step in range(6)]
    assert run == [1, 4, 7, 10, 1, 4]  # four batches an epoch, then another epoch
    replacement = from_iterator(make)
    assert replacement(BatchKey(3, 1, 3)) == 10
    assert replacement(BatchKey(3, 1, 3)) == 10
    assert replacement(BatchKey(1, 1, 3)) == 4
    with pytest.raises(ConfigurationError, match="empty iterator"):
        from_iterator(lambda rank, world: iter(()))(BatchKey(0, 0, 1))
    with pytest.raises(ConfigurationError, match="make is range: must be a function"):
        from_iterator(range(3))  # type: ignore[arg-type]


def test_from_iterator_names_the_arguments_of_make() -> None:
    """A generator without arguments ended with a bare TypeError in the middle of the start."""

    def stream():
        yield 1

    with pytest.raises(ConfigurationError, match=r"called as make\(rank, world\).*make\(\)\..*pass shared=True"):
        from_iterator(stream)
    assert from_iterator(stream, shared=True)(BatchKey(0, 0, 1)) == 1
    with pytest.raises(ConfigurationError, match=r"called as make\(\).*leave out shared=True"):
        from_iterator(lambda rank, world: iter([1]), shared=True)
    with pytest.raises(ConfigurationError, match=r"defined as make\(one\)$"):
        from_iterator(lambda one: iter([1]))
    assert from_iterator(lambda *of, **more: iter([of]))(BatchKey(0, 1, 2)) == (1, 2)


@pytest.mark.parametrize("batches", [1, 5])
def test_t4_a_stream_is_not_read_again_for_a_contribution_that_is_computed_again(batches: int) -> None:
    """An Async rank whose contribution was once too stale read its whole stream again for each one that followed."""
    made = 0

    def make(rank: int, world: int) -> Iterator[int]:
        nonlocal made
        made += 1
        return itertools.count()

    stream = from_iterator(make)
    keys = [BatchKey(step, 0, 1, batches=batches) for step in range(8 * batches + 2)]
    for contribution in range(7):
        of = keys[contribution * batches : (contribution + 1) * batches]
        ahead = keys[(contribution + 1) * batches :][:2]  # what a prefetcher has read when the answer arrives
        for _ in range(3):
            assert [stream(key) for key in of] == [key.step for key in of]
            assert [stream(key) for key in ahead] == [key.step for key in ahead]
    assert made == 1


def test_t9_a_shared_stream_is_not_read_again_when_the_number_of_ranks_changes() -> None:
    made = 0

    def make() -> Iterator[int]:
        nonlocal made
        made += 1
        return itertools.count()

    for rank in range(2):
        made, stream = 0, from_iterator(make, shared=True)
        assert [stream(BatchKey(step, rank, 2)) for step in (499, 500, 501)] == [998 + rank, 1000 + rank, 1002 + rank]
        assert stream(BatchKey(500, rank, 3, offset=-500)) == 1000 + rank
        assert stream(BatchKey(502, rank, 3, offset=-500)) == 1006 + rank
        assert stream(BatchKey(501, rank, 1, offset=502)) == 1003 + rank
        assert made == 1


@struct.dataclass
class Tokens:
    tokens: Any


@pytest.mark.parametrize("kind", [dict, Tokens])
def test_a_stream_keeps_no_more_than_a_gibibyte(kind: Any) -> None:
    made = 0

    def make(rank: int, world: int) -> Iterator[Any]:
        nonlocal made
        made += 1
        # 512 MiB that take no memory.
        return (kind(tokens=np.broadcast_to(np.float64(n), (1 << 26,))) for n in itertools.count())

    def first(step: int) -> Any:
        batch = stream(BatchKey(step, 0, 1))
        return (batch["tokens"] if kind is dict else batch.tokens)[0]

    stream = from_iterator(make)
    assert [first(step) for step in (0, 1, 2, 1)] == [0, 1, 2, 1]
    assert made == 1
    assert first(0) == 0
    assert made == 2


def test_t4_a_stream_that_raised_is_made_again_and_keeps_its_place() -> None:
    broken = True

    def make() -> Iterator[int]:
        yield 0
        if broken:
            raise OSError("no such host")
        yield 1

    stream = from_iterator(make, shared=True)
    assert stream(BatchKey(0, 0, 1)) == 0
    for _ in range(2):
        with pytest.raises(OSError, match="no such host"):
            stream(BatchKey(1, 0, 1))
    broken = False
    assert [stream(BatchKey(step, 0, 1)) for step in (1, 2)] == [1, 0]


def test_t9_a_stream_states_that_it_loses_its_place_and_a_shared_one_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    keys = [BatchKey(step, rank, 3) for step in range(2) for rank in range(3)]
    keys += [BatchKey(step, rank, 2, offset=2) for step in range(2, 5) for rank in range(2)]
    each = [from_iterator(lambda: iter(range(8)), shared=True) for _ in range(3)]
    assert [each[key.rank](key) for key in keys] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    own = [from_iterator(lambda rank, world: iter(range(rank, 100, world))) for _ in range(3)]
    with caplog.at_level("WARNING", logger="backstay"):
        logging.getLogger("backstay").addHandler(caplog.handler)
        drawn = [own[key.rank](key) for key in keys]
        logging.getLogger("backstay").removeHandler(caplog.handler)
    assert drawn[:6] == [0, 1, 2, 3, 4, 5]
    assert drawn[6:8] == [6, 7]
    assert "the number of ranks changed from 3 to 2 at step 2" in caplog.text
    assert "Samples may be used twice or not at all" in caplog.text
