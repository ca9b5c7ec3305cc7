"""Outer optimizers of local steps, computed in one process: held-out bits per byte for many ways to train.

It needs no root and no cluster, so it is the place to compare outer optimizers. `bench/localsteps.py` measures real
jobs. All rows train the byte-level transformer of `examples/bytes` on the same number of tokens, with the same inner
optimizer. No row is tuned.

- Sync rows compute the ranks one after another in this process (`train_local`). By promise T4, a job computes the same.
- Async rows apply each contribution alone, in the order in which workers of different speeds would send them. The
  slowest worker takes 1.5 times as long as the fastest.
- Bytes are those of the codecs, counted over both directions. Frame headers are below 0.1 % of them.
- The time at 1 Gb/s is computed, and not measured on a link. It is the measured time of a step in one process, and the
  bytes of a worker divided by 125 MB/s, less what `overlap` hides. Each worker has its own link, and servers have more.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import backstay
from backstay._compute._local_steps import LocalProgram, LocalTraining
from backstay._coordination import MODES
from backstay._roles._local import train_local
from backstay._roles._script import Script
from backstay._update._local_steps import default_outer
from backstay._update._tree import describe

REPO = Path(__file__).resolve().parent.parent
BYTES_PER_SECOND = 125e6
SIZES = {"small": (64, 2, 64, 8), "large": (128, 4, 128, 16)}  # width, layers, context, batch
COUNT = 24


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        workers: that compute.
        used: of their contributions in each update; the others are dropped, as with backups and no grace.
        local: the arguments of `LocalSteps`; None: an update for each batch.
        outer: the outer optimizer, and whether Async contributions are damped; None: the default of the mode.
    """

    name: str
    workers: int
    used: int
    local: dict[str, Any] | None = None
    wire: backstay.Wire | None = None
    mode: str = "Sync"
    outer: tuple[optax.GradientTransformation, bool] | None = None


STREAMED = {"count": COUNT, "fragments": 4, "overlap": 2}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
ROWS = (
    Row("Sync", 4, 4),
    Row("Sync, 1 of 4 is a backup, no grace", 4, 3),
    Row("LocalSteps 6", 4, 4, {"count": 6}),
    Row("LocalSteps 24", 4, 4, {"count": COUNT}),
    Row("LocalSteps 24", 8, 8, {"count": COUNT}),
    Row("LocalSteps 24, 4 fragments, overlap 2, Int4", 4, 4, STREAMED, backstay.Wire("Int4")),
    Row("LocalSteps 24, 4 fragments, overlap 2, Int4", 8, 8, STREAMED, backstay.Wire("Int4")),
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
)


def example(size: str) -> Any:
    """The example's module, with the sizes of its model replaced."""
    spec = importlib.util.spec_from_file_location("bytes_example", REPO / "examples/bytes/train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTH, module.LAYERS, module.CONTEXT, module.BATCH = SIZES[size]
    return module


def inner(steps: int) -> optax.GradientTransformation:
    """For so many steps of a worker."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 10), steps, 1e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def local_of(row: Row, steps: int) -> backstay.LocalSteps | None:
    return None if row.local is None else backstay.LocalSteps(optimizer=inner(steps), **row.local)


def outer_of(row: Row) -> tuple[optax.GradientTransformation, bool]:
    """The outer optimizer, and whether contributions are damped."""
    late = MODES[row.mode].uses_older_versions()
    return row.outer or (default_outer(momentum=not late), late)


def bits_of(row: Row, module: Any, steps: int, seed: int) -> float:
    """Held-out bits per byte after so many steps of each worker."""
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
    program, updates = LocalProgram(module.loss, tree, local), steps * row.workers // local.batches
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


def bytes_of(row: Row, module: Any) -> tuple[float, int]:
    """The mean bytes of a worker's exchange in both directions, and the steps between two of them."""
    local = local_of(row, 1000)
    script = Script(
        init=module.init,
        loss=module.loss,
        batches=lambda key: None,
        optimizer=inner(1000) if local is None else outer_of(row)[0],
        steps=1,
        local=local,
    )
    wires = script.plan(1, row.wire).wires
    turns = wires[0].count
    total = sum(wire.of(turn).sent + wire.of(turn).received for wire in wires for turn in range(turns))
    return total / turns, 1 if local is None else local.batches


def step_seconds(module: Any) -> float:
    """The median time of a step of one worker in this process, which has the machine for itself."""
    batches = backstay.from_dataset(module.Windows(), batch_size=module.BATCH)
    params = module.init(jax.random.key(0))
    tree = describe(params)
    training = LocalTraining(LocalProgram(module.loss, tree, backstay.LocalSteps(COUNT, inner(1000))), 100)
    times = []
    for number in range(6):
        began = time.perf_counter()
        made = training.contribute(jax.tree.leaves(params), backstay.BatchKey(number, 0, 1), batches)
        jax.block_until_ready(made.leaves)
        times.append((time.perf_counter() - began) / COUNT)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker-steps", type=int, default=3840, help="steps of all workers of a row together")
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows, from 0; default: all")
    arguments = parser.parse_args()
    module = example(arguments.size)
    seconds = step_seconds(module)
    width, layers, context, batch = SIZES[arguments.size]
    tokens = arguments.worker_steps * batch * context
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0))))
    print(
        f"{arguments.size}: width {width}, {layers} layers, {count:,} parameters, {tokens:,} tokens, "
        f"{1000 * seconds:.1f} ms a step"
    )
    print(f"{'':52} {'workers':>7} {'bits/byte':>15} {'bytes/token':>11} {'s at 1 Gb/s':>11} {'s/step':>8}")
    for number in arguments.rows or range(len(ROWS)):
        row = ROWS[number]
        steps = arguments.worker_steps // row.workers
        found = [bits_of(row, module, steps, seed) for seed in range(arguments.seeds)]
        exchange, between = bytes_of(row, module)
        hidden = 0 if row.local is None else row.local.get("overlap", 0) * seconds
        wall = steps * seconds + steps / between * max(0.0, exchange / BYTES_PER_SECOND - hidden)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(
            f"{row.name:52} {row.workers:>7} {statistics.mean(found):>8.3f} ± {spread:.3f} "
            f"{exchange / between / (batch * context):>11.1f} {wall:>11.1f} {wall / steps:>8.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
