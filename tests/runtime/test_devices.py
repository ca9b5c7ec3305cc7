"""A worker whose container requests GPUs never trains on the CPU instead."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import backstay
from backstay import testing


def train() -> None:
    import jax

    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] - batch) ** 2)

    backstay.train(
        init=lambda key: {"w": jnp.zeros(3)},
        loss=loss,
        batches=lambda key: jnp.ones(3),
        optimizer=optax.sgd(0.1),
        steps=3,
    )
    print("platforms", jax.config.jax_platforms)


def test_an_image_without_cuda_is_named() -> None:
    job = testing.run(train, env={"BACKSTAY_GPUS": "2", "JAX_PLATFORMS": "cuda,cpu"}, check=False)
    assert not job.succeeded
    assert "the container requests 2 GPUs, and its image has no CUDA packages of JAX" in job.message


@pytest.mark.parametrize("variables", [{"BACKSTAY_GPUS": "1", "JAX_PLATFORMS": "cpu"}, {}])
def test_a_user_may_choose_the_cpu(variables: dict[str, str]) -> None:
    assert testing.run(train, env=variables).result.step == 3
