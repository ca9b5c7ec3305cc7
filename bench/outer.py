"""Measures the held-out bits per byte of outer optimizers of local steps, for many ways to train in one process.

It needs no root and no cluster, so it is the place to compare outer optimizers. `bench/localsteps.py` measures bytes
and time of real jobs. All rows train the byte-level transformer of `examples/bytes` on the same number of tokens,
with the same inner optimizer. No row is tuned.

- Sync rows compute the ranks one after another in this process (`train_local`). By promise T4, a job computes the same.
- Async rows apply each contribution alone, in the order in which workers of different speeds would send them. The
  slowest worker takes 1.5 times as long as the fastest.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from scripts.text import SIZES, example, inner

import backstay
from backstay._compute._local_steps import LocalProgram, LocalTraining
from backstay._coordination import MODES, Mode
from backstay._single._reference import train_local
from backstay._update import Objective
from backstay._update._local_steps import default_outer
from backstay._update._tree import describe

COUNT = 24


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        workers: number of workers that compute.
        used: number of their contributions in each update; the others are dropped, as with backups and no grace.
        local: the arguments of `LocalSteps`; None: an update for each batch.
        outer: the outer optimizer, and whether Async contributions are damped; None: the default of the mode.
    """

    name: str
    workers: int
    used: int
    local: dict[str, Any] | None = None
    wire: backstay.Wire | None = None
    mode: Mode = "Sync"
    outer: tuple[optax.GradientTransformation, bool] | None = None


STREAMED = {"count": COUNT, "fragments": 4, "overlap": 2}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
INT4 = backstay.Wire("Int4")
HALF = optax.sgd(0.7, momentum=0.5, nesterov=True)
ROWS = (
    Row("Sync", 4, 4),
    Row("Sync, 1 of 4 is a backup, no grace", 4, 3),
    Row("LocalSteps 24", 4, 4, {"count": COUNT}),
    Row("LocalSteps 6, no warm-up", 4, 4, {"count": 6}, outer=(NESTEROV, False)),
    Row("LocalSteps 24, no warm-up", 4, 4, {"count": COUNT}, outer=(NESTEROV, False)),
    Row("LocalSteps 24, no warm-up", 8, 8, {"count": COUNT}, outer=(NESTEROV, False)),
    *(
        Row("LocalSteps 24, no warm-up, 4 fragments, overlap 2, Int4", n, n, STREAMED, INT4, outer=(NESTEROV, False))
        for n in (4, 8)
    ),
    Row("Async LocalSteps 24", 4, 4, {"count": COUNT}, mode="Async"),
    Row("Async LocalSteps 24", 8, 8, {"count": COUNT}, mode="Async"),
    Row("Async LocalSteps 24, outer Nesterov 0.9", 4, 4, {"count": COUNT}, mode="Async", outer=(NESTEROV, False)),
    Row(
        "Async LocalSteps 24, outer Nesterov 0.9, damped", 4, 4, {"count": COUNT}, mode="Async", outer=(NESTEROV, True)
    ),
    Row(
        "Async LocalSteps 24, outer SGD, not damped",
        4,
        4,
        {"count": COUNT},
        mode="Async",
        outer=(optax.sgd(0.7), False),
    ),
    Row("LocalSteps 24, outer SGD 1.0", 4, 4, {"count": COUNT}, outer=(optax.sgd(1.0), False)),
    Row("LocalSteps 24, momentum 0.5", 4, 4, {"count": COUNT}, outer=(HALF, False)),
)


def local_of(row: Row, steps: int) -> backstay.LocalSteps | None:
    return None if row.local is None else backstay.LocalSteps(optimizer=inner(steps), **row.local)


def outer_of(row: Row) -> tuple[optax.GradientTransformation, bool]:
    """The outer optimizer, and whether contributions are damped."""
    late = MODES[row.mode].uses_older_versions()
    if row.outer is not None:
        return row.outer
    local = local_of(row, COUNT)
    assert local is not None, f"{row.name} has no outer optimizer"
    return default_outer(local, late=late)[0], late


def bits_of(row: Row, module: Any, steps: int, seed: int) -> float:
    """Held-out bits per byte after this number of steps of each worker."""
    batches = backstay.from_dataset(module.Windows(), batch_size=module.BATCH)
    if row.mode == "Async":
        params = asynchronous(row, module, batches, steps, seed)
        return float(module.evaluate(params)["bits_per_byte"])
    local = local_of(row, steps)
    updates = steps if local is None else steps // local.batches
    optimizer = inner(steps) if local is None else outer_of(row)[0]
    result = train_local(
        module.init, module.loss, batches, optimizer, updates, seed=seed, world=row.used, wire=row.wire, local=local
    )
    return float(module.evaluate(result.params)["bits_per_byte"])


def asynchronous(row: Row, module: Any, batches: Callable[[Any], Any], steps: int, seed: int) -> Any:
    """The parameters after all workers together made ``steps * workers`` steps."""
    local = local_of(row, steps)
    assert local is not None
    outer, damped = outer_of(row)
    params = module.init(jax.random.key(seed))
    tree, state = describe(params), outer.init(params)
    program, updates = LocalProgram(Objective(module.loss, tree), local), steps * row.workers // local.batches
    ranks = [LocalTraining(program, updates) for _ in range(row.workers)]

    @jax.jit
    def apply(difference: Any, state: Any, params: Any, weight: Any) -> Any:
        changes, state = outer.update(jax.tree.map(lambda leaf: leaf * weight, difference), state, params)
        return optax.apply_updates(params, changes), state

    random = np.random.default_rng(seed)
    pace = [1 + 0.5 * rank / max(1, row.workers - 1) for rank in range(row.workers)]
    due = [(pace[rank] * random.uniform(1, 1.1), rank, 0) for rank in range(row.workers)]
    heapq.heapify(due)
    pulled = [(params, 0)] * row.workers
    for version in range(updates):
        when, rank, step = heapq.heappop(due)
        base, at = pulled[rank]
        key = backstay.BatchKey(step=step, rank=rank, world=row.workers, seed=seed)
        made = ranks[rank].contribute(jax.tree.leaves(base), key, batches)
        weight = 1 / (1 + version - at) if damped else 1.0
        params, state = apply(tree.unflatten(made.leaves), state, params, np.float32(weight))
        pulled[rank] = params, version + 1
        heapq.heappush(due, (when + pace[rank] * random.uniform(1, 1.1), rank, step + 1))
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker-steps", type=int, default=3840, help="steps of all workers of a row together")
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows, from 0; default: all")
    parser.add_argument("--count", type=int, help="local steps between two updates; default: that of the row's name")
    arguments = parser.parse_args()
    module = example(arguments.size)
    width, layers, context, batch = SIZES[arguments.size]
    tokens = arguments.worker_steps * batch * context
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0))))
    print(f"{arguments.size}: width {width}, {layers} layers, {count:,} parameters, {tokens:,} tokens")
    print(f"{'':52} {'workers':>7} {'bits/byte':>15}")
    for number in arguments.rows or range(len(ROWS)):
        row = ROWS[number]
        if arguments.count and row.local:
            row = replace(
                row, name=f"{row.name}, count {arguments.count}", local=row.local | {"count": arguments.count}
            )
        steps = arguments.worker_steps // row.workers
        found = [bits_of(row, module, steps, seed) for seed in range(arguments.seeds)]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{row.name:52} {row.workers:>7} {statistics.mean(found):>8.3f} ± {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
