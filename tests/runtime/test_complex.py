"""Complex parameters train as their real and imaginary parts would, in one process and in a job."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import testing

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
    """The same parameters as real arrays."""
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
