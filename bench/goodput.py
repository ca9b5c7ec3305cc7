"""Goodput of whole jobs, in quiet runs and while pods are killed: `status.workerSeconds` (docs/goodput.md).

Two independent witnesses check it. The parameters of bench/scripts/witness.py count the applied gradients, and each of
them slept for a fixed time. The workers that ended by themselves reported their own seconds.

    python bench/goodput.py [--seconds 30] [--standbys 0|1] [--seed 0]

The exit status is 1 when an update was lost, or a gradient applied twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import Any

from _cluster import BenchCluster, BenchJob, cluster, seconds_per_step, stored
from _common import table
from chaos import Chaos, witness_of

from backstay_spec.goodput import PARTS

COMPUTE = 0.2
EVERY_STEPS = 50
CASES: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("4 workers", "", 0, {"workers": 4, "backups": 0}),
    ("... a worker killed every 10 s", "worker", 10.0, {"workers": 4, "backups": 0}),
    ("... a server killed every 10 s", "server", 10.0, {"workers": 4, "backups": 0}),
    ("4 workers, 1 backup", "", 0, {"workers": 4, "backups": 1}),
    ("... a worker killed every 10 s", "worker", 10.0, {"workers": 4, "backups": 1}),
    ("4 workers, 1 backup, grace Auto", "", 0, {"workers": 4, "backups": 1, "grace": "Auto"}),
    ("... a worker killed every 10 s", "worker", 10.0, {"workers": 4, "backups": 1, "grace": "Auto"}),
    ("8 workers, 2 backups", "", 0, {"workers": 8, "backups": 2}),
    ("... a worker killed every 5 s", "worker", 5.0, {"workers": 8, "backups": 2}),
)


def all_train(job: BenchJob) -> bool:
    """Returns whether every rank has computed."""
    return all(
        any(what.startswith("step") for pod in job.pods(f"worker-{rank}") for _, what in job.marks(pod))
        for rank in range(job.workers)
    )


def reported(job: BenchJob) -> dict[str, float]:
    """Returns the seconds that the workers which ended by themselves reported at their end."""
    found: dict[str, float] = {}
    for fact in job.facts("worker_seconds"):
        for part in PARTS:
            found[part] = found.get(part, 0.0) + float(fact.notes.get(part, 0.0))
    return found


async def run(on: BenchCluster, arguments: argparse.Namespace, case: int) -> tuple[BenchJob, float, int]:
    """Run a job of one case. Returns it with the seconds of an update, and how many pods were killed."""
    _, what, every, shape = CASES[case]
    job = BenchJob(
        on,
        f"goodput-{case}",
        steps=int(arguments.seconds / COMPUTE),
        servers=2,
        standbys=arguments.standbys,
        pause=0.0,
        every_steps=EVERY_STEPS,
        env={"COMPUTE": str(COMPUTE), "SIZE": "250000"},
        **shape,
    )
    await job.submit()
    await job.wait("all of them train", lambda: all_train(job), 300)
    chaos, began = Chaos(on, job, arguments.seed, 0), time.time()
    while (await job.look()).get("phase") == "Running":
        await asyncio.sleep(every or 0.5)
        if what and (await job.look()).get("phase") == "Running":
            await chaos.cause(chaos.kill_worker if what == "worker" else chaos.kill_active_server)
    await job.wait_for_end(180)
    await asyncio.sleep(2.0)  # until the last worker has ended
    await job.look()
    return job, seconds_per_step([update for update in job.updates() if update.at >= began]), len(chaos.faults)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measure all cases in one cluster; return whether each passed."""
    fine, quiet = True, 0.0
    rows: list[tuple[str, ...]] = [("", "killed", "s/update", "of quiet", "goodput", "witness", "workers", *PARTS[1:])]
    async with cluster(arguments.keep) as on:
        for case, (name, what, _, _) in enumerate(CASES):
            job, pace, killed = await run(on, arguments, case)
            quiet = quiet if what else pace
            counted, seconds = witness_of(job), job.status["workerSeconds"]
            fine = fine and counted.lost == counted.twice == 0
            total, applied = sum(seconds.values()), int((stored(job)[1]["a_count"] > 0).sum())
            own = reported(job)
            rows.append(
                (
                    name,
                    str(killed),
                    f"{pace:.3f}",
                    f"{quiet / pace:.0%}",
                    f"{seconds['applied'] / total:.1%}",
                    f"{applied * COMPUTE / total:.1%}",
                    f"{own['applied'] / sum(own.values()):.1%}",
                    *(f"{seconds.get(part, 0.0) / total:.1%}" for part in PARTS[1:]),
                )
            )
            print(f"{name}: {seconds}", file=sys.stderr, flush=True)
            await job.delete()
    print(table(rows))
    return fine


def main() -> None:
    """Parse arguments, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="seconds of successive computation in a job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--standbys", type=int, choices=(0, 1), default=1)
    parser.add_argument("--keep", help="a folder for logs and checkpoints, which is kept")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for reading checkpoints here
    sys.exit(0 if asyncio.run(measure(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
