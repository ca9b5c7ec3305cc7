"""T4: misleading transformations. A leaf that is cut is elementwise, any other stays whole, and both are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._update import array_specs
from backstay._update._engine import ShardEngine
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import describe
from backstay.errors import OptimizerError

RNG = np.random.default_rng(0)
PARAMS = {
    "a": RNG.normal(size=(8, 24)).astype(np.float32),
    "b": RNG.normal(size=(24, 8)).astype(np.float32),
    "c": RNG.normal(size=(48,)).astype(np.float32),
    "s": np.float32(0.5),
}
WEIGHTS = {name: RNG.normal(size=np.shape(leaf)).astype(np.float32) for name, leaf in PARAMS.items()}

SCALE = jnp.float32(0.3)


def each(update, state=None):
    """Returns an optimizer from a function of (gradient, param) of one leaf."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState() if state is None else state(params),
        lambda grads, state, params: (jax.tree.map(update, grads, params), state),
    )


def counted(update):
    """Returns an optimizer from a function of (count, gradient) of one leaf."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32),
        lambda grads, count, params: (jax.tree.map(lambda g: update(count, g), grads), count + 1),
    )


def with_state(start, update):
    """Returns an optimizer from a function of (gradient, state) of one leaf to (update, state)."""

    def step(grads, states, params):
        pairs = jax.tree.map(update, grads, states)
        outer = jax.tree.structure(grads)
        return jax.tree.transpose(outer, jax.tree.structure((0, 0)), pairs)

    return optax.GradientTransformation(lambda params: jax.tree.map(start, params), step)


def swap_a_and_c(grads, state, params):
    del params
    moved = dict(grads)
    moved["a"] = grads["a"] * jnp.sum(grads["c"])
    return moved, state


def late_norm(grads, state, params):
    """Uses the global norm of the step before: leaves meet only through the state."""
    del params
    return jax.tree.map(lambda g: g / (1 + state), grads), optax.tree.norm(grads)


def first_moment_of_b_only(grads, state, params):
    del params
    return {**grads, "b": grads["b"] + state}, 0.9 * state + grads["b"]


def no_state(params):
    del params
    return optax.EmptyState()


@jax.custom_jvp
def cube(x):
    return x * x * x


cube.defjvp(lambda primals, tangents: (cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]))

CUT, WHOLE = {"a", "b", "c", "s"}, {"s"}
CASES = {
    # elementwise, in ways that are not plain arithmetic
    "custom-jvp": (each(lambda g, p: cube(g)), CUT),
    "nested-jit": (each(jax.jit(lambda g, p: jnp.where(p > 0, g, jax.nn.softplus(g)))), CUT),
    "checkpoint": (each(jax.checkpoint(lambda g, p: jnp.sin(g) * p)), CUT),
    "there-and-back": (each(lambda g, p: g.reshape(-1).reshape(p.shape) + jnp.squeeze(jnp.expand_dims(p, 0), 0)), CUT),
    "reshaped": (each(lambda g, p: (g.reshape(-1) * 2).reshape(p.shape)), CUT),
    "uniform-array": (each(lambda g, p: g * jnp.linalg.norm(jnp.ones((3, 3)))), CUT),
    "captured-scalar": (each(lambda g, p: g * SCALE), CUT),
    "by-shape": (each(lambda g, p: g / p.size if p.ndim > 1 else g * 2), CUT),
    "cond-on-count": (counted(lambda n, g: jax.lax.cond(n % 2 == 0, lambda x: 2 * x, jnp.tanh, g)), CUT),
    "switch-on-count": (
        counted(lambda n, g: jax.lax.switch(n, [lambda x: x, lambda x: -x, lambda x: x * x], g)),
        CUT,
    ),
    "integer-state": (
        with_state(lambda p: jnp.zeros(p.shape, jnp.int32), lambda g, n: (g / (1 + n), n + (g > 0))),
        CUT,
    ),
    "bool-state": (with_state(lambda p: jnp.zeros(p.shape, bool), lambda g, b: (jnp.where(b, 0, g), b | (g > 1))), CUT),
    "only-b-has-state": (optax.GradientTransformation(lambda p: jnp.zeros_like(p["b"]), first_moment_of_b_only), CUT),
    "start-kept": (
        optax.GradientTransformation(
            lambda params: params, lambda g, start, p: (jax.tree.map(lambda x, y, z: x + y - z, g, p, start), start)
        ),
        CUT,
    ),
    # not elementwise; a scalar is of one element and may be cut, which makes no difference
    "mean": (each(lambda g, p: g - jnp.mean(g)), set()),
    "sorted": (each(lambda g, p: jnp.sort(g, axis=-1) if p.ndim else g), WHOLE),
    "reversed": (each(lambda g, p: g[::-1] if p.ndim else g), WHOLE),
    "rolled": (each(lambda g, p: jnp.roll(g, 1) if p.ndim else g), WHOLE),
    "cumulative": (each(lambda g, p: jnp.cumsum(g, axis=0) if p.ndim else g), WHOLE),
    "transposed": (each(lambda g, p: (g.T.reshape(p.shape)) if p.ndim else g), {"c", "s"}),
    "position": (each(lambda g, p: g * jnp.arange(p.size).reshape(p.shape) if p.ndim else g), WHOLE),
    "captured-array": (optax.stateless(lambda g, p: jax.tree.map(jnp.multiply, g, WEIGHTS)), WHOLE),
    "first-row": (each(lambda g, p: g + g[:1] if p.ndim else g), WHOLE),
    "cond-on-itself": (each(lambda g, p: jax.lax.cond(jnp.sum(g) > 0, lambda x: x, lambda x: -x, g)), set()),
    "while": (each(lambda g, p: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5, g)), set()),
    "norm-of-count": (counted(lambda n, g: jax.lax.cond(n > 1, lambda x: x / jnp.sum(x * x), lambda x: x, g)), set()),
    "noise": (
        optax.GradientTransformation(
            lambda params: jax.random.key(0),
            lambda g, key, p: (
                jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), g),
                jax.random.split(key, 1)[0],
            ),
        ),
        WHOLE,
    ),
    "a-reads-c": (optax.GradientTransformation(no_state, swap_a_and_c), {"b", "s"}),
}


@pytest.mark.parametrize("name", CASES)
def test_t4_misleading_transformations(name):
    transformation, cut = CASES[name]
    optimizer = optax.chain(transformation, optax.scale(-0.1))
    tree = describe(PARAMS)
    names = [leaf.path for leaf in tree.leaves]
    rule = analyse(optimizer, tree)
    assert {names[group.leaves[0]] for group in rule.groups if group.elementwise} == cut
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    parts = partition(tree, rule, 3, 256)
    engines = [ShardEngine(parts, shard, rule, PARAMS) for shard in range(3)]

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(1)
    for _ in range(4):
        leaves = [rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in tree.leaves]
        params, state = step(params, state, tree.unflatten(leaves))
        for engine in engines:
            engine.apply([[gather(block, leaves) for block in engine.blocks]])
    got = [np.zeros(leaf.shape, leaf.dtype) for leaf in tree.leaves]
    for engine in engines:
        for index, block in enumerate(engine.blocks):
            scatter(block, engine.block(index), got)
    for leaf, mine, want in zip(tree.leaves, got, jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-5, err_msg=str(leaf))
    covered = {spec.key: 0 for spec in array_specs(rule)}
    for engine in engines:
        for entry in engine.snapshot().entries:
            covered[entry.key] += entry.stop - entry.start
    assert covered == {spec.key: spec.size for spec in array_specs(rule)}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.GradientTransformation(lambda params: jnp.zeros(()), late_norm),
        optax.stateless(lambda g, p: jax.tree.map(lambda x: x * jnp.sum(p["s"]), g)),
        optax.stateless(lambda g, p: jax.tree.map(lambda x: x + sum(jnp.sum(y) for y in jax.tree.leaves(g)), g)),
    ],
    ids=["through-the-state", "all-read-one", "all-read-all"],
)
def test_leaves_that_meet_anywhere_are_refused_on_two_shards(optimizer):
    rule = analyse(optimizer, describe(PARAMS))
    assert [group.leaves for group in rule.groups] == [(0, 1, 2, 3)]
    rule.check(1)
    with pytest.raises(OptimizerError, match=r"leaf \w depends on leaf \w in an update"):
        rule.check(2)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (3, "optimizer is int, not an optax.GradientTransformation"),
        (optax.stateless(lambda g, p: 1 / 0), "optimizer.update fails .* ZeroDivisionError"),
        (each(lambda g, p: g if jnp.sum(g) > 0 else -g), "optimizer.update fails .* TracerBoolConversionError"),
        (with_state(lambda p: jnp.zeros(p.shape, jnp.int8), lambda g, n: (g, n + g)), "its state a from int8"),
        (
            optax.GradientTransformation(lambda p: (jnp.zeros(()),), lambda g, s, p: (g, (s[0], s[0]))),
            "a state of another structure",
        ),
    ],
)
def test_optimizers_that_cannot_run_on_a_server(optimizer, message):
    with pytest.raises(OptimizerError, match=message):
        analyse(optimizer, describe(PARAMS))


def test_leaves_of_a_large_tree_share_programs():
    """64 leaves of 5 shapes: two programs (decayed or not) where they may be cut, else one for each shape."""
    tree = describe({f"l{i:03}": np.zeros((i % 8 + 1, 4) if i % 2 else (5,), np.float32) for i in range(64)})
    mask = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    rule = analyse(optax.adamw(1e-3, mask=mask), tree)
    assert len(rule.programs) == 2
    assert len(analyse(optax.lamb(1e-3), tree).programs) == 5
