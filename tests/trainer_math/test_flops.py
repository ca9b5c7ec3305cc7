"""The estimate of a gradient's floating-point operations, and the peak of the devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backstay._compute._flops import flops_of, peak_of
from backstay._compute._gradient import GradientFn
from backstay._update import Objective
from backstay._update._tree import describe

H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


def test_the_estimate_counts_the_products_of_forward_and_backward_pass() -> None:
    rows, size = 64, 128
    params = {"w": np.zeros((size, size), np.float32)}
    function = GradientFn(Objective(lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), describe(params)))
    flops = function.compile(np.zeros((rows, size), np.float32))
    assert flops is not None
    product = 2 * rows * size * size
    assert 2 * product <= flops < 3 * product  # the gradient of the batch is not needed


def test_a_function_with_a_loop_has_no_estimate() -> None:
    """XLA counts the body of a loop once: 32 layers would have the work of one."""
    params = {"w": np.zeros((32, 64, 64), np.float32)}

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p["w"])[0])

    assert GradientFn(Objective(loss, describe(params))).compile(np.zeros((8, 64), np.float32)) is None


@pytest.mark.parametrize("analysis", [None, {}, [], {"flops": -1.0}, RuntimeError("unsupported")])
def test_a_backend_without_an_estimate_has_none(analysis: object) -> None:
    def cost_analysis() -> object:
        if isinstance(analysis, Exception):
            raise analysis
        return analysis

    assert flops_of(SimpleNamespace(cost_analysis=cost_analysis, as_text=str), 2) is None
    assert flops_of(SimpleNamespace(cost_analysis=lambda: [{"flops": 3.0}], as_text=str), 2) == 6.0


def test_the_peak_is_that_of_all_devices_or_not_known() -> None:
    assert peak_of([H100, H100]) == 2 * 989.4e12
    assert peak_of([SimpleNamespace(device_kind="NVIDIA L40S")]) == 362e12, "and not that of the L4"
    assert peak_of([SimpleNamespace(device_kind="NVIDIA A100-SXM4-40GB")]) == 312e12
    for kind in ("NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v4 lite", "abacus"):
        assert peak_of([H100, SimpleNamespace(device_kind=kind)]) is None, kind
    assert peak_of([]) is None
    assert peak_of(jax.devices("cpu")) is None
