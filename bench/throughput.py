"""Examples a second of the digits example as a job, against the same script in one process, in turns in one run.

One process already uses all cores for one batch. A job of one worker computes the same batches, so the difference is
the cost of push, update and pull. Jobs of more workers on the same cores show the cost of sharing them.

    python bench/throughput.py [--rounds 2] [--seconds 6]
"""

from __future__ import annotations

import argparse
import asyncio

from _cluster import BenchCluster, BenchJob, BenchUpdate, alone, cluster, median, row

from backstay_spec.quorum import quorum_of

# workers, servers, backups
SHAPES = ((1, 1, 0), (1, 2, 0), (2, 2, 0), (4, 2, 1))
SKIPPED_UPDATES = 10  # compilation, and new connections


def examples_per_second(updates: list[BenchUpdate], batch: int, quorum: int) -> float:
    """Examples per second, without the first few updates."""
    kept = updates[SKIPPED_UPDATES:]
    return (kept[-1].step - kept[0].step) * batch * quorum / (kept[-1].at - kept[0].at)


async def in_one_process(batch: int, steps: int) -> float:
    """Run the script in one process, and return its examples per second."""
    marks = await alone("digits.py", BATCH=str(batch), STEPS=str(steps))
    updates = [BenchUpdate(at, int(what.split()[1]), "alone") for at, what in marks if what.startswith("step ")]
    return examples_per_second(updates, batch, 1)


async def as_job(
    on: BenchCluster, name: str, batch: int, steps: int, workers: int, servers: int, backups: int
) -> tuple[float, float]:
    """Run the script as a job, and return its examples and updates per second."""
    job = BenchJob(
        on, name, steps=steps, workers=workers, servers=servers, backups=backups, every_steps=100_000,
        env={"BATCH": str(batch)}, script="digits.py",
    )  # fmt: skip
    await job.submit()
    await job.wait_for_end(300)
    updates = job.updates()
    await job.delete()
    quorum = quorum_of(backups, workers)
    rate = examples_per_second(updates, batch, quorum)
    return rate, rate / (batch * quorum)


async def measure(rounds: int, seconds: float) -> None:
    """Measure the script in one process and each shape of job, in turns."""
    async with cluster() as on:
        for batch in (32, 512):
            pace = await in_one_process(batch, 100) / batch
            steps = max(60, int(seconds * pace))
            single: list[float] = []
            jobs: dict[tuple[int, int, int], list[tuple[float, float]]] = {shape: [] for shape in SHAPES}
            for turn in range(rounds):
                single.append(await in_one_process(batch, steps))
                for shape in SHAPES:
                    name = f"digits-{batch}-{'-'.join(map(str, shape))}-{turn}"
                    # An update of a job with many workers needs more computation on the same cores.
                    jobs[shape].append(await as_job(on, name, batch, max(60, steps // shape[0]), *shape))
            one = median(single)
            row(f"batch {batch}: one process", f"{one:.0f} examples/s", f"{1e3 * batch / one:.1f} ms an update")
            for (workers, servers, backups), found in jobs.items():
                rate, updates = median([f[0] for f in found]), median([f[1] for f in found])
                row(
                    f"batch {batch}: {workers} workers, {servers} servers, {backups} backups",
                    f"{rate:.0f} examples/s",
                    f"{rate / one:.1%} of one process, {1e3 / updates:.1f} ms an update",
                )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate seconds of each run")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, arguments.seconds))


if __name__ == "__main__":
    main()
