"""The time in which a server applies an update to 64 MB of float32 parameters, beside memcpy in the same run."""

from __future__ import annotations

import argparse
import statistics
import time

import jax.numpy as jnp
import numpy as np
import optax

from backstay._update._engine import ShardEngine
from backstay._update._partition import gather, partition
from backstay._update._rules import analyse
from backstay._update._tree import describe

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)),
    "lamb": lambda: optax.lamb(1e-3),
}


def aligned(size: int) -> np.ndarray:
    raw = np.empty(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def median_ms(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=sorted(OPTIMIZERS))
    options = parser.parse_args()
    side = 1024
    leaves = options.megabytes * (1 << 20) // (4 * side * side)
    params = {f"layer{i}": jnp.full((side, side), 0.5, jnp.float32) for i in range(leaves)}
    flat = [aligned(side * side) for _ in range(leaves)]
    for leaf in flat:
        leaf[...] = 0.01
    target = [aligned(side * side) for _ in range(leaves)]

    def copies() -> None:
        for to, of in zip(target, flat, strict=True):
            np.copyto(to, of)

    copy = median_ms(copies, options.repeats)
    print(f"{'memcpy':10} {copy:7.1f} ms   {options.megabytes} MB")
    tree = describe(params)
    for name, make in OPTIMIZERS.items():
        if options.only not in (None, name):
            continue
        rule = analyse(make(), tree)
        parts = partition(tree, rule, 1)
        engine = ShardEngine(parts, 0, rule, params)
        start = time.perf_counter()
        engine.compile()
        compiled = time.perf_counter() - start
        gradient = [gather(block, flat) for block in engine.blocks]
        first: list[float] = []

        def update(engine=engine, gradient=gradient, first=first) -> None:
            start = time.perf_counter()
            engine.apply([gradient])
            engine.ready(0)
            first.append((time.perf_counter() - start) * 1e3)
            for b in range(1, len(engine.blocks)):
                engine.ready(b)

        update()
        took = median_ms(update, options.repeats)
        print(
            f"{name:10} {took:7.1f} ms   {took / copy:5.2f} x memcpy   first block {statistics.median(first):5.1f} ms"
            f"   {len(engine.blocks)} blocks   compiled in {compiled:.2f} s"
        )


if __name__ == "__main__":
    main()
