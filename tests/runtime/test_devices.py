"""A worker whose container requests GPUs never trains on the CPU instead."""

from __future__ import annotations

from typing import Any

import pytest

from backstay import testing

from . import devices


@pytest.mark.parametrize("script", [devices.train, devices.on_a_node_with_a_gpu])
def test_an_image_without_cuda_is_named(script: Any) -> None:
    job = testing.run(script, env={"BACKSTAY_GPUS": "2", "JAX_PLATFORMS": "cuda,cpu"}, check=False)
    assert not job.succeeded
    assert "the container requests 2 GPUs, and its image has no CUDA packages of JAX" in job.message


@pytest.mark.parametrize("variables", [{"BACKSTAY_GPUS": "1", "JAX_PLATFORMS": "cpu"}, {}])
def test_a_user_may_choose_the_cpu(variables: dict[str, str]) -> None:
    assert testing.run(devices.train, env=variables).result.step == 3


def test_a_script_may_use_jax_before_it_trains() -> None:
    assert testing.run(devices.uses_devices_first).result.step == 3
