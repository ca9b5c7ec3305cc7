"""A loss that is NaN while its gradients are finite is reported, in one process and in a job."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import testing


def script(steps: int = 6):
    """The batch of step 3 is empty: its mean is NaN, and its gradient 0."""

    def loss(params, batch):
        return jnp.sum(params["w"]) + jnp.mean(batch["x"][: batch["rows"].shape[0]]) - jnp.mean(batch["x"])

    def batches(key):
        return {"x": np.ones(4), "rows": np.zeros(0 if key.step >= 3 else 4)}

    return backstay.train(
        init=lambda key: {"w": jnp.zeros(2)}, loss=loss, batches=batches, optimizer=optax.sgd(0.1), steps=steps
    )


def test_one_process_warns_once(capfd: pytest.CaptureFixture[str]) -> None:
    result = script()
    text = capfd.readouterr().err
    assert text.count("the loss of step 4 is nan although its gradients are finite") == 1
    np.testing.assert_allclose(result.params["w"], -0.6, rtol=1e-6)


def test_a_job_warns_once_and_reports_the_step() -> None:
    job = testing.run(script)
    assert job.succeeded
    text = "".join(job.logs.values())
    assert text.count("the loss of step 4 is nan although its gradients are finite") == 1
