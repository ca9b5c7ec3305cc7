"""Measures the time of a step of `train` in one process and of a plain jitted loop, in one run and by turns.

Both train the same model on the same batches with Adam. The plain loop is typical for a JAX user: one
jitted function with donated buffers, and no value is read before the end. The benchmark prints one line for each size:
the medians, and the median and the quartiles of the ratio. The turns are short, so that other programs on the machine
disturb both loops equally. The last columns are the most memory that a process of each loop held.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay
from backstay._script import Script
from backstay._single._loop import train_alone

WARM = 20


def network(width: int, batch: int) -> tuple[Any, Any, Any, Any]:
    """`init`, `loss`, `batches` and the optimizer of three layers."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        return [jax.random.normal(k, (width, width)) / np.sqrt(width) for k in keys]

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    data = np.random.default_rng(0).normal(size=(4096, width)).astype(np.float32)
    return init, loss, backstay.from_dataset((data, np.sin(data)), batch_size=batch, seed=0), optax.adam(1e-3)


def embedding(rows: int, width: int, batch: int) -> tuple[Any, Any, Any, Any]:
    """Returns the same of one large table, whose gradient is mostly zeros. Memory, and not arithmetic, takes the
    time."""

    def init(key: Any) -> Any:
        return {"table": 0.01 * jax.random.normal(key, (rows, width)), "out": jnp.zeros((width, 4))}

    def loss(params: Any, batch: Any) -> Any:
        items, labels = batch
        logits = params["table"][items].mean(1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    rng = np.random.default_rng(0)
    items, labels = rng.integers(0, rows, (4096, 4)), rng.integers(0, 4, 4096)
    data = items.astype(np.int32), labels.astype(np.int32)
    return init, loss, backstay.from_dataset(data, batch_size=batch, seed=0), optax.adam(1e-3)


SIZES: dict[str, Callable[[], tuple[Any, Any, Any, Any]]] = {
    "0.3 ms": lambda: network(64, 64),
    "1 ms": lambda: network(256, 96),
    "5 ms": lambda: network(512, 256),
    "20 ms": lambda: network(1024, 384),
    "64 M": lambda: embedding(2_000_000, 32, 256),
}


def plain(init: Any, loss: Any, batches: Any, optimizer: Any, steps: int) -> float:
    """Returns the seconds of one step of the plain loop."""

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
    """Returns the seconds of one step of `train`."""
    times = []

    def on_update(report: Any) -> bool:
        if report.step in (WARM, steps):
            jax.block_until_ready(report.applied)
            times.append(time.perf_counter())
        return False  # continue

    train_alone(Script(init=init, loss=loss, batches=batches, optimizer=optimizer, steps=steps), on_update=on_update)
    return (times[1] - times[0]) / (steps - WARM)


def peak(size: str, loop: Callable[..., float]) -> float:
    """Returns the most memory that a process held which ran `loop` for a few steps, in GB."""
    loop(*SIZES[size](), WARM + 5)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def peaks(size: str) -> list[float]:
    """`peak` of both loops."""
    processes = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with processes:
        return [processes.submit(peak, size, loop).result() for loop in (plain, ours)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds of each loop in each turn")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--size", choices=SIZES, help="one of them only")
    arguments = parser.parse_args()
    print(f"{'size':>8} {'plain':>10} {'train':>10} {'ratio':>7}  {'quartiles':14}  {'plain':>8} {'train':>8}")
    for name in [arguments.size] if arguments.size else SIZES:
        what = SIZES[name]()
        steps = WARM + max(20, int(arguments.seconds / plain(*what, WARM + 20)))
        pairs = [(plain(*what, steps), ours(*what, steps)) for _ in range(arguments.turns)]
        middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
        low, ratio, high = statistics.quantiles((own / other for other, own in pairs), n=4)
        times = " ".join(f"{seconds * 1e3:8.2f}ms" for seconds in middle)
        most = " ".join(f"{gigabytes:6.2f}GB" for gigabytes in peaks(name))
        print(f"{name:>8} {times} {ratio:7.3f}  {low:.3f} to {high:.3f}  {most}", flush=True)


if __name__ == "__main__":
    main()
