"""A worker whose container requests GPUs never trains on the CPU instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from backstay import testing
from backstay._pod._devices import use_devices
from backstay.errors import BackstayError

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


@pytest.mark.parametrize(("found", "least"), [(0, 1), (1, 8), (7, 8), (8, 8), (2, 1)])
def test_a_worker_trains_with_all_its_gpus_or_not(found: int, least: int) -> None:
    """With some of them it would train too, and take several times as long."""
    gpus = [SimpleNamespace(platform="gpu")] * found or [SimpleNamespace(platform="cpu")]
    plugins = [SimpleNamespace(name="xla_cuda13")]
    with (
        patch("jax.config", SimpleNamespace(jax_platforms="cuda,cpu")),
        patch("jax.local_devices", lambda: gpus),
        patch("backstay._pod._devices.entry_points", lambda group: plugins),
    ):
        if found >= least:
            use_devices("worker", {"BACKSTAY_GPUS": str(least)})
            return
        with pytest.raises(BackstayError, match=f"JAX can use {found} of the {least} GPUs of this container: run"):
            use_devices("worker", {"BACKSTAY_GPUS": str(least)})
