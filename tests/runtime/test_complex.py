"""Complex parameters train as their real and imaginary parts would, in one process and in a job."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import testing
from backstay.errors import ConfigurationError

STEPS = 8
CASES = {
    "plain": {},
    "clipped": {"clip_norm": 0.3},
    "average": {"average": 0.5},
    "local": {"local": backstay.LocalSteps(2, optax.sgd(0.05, momentum=0.9)), "optimizer": None},
}


@pytest.fixture
def _float64():
    with jax.enable_x64(True):
        yield


def init(key):
    one, other = jax.random.normal(key, (2, 3))
    return {"w": one + 1j * other, "b": jnp.zeros(())}


def parts(key):
    """Returns the same parameters as real arrays."""
    params = init(key)
    return {"w": (params["w"].real, params["w"].imag), "b": params["b"]}


def loss(params, batch):
    error = jnp.sum(params["w"] * batch[:, :3], axis=1) + params["b"] - batch[:, 3]
    return jnp.mean(jnp.abs(error) ** 2)


def loss_of_parts(params, batch):
    return loss({"w": params["w"][0] + 1j * params["w"][1], "b": params["b"]}, batch)


def batches(key):
    one, other = key.rng.normal(size=(2, 5, 4))
    return one + 1j * other


def arguments(case: str, **more):
    return {"batches": batches, "optimizer": optax.sgd(0.05, momentum=0.9), "steps": STEPS, **CASES[case], **more}


def script():
    backstay.train(**arguments("clipped", init=init, loss=loss))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("case", list(CASES))
def test_t4_complex_parameters_train_as_their_parts(case: str) -> None:
    seen = {"params": init, "parts": parts}, {"params": loss, "parts": loss_of_parts}
    results = {
        kind: backstay.train(**arguments(case, init=seen[0][kind], loss=seen[1][kind])) for kind in ("params", "parts")
    }
    for field in ("params", "average") if case == "average" else ("params",):
        one, other = getattr(results["params"], field), getattr(results["parts"], field)
        np.testing.assert_allclose(one["w"], np.asarray(other["w"][0]) + 1j * np.asarray(other["w"][1]), rtol=1e-12)
        np.testing.assert_allclose(one["b"], other["b"], rtol=1e-12)
    first = float(loss(init(jax.random.key(0)), batches(backstay.BatchKey(0, 0, 0, 1))))
    assert results["params"].loss < first


@pytest.mark.filterwarnings("ignore:Casting from complex")  # which Python hides from a user
@pytest.mark.parametrize(
    "optimizer",
    [optax.MultiSteps(optax.sgd(0.05), 2), optax.adam(0.1, mu_dtype="float32")],
    ids=["accumulator", "moment"],
)
@pytest.mark.parametrize("place", ["optimizer", "local"])
def test_t4_an_optimizer_that_drops_imaginary_parts_is_refused(optimizer, place: str) -> None:
    more = {"optimizer": optimizer}
    if place == "local":
        more = {"optimizer": None, "local": backstay.LocalSteps(2, optimizer)}
    with pytest.raises(ConfigurationError, match="converts complex values to float32, which drops their imaginary"):
        backstay.train(**arguments("plain", init=init, loss=loss, **more))


@pytest.mark.filterwarnings("ignore:Casting from complex")  # which Python hides from a user
@pytest.mark.usefixtures("_float64")
def test_t4_gradients_that_are_accumulated_as_complex_values_train_as_their_parts() -> None:
    """The accumulator of a real parameter is complex too, and has no imaginary part to drop."""
    multi = optax.MultiSteps(optax.sgd(0.05), 2, accumulator_dtype=jnp.complex128)
    one = backstay.train(**arguments("plain", init=init, loss=loss, optimizer=multi))
    real = optax.MultiSteps(optax.sgd(0.05), 2, accumulator_dtype=jnp.float64)
    other = backstay.train(**arguments("plain", init=parts, loss=loss_of_parts, optimizer=real))
    np.testing.assert_allclose(one.params["w"], other.params["w"][0] + 1j * other.params["w"][1], rtol=1e-12)


def test_t4_an_optimizer_that_takes_the_real_part_is_not_refused() -> None:
    def update(gradients, state, params=None):
        moved = jax.tree.map(lambda leaf: -0.1 * leaf.real.astype(leaf.dtype), gradients)
        added = jax.tree.map(lambda leaf: jnp.abs(leaf) + (leaf != 0), gradients)
        return moved, jax.tree.map(jnp.add, state, added)

    def zeros(params):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)

    result = backstay.train(
        **arguments("plain", init=init, loss=loss, optimizer=optax.GradientTransformation(zeros, update))
    )
    np.testing.assert_array_equal(result.params["w"].imag, init(jax.random.key(0))["w"].imag)


def test_t4_own_gradients_are_the_conjugates_of_what_jax_computes() -> None:
    def own(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return value, jax.tree.map(jnp.conj, gradients)

    one = backstay.train(**arguments("plain", init=init, loss=loss))
    other = backstay.train(**arguments("plain", init=init, gradients=own))
    np.testing.assert_array_equal(one.params["w"], other.params["w"])


def test_t4_complex_parameters_of_a_job_are_those_of_one_process() -> None:
    job = testing.run(script, servers=2, workers=1)
    alone = backstay.train(**arguments("clipped", init=init, loss=loss))
    for name in ("w", "b"):
        np.testing.assert_allclose(job.result.params[name], alone.params[name], rtol=1e-4)
