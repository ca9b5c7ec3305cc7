"""Measures the cost of a checkpoint with updates of 64 MB one after another, with and without a checkpoint being
written.

The pause is the time by which an update exceeds the quiet median, from the snapshot until the file is stored. The
table compares the rate of writing the file with memcpy, and with a plain write and fsync of the same bytes.

    python bench/checkpoint.py [--megabytes 64] [--optimizer adam] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from apply import OPTIMIZERS, aligned, median_ms

from backstay._checkpoint import CheckpointStore, CheckpointWriter
from backstay._update._engine import ShardEngine
from backstay._update._partition import gather, partition
from backstay._update._rules import analyse
from backstay._update._tree import describe


class CheckpointReports:
    """A coordinator that only receives the report of a stored checkpoint."""

    def __init__(self) -> None:
        self.stored = threading.Event()
        self.error = ""

    def report(self, report: object) -> None:
        self.error = getattr(report, "error", "")
        self.stored.set()


def raw_write_ms(folder: Path, content: np.ndarray) -> float:
    """Milliseconds of a plain write and fsync of the same bytes."""
    path = folder / "raw"
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
    took = (time.perf_counter() - start) * 1e3
    path.unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between updates, as gradients take")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    side = 1024
    leaves = options.megabytes * (1 << 20) // (4 * side * side)
    params = {f"layer{i}": jnp.full((side, side), 0.5, jnp.float32) for i in range(leaves)}
    tree = describe(params)
    rule = analyse(OPTIMIZERS[options.optimizer](), tree)
    parts = partition(tree, rule, 1)
    engine = ShardEngine(parts, 0, rule, params)
    engine.compile()
    flat = [aligned(side * side) for _ in range(leaves)]
    for leaf in flat:
        leaf[...] = 0.01
    gradient = [gather(block, flat) for block in engine.blocks]

    def update() -> float:
        start = time.perf_counter()
        engine.apply([gradient])
        for b in range(len(engine.blocks)):
            engine.ready(b)
        return (time.perf_counter() - start) * 1e3

    with tempfile.TemporaryDirectory(prefix="backstay-bench-", dir=options.folder) as scratch:
        folder, reports = Path(scratch), CheckpointReports()
        writer = CheckpointWriter(
            CheckpointStore(str(folder / "checkpoints")),
            reports,
            shard=0,
            shards=1,
            incarnation=0,
            stored=lambda seconds, size: None,
            history=lambda: "0" * 16,
        )
        quiet, during, snapshots, writes, pauses, raws = [], [], [], [], [], []
        size = 0
        for _ in range(4):
            update()
        for _ in range(options.rounds):
            for _ in range(10):
                quiet.append(update())
                time.sleep(options.pause)
            median = statistics.median(quiet)
            reports.stored.clear()
            start = time.perf_counter()
            snapshot = engine.snapshot()
            snapshots.append((time.perf_counter() - start) * 1e3)
            size = sum(entry.value.nbytes for entry in snapshot.entries)
            writer(snapshot, 1, engine.version)
            del snapshot
            mine = [update()]
            while not reports.stored.is_set():
                time.sleep(options.pause)
                mine.append(update())
            writes.append((time.perf_counter() - start) * 1e3)
            if reports.error:
                raise SystemExit(reports.error)
            during += mine
            pauses.append(max(0.0, max(mine) - median))
            raws.append(raw_write_ms(folder, np.ones(size, np.uint8)))
        writer.close()
    source, target = aligned(size // 4), aligned(size // 4)
    source[...] = 1
    copy = median_ms(lambda: np.copyto(target, source), 5)

    def row(what: str, ms: float, of: int) -> None:
        print(f"{what:58} {ms:8.1f} ms   {of / ms / 1e6 if of else 0.0:6.2f} GB/s")

    print(f"{options.optimizer}: {options.megabytes} MB of parameters, {size / 1e6:.0f} MB in a checkpoint\n")
    row("memcpy of a checkpoint", copy, size)
    row("plain write and fsync of a checkpoint", statistics.median(raws), size)
    row("a checkpoint: copy-on-write, write, SHA-256, fsync, rename", statistics.median(writes), size)
    print(f"{'update, quiet, median':58} {statistics.median(quiet):8.1f} ms")
    print(f"{'update, while a checkpoint is written, median':58} {statistics.median(during):8.1f} ms")
    print(f"{'taking the snapshot (views, no copy)':58} {statistics.median(snapshots):8.1f} ms")
    print(f"{'pause: the slowest update meanwhile, beyond the quiet one':58} {statistics.median(pauses):8.1f} ms")


if __name__ == "__main__":
    main()
