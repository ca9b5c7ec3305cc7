"""Model state and random keys work in the plain loop, on shards, and in messages (T4, T7)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey
from backstay._compute._gradient import GradientFn
from backstay._update import Objective, array_specs
from backstay._update._clip import clip_factor
from backstay._update._engine import ShardEngine
from backstay._update._engine._kernels import Mean, enable_x64, state_mean
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import describe
from backstay._update._untrained import ZeroLeaves
from backstay.errors import ConfigurationError, JobFailed, OptimizerError, TreeError
from backstay.testing import train_local

WORLD = 3


def init(key):
    params = {"w": jax.random.normal(key, (40, 3)), "scale": jnp.ones(40)}
    state = {
        "mean": jnp.zeros(40),
        "low": jnp.full(40, jnp.inf),
        "count": jnp.int32(0),
        "seen": jnp.zeros(3, bool),
        "none": None,
    }
    return params, state


def loss(params, state, batch, key):
    """Batch normalization with dropout; a minimum, a counter and flags besides."""
    x, y = batch
    x = x + 0 * params["scale"][0]
    mean = jnp.mean(x, axis=0)
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    out = jnp.where(keep, (x - mean) * params["scale"], 0) @ params["w"]
    new = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "low": jnp.minimum(state["low"], jnp.min(x, axis=0)),
        "count": state["count"] + jnp.int32(x.shape[0]) + jnp.int32(x[0, 0] > 0),
        "seen": state["seen"] | (jnp.max(y, axis=0) > 1.5),
        "none": None,
    }
    return jnp.mean((out - y) ** 2), new, {"kept": jnp.mean(keep.astype(jnp.float32))}


def batches(key):
    return key.rng.normal(size=(8, 40)), key.rng.normal(size=(8, 3))


def plain(steps, optimizer, seed, clip_norm=None):
    """Returns the loop written out, which averages gradients and states of all ranks in order of rank."""
    params, state = jax.tree.map(jnp.asarray, init(jax.random.key(seed)))
    chain = optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    held = chain.init(params)
    gradient = jax.jit(jax.value_and_grad(lambda *arguments: loss(*arguments)[:2], has_aux=True))
    for step in range(steps):
        keys = [BatchKey(step, rank, WORLD, seed) for rank in range(WORLD)]
        parts = [gradient(params, state, batches(key), key.key) for key in keys]
        mean = jax.tree.map(lambda a, b, c: ((a + b) + c) / 3, *(grads for _, grads in parts))
        news = [new for (_, new), _ in parts]
        state = {
            "mean": ((news[0]["mean"] + news[1]["mean"]) + news[2]["mean"]) / 3,
            "low": ((news[0]["low"] + news[1]["low"]) + news[2]["low"]) / 3,
            "count": news[0]["count"],
            "seen": news[0]["seen"],
            "none": None,
        }
        updates, held = chain.update(mean, held, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_t4_the_plain_loop_averages_the_states_of_all_ranks(clip_norm):
    with enable_x64():
        want = plain(20, optax.adam(1e-2), 3, clip_norm)
        got = train_local(
            init,
            loss,
            batches,
            optax.adam(1e-2),
            20,
            has_state=True,
            has_rng=True,
            seed=3,
            clip_norm=clip_norm,
            world=WORLD,
            evaluate=lambda params, state: {"count": state["count"], "w": params["w"][0, 0]},
        )
        assert_close((got.params, got.state), want)
        assert got.metrics == {"count": int(want[1]["count"]), "w": pytest.approx(float(want[0]["w"][0, 0]), rel=1e-9)}


def test_t4_shards_follow_the_plain_loop_with_state_over_a_checkpoint_of_other_shards():
    """Clipped; through a mean that a standby gets; half way through, three shards become four."""
    optimizer, clip_norm = optax.adamw(1e-2), 0.3
    with enable_x64():
        want = plain(50, optimizer, 5, clip_norm)
        model = init(jax.random.key(5))
        tree = describe(model, has_state=True)
        rule = analyse(optimizer, tree)
        parts = partition(tree, rule, 3, 128)
        engines = [ShardEngine(parts, shard, rule, model) for shard in range(3)]
        for engine in engines:
            engine.compile((WORLD,), clipped=True)
        gradient_of = GradientFn(Objective(loss, tree, has_rng=True, seed=5))
        leaves = [np.array(leaf, spec.dtype) for leaf, spec in zip(jax.tree.leaves(model), tree.leaves, strict=True)]
        for step in range(50):
            if step == 25:
                engines, parts = resharded(engines, rule, tree, 4)
            hosts = []
            for rank in range(WORLD):
                key = BatchKey(step, rank, WORLD, 5)
                made = gradient_of(tree.unflatten(leaves), batches(key), (step, rank))
                assert made.finite  # though `low` begins at infinity
                hosts.append(made.host())
            blocks = [[[gather(block, host) for block in engine.blocks] for host in hosts] for engine in engines]
            if step % 2:
                blocks = [
                    [engine.mean(own, weights=[1.0] * 3, divisor=3)]
                    for engine, own in zip(engines, blocks, strict=True)
                ]
                blocks = [[[np.asarray(block) for block in own[0]]] for own in blocks]
            divisor = 1 if step % 2 else 3
            pairs = list(zip(engines, blocks, strict=True))
            factor = clip_factor(clip_norm, sum(engine.sum_of_squares(own, None, divisor) for engine, own in pairs))
            for engine, own in pairs:
                engine.apply(own, divisor=divisor, clip_factor=factor)
                for index, block in enumerate(engine.blocks):
                    scatter(block, engine.block(index), leaves)
        assert_close(tree.unflatten(leaves), want)


def resharded(engines, rule, tree, shards):
    specs = {spec.key: np.zeros(spec.size, spec.dtype) for spec in array_specs(rule)}
    assert {"state/mean", "state/count", "state/seen", "params/w"} <= specs.keys()
    for engine in engines:
        for entry in engine.snapshot().entries:
            specs[entry.key][entry.start : entry.stop] = entry.value
    parts = partition(tree, rule, shards, 128)
    read = lambda key, start, stop: specs[key][start:stop].copy()  # noqa: E731
    return [ShardEngine.restore(parts, shard, rule, read, engines[0].version) for shard in range(shards)], parts


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([np.float32, np.float16, np.int32, np.bool_, np.complex64]),
    st.lists(st.floats(0, 4, width=16), min_size=1, max_size=4),
    st.data(),
)
def test_the_new_state_is_the_weighted_mean_for_any_divisor_and_clip_factor(dtype, weights, data):
    values = [np.asarray([data.draw(st.integers(-9, 9)), 1]).astype(dtype) for _ in weights]
    how = Mean.of(weights, data.draw(st.integers(1, 9)), 0.5)
    got = np.asarray(state_mean([jnp.asarray(v) for v in values], how.form, how.state_scalars(np.dtype(dtype))))
    assert got.dtype == dtype
    if not np.issubdtype(dtype, np.inexact):
        assert np.array_equal(got, values[0])
        return
    used = weights if sum(weights) else [1.0] * len(weights)
    wide = np.complex128 if dtype is np.complex64 else np.float64
    want = sum(w * v.astype(wide) for w, v in zip(used, values, strict=True)) / sum(used)
    np.testing.assert_allclose(got, want, rtol=2e-3 if dtype is np.float16 else 1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.floats(width=32, allow_nan=False), st.lists(st.floats(0.1, 9), min_size=2, max_size=9))
def test_what_is_equal_in_all_contributions_keeps_its_bits(value, weights):
    how = Mean.of(weights, 1, 1.0)
    values = [jnp.asarray([value], jnp.float32)] * len(weights)
    got = np.asarray(state_mean(values, how.form, how.state_scalars(np.dtype(np.float32))))
    assert got.tobytes() == np.asarray(values[0]).tobytes()


def test_the_new_state_is_never_the_memory_of_a_contribution():
    """Staging memory is used again for the next contribution."""
    model = {"w": np.zeros(3, np.float32)}, {"s": np.zeros(64, np.float32), "n": np.zeros(64, np.int32)}
    tree = describe(model, has_state=True)
    rule = analyse(optax.sgd(0.1), tree)
    engine = ShardEngine(partition(tree, rule, 1), 0, rule, model)
    staging = [aligned(block.size, block.dtype) for block in engine.blocks]
    for value in (5, 6):
        for memory in staging:
            memory[:] = value
        engine.apply([staging])
        for index in range(len(staging)):
            engine.ready(index)
        for memory in staging:
            memory[:] = 99
        held = [np.array(engine.block(index)) for index, block in enumerate(engine.blocks) if not block.trained]
        assert all((block == value).all() for block in held)
        assert len(held) == 2


def aligned(size, dtype):
    memory = np.zeros(size * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size * np.dtype(dtype).itemsize].view(dtype)


def test_a_block_holds_parameters_or_state_never_both_and_only_parameters_are_examined():
    tree = describe(init(jax.random.key(0)), has_state=True)
    for shards in (1, 2, 5):
        parts = partition(tree, analyse(optax.adam(1e-3), tree), shards)
        blocks = [block for layout in parts.shards for block in layout.blocks]
        assert all({tree.leaves[piece.leaf].trained for piece in b.pieces} == {b.trained} for b in blocks)
        assert {b.trained for b in blocks} == {True, False}
    asked = []
    ZeroLeaves(tree).examine(0, lambda leaves: asked.append(leaves) or {leaf: [np.ones(1)] for leaf in leaves})
    assert asked == [[0, 1]]


def test_the_digests_cover_the_state():
    params, state = init(jax.random.key(0))

    def digests(model, **how):
        tree = describe(model, **how)
        parts = partition(tree, analyse(optax.adam(1e-3), tree), 2)
        return parts.digest, parts.structure_digest

    known = digests((params, state), has_state=True)
    others = [
        digests(params),
        digests((params, {}), has_state=True),
        digests((params, state | {"mean": jnp.zeros(41)}), has_state=True),
        digests((params, state | {"count": 0.0}), has_state=True),
        digests((params, {"other" if name == "mean" else name: leaf for name, leaf in state.items()}), has_state=True),
    ]
    assert all(known[0] != one and known[1] != other for one, other in others)
    assert digests((params, state), has_state=True) == known


def test_a_skipped_update_leaves_the_state_and_nan_in_a_state_skips():
    def bad(params, state, batch):
        new = {"s": state["s"] + jnp.where(batch == 2, jnp.nan, 1.0)}
        return params["w"] ** 2, new

    model = {"w": jnp.ones(())}, {"s": jnp.zeros(())}
    seen = []
    result = train_local(
        lambda key: model,
        bad,
        lambda key: np.float32(key.step),
        optax.sgd(0.1),
        5,
        has_state=True,
        on_update=lambda update: seen.append(update.applied),
    )
    assert seen == [True, True, False, True, True]
    assert float(result.state["s"]) == 4.0
    with pytest.raises(JobFailed, match="NonFinite"):
        train_local(lambda key: model, bad, lambda key: np.float32(2), optax.sgd(0.1), 5, has_state=True)


def test_the_key_is_that_of_the_batch_and_no_other_has_it():
    def keyed(params, batch, key):
        return jnp.sum(params * jax.random.normal(key, (2,)))

    tree = describe(np.zeros(2, np.float32))
    function = GradientFn(Objective(keyed, tree, has_rng=True, seed=7))
    drawn = {}
    for step in range(3):
        for rank in range(3):
            made = function(np.zeros(2, np.float32), np.zeros(1), (step, rank))
            want = jax.random.normal(BatchKey(step, rank, 4, 7).key, (2,))
            np.testing.assert_allclose(made.host()[0], want, rtol=1e-6)
            drawn[step, rank] = made.host()[0].tobytes()
    assert len(set(drawn.values())) == 9
    assert function._function._cache_size() == 1  # nothing is compiled again for another step, rank or world


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda p, s: p["w"], r"loss returned .*: with has_state=True it must be \(scalar, new_state\), or"),
        (lambda p, s: (p["w"], s, 3), r"loss returned a tuple of array .*int|loss returned a tuple"),
        (lambda p, s: (p["w"], {"a": s["a"]}), "new state of another structure than init's: the leaf b is only in one"),
        (lambda p, s: (p["w"], s | {"a": jnp.zeros(3)}), r"float32\[3\] as the new state of a: must be float32\[2\]"),
        (lambda p, s: (p["w"], s | {"a": s["a"].astype(jnp.bfloat16)}), r"bfloat16\[2\] as the new state of a"),
        (lambda p, s: (p["w"], s | {"b": "x"}), "loss returned str as the new state of b"),
        (lambda p, s: (s["a"], s), "must be a floating-point scalar"),
    ],
)
def test_a_wrong_new_state_is_refused_with_its_first_batch(returned, message):
    model = {"w": np.float32(1)}, {"a": np.zeros(2, np.float32), "b": 3}
    function = GradientFn(Objective(lambda p, s, batch: returned(p, s), describe(model, has_state=True)))
    with pytest.raises(ConfigurationError, match=message):
        function(model, np.zeros(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"w": np.float32(1)}, r"init returned dict: with has_state=True it must return the pair \(params, state\)"),
        ((1.0, 2.0, 3.0), "init returned a tuple of 3"),
        ((1.0, {"key": jax.random.key(0)}), "model state: leaf key is a typed random key, .* has_rng=True"),
        ((1.0, {"f": print}), "model state: leaf f is of type builtin_function_or_method"),
        (({"n": 3}, {}), r"parameters: leaf n is int32, .* move it to the model state \(has_state=True\)"),
    ],
)
def test_a_model_that_is_none_is_refused(model, message):
    with pytest.raises(TreeError, match=message):
        describe(model, has_state=True)


def test_leaves_of_the_state_may_be_one_array_and_an_optimizer_over_all_parameters_is_still_refused():
    zero = jnp.zeros(2)
    tree = describe(({"a": jnp.ones(2), "b": jnp.ones(2)}, {"x": zero, "y": zero}), has_state=True)
    assert [leaf.name for leaf in tree.leaves] == ["a", "b", "state/x", "state/y"]
    assert tree.parameters.leaves == tree.leaves[:2]
    assert tree.state is not None
    assert tree.state.unflatten([1, 2]) == {"x": 1, "y": 2}
    with pytest.raises(OptimizerError, match="clip_norm="):
        partition(tree, analyse(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), tree), 2)
