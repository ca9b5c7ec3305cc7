"""Parameters that the optimizer provably never changes are frozen without `frozen=`, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey, LocalSteps, load, train
from backstay._script import Script
from backstay._update import analyse, enable_x64, only_trained, trace, unchanged_parameters
from backstay._update._tree import describe
from backstay.errors import CheckpointError, OptimizerError

STEPS = 6
SHAPES = {"a": (4, 3), "b": (3,), "c": (), "d": (2, 2)}
LABELS = {"a": "frozen", "b": "trained", "c": "frozen", "d": "trained"}


def tree():
    return describe({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()})


def frozen_by(optimizer):
    found = unchanged_parameters(trace(optimizer, tree()))
    return {name for name, flag in zip(SHAPES, found, strict=True) if flag}


def labelled(inner, labels=LABELS):
    return optax.multi_transform({"trained": inner, "frozen": optax.set_to_zero()}, labels)


MASK = {name: label == "frozen" for name, label in LABELS.items()}


def selecting(gradients, state, params=None):
    return jax.tree.map(lambda stays, update: jnp.where(stays, 0.0, update), MASK, gradients), state


def casting(kind, on, off):
    """Masks of another dtype, whose elements are not the numbers of the branches."""

    def update(gradients, state, params=None):
        def masked(stays, update):
            mask = jnp.full(update.shape, off if stays else on, kind)
            return jnp.where(mask.astype(bool), update, jnp.zeros_like(update))

        return jax.tree.map(masked, MASK, gradients), state

    return optax.chain(optax.scale(-0.1), optax.GradientTransformation(lambda params: (), update))


@pytest.mark.parametrize(
    ("optimizer", "frozen"),
    [
        (labelled(optax.adamw(1e-3, weight_decay=0.1)), {"a", "c"}),
        (labelled(optax.MultiSteps(optax.adam(1e-3), 3)), {"a", "c"}),
        (labelled(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)), {"a", "c"}),
        (labelled(optax.adam(1e-3), lambda params: LABELS), {"a", "c"}),
        (optax.chain(labelled(optax.clip_by_global_norm(1.0)), labelled(optax.sgd(0.1))), {"a", "c"}),
        (optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.scale(-0.1)), set()),  # NaN * 0 is not 0
        (optax.chain(optax.scale(-0.1), optax.masked(optax.set_to_zero(), MASK)), {"a", "c"}),
        (optax.chain(optax.scale(-0.1), optax.GradientTransformation(lambda params: (), selecting)), {"a", "c"}),
        (casting(np.uint8, 255, 0), {"c"}),  # JAX computes a scalar mask itself
        (casting(np.float32, 0.5, 0.0), {"c"}),
        (optax.sgd(0.1), set()),
        (optax.set_to_zero(), set()),  # nothing would train
        # The norm of all gradients, or moments of all, are used for the others or kept.
        (optax.chain(optax.clip_by_global_norm(1.0), labelled(optax.sgd(0.1))), set()),
        (optax.chain(optax.adam(1e-3), optax.masked(optax.set_to_zero(), MASK)), set()),
        (optax.apply_if_finite(labelled(optax.sgd(0.1)), 3), set()),
        # Weight decay after the zeros changes all parameters.
        (optax.chain(labelled(optax.sgd(0.1)), optax.add_decayed_weights(-0.1)), set()),
    ],
)
def test_what_provably_stays_is_found_and_nothing_else(optimizer, frozen):
    assert frozen_by(optimizer) == frozen


INNER = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


@given(
    st.fixed_dictionaries(dict.fromkeys(SHAPES, st.sampled_from(["trained", "frozen", *INNER]))),
    st.sampled_from(sorted(INNER)),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=8)
def test_the_rest_is_updated_as_beside_what_stays(labels, inner, seed):
    """Two updates of the whole tree and of the rest alone, bit for bit."""
    optimizer = optax.multi_transform({**INNER, "trained": INNER[inner], "frozen": optax.set_to_zero()}, labels)
    spec = tree()
    found = unchanged_parameters(trace(optimizer, spec))
    wanted = [labels[name] == "frozen" for name in SHAPES]
    assert list(found) == (wanted if 0 < sum(wanted) < len(wanted) else [False] * len(wanted))
    if not any(found):
        return
    apart = describe(spec.shapes(), frozen=dict(zip(SHAPES, found, strict=True))).frozen
    rng = np.random.default_rng(seed)
    params, *gradients = (
        {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()} for _ in range(3)
    )
    rest = only_trained(optimizer, apart)
    whole, part, kept = params, apart.rest(params), apart.values(params)
    states = optimizer.init(whole), rest.init(part)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, states[0], whole)
        updates_of_part, state_of_part = rest.update(apart.rest(gradient), states[1], part)
        whole, part, states = (
            optax.apply_updates(whole, updates),
            optax.apply_updates(part, updates_of_part),
            (state, state_of_part),
        )
    expected, found = (whole, states[0]), (apart.combine(part, kept), states[1])
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_state_of_the_rest_has_nothing_of_what_stays():
    optimizer = labelled(optax.adam(1e-2))
    apart = describe(tree().shapes(), frozen=MASK)
    rule = analyse(only_trained(optimizer, apart.frozen), apart)
    assert sum(np.prod(state.shape, dtype=int) for state in rule.states if state.shape) == 2 * (3 + 4)
    assert {leaf.path for leaf in rule.tree.leaves} == {"b", "d"}
    assert all(group.elementwise for group in rule.groups)


def init(key):
    first, second = jax.random.split(key)
    return {"base": jax.random.normal(first, (6, 6)), "head": jax.random.normal(second, (6, 3)), "bias": jnp.zeros(3)}


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["base"]) @ params["head"] + params["bias"] - y) ** 2)


def batches(key):
    return key.rng.normal(size=(8, 6)), key.rng.normal(size=(8, 3))


OPTIMIZER = labelled(optax.adam(1e-2), {"base": "frozen", "head": "trained", "bias": "trained"})
ARGUMENTS = {"init": init, "loss": loss, "batches": batches, "optimizer": OPTIMIZER, "steps": STEPS}


def plain():
    params = jax.tree.map(jnp.asarray, init(jax.random.key(0)))
    held = OPTIMIZER.init(params)
    for step in range(STEPS):
        gradient = jax.grad(loss)(params, batches(BatchKey(step, 0, 1, 0)))
        updates, held = OPTIMIZER.update(gradient, held, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("more", [{}, {"average": 0.9}, {"frozen": False}, {"gradients": True}])
def test_t4_a_script_gets_what_a_plain_loop_gives(more, capsys):
    arguments = {**ARGUMENTS, **more}
    if "gradients" in more:
        arguments |= {"loss": None, "gradients": jax.value_and_grad(loss)}
    with enable_x64():
        found, expected = train(**arguments), plain()
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    said = "the optimizer never changes 1 of 3 parameters" in capsys.readouterr().err
    assert said == ("frozen" not in more)


def test_a_checkpoint_has_what_trains(tmp_path):
    result = train(**ARGUMENTS, checkpoint=tmp_path / "ckpt")
    loaded = load(tmp_path / "ckpt")
    assert loaded.params["base"] is None
    whole = load(tmp_path / "ckpt", base=init(jax.random.key(0)))
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_with_all_parameters_is_refused_with_the_cure(tmp_path):
    """A version that froze nothing by itself has stored it."""
    train(**ARGUMENTS, checkpoint=tmp_path, frozen=False)
    more = {**ARGUMENTS, "steps": 8, "checkpoint": tmp_path}
    with pytest.raises(CheckpointError, match=r"base was not frozen beside it, and is frozen now\. .*frozen=False"):
        train(**more)
    assert train(**more, frozen=np.False_).step == 8


def test_a_checkpoint_without_what_trains_now_is_refused_with_the_cure(tmp_path):
    train(**ARGUMENTS, checkpoint=tmp_path / "old")
    more = {**ARGUMENTS, "steps": 8, "optimizer": optax.adam(1e-2)}
    with pytest.raises(CheckpointError, match=r"base was frozen beside it, and is not frozen now\. .*start_from"):
        train(**more, checkpoint=tmp_path / "old")
    assert train(**more, start_from=tmp_path / "old").step == 8


@pytest.mark.parametrize("count", [3, 600])
def test_a_long_program_is_read(count):
    """A chain of many operations, and one in which the same zeros are used again."""

    def update(gradients, state, params=None):
        total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients) * count)
        zero = jnp.zeros(())
        for _ in range(count):
            zero = zero + zero
        return jax.tree.map(lambda stays, leaf: leaf * zero if stays else leaf / total, MASK, gradients), state

    assert frozen_by(optax.GradientTransformation(lambda params: (), update)) == set()


def test_a_norm_of_what_trains_alone_needs_no_second_server():
    optimizer = labelled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    apart = describe(tree().shapes(), frozen=MASK)
    analyse(only_trained(optimizer, apart.frozen), apart).check(2)
    with pytest.raises(OptimizerError):
        analyse(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), tree()).check(2)


def test_what_is_not_proven_is_not_frozen():
    def trained_of(**more):
        return {leaf.path for leaf in Script(**{**ARGUMENTS, **more}).beginning.tree.leaves}

    everything = {"base", "head", "bias"}
    assert trained_of() == {"head", "bias"}
    assert trained_of(frozen=False) == everything
    assert trained_of(frozen=lambda name: name == "bias") == {"base", "head"}
    assert trained_of(local=LocalSteps(2, OPTIMIZER)) == everything
    assert trained_of(optimizer=optax.contrib.reduce_on_plateau()) == everything  # cannot be traced
