"""The moving average of the parameters in jobs of real processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import testing
from backstay._process import Environment
from backstay._roles._stored_result import restored
from backstay._script import Script, ScriptPlan
from backstay._update import describe
from backstay_spec.runtime import Trained

STEPS = 8


def script():
    backstay.train(**arguments())


def arguments(**more):
    jax.config.update("jax_enable_x64", True)
    return {
        "init": lambda key: {
            # `Wire` encodes only float32 leaves of at least `SMALL` elements.
            "dense": {"kernel": jax.random.normal(key, (40, 120), jnp.float32), "bias": jnp.zeros(120)},
            "out": jnp.ones((120, 2)),
        },
        "loss": loss,
        "batches": lambda key: key.rng.normal(size=(4, 40)),
        "optimizer": optax.adam(1e-2),
        "steps": STEPS,
        "average": 0.9,
        **more,
    }


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["dense"]["kernel"] + params["dense"]["bias"])
    return jnp.mean((hidden @ params["out"] - 1.0) ** 2)


def fragments():
    backstay.train(**arguments(local=backstay.LocalSteps(2, optax.sgd(1e-2), fragments=2), optimizer=optax.sgd(0.7)))


def assert_close(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)


def test_t4_the_average_of_a_job_is_that_of_one_process_though_servers_and_workers_die(tmp_path: Path) -> None:
    """T3, T4, T6, T7: over two shards with standbys; a server dies, and a worker that has the last version. Its
    replacement reads the average from the last checkpoint."""
    job = testing.run(
        script,
        servers=2,
        standbys=1,
        checkpoint_every=3,
        folder=tmp_path,
        faults=["kill server/1 @4"],
        wire={"parameters": "BFloat16"},
    )
    with jax.enable_x64(True):
        # The same rounding of the parameters that workers get.
        alone = backstay.train(**arguments(wire=backstay.Wire(parameters="BFloat16")))
    assert_close(job.params, alone.params)
    assert_close(job.result.average, alone.average)
    assert np.abs(alone.average["dense"]["kernel"] - alone.params["dense"]["kernel"]).max() > 1e-4
    stored = backstay.load(str(tmp_path / "checkpoints"))
    assert stored.step == STEPS
    assert_close(stored.average, alone.average)


def test_t4_the_average_of_fragments_is_that_of_one_process() -> None:
    job = testing.run(fragments, servers=2)
    with jax.enable_x64(True):
        local = backstay.LocalSteps(2, optax.sgd(1e-2), fragments=2)
        alone = backstay.train(**arguments(local=local, optimizer=optax.sgd(0.7)))
    assert_close(job.result.average, alone.average)


def kernel(params) -> dict[str, float]:
    # Not by JAX, whose sum has other bits under other flags of the compiler.
    return {"kernel": float(np.sum(np.asarray(params["dense"]["kernel"], np.float64)))}


def evaluates():
    backstay.train(**arguments(evaluate=kernel))


def assert_of_the_average(result) -> None:
    assert result.metrics == pytest.approx(kernel(result.average), rel=1e-9)
    assert result.metrics != pytest.approx(kernel(result.params), rel=1e-5)


@pytest.mark.parametrize("evaluator", [False, True])
def test_evaluate_gets_the_average_in_worker_0_and_in_the_evaluator(tmp_path: Path, evaluator: bool) -> None:
    """`Result.average` and `load(...).average` are what a user serves, so their numbers are the ones that count."""
    job = testing.run(evaluates, servers=2, checkpoint_every=3, folder=tmp_path, evaluator=evaluator)
    assert_of_the_average(job.result)
    again = testing.run(evaluates, servers=2, checkpoint_every=3, folder=tmp_path)
    assert again.result.step == STEPS
    assert_of_the_average(again.result)


def test_evaluate_gets_the_average_in_one_process() -> None:
    """After the last update, and every `evaluate_every` updates."""
    found = []

    def evaluate(params):
        found.append(kernel(params)["kernel"])
        return {"kernel": found[-1]}

    with jax.enable_x64(True):
        result = backstay.train(**arguments(evaluate=evaluate, evaluate_every=4))
        half = backstay.train(**arguments(steps=4))
        assert_of_the_average(result)
        assert found == pytest.approx([kernel(one.average)["kernel"] for one in (half, result)], rel=1e-9)


def test_a_replacement_that_returns_after_training_evaluates_the_average(tmp_path: Path) -> None:
    """The pod of worker 0 is created after the servers have left, and no evaluation was reported."""
    testing.run(script, checkpoint_every=4, folder=tmp_path)
    stored = backstay.load(str(tmp_path / "checkpoints"))
    environment = SimpleNamespace(
        member=0, checkpoint_uri=str(tmp_path / "checkpoints"), termination_log=tmp_path / "termination-log", index=0
    )
    plan = SimpleNamespace(partition=SimpleNamespace(tree=describe(stored.params)))
    with jax.enable_x64(True):
        given = Script(**arguments(evaluate=kernel))
        ended = Trained(step=STEPS, checkpoint=stored.uri)
        loaded: list[int] = []
        result = restored(cast("Environment", environment), ended, given, cast("ScriptPlan", plan), loaded.append)
    assert loaded == [STEPS]
    assert_close(result.average, stored.average)
    assert_of_the_average(result)


def test_a_checkpoint_without_an_average_has_none(tmp_path: Path) -> None:
    testing.run(plain, checkpoint_every=4, folder=tmp_path)
    assert backstay.load(str(tmp_path / "checkpoints")).average is None


def plain():
    backstay.train(**arguments(average=None))
