"""Codecs lose no element over many contributions, however small it is in its group (T10)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import Wire
from backstay._compute import Encoder, Summary
from backstay._data import BatchKey
from backstay._transport import frames
from backstay._update import Partition, Rounding, ShardEngine, analyse, coded_leaves, describe, partition, shard_wires
from backstay._update._codecs import CODECS, GROUP, BlockWire, body_of, bound_of, seed_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
WITH_FEEDBACK = ["Int8", "Int4"]
SIZE = 5 * GROUP + 3  # five groups and a tail
TOP = {"Int8": 127, "Int4": 7}


@pytest.fixture(autouse=True)
def float64() -> Any:
    with jax.enable_x64(True):
        yield


def wire_of(name: Any, dtype: np.dtype, size: int = SIZE) -> BlockWire:
    return BlockWire(size, dtype, CODECS[name], np.arange(size // GROUP, dtype=np.uint32))


@cache
def decoder(_name: str) -> Any:
    return jax.jit(lambda block: block.decode())


@st.composite
def magnitudes(draw: st.DrawFn, dtype: np.dtype) -> np.ndarray:
    """Elements of many magnitudes, of which the largest is 1, in every group."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lowest = draw(st.sampled_from([-1, -3, -4.5, -6]))
    values = 10 ** rng.uniform(lowest, 0, SIZE) * rng.choice([-1, 1], SIZE)
    values[:: GROUP // 4] = draw(st.sampled_from([1.0, -1.0, 0.7]))
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
@settings(max_examples=10, deadline=None)  # each has 150 groups
@given(data=st.data(), seed=st.integers(0, 1000))
def test_t10_what_servers_decode_and_the_residual_are_all_that_was_sent(
    name: Any, dtype: np.dtype, data: st.DataObject, seed: int
) -> None:
    """T10: each contribution adds at most the rounding of a sum in the dtype of the residual, for every element."""
    wire, body, rounds = wire_of(name, dtype), body_of(SIZE), 30
    each = [data.draw(magnitudes(dtype)) for _ in range(2)]
    residual: Any = wire.no_residual()
    assert residual.dtype == (np.float64 if dtype == np.float64 else np.float32)
    given, arrived = np.zeros(SIZE, np.longdouble), np.zeros(SIZE, np.longdouble)
    for step in range(rounds):
        values = each[step % len(each)]
        block, residual = wire.encode_with(values, residual, seed_of(seed, step, 0))
        given += values.astype(np.float64)
        arrived += np.asarray(decoder(name)(block)).astype(np.float64)
    rest = np.asarray(residual)
    unit = np.finfo(residual.dtype).eps
    scale = 1 / TOP[name]
    largest = np.abs(np.stack([one.astype(np.float64) for one in each])).max(axis=0)
    error = np.abs(arrived + rest - given)[:body] / (rounds * unit * (largest + 2 * scale)[:body])
    assert error.max() <= 1, each[0][np.argmax(error)]
    # The largest element of a group counts with its residual.
    most = scale / (1 - scale) + bound_of(name, dtype).floor + float(ml_dtypes.finfo(dtype).eps)
    assert np.abs(rest[:body]).max() <= most
    assert (arrived == given)[body:].all()
    assert not rest[body:].any()


class Given:
    """A contribution of one leaf on the host."""

    def __init__(self, parts: Partition, leaf: np.ndarray, key: BatchKey) -> None:
        self.key, self.summary = key, Summary(True, 1, 0.0, {})
        self.blocks: Any = [[leaf[block.pieces[0].start :][: block.size] for block in parts.shards[0].blocks]]

    def wait(self) -> None:
        pass


Decode = Callable[[int], np.ndarray]


def as_a_job(wire: Wire, values: np.ndarray, ranks: int) -> Decode:
    """Returns the mean that the engine of a server computes from the bytes of `ranks` workers, by step."""
    tree = describe({"w": values})
    coded = coded_leaves(tree, wire)
    parts = partition(tree, rule := analyse(optax.sgd(0.1), tree), 1, 1 << 22, coded)
    wires = shard_wires(parts, wire, coded)
    engine = ShardEngine(parts, 0, rule, {"w": values})
    encoders = [Encoder(wires, 0, error_feedback=bool(wire.error_feedback)) for _ in range(ranks)]

    def mean(step: int) -> np.ndarray:
        contributions = []
        for rank, encoder in enumerate(encoders):
            key = BatchKey(step=step, rank=rank, world=ranks, seed=0)
            with encoder.sending(Given(parts, values, key)) as sending:
                data = [np.concatenate(frames.sections_of(block)) for block in sending.blocks[0]]
                sending.applied()
            contributions.append([one.views(data[b]) for b, one in enumerate(wires[0].gradients)])
        means = engine.mean(contributions, weights=[1.0] * ranks, divisor=ranks)
        return np.concatenate([np.asarray(block).astype(np.float64) for block in means])

    return mean


def as_one_process(wire: Wire, values: np.ndarray, ranks: int) -> Decode:
    """Returns the mean that training in one process computes with."""
    rounding = Rounding(describe({"w": values}), wire)

    def mean(step: int) -> np.ndarray:
        each = [rounding.gradients([jnp.asarray(values)], 0, step, rank)[0] for rank in range(ranks)]
        return np.mean([np.asarray(one).astype(np.float64) for one in each], axis=0)

    return mean


# A job has each dtype once with feedback, and one process the other pairs: the test above has all pairs.
LONG_RUNS = [
    (name, dtype, made, ranks)
    for made, ranks, first in ((as_a_job, 3, 0), (as_one_process, 1, 1))
    for number, name in enumerate(["Exact", "BFloat16", "Int8", "Int4"])
    for dtype in (DTYPES[(first + number) % 2 :: 2] if name in WITH_FEEDBACK else DTYPES)
]


@pytest.mark.parametrize(("name", "dtype", "made", "ranks"), LONG_RUNS)
def test_t10_no_element_is_lost_in_the_long_run(name: Any, dtype: np.dtype, made: Any, ranks: int) -> None:
    """T10: a constant gradient, with one large element in each 64, keeps its small elements of every magnitude."""
    feedback = name in WITH_FEEDBACK
    rng = np.random.default_rng(0)
    values = 10 ** rng.uniform(-5 if feedback else -6, -3, 192 * GROUP)
    values[::64] = 1.0
    values = values.astype(dtype)
    wide = values.astype(np.float64)
    decode, rounds = made(Wire(gradients=name, error_feedback=feedback), values, ranks), 500
    if not feedback:
        rounds = 2  # the same each time
    mean = sum(decode(step) for step in range(rounds)) / rounds
    # The mean of several contributions is rounded once to the dtype of the leaf.
    rounded = 2.0**-9 if dtype == BFLOAT16 and ranks > 1 else 2.0**-11 if dtype == np.float16 and ranks > 1 else 1e-6
    for low, high in ((1e-6, 1e-5), (1e-5, 1e-4), (1e-4, 1e-3), (0.5, 2)):
        some = (wide >= low) & (wide < high)
        if not some.any():
            continue
        share = mean[some].sum() / wide[some].sum()
        # The residuals that are left at the end, at most an integer each and of both signs: five deviations.
        noise = 5 / TOP[name] / np.sqrt(some.sum() * ranks) / rounds / wide[some].mean() if feedback else 0.0
        assert noise < 0.4
        assert share == pytest.approx(1.0, abs=noise + rounded + (2.0**-8 if name == "BFloat16" else 0)), (low, share)
