"""A worker whose container requests GPUs never trains on the CPU instead."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

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


def on_a_node_with_a_gpu() -> None:
    """JAX raises an error where it finds the files of a GPU's driver, and no packages for it."""
    patch("jax._src.hardware_utils.has_visible_nvidia_gpu", lambda: True).start()
    train()


@pytest.mark.parametrize("script", [train, on_a_node_with_a_gpu])
def test_an_image_without_cuda_is_named(script: Any) -> None:
    job = testing.run(script, env={"BACKSTAY_GPUS": "2", "JAX_PLATFORMS": "cuda,cpu"}, check=False)
    assert not job.succeeded
    assert "the container requests 2 GPUs, and its image has no CUDA packages of JAX" in job.message


@pytest.mark.parametrize("variables", [{"BACKSTAY_GPUS": "1", "JAX_PLATFORMS": "cpu"}, {}])
def test_a_user_may_choose_the_cpu(variables: dict[str, str]) -> None:
    assert testing.run(train, env=variables).result.step == 3


def uses_devices_first() -> None:
    """A script with an array at the top level of its module does this."""
    jnp.ones(3).block_until_ready()
    train()


def test_a_script_may_use_jax_before_it_trains() -> None:
    assert testing.run(uses_devices_first).result.step == 3
