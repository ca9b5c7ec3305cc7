"""The engine of a shard computes sums and weights, never changes memory under its reader, and makes snapshots for other
shards."""

from __future__ import annotations

import math
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._update._array_specs import STATE, array_specs
from backstay._update._clip import clip_factor
from backstay._update._codecs import Wire, coded_leaves, shard_wires
from backstay._update._engine import ShardEngine
from backstay._update._engine._kernels import enable_x64, kernels_of
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import PARAMS, describe
from backstay.errors import CheckpointError, TreeError


def make(optimizer, params, shards=1, block_bytes=512):
    tree = describe(params)
    rule = analyse(optimizer, tree)
    parts = partition(tree, rule, shards, block_bytes)
    return tree, rule, parts, [ShardEngine(parts, shard, rule, params) for shard in range(shards)]


def small(dtype=np.float32):
    rng = np.random.default_rng(1)
    return {
        "a": rng.normal(size=(7, 31)).astype(dtype),
        "b": rng.normal(size=(5,)).astype(dtype),
        "c": np.asarray(0.3, dtype),
        "d": np.zeros((0, 2), dtype),
    }


def gradients_of(tree, seed=2, scale=1.0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=leaf.shape)).astype(leaf.dtype) for leaf in tree.leaves]


def apply(engines, contributions, **how):
    for engine in engines:
        engine.apply([[gather(block, leaves) for block in engine.blocks] for leaves in contributions], **how)


def collect(tree, engines):
    leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in tree.leaves]
    for engine in engines:
        for index, block in enumerate(engine.blocks):
            scatter(block, engine.block(index), leaves)
    return leaves


def same_bits(one, other):
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def aligned(values):
    raw = np.empty(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start : start + values.nbytes].view(values.dtype)
    result[...] = values
    return result


CENTRALIZED = optax.chain(optax.centralize(), optax.sgd(1.0))  # whole leaves; of one dimension it leaves them alone


@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), CENTRALIZED], ids=["elementwise", "whole"])
def test_t4_the_sum_is_in_order_of_rank(optimizer):
    """1e8 + 1 - 1e8 is 0 in float32 in this order, and 1 in another: the order shows."""
    params = {"a": np.ones((16,), np.float32), "b": np.ones((4, 4), np.float32)}
    tree, _, _, engines = make(optimizer, params)
    before = 1.0
    for order, change in [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)]:
        apply(engines, [[np.full(leaf.shape, value, np.float32) for leaf in tree.leaves] for value in order])
        assert np.all(collect(tree, engines)[0] == np.float32(before - change))
        before -= change


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("how", [{}, {"weights": [0.5, 0.25, 1.0]}, {"clip_factor": 0.37}])
def test_the_mean_is_rounded_once(dtype, how):
    """In float32 for narrower floats, summed in order of rank; SGD with rate 1 from zero shows the mean itself.

    Divided by 4: for other divisors the compiler may multiply with the reciprocal.
    """
    tree, _, _, engines = make(optax.sgd(1.0), jax.tree.map(np.zeros_like, small(dtype)))
    contributions = [gradients_of(tree, seed) for seed in range(3)]
    apply(engines, contributions, divisor=4, **how)
    for index, leaf in enumerate(collect(tree, engines)):
        total = np.zeros(leaf.shape, np.float32)
        for weight, gradients in zip(how.get("weights", [1, 1, 1]), contributions, strict=True):
            total = total + gradients[index].astype(np.float32) * np.float32(weight)
        want = (-(total / np.float32(4)) * np.float32(how.get("clip_factor", 1))).astype(dtype)
        if "weights" not in how:
            assert leaf.tobytes() == want.tobytes()
        # The compiler may contract a product and a sum into one rounding.
        rtol = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(leaf.astype(np.float32), want.astype(np.float32), rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_nothing_clipped_or_weighted_is_bit_equal_to_not_multiplying(name):
    optimizer = getattr(optax, name)(1e-2)
    plain, explicit = make(optimizer, small(), 2), make(optimizer, small(), 2)
    for seed in range(3):
        gradients = gradients_of(plain[0], seed)
        apply(plain[3], [gradients])
        apply(explicit[3], [gradients], weights=[1.0], divisor=1, clip_factor=1.0)
    assert same_bits(collect(plain[0], plain[3]), collect(plain[0], explicit[3]))


def test_values_of_weights_divisors_and_factors_compile_nothing():
    tree, rule, _, engines = make(optax.adam(1e-2), small())
    engines[0].compile([2], weighted=True, clipped=True)
    functions = [f for key, f in kernels_of(rule)._jitted.items() if key[0] in ("stretch", "squares", "advance")]
    before = sum(function._cache_size() for function in functions)
    gradients = [gradients_of(tree, 1), gradients_of(tree, 2)]
    for step in range(1, 6):
        apply(engines, gradients, weights=[1.0, 1 / (1 + step)], divisor=2, clip_factor=1 / step)
        apply(engines, gradients, divisor=2)
        blocks = [[gather(block, leaves) for block in engines[0].blocks] for leaves in gradients]
        engines[0].sum_of_squares(blocks, [1.0, 1.0], 2)
    assert sum(function._cache_size() for function in functions) == before
    assert len(kernels_of(rule)._jitted) == len(functions)


def test_equal_blocks_share_one_executable():
    params = {f"layer{i}": np.ones((32, 32), np.float32) for i in range(6)}
    _, rule, parts, engines = make(optax.adam(1e-3), params, 1, block_bytes=1024)
    assert len(parts.shards[0].blocks) == 24
    engines[0].compile()
    (stretch,) = [function for key, function in kernels_of(rule)._jitted.items() if key[0] == "stretch"]
    assert stretch._cache_size() == 1
    _, rule, parts, engines = make(optax.lamb(1e-3), params)
    engines[0].compile()
    (whole,) = [function for key, function in kernels_of(rule)._jitted.items() if key[0] == "whole"]
    assert whole._cache_size() == 1


def test_compiling_changes_nothing():
    for optimizer, more in ((optax.adam(1e-2), True), (optax.lars(1e-2), False)):
        tree, _, _, (cold,) = make(optimizer, small())
        _, _, _, (warm,) = make(optimizer, small())
        warm.compile([1], weighted=more, clipped=more)
        assert warm.version == 0
        for engine in (cold, warm):
            apply([engine], [gradients_of(tree)])
        assert same_bits(collect(tree, [cold]), collect(tree, [warm]))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb"])
def test_t4_an_update_that_encodes_parameters_gives_the_same_bits(name):
    """T4: parameters and state are those of a standby, which encodes nothing. An encoded block is taken once."""
    tree = describe({"w": np.random.default_rng(1).normal(size=(40, 301)).astype(np.float32), "b": small()["b"]})
    rule, wire = analyse(getattr(optax, name)(1e-2), tree), Wire(parameters="BFloat16")
    coded = coded_leaves(tree, wire)
    parts = partition(tree, rule, 1, 4096, coded=coded)
    wires = shard_wires(parts, wire, coded)[0].parameters
    params = tree.unflatten([np.full(leaf.shape, 0.3, leaf.dtype) for leaf in tree.leaves])
    plain, encoding = (ShardEngine(parts, 0, rule, params) for _ in range(2))
    encoding.compile((2,), parameters=wires)
    for seed in range(3):
        for engine in (plain, encoding):
            apply([engine], [gradients_of(tree, seed), gradients_of(tree, seed + 1)], divisor=2)
        for index, one in enumerate(wires):
            sent = encoding.encoded(index)
            assert (sent is not None) == (one.codec is not None and name != "lamb")
            assert encoding.encoded(index) is plain.encoded(index) is None
            if sent is not None:
                wanted = one.encode(plain.block(index))
                assert same_bits(jax.tree.leaves(sent), jax.tree.leaves(wanted))
    kept, found = plain.snapshot(whole=True), encoding.snapshot(whole=True)
    assert same_bits([entry.value for entry in kept.entries], [entry.value for entry in found.entries])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_t4_clip_norm_is_exact_over_shards(shards):
    """In float64, against optax's own clipping in one process."""
    with enable_x64():
        params = small(np.float64)
        reference = optax.chain(optax.clip_by_global_norm(0.9), optax.adam(1e-2))
        tree, _, _, engines = make(optax.adam(1e-2), params, shards)
        state = reference.init(params)
        step = jax.jit(reference.update)
        factors = []
        for seed in range(6):
            gradients = gradients_of(tree, seed, scale=10.0 ** (-seed))
            updates, state = step(tree.unflatten(gradients), state, params)
            params = optax.apply_updates(params, updates)
            total = sum(
                engine.sum_of_squares([[gather(block, gradients) for block in engine.blocks]]) for engine in engines
            )
            assert total == pytest.approx(sum(float(np.sum(g**2)) for g in gradients), rel=1e-13)
            factors.append(clip_factor(0.9, total))
            apply(engines, [gradients], clip_factor=factors[-1])
        assert factors[0] < 1.0
        assert factors[-1] == 1.0
        for got, want in zip(collect(tree, engines), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9)


def test_sums_of_squares_are_in_float64_for_every_dtype():
    for dtype in (np.float32, ml_dtypes.bfloat16):
        tree, _, _, engines = make(optax.sgd(1.0), small(dtype), 1)
        contributions = [gradients_of(tree, 1), gradients_of(tree, 2)]
        blocks = [[gather(block, leaves) for block in engines[0].blocks] for leaves in contributions]
        means = [
            ((one.astype(np.float32) + other.astype(np.float32)) / np.float32(2)).astype(dtype)
            for one, other in zip(*contributions, strict=True)
        ]
        want = math.fsum(float(x) ** 2 for mean in means for x in mean.reshape(-1))
        assert engines[0].sum_of_squares(blocks, [1.0, 1.0], 2) == pytest.approx(want, rel=1e-13)


def test_t4_bit_for_bit_run_after_run():
    for optimizer in (optax.adamw(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)):
        runs = []
        for _ in range(2):
            tree, _, _, engines = make(optimizer, small(), 2)
            for seed in range(5):
                apply(engines, [gradients_of(tree, seed), gradients_of(tree, seed + 9)], divisor=2)
            runs.append(collect(tree, engines))
        assert same_bits(*runs)


def test_what_a_reader_holds_never_changes():
    """A slow reader keeps every view over three more updates while JAX updates in place beside it."""
    for optimizer in (optax.adam(1e-1), optax.lamb(1e-1)):
        tree, _, _, (engine,) = make(optimizer, small())
        held, copies = [], []
        for seed in range(4):
            views = [engine.block(index) for index in range(len(engine.blocks))]
            assert all(not view.flags.writeable and not view.flags.owndata for view in views)
            snapshot = engine.snapshot()
            held.append((views, [entry.value for entry in snapshot.entries]))
            copies.append(tuple([array.copy() for array in arrays] for arrays in held[-1]))
            apply([engine], [gradients_of(tree, seed)])
        final = [engine.block(index) for index in range(len(engine.blocks))]
        for arrays, copied in zip(held, copies, strict=True):
            assert same_bits(arrays[0], copied[0])
            assert same_bits(arrays[1], copied[1])
        assert not same_bits(final, held[-1][0])


def test_state_is_donated_not_copied():
    """Without a view of them, the parameters stay where they are."""
    params = {"a": np.ones((256, 64), np.float32)}
    _, _, _, (engine,) = make(optax.adam(1e-2), params, block_bytes=1 << 20)
    gradients = [aligned(np.ones(256 * 64, np.float32))]
    engine.apply([gradients])
    places = set()
    for _ in range(4):
        places.add(engine.block(0).ctypes.data)
        engine.apply([gradients])
    assert len(places) == 1
    assert jax.device_put(gradients[0], may_alias=True).unsafe_buffer_pointer() == gradients[0].ctypes.data


def test_gradient_memory_is_free_after_ready():
    tree, _, _, (engine,) = make(optax.sgd(0.5), {"a": np.zeros((64, 64), np.float32)}, block_bytes=1024)
    staging = [aligned(np.ones(block.size, np.float32)) for block in engine.blocks]
    for step in range(1, 20):
        engine.apply([staging])
        for index, memory in enumerate(staging):
            engine.ready(index)
            memory[...] = -7.0 if index % 2 else 1e6
        (leaf,) = collect(tree, [engine])
        assert np.all(leaf == np.float32(-0.5 * step))
        for memory in staging:
            memory[...] = 1.0


def test_an_engine_has_copied_what_it_starts_from():
    """The caller may write into its arrays afterwards. Another thread could read aligned ones too late."""
    own = aligned(np.zeros(1 << 20, np.float32)).reshape(1024, 1024)
    for number in range(20):
        own[...] = number
        _, _, _, (engine,) = make(CENTRALIZED, {"a": own}, block_bytes=1 << 23)
        own[...] = -1
        assert np.all(engine.block(0) == number)


def test_readers_in_other_threads_read_whole_versions():
    _, _, _, (engine,) = make(optax.sgd(1.0), {"a": np.zeros((64, 64), np.float32)}, block_bytes=16384)
    wrong, stop = [], threading.Event()

    def read():
        last = 0.0
        while not stop.is_set():
            view = engine.block(0)
            value = float(view[0])
            if not np.all(view == value) or value > last:
                wrong.append((last, value))
            last = value

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(200):
            apply([engine], [[np.ones((64, 64), np.float32)]])
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert engine.block(0)[0] == -200.0


def test_skipping_moves_the_version_and_nothing_else():
    _, _, _, (engine,) = make(optax.adam(1e-2), small())
    before = [entry.value.copy() for entry in engine.snapshot().entries]
    engine.skip()
    assert engine.version == engine.snapshot().version == 1
    assert same_bits(before, [entry.value for entry in engine.snapshot().entries])


def pool(specs, engines):
    """Returns the content of a checkpoint of all shards, with every element once."""
    arrays = {spec.key: np.zeros(spec.size, spec.dtype) for spec in specs}
    counts = {spec.key: np.zeros(spec.size, int) for spec in specs}
    for engine in engines:
        for entry in engine.snapshot().entries:
            arrays[entry.key][entry.start : entry.stop] = entry.value
            counts[entry.key][entry.start : entry.stop] += 1
    assert all((count == 1).all() for count in counts.values())
    return arrays


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "noisy": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(1)),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_t7_a_snapshot_restores_into_another_number_of_shards(name):
    optimizer = OPTIMIZERS[name]()
    tree, rule, _, engines = make(optimizer, small(), 3)
    for seed in range(3):
        apply(engines, [gradients_of(tree, seed)])
    specs = array_specs(rule)
    arrays = pool(specs, engines)
    assert {key.split("/")[0] + "/" for key in arrays} <= {PARAMS, STATE}

    def read(key, start, stop):
        return arrays[key][start:stop]

    parts = partition(tree, rule, 2, block_bytes=256)
    restored = [ShardEngine.restore(parts, shard, rule, read, version=3) for shard in range(2)]
    assert [engine.version for engine in restored] == [3, 3]
    again = pool(specs, restored)
    assert all(again[key].tobytes() == arrays[key].tobytes() for key in arrays)
    for group in (engines, restored):
        for seed in range(3, 6):
            apply(group, [gradients_of(tree, seed)])
    for one, other in zip(collect(tree, engines), collect(tree, restored), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "lamb", "schedule free", "centralized"])
def test_a_shard_begins_with_the_leaves_that_it_needs(name, shards):
    """It has no memory for the others."""
    more = {
        "lamb": lambda: optax.lamb(1e-2),
        "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),  # its state begins with the parameters
        "centralized": lambda: CENTRALIZED,
    }
    params = small()
    tree, rule, parts, engines = make((OPTIMIZERS | more)[name](), params, shards)
    wanted = pool(array_specs(rule), engines)
    leaves, held = jax.tree.leaves(params), []
    for shard in range(shards):
        needs = ShardEngine.needs(parts, shard, rule)
        some = [
            leaf if index in needs else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(leaves)
        ]
        held.append(ShardEngine(parts, shard, rule, tree.unflatten(some)))
    found = pool(array_specs(rule), held)
    assert {key: value.tobytes() for key, value in found.items()} == {
        key: value.tobytes() for key, value in wanted.items()
    }
    if shards == 3 and name in ("adamw", "lamb"):
        assert any(len(ShardEngine.needs(parts, shard, rule)) < len(leaves) for shard in range(shards))


def test_a_checkpoint_of_another_dtype_or_size_is_refused():
    _, rule, parts, _ = make(optax.adam(1e-2), small())
    with pytest.raises(CheckpointError, match=r"array params/a, elements 0:128, is float64\[128\]: must be float32"):
        ShardEngine.restore(parts, 0, rule, lambda key, start, stop: np.zeros(stop - start), 0)
    with pytest.raises(CheckpointError, match=r"is float32\[3\]: must be float32\[128\]"):
        ShardEngine.restore(parts, 0, rule, lambda key, start, stop: np.zeros(3, np.float32), 0)


def test_wrong_gradients_and_parameters_are_refused_before_anything_is_changed():
    tree, rule, parts, (engine,) = make(optax.adam(1e-2), small())
    good = [gather(block, gradients_of(tree)) for block in engine.blocks]
    for bad, message in [
        ([good[:-1]], r"contribution 0 has 1 blocks: shard 0 has 2"),
        ([good, [good[0], good[1].astype(np.float64)]], r"contribution 1, block 1 is float64\[95\]: must be float32"),
        ([[good[0], good[1][:-1]]], r"block 1 is float32\[94\]: must be float32\[95\]"),
        ([], r"weights is empty: a mean needs at least one gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.apply(bad)
    with pytest.raises(ValueError, match=r"1 gradients and 2 weights"):
        engine.apply([good], weights=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"clip_factor is nan"):
        engine.apply([good], clip_factor=math.nan)
    with pytest.raises(ValueError, match=r"divisor is 0"):
        engine.apply([good], divisor=0)
    assert engine.version == 0
    with pytest.raises(TreeError, match=r"leaf a is a float32\[7,31\] here and a float32\[7,30\] in the other tree"):
        ShardEngine(parts, 0, rule, {**small(), "a": np.zeros((7, 30), np.float32)})


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "bfloat16", "float16"])),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_any_tree_any_shards(shapes, shards):
    params = {f"l{i}": np.full(shape, 0.5, jnp.dtype(dtype)) for i, (shape, dtype) in enumerate(shapes)}
    tree, _, _, engines = make(optax.sgd(0.25, momentum=0.5), params, shards, block_bytes=128)
    apply(engines, [[np.ones(leaf.shape, leaf.dtype) for leaf in tree.leaves]] * 2, divisor=2)
    for leaf, got in zip(tree.leaves, collect(tree, engines), strict=True):
        assert got.tobytes() == np.full(leaf.shape, 0.25, leaf.dtype).tobytes()
