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
from outer import COUNT, Row, bits_of
from scripts.text import SIZES, example

import backstay
from backstay._update import analyse, coded_leaves, describe, partition, shard_wires

EXACT = "Exact"
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
            row = Row(group, WORKERS, WORKERS, local, None if wire.exact else wire)
            found = [bits_of(row, module, steps, seed) for seed in range(arguments.seeds)]
            first = first or found
            more = spread([mine - plain for mine, plain in zip(found, first, strict=True)]) if number else ""
            name = f"{group}: {title(wire)}" if not number else f"  {title(wire)}"
            print(f"{name:32} {share(module, wire):>6.3f} {spread(found):>16} {more:>17}", flush=True)


if __name__ == "__main__":
    main()
