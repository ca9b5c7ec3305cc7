"""`train(gradients=...)` and `Result.history`, in one process and in jobs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay import History, testing
from backstay.errors import ConfigurationError

STEPS = 6


def init(key):
    return {"w": jax.random.normal(key, (6, 3)), "b": jnp.zeros(3)}, {"mean": jnp.zeros(6)}


def loss(params, state, batch, key):
    kept = jnp.where(jax.random.bernoulli(key, 0.8, batch.shape), batch - state["mean"], 0)
    new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch, axis=0)}
    return jnp.mean((kept @ params["w"] + params["b"] - 1.0) ** 2), new


def own(params, state, batch, key):
    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params, state, batch, key)
    return (value, new, {"size": jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))}), gradients


def arguments(**more):
    jax.config.update("jax_enable_x64", True)
    return {
        "init": init,
        "batches": lambda key: key.rng.normal(size=(4, 6)),
        "optimizer": optax.adam(1e-2),
        "steps": STEPS,
        "has_state": True,
        "has_rng": True,
        **more,
    }


def script():
    backstay.train(**arguments(gradients=own))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def assert_same(one, other, rtol: float = 0) -> None:
    for left, right in zip(*(jax.tree.leaves((each.params, each.state)) for each in (one, other)), strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.parametrize("local", [None, backstay.LocalSteps(2, optax.sgd(1e-2))])
def test_t4_value_and_grad_of_the_loss_gives_the_same_bits_as_the_loss(local) -> None:
    settings = {"local": local} if local is None else {"local": local, "optimizer": None}
    one = backstay.train(**arguments(loss=loss, **settings))
    other = backstay.train(**arguments(gradients=jax.value_and_grad(loss, has_aux=True), **settings))
    assert_same(one, other)
    assert one.loss == other.loss


def test_t4_own_gradients_and_the_history_of_a_job_are_those_of_one_process() -> None:
    job = testing.run(script, servers=2, faults=["kill server/1 @3"], checkpoint_every=1)
    alone = backstay.train(**arguments(gradients=own))
    assert_same(job.result, alone, 1e-9)
    for history in (job.result.history, alone.history):
        assert history.steps == list(range(1, STEPS + 1))
        np.testing.assert_allclose(history.loss, alone.history.loss, rtol=1e-9)
        np.testing.assert_allclose(history.metrics["size"], alone.history.metrics["size"], rtol=1e-9)
    assert alone.history.loss[-1] == alone.loss


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradients": own, "loss": loss}, "either loss or gradients"),
        ({}, "either loss or gradients"),
        ({"gradients": 3}, "gradients is int: must be a function"),
        ({"gradients": loss}, "gradients returned, as its result, .*with has_state=True"),
        ({"gradients": lambda *of: loss(*of)[0]}, "as jax.value_and_grad returns them"),
        ({"gradients": lambda p, *of: (loss(p, *of), {"w": p["w"]})}, "the leaf b is only in one of them"),
        (
            {"gradients": lambda p, *of: (loss(p, *of), {**p, "b": jnp.zeros(4)})},
            r"gradient of b: must be float64\[3\]",
        ),
        ({"gradients": lambda p, *of: (1, p)}, "must be .scalar, new_state"),
    ],
)
def test_a_wrong_function_is_refused_with_the_reason(changes, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        backstay.train(**arguments(**changes))


@given(st.integers(1, 5_000), st.integers(0, 5_000))
def test_a_history_is_bounded_and_its_steps_depend_on_the_number_of_steps_alone(steps: int, back: int) -> None:
    """A rollback to an earlier step leaves the same points as a run without it, as far as they were kept."""
    plain, rolled = History(), History()
    for step in range(1, steps + 1):
        plain.add(step, lambda: (float(step), {"m": -float(step)}))  # noqa: B023
    for step in [*range(1, steps + 1), *range(min(back, steps) + 1, steps + 1)]:
        rolled.add(step, lambda: (float(step), {"m": -float(step)}))  # noqa: B023
    assert rolled == plain
    assert plain.steps == list(range(plain.every, steps + 1, plain.every))
    assert len(plain.steps) <= 1000
    assert plain.loss == [float(step) for step in plain.steps]
    assert plain.metrics["m"] == [-float(step) for step in plain.steps]


def test_a_metric_that_appears_later_has_nan_before() -> None:
    history = History()
    history.add(1, lambda: (1.0, {}))
    history.add(2, lambda: (2.0, {"late": 3.0}))
    history.add(3, lambda: (2.0, {}))
    assert [math.isnan(value) for value in history.metrics["late"]] == [True, False, True]
