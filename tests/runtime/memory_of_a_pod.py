"""Trains large arrays that FSDP divides, and prints by how many MB the memory of the process has grown at most."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import backstay

IS_WORKER = os.environ["BACKSTAY_ROLE"] == "worker"
jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]) if IS_WORKER else 1)
LEAVES, SIZE = 8, 8 << 20  # of float32, which are 256 MB


def init(key):
    return {f"w{number}": jnp.linspace(0.0, number, SIZE) for number in range(LEAVES)}


def loss(params, batch):
    """Needs no collective of whole arrays: each device has a part of each sum."""
    return sum(jnp.sum((value - batch) ** 2) for value in params.values()) / SIZE


def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) >> 10


if __name__ == "__main__":
    if IS_WORKER:
        backstay.initialize()
        jnp.zeros(3).block_until_ready()
    began = memory("VmRSS")
    result = backstay.train(
        init=init,
        loss=loss,
        batches=lambda key: jnp.float32(key.step),
        optimizer=optax.sgd(0.1),
        sharding="fsdp",
        steps=2,
    )
    for leaf in result.params.values():
        assert leaf.addressable_data(0).size * jax.device_count() == leaf.size
    print(f"grew by {memory('VmHWM') - began} MB", flush=True)
