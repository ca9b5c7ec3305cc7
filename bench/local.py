"""Measures the time of a step of `train` in one process and of a plain jitted loop, in one run and by turns.

Both train the same network on the same batches with Adam. The plain loop is typical for a JAX user: one
jitted function with donated buffers, and no value is read before the end. The benchmark prints one line for each size:
the medians, and the median and the quartiles of the ratio. The turns are short, so that other programs on the machine
disturb both loops equally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay
from backstay._roles._script import Script
from backstay._single._loop import train_alone

SIZES = {"0.3 ms": (64, 64), "1 ms": (256, 96), "5 ms": (512, 256), "20 ms": (1024, 384)}  # width, batch
WARM = 20


def model(width: int) -> Any:
    def init(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        return [jax.random.normal(k, (width, width)) / np.sqrt(width) for k in keys]

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    return init, loss


def plain(init: Any, loss: Any, batches: Any, optimizer: Any, steps: int) -> float:
    """Seconds of one step of the plain loop."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = init(jax.random.key(0))
    state = optimizer.init(params)
    began = 0.0
    for number in range(steps):
        if number == WARM:
            jax.block_until_ready(params)
            began = time.perf_counter()
        params, state, value = jitted(params, state, batches(backstay.BatchKey(number, 0, 1)))
    jax.block_until_ready((params, value))
    return (time.perf_counter() - began) / (steps - WARM)


def ours(init: Any, loss: Any, batches: Any, optimizer: Any, steps: int) -> float:
    """Seconds of one step of `train`."""
    times = []

    def on_update(report: Any) -> bool:
        if report.step in (WARM, steps):
            jax.block_until_ready(report.applied)
            times.append(time.perf_counter())
        return False  # continue

    train_alone(Script(init=init, loss=loss, batches=batches, optimizer=optimizer, steps=steps), on_update=on_update)
    return (times[1] - times[0]) / (steps - WARM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds of each loop in each turn")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--size", choices=SIZES, help="one of them only")
    arguments = parser.parse_args()
    print(f"{'size':>8} {'plain':>10} {'train':>10} {'ratio':>7}  quartiles")
    for name in [arguments.size] if arguments.size else SIZES:
        width, batch = SIZES[name]
        data = np.random.default_rng(0).normal(size=(4096, width)).astype(np.float32)
        batches = backstay.from_dataset((data, np.sin(data)), batch_size=batch, seed=0)
        what: tuple[Any, Any, Any, Any] = (*model(width), batches, optax.adam(1e-3))
        steps = WARM + max(20, int(arguments.seconds / plain(*what, WARM + 20)))
        pairs = [(plain(*what, steps), ours(*what, steps)) for _ in range(arguments.turns)]
        middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
        low, ratio, high = statistics.quantiles((own / other for other, own in pairs), n=4)
        times = " ".join(f"{seconds * 1e3:8.2f}ms" for seconds in middle)
        print(f"{name:>8} {times} {ratio:7.3f}  {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main()
