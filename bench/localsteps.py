"""Local steps beside an update for each batch, as jobs over a link of 1 Gb/s, in quiet runs and while workers die.

A worker is killed 13 s after the first update, and then every 26 s.

All rows train the byte-level transformer of `examples/bytes` on the same number of tokens, with the same inner
optimizer. No row is tuned. The link is the one of the server. The kernel limits it in each direction, in a network
namespace of this program (bench/_link.py). This needs root. The workers share the cores of this machine.

    python bench/localsteps.py [--size small|large] [--seeds 3] [--rows N ...] [--results FILE]

Columns: bits per byte on held-out text, after the last update (mean and standard deviation over the seeds); bytes on
the link for each token, in both directions, with all headers; goodput (docs/goodput.md); the seconds from the first
update to the last. The file keeps the results: a run that it has is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _link
from _cluster import Cluster, Job, cluster
from _common import table
from chaos import Chaos

COUNT, KILL_SECONDS = 24, 26.0
STEPS = {"small": 3840, "large": 960}
_NUMBERS = itertools.count()
STREAMED = {"count": COUNT, "fragments": 4, "overlap": 2}


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        workers: how many.
        local: the arguments of `LocalSteps`; None: an update for each batch.
        update, wire: of the job's spec.
        outer_rate: of plain SGD as outer optimizer; None: the default of the mode.
    """

    name: str
    workers: int = 4
    local: dict[str, Any] | None = None
    update: dict[str, Any] = field(default_factory=lambda: {"mode": "Sync", "backups": 0})
    wire: dict[str, Any] = field(default_factory=dict)
    outer_rate: float | None = None

    @property
    def between(self) -> int:
        """Steps of a worker between two of its contributions."""
        return 1 if self.local is None else int(self.local["count"]) // int(self.local.get("fragments", 1))


ROWS = (
    Row("Sync"),
    Row("Sync, 1 backup, no grace", update={"mode": "Sync", "backups": 1}),
    Row("Sync, 1 backup, grace Auto", update={"mode": "Sync", "backups": 1, "grace": "Auto"}),
    Row("24 local steps", local={"count": COUNT}),
    Row("24 local steps, outer SGD 1.0", local={"count": COUNT}, outer_rate=1.0),
    Row("24 local steps", workers=8, local={"count": COUNT}),
    Row("24 local steps, 4 fragments, overlap 2, Int4", local=STREAMED, wire={"gradients": "Int4"}),
    Row("Async, 24 local steps", local={"count": COUNT}, update={"mode": "Async"}),
)


@dataclass(frozen=True)
class Result:
    """The measurements of one run.

    Attributes:
        bits: held-out bits per byte.
        sent: bytes on the link for each token.
        goodput: between 0 and 1.
        seconds: from the first update to the last.
        killed: workers.
    """

    bits: float
    sent: float
    goodput: float
    seconds: float
    killed: int


async def run(on: Cluster, row: Row, size: str, seed: int, killing: bool) -> Result:
    """Train one row as a job."""
    from scripts.text import example

    import backstay

    steps = STEPS[size] // row.workers
    contributions = 1 if row.update["mode"] == "Sync" else row.workers
    updates = steps // row.between * contributions
    job = Job(on, f"text-{next(_NUMBERS)}", steps=updates, workers=row.workers, every_steps=100_000, script="text.py")
    job.spec["args"] = [
        *("--size", size, "--worker-steps", str(steps), "--updates", str(updates), "--seed", str(seed)),
        *(("--local", json.dumps(row.local)) if row.local else ()),
        *(("--outer-rate", str(row.outer_rate)) if row.outer_rate is not None else ()),
    ]
    job.spec["update"], job.spec["wire"] = row.update, row.wire
    before = sum(_link.carried())
    await job.submit()
    await job.wait("the first update", job.updates, 300)
    chaos = Chaos(on, job, seed, 0)

    async def kill() -> None:
        await asyncio.sleep(KILL_SECONDS / 2)  # so that a short run has a death, too
        while True:
            await chaos.cause(chaos.kill_worker)
            await asyncio.sleep(KILL_SECONDS)

    killer = asyncio.ensure_future(kill()) if killing else None
    try:
        await job.wait_for_end(1800)
    finally:
        if killer is not None:
            killer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killer
    sent = sum(_link.carried()) - before
    await asyncio.sleep(2.0)  # until the last worker has ended
    seconds = (await job.look())["workerSeconds"]
    times = [update.at for update in job.updates()]
    module = example(size)
    bits = module.evaluate(backstay.load(str(job.checkpoints)).params)["bits_per_byte"]
    await job.delete()
    goodput = seconds["applied"] / sum(seconds.values())
    tokens = steps * row.workers * module.BATCH * module.CONTEXT
    return Result(float(bits), sent / tokens, goodput, times[-1] - times[0], len(chaos.faults))


def shown(results: dict[str, Result], size: str, rows: Iterable[int]) -> str:
    """The table of the runs that there are."""
    lines = [("", "workers", "killed", "bits/byte", "bytes/token", "goodput", "seconds")]
    for number in rows:
        for killing in (False, True):
            found = [result for key, result in results.items() if key.rpartition("/")[0] == name(size, number, killing)]
            if not found:
                continue
            bits = [result.bits for result in found]
            spread = f" ± {statistics.stdev(bits):.3f}" if len(bits) > 1 else ""
            lines.append(
                (
                    "... with deaths" if killing else ROWS[number].name,
                    str(ROWS[number].workers),
                    f"{statistics.mean(result.killed for result in found):.1f}",
                    f"{statistics.mean(bits):.3f}{spread}",
                    f"{statistics.mean(result.sent for result in found):,.0f}",
                    f"{statistics.mean(result.goodput for result in found):.1%}",
                    f"{statistics.mean(result.seconds for result in found):.1f}",
                )
            )
    return table(lines)


def name(size: str, row: int, killing: bool) -> str:
    """The name of a run in the file of results, without its seed."""
    return f"{size}/{row}/{'killed' if killing else 'quiet'}"


async def measure(arguments: argparse.Namespace, path: Path | None) -> dict[str, Result]:
    """All runs that are not in the file, in one cluster."""
    kept = json.loads(path.read_text()) if path and path.exists() else {}
    results = {key: Result(**values) for key, values in kept.items()}
    async with cluster() as on:
        for seed in range(arguments.seeds):
            for number in arguments.rows:
                for killing in (False, True):
                    key = f"{name(arguments.size, number, killing)}/{seed}"
                    if key in results:
                        continue
                    results[key] = await run(on, ROWS[number], arguments.size, seed, killing)
                    print(key, results[key], file=sys.stderr, flush=True)
                    if path:
                        path.write_text(json.dumps({key: asdict(value) for key, value in results.items()}, indent=1))
    return results


def main() -> None:
    """Parse arguments, enter the namespace, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=STEPS, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second on the link, in each direction")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="from 0; default: all")
    parser.add_argument("--results", type=Path, help="a file that keeps the results")
    arguments = parser.parse_args()
    _link.enter(arguments.gigabits)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for evaluating here
    results = asyncio.run(measure(arguments, arguments.results))
    print(table([("size", arguments.size), ("link", f"{arguments.gigabits:g} Gb/s")]))
    print(shown(results, arguments.size, arguments.rows))


if __name__ == "__main__":
    main()
