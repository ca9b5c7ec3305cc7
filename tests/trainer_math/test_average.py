"""The moving average of the parameters follows the documented formula, on any number of shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from backstay import errors, train
from backstay._update._average import average_of, averaged
from backstay._update._engine import ShardEngine
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import describe


def expected(history, decay):
    """Returns the average after each update of the parameters in `history`, of which the first are the initial ones."""
    average = np.asarray(history[0], np.float64)
    for number, params in enumerate(history[1:], start=1):
        kept = min(decay, number / (number + 9))
        average = kept * average + (1 - kept) * np.asarray(params, np.float64)
    return average


@pytest.mark.parametrize("decay", [0.5, 0.999])
@pytest.mark.parametrize("init", [lambda key: {"w": jnp.arange(3.0)}, lambda key: jnp.arange(3.0)])
def test_t4_one_process_returns_the_average_of_the_documentation(decay, init) -> None:
    history = [np.arange(3.0)]
    with jax.enable_x64(True):
        result = train(
            init=init,
            loss=lambda params, batch: jnp.sum((jax.tree.leaves(params)[0] - batch) ** 2),
            batches=lambda key: np.asarray(key.step % 3, float),
            optimizer=optax.sgd(0.1, momentum=0.9),
            steps=30,
            average=decay,
        )
        params, state = jnp.arange(3.0), None
        optimizer = optax.sgd(0.1, momentum=0.9)
        state = optimizer.init(params)
        for step in range(30):
            updates, state = optimizer.update(2 * (params - step % 3), state, params)
            params = optax.apply_updates(params, updates)
            history.append(np.asarray(params))
    assert jax.tree.structure(result.average) == jax.tree.structure(result.params)
    np.testing.assert_allclose(jax.tree.leaves(result.params)[0], history[-1], rtol=1e-12)
    np.testing.assert_allclose(jax.tree.leaves(result.average)[0], expected(history, decay), rtol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "shards"), [(optax.sgd(0.1), 1), (optax.adam(0.1), 3), (optax.adafactor(0.1), 2)]
)
def test_t4_shards_hold_the_average_of_one_process(optimizer, shards: int) -> None:
    """The leaves are cut, packed or whole, of several dtypes, and one is empty."""
    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(7, 130)).astype(np.float32),
        "b": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "c": np.asarray(0.3, np.float32),
        "d": np.zeros((0, 2), np.float32),
    }
    whole = averaged(optimizer, 0.9)
    tree = describe(params)
    rule = analyse(whole, tree)
    parts = partition(tree, rule, shards, 512)
    engines = [ShardEngine(parts, shard, rule, params) for shard in range(shards)]
    assert all(engine.has_average for engine in engines)
    model = jax.tree.map(jnp.asarray, params)
    state = whole.init(model)
    for _ in range(3):
        leaves = [rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in tree.leaves]
        for engine in engines:
            engine.apply([[gather(block, leaves) for block in engine.blocks]])
        updates, state = jax.jit(whole.update)(tree.unflatten(leaves), state, model)
        model = optax.apply_updates(model, updates)
    found = [np.zeros(leaf.shape, leaf.dtype) for leaf in tree.leaves]
    for engine in engines:
        for index, block in enumerate(engine.blocks):
            scatter(block, engine.average(index), found)
    for leaf, one, other in zip(tree.leaves, found, jax.tree.leaves(average_of(state, tree)), strict=True):
        assert one.dtype == other.dtype == leaf.dtype
        tolerance = 2e-2 if leaf.dtype == ml_dtypes.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=tolerance, atol=1e-6)


def test_t10_small_changes_of_bfloat16_parameters_reach_the_average() -> None:
    """A change below the precision of bfloat16 would be lost if the average had that dtype."""
    optimizer = averaged(optax.sgd(1.0), 0.999)
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    target = {"w": jnp.full(4, 2.0, jnp.bfloat16)}

    @jax.jit
    def many(state):
        zero = jax.tree.map(jnp.zeros_like, target)
        return jax.lax.fori_loop(0, 20000, lambda _, state: optimizer.update(zero, state, target)[1], state)

    state = many(optimizer.init(params))
    assert average_of(state, describe(params))["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(state.parameter_average["w"], 2.0, rtol=1e-3)


def test_an_optimizer_without_an_average_has_none() -> None:
    tree = describe({"w": np.zeros(3, np.float32)})
    rule = analyse(optax.adam(0.1), tree)
    engine = ShardEngine(partition(tree, rule, 1), 0, rule, {"w": np.zeros(3, np.float32)})
    assert not engine.has_average
    assert average_of(optax.adam(0.1).init({"w": jnp.zeros(3)}), tree) is None


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, True, float("nan")])
def test_a_decay_outside_0_to_1_is_refused(value) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"average is .*: must be the decay"):
        train(
            init=lambda key: jnp.zeros(2),
            loss=lambda params, batch: params.sum(),
            batches=lambda key: (),
            optimizer=optax.sgd(0.1),
            steps=1,
            average=value,
        )
