"""T1, T4: an update of any number of contributions, by the same programs."""

from __future__ import annotations

import itertools

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from backstay._update._engine import ShardEngine
from backstay._update._engine._kernels import FUSED, Mean, enable_x64, kernels_of, state_mean
from backstay._update._engine._sums import Tree
from backstay._update._partition import partition
from backstay._update._rules import analyse
from backstay._update._tree import describe

MANY = (1, 2 * FUSED + 1)


def engine_of(params, optimizer=None):
    tree = describe(params)
    rule = analyse(optimizer or optax.sgd(1.0), tree)
    parts = partition(tree, rule, 1, 512)
    return rule, ShardEngine(parts, 0, rule, params)


def contributions_of(engine, count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [
        [(scale * rng.normal(size=block.size)).astype(block.dtype) for block in engine.blocks] for _ in range(count)
    ]


def params_of(dtype):
    return {"a": np.zeros((13, 17), dtype), "b": np.zeros(5, dtype)}


@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), optax.chain(optax.centralize(), optax.sgd(1.0))])
def test_t1_the_mean_of_any_number_of_contributions(optimizer) -> None:
    """In float64, against NumPy; elementwise and of whole leaves."""
    with enable_x64():
        for count, weighted in itertools.product(MANY, (False, True)):
            weights = [0.5 + rank for rank in range(count)] if weighted else [1.0] * count
            _, engine = engine_of({"b": np.zeros(33)}, optimizer)
            given = contributions_of(engine, count)
            want = sum(w * np.concatenate(g) for w, g in zip(weights, given, strict=True)) / count
            engine.apply(given, weights=weights, divisor=count, clip_factor=0.25)
            got = np.concatenate([engine.block(b) for b in range(len(engine.blocks))])
            np.testing.assert_allclose(got, -0.25 * want, rtol=1e-12, atol=1e-15)
            _, other = engine_of({"b": np.zeros(33)}, optimizer)
            norm = other.sum_of_squares(given, weights, count)
            assert norm == pytest.approx(float(np.sum(want**2)), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_t4_a_standby_repeats_an_update_of_many_bit_for_bit(dtype) -> None:
    """It gets the mean, and applies it alone."""
    optimizer = optax.adam(1e-2)
    _, active = engine_of(params_of(dtype), optimizer)
    _, standby = engine_of(params_of(dtype), optimizer)
    for step in range(2):
        given = contributions_of(active, FUSED + 3, step)
        weights = [1.0 + rank / 3 for rank in range(len(given))]
        mean = [np.asarray(block) for block in active.mean(given, weights=weights, divisor=len(given))]
        active.apply(given, weights=weights, divisor=len(given), clip_factor=0.5)
        standby.apply([mean], weights=[1.0], divisor=1, clip_factor=0.5)
        for b in range(len(active.blocks)):
            assert active.block(b).tobytes() == standby.block(b).tobytes()


def test_t4_the_sum_of_many_is_a_fixed_tree_over_the_ranks() -> None:
    """In float32, 1e8 + 1 is 1e8. Four ranks are added in order, then the sums of four."""
    for order, mean in [
        ((1e8, 1.0, -1e8, 0.0, 0.0, 0.0), 0.0),
        ((1e8, -1e8, 0.0, 0.0, 0.0, 1.0), 1.0),
        ((1e8, 0.0, 0.0, 0.0, 1.0, -1e8), 0.0),
        ((1e8, 0.0, 0.0, 0.0, -1e8, 0.0, 1.0), 0.0),
        ((0.0,) * 4 + (1e8, 0.0, 0.0, 0.0) + (-1e8, 0.0, 0.0, 0.0) + (1.0,), 1.0),
    ]:
        _, engine = engine_of({"b": np.zeros(8, np.float32)})
        engine.apply([[np.full(8, value, np.float32)] for value in order], divisor=1)
        assert np.all(engine.block(0) == np.float32(-mean)), order


def test_equal_weights_give_the_bits_of_no_weights() -> None:
    _, weighted = engine_of(params_of(np.float32))
    _, plain = engine_of(params_of(np.float32))
    given = contributions_of(plain, 23)
    weighted.apply(given, weights=[1.0] * 23, divisor=23)
    plain.apply(given, divisor=23)
    assert all(weighted.block(b).tobytes() == plain.block(b).tobytes() for b in range(len(plain.blocks)))


@pytest.mark.parametrize("examples", [0.0, 10.0])
def test_equal_numbers_of_examples_give_the_bits_of_no_weights(examples: float) -> None:
    """The weights of a sum are numbers of examples, because those of other contributions are not known yet."""
    _, engine = engine_of(params_of(np.float32))
    given = contributions_of(engine, 5)
    want = engine.mean(given, weights=[1.0] * 5, divisor=5)
    tree = Tree(engine.add)
    for rank, blocks in enumerate(given):
        tree.put(rank, engine.nodes(blocks, examples))
    got = engine.finish(tree.root(), 5 * examples)
    assert [np.asarray(block).tobytes() for block in got] == [np.asarray(block).tobytes() for block in want]


def test_another_number_of_contributions_compiles_nothing() -> None:
    rule, engine = engine_of({"b": np.zeros(5, np.float32)})
    engine.compile((FUSED, FUSED + 1), weighted=True, clipped=True)

    def executables() -> int:
        return sum(function._cache_size() for function in kernels_of(rule)._jitted.values())

    before = executables()
    for count in (FUSED, FUSED + 1, 2 * FUSED, 39):
        given = contributions_of(engine, count)
        engine.apply(given, weights=[1.0 + rank for rank in range(count)], divisor=count, clip_factor=0.5)
        engine.apply(given, divisor=count)
        engine.sum_of_squares(given, divisor=count)
    engine.ready(0)
    assert executables() == before


def test_the_state_of_many_is_that_of_few() -> None:
    """The sums keep the rules of `state_mean`: equal values stay, infinities too, integers are those of the first."""
    rng = np.random.default_rng(3)
    rule, _ = engine_of(params_of(np.float32))
    for count in (FUSED + 1, 2 * FUSED):
        values = [rng.normal(size=64).astype(np.float32) for _ in range(count)]
        for value in values:
            value[:16] = 0.1
            value[16:32] = np.inf
        values[1][20:24] = 7.0
        how = Mean.of([1.0 + rank for rank in range(count)], count, 1.0)
        scalars = how.state_scalars(np.dtype(np.float32))
        got = np.asarray(kernels_of(rule).folded(list(map(jax.numpy.asarray, values)), how.weights, 1, trained=False))
        want = np.asarray(state_mean([jax.numpy.asarray(value) for value in values], how.form, scalars))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
        assert got[:16].tobytes() == values[0][:16].tobytes()
        whole = [np.full(4, rank, np.int32) for rank in range(count)]
        got = kernels_of(rule).folded(list(map(jax.numpy.asarray, whole)), how.weights, 1, trained=False)
        assert np.asarray(got).tolist() == [0] * 4


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_t4_sums_made_in_any_order_of_arrival_give_the_same_bits(dtype, weighted: bool) -> None:
    """Groups of four ranks are added up when they are complete, the rest at the decision."""
    _, engine = engine_of(params_of(dtype))
    for seed, count in enumerate((5, 8, 17, 23)):
        given = contributions_of(engine, count, seed)
        weights = [1.0 + rank % 3 for rank in range(count)] if weighted else [1.0] * count
        divisor = sum(weights)
        want = engine.mean(given, weights=weights, divisor=divisor)
        tree = Tree(engine.add)
        groups = list(range(count // FUSED))
        np.random.default_rng(seed).shuffle(groups)
        leaves = [engine.nodes(blocks, weight) for blocks, weight in zip(given, weights, strict=True)]
        for group in groups:
            tree.put(group, engine.add(leaves[FUSED * group : FUSED * (group + 1)]), level=1)
        for rank in range(count // FUSED * FUSED, count):
            tree.put(rank, leaves[rank])
        got = engine.finish(tree.root(), divisor)
        assert [np.asarray(block).tobytes() for block in got] == [np.asarray(block).tobytes() for block in want]
