"""The training functions of test_devices.py.

They are in a file without names such as JAX_PLATFORMS, because pods of a file with these names are not forked.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import optax

import backstay


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
    print(f"platforms {jax.config.jax_platforms}")


def on_a_node_with_a_gpu() -> None:
    """JAX raises an error where it finds the files of a GPU's driver, and no packages for it."""
    patch("jax._src.hardware_utils.has_visible_nvidia_gpu", lambda: True).start()
    train()


def uses_devices_first() -> None:
    """A script with an array at the top level of its module does this."""
    jnp.ones(3).block_until_ready()
    train()
