"""A worker on an accelerator trains bit for bit as one on the CPU. The CPU stands for the accelerator."""

from __future__ import annotations

import os
import pkgutil
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import testing

STEPS = 6
# `test_device` of the codecs compares the bytes of each codec, with and without error feedback, over three servers.
# `test_group` and `test_sharded` have such workers in jobs, with enough pinned memory.
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"servers": 2},
    "fragments": {"servers": 2, "wire": {"gradients": "Int4"}, "local": {"count": 4, "fragments": 2, "overlap": 1}},
    "async": {
        "wire": {"gradients": "Int8", "parameters": "BFloat16", "error_feedback": True},
        "mode": "Async",
        "overlap": True,
    },
}


# How many arrays have room in pinned memory. None: all arrays but the encoded gradients.
FULL = {"fragments": 0, "exact": 1, "async": None}


def apart() -> None:
    """Let the CPU count as an accelerator in this process."""
    patch("backstay._transport._tensors._buffers.shares_host_memory", lambda device: False).start()
    patch("backstay._compute.Placement.on_host", False).start()
    encoder = "backstay._compute._device_encoding.DeviceEncoder"
    encode = pkgutil.resolve_name(encoder).encode

    def printing(self: Any, *arguments: Any) -> Any:
        print("encoded on the accelerator")
        return encode(self, *arguments)

    patch(f"{encoder}.encode", printing).start()


def fill(room: int | None) -> None:
    """Let pinned memory be full; `room`: see `FULL`."""
    put, jit, copied = jax.device_put, jax.jit, []

    def in_pinned(place: Any) -> bool:
        return "pinned_host" in [getattr(one, "memory_kind", None) for one in jax.tree.leaves(place)]

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory, xla_gpu_host_bfc")

    def put_if_room(value: Any, device: Any = None, **more: Any) -> Any:
        if in_pinned(device):
            copied.append(value)
            if room is not None and len(copied) > room:
                full()
        return put(value, device, **more)

    def jit_if_room(function: Any, **more: Any) -> Any:
        return full if in_pinned(more.get("out_shardings")) else jit(function, **more)

    patch("jax.device_put", put_if_room).start()
    patch("jax.jit", jit_if_room).start()


def train() -> None:
    if os.environ["APART"] == "yes":
        apart()
        fill(FULL[os.environ["WAY"]])
    local = WAYS[os.environ["WAY"]].get("local")
    inner = {} if local is None else {"local": backstay.LocalSteps(optimizer=optax.adam(1e-2), **local)}

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        shapes = {"first": (96, 128), "second": (128, 64), "bias": (64,)}
        return {name: jax.random.normal(key, shapes[name]) * 0.1 for name, key in zip(shapes, keys, strict=True)}

    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch @ params["first"])
        return jnp.mean((hidden @ params["second"] + params["bias"] - batch[:, :64]) ** 2)

    result = backstay.train(
        init=init,
        loss=loss,
        batches=lambda key: np.asarray(jax.random.normal(key.key, (16, 96))),
        optimizer=None if local else optax.adam(1e-2),
        steps=STEPS,
        **inner,
    )
    # Arrays that are bound to one device cannot be used together with arrays on all of them.
    print(f"bound {any(leaf.committed for leaf in jax.tree.leaves(result.params))}")


def params_of(way: str, which: str) -> Any:
    settings = {name: value for name, value in WAYS[way].items() if name != "local"}
    job = testing.run(train, env={"WAY": way, "APART": which}, **settings)
    assert job.outcomes() == {"applied": STEPS}
    (log,) = (text for name, text in job.logs.items() if name.startswith("worker"))
    assert "bound False" in log
    assert (log.count("encoded on the accelerator") >= STEPS) == (which == "yes")
    assert log.count("pinned memory is full") == (which == "yes")
    return job.params


@pytest.mark.parametrize("way", WAYS)
def test_t4_an_accelerator_trains_as_the_cpu(way: str) -> None:
    ours, theirs = params_of(way, "yes"), params_of(way, "no")
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
