"""Measures the held-out bits per byte of training with codecs in one process, and the bytes of an update.

All rows train the byte-level transformer of `examples/bytes` with 4 workers, the same batches and the same inner
optimizer. No row is tuned. The ranks are computed one after another, with the rounding of a job (promises T4 and T10),
so no row needs a cluster. The first row of each group has no codec, and the others are compared to it: with the same
seed, the difference is the codec's.

    python bench/quality.py [--size tiny|small|large] [--seeds 3] [--worker-steps 3840] [--rows N ...]

Columns: bytes of tensors of an update and worker, as a share of those without a codec; bits per byte, mean and standard
deviation over the seeds; the mean difference to the group's first row, and its standard deviation.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
import optax
from scripts.text import SIZES, batches_of, example, inner

import backstay
from backstay._single._reference import train_local
from backstay._update import analyse, coded_leaves, describe, partition, shard_wires
from backstay._update._local_steps import default_outer

EXACT = "Exact"
COUNT = 24
GROUPS: tuple[tuple[str, dict[str, Any] | None], ...] = (("Sync", None), (f"{COUNT} local steps", {"count": COUNT}))
WIRES = (
    backstay.Wire(),
    backstay.Wire("BFloat16", "BFloat16"),
    backstay.Wire("Int8", "BFloat16", error_feedback=False),
    backstay.Wire("Int8", "BFloat16", error_feedback=True),
    backstay.Wire("Int4", "BFloat16", error_feedback=False),
    backstay.Wire("Int4", "BFloat16", error_feedback=True),
)
WORKERS = 4


def share(module: Any, wire: backstay.Wire) -> float:
    """Returns the bytes of a contribution and of the parameters, as a share of those without a codec."""
    tree = describe(module.init(jax.random.key(0)))
    coded = coded_leaves(tree, wire)
    (of,) = shard_wires(partition(tree, analyse(optax.sgd(1.0), tree), 1, coded=coded), wire, coded)
    used = sum(block.nbytes for blocks in (of.gradients, of.parameters) for block in blocks)
    return used / (2 * sum(block.nbytes for block in of.exact))


def bits_of(local: dict[str, Any] | None, wire: backstay.Wire, module: Any, steps: int, seed: int) -> float:
    """Returns the held-out bits per byte after this number of steps of each worker.

    Args:
        local: the arguments of `LocalSteps`; None: an update for each batch.
    """
    optimizer, updates, made = inner(steps), steps, None
    if local is not None:
        made = backstay.LocalSteps(optimizer=inner(steps), **local)
        optimizer, updates = default_outer(made, late=False)[0], steps // made.batches
    result = train_local(
        module.init,
        module.loss,
        batches_of(module),
        optimizer,
        updates,
        seed=seed,
        world=WORKERS,
        wire=wire,
        local=made,
    )
    return float(module.evaluate(result.params)["bits_per_byte"])


def title(wire: backstay.Wire) -> str:
    if wire.gradients == EXACT:
        return EXACT
    return f"{wire.gradients}, {wire.parameters}" + (", error feedback" if wire.error_feedback else "")


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):>8.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker-steps", type=int, default=3840, help="steps of all workers of a row together")
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows in each group, from 1; default: all")
    arguments = parser.parse_args()
    module, steps = example(arguments.size), arguments.worker_steps // WORKERS
    print(f"{'gradients, parameters':32} {'bytes':>6} {'bits per byte':>16} {'difference':>17}")
    for group, local in GROUPS:
        first: list[float] = []
        for number, wire in enumerate(WIRES):
            if number and arguments.rows and number not in arguments.rows:
                continue
            found = [bits_of(local, wire, module, steps, seed) for seed in range(arguments.seeds)]
            first = first or found
            more = spread([mine - plain for mine, plain in zip(found, first, strict=True)]) if number else ""
            name = f"{group}: {title(wire)}" if not number else f"  {title(wire)}"
            print(f"{name:32} {share(module, wire):>6.3f} {spread(found):>16} {more:>17}", flush=True)


if __name__ == "__main__":
    main()
