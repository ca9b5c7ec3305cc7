"""Deaths at chosen points of a step, one small job each, and the parameters of the witness afterwards.

Random faults seldom happen at these points. One example is between the decision of an update and its application.
Others are while a standby receives the state, at the last update, and in all pods at the same time. Each job runs
without standbys or with them. In Sync mode, the bits must be those of a run without faults.

    python bench/moments.py [--seconds 120] [--standbys 0|1] [--pods-per-rank N] [SCRIPT ...]

A SCRIPT has the form that docs/faults.md describes. It replaces the scripts of this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence

import numpy as np
from _cluster import BenchCluster, BenchJob, cluster, gaps, stored
from chaos import injected, redone_of, witness_of

STEPS, EVERY_STEPS, STALL_SECONDS, WORKERS = 60, 20, 8, 2
HOLD = 20
"""A job with standbys computes no gradient from this step on until the standbys are in sync."""

SCRIPTS = (
    f"kill server/0 @{STEPS} applied",
    f"kill server/1 @{STEPS} applied",
    f"kill server/0 @{STEPS} rename",
    "kill server/1 @40 rename",
    "kill server/* @31 commit",
    "kill worker/* @30 push; kill server/0 @30 commit",
    f"kill server/1 @{STEPS - 1} commit; kill worker/* @20 push",
    "stop server/0 @25 commit 12s",
    "stop worker/0 @25 push 12s",
    "hang worker/1 @20",
    "corrupt worker/0 @20; corrupt server/1 @25; cut worker/1 @30; cut server/0 @35",
    "fill server/1 @19 3s; kill server/0 @30",
    "exit server/1 @20 0; exit worker/0 @40 0",
)

KEPT = (
    "kill server/0 @30 commit",
    "kill server/1 @30 commit",
    "kill server/0 @30 norm",
    "kill server/1 @30 norm",
    "kill server/0 @40 rename",
    "kill server/1 @40 rename",
    "kill server/0 @40 manifest",
    f"kill server/0 @{STEPS}",
    f"kill server/0 @{STEPS} manifest",
    f"kill server/0 @{STEPS} done",
    f"kill server/1 @{STEPS} done",
    "kill server/* @30 commit",
    "kill server/* @30 norm",
    "kill server/*#2 @30 follow",
    "kill server/*#2 @0 state",
    "kill server/0 @30 commit; kill server/1 @31 norm",
    "kill server/1#2 @30 follow; kill server/0 @33",
    "kill worker/* @30 push; kill server/0 @30 norm",
    "stop server/0 @30 norm",
    "stop server/1 @30 commit",
    "stop server/1#2 @30 follow 12s",
    "cut server/0#2 @30 follow; cut server/0 @34; cut server/1 @38 norm",
)
"""Faults of jobs with standbys. No update is redone."""

LOST = (
    "kill server/0 @30; kill server/0#2 @30 follow",
    "kill server/1 @30 commit; kill server/1#2 @31",
)
"""Faults that kill both servers of a shard. The job goes back to the checkpoint."""


OF_RANKS = (
    "kill worker/0.0 @20; kill worker/1.1 @30 push",
    "kill worker/1.0 @30 push; kill server/0 @31 commit",
    "exit worker/0.1 @25 1; exit worker/0.0#2 @35 0",
    "stop worker/1.1 @20; stop worker/0.0 @40 push",
    "hang worker/0.1 @20",
    "cut worker/0.0 @20; cut worker/1.1 @30; corrupt worker/0.1 @40",
    f"kill worker/0.1 @{STEPS} done",
    f"kill worker/0.0 @{STEPS} done",
    "kill server/0 @30 commit; kill worker/*.1 @30",
)
"""Faults of pods of ranks that have two or more."""


class Moments:
    """The jobs of one run, and the runs without faults that they are compared with."""

    def __init__(self, on: BenchCluster, seconds: float, pods_per_rank: int) -> None:
        self._on, self._seconds, self._pods = on, seconds, pods_per_rank
        self._quiet: dict[int, dict[str, np.ndarray]] = {}
        self._number = 0

    async def one(self, mode: str, script: str, *, standbys: int, free: bool) -> bool:
        """Train with one fault script. Return False if a gradient was lost or repeated, or if no fault was injected.

        Args:
            free: whether the case fails if updates are redone.
        """
        # In Async each worker counts its own steps.
        hold = HOLD if mode == "Sync" else HOLD // WORKERS
        job = self._job(mode, standbys, FAULT_INJECTION=script, **({"HOLD": str(hold)} if standbys else {}))
        began = time.monotonic()
        await job.submit()
        if standbys:
            await job.wait("its standbys are in sync", lambda: _in_sync(job) and len(job.updates()) >= HOLD)
            job.release()
        await job.wait_for_end(self._seconds)
        counted, faults, updates = witness_of(job), sum(injected(job).values()), job.updates()
        redone, bits = redone_of(updates), "-"
        if mode == "Sync":
            if standbys not in self._quiet:
                quiet = self._job(mode, standbys)
                await quiet.submit()
                await quiet.wait_for_end(self._seconds)
                self._quiet[standbys] = stored(quiet)[1]
                await quiet.delete()
            ours, theirs = stored(job)[1], self._quiet[standbys]
            bits = "yes" if all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs) else "NO"
        took, longest = time.monotonic() - began, gaps(updates, updates[0].at, updates[-1].at)
        print(
            f"{mode:<6}{standbys:>8}  {script:<80}{faults:>7}{counted.lost:>6}{counted.twice:>7}{redone:>8}{bits:>6}"
            f"{longest:>8.1f} s{took:>8.1f} s",
            flush=True,
        )
        await job.delete()
        return counted.lost == counted.twice == 0 and faults > 0 and bits != "NO" and not (free and redone)

    def _job(self, mode: str, standbys: int, **env: str) -> BenchJob:
        self._number += 1
        return BenchJob(
            self._on, f"moment-{self._number}-{mode.lower()}", steps=STEPS, workers=WORKERS, servers=2, mode=mode,
            pause=0.03, standbys=standbys, every_steps=EVERY_STEPS, stall_seconds=STALL_SECONDS, env=env,
            pods_per_rank=self._pods,
        )  # fmt: skip


def _in_sync(job: BenchJob) -> bool:
    conditions = job.status.get("conditions", [])
    return any(each["type"] == "StandbysInSync" and each["status"] == "True" for each in conditions)


async def measure(scripts: Sequence[str], standbys: Sequence[int], seconds: float, pods_per_rank: int) -> bool:
    """Run each script in both modes."""
    print(
        f"{'mode':<6}{'standbys':>8}  {'FAULT_INJECTION':<80}{'faults':>7}{'lost':>6}{'twice':>7}{'redone':>8}"
        f"{'bits':>6}{'no update':>10}{'took':>10}"
    )
    todo = [(script, number, False) for number in standbys for script in scripts]
    if not scripts and pods_per_rank > 1:
        todo += [(script, number, False) for number in standbys for script in OF_RANKS]
    elif not scripts:
        todo += [(script, 0, False) for script in SCRIPTS if 0 in standbys]
        todo += [(script, 1, True) for script in KEPT if 1 in standbys]
        todo += [(script, 1, False) for script in LOST if 1 in standbys]
    async with cluster() as on:
        moments = Moments(on, seconds, pods_per_rank)
        return all(
            [
                await moments.one(mode, script, standbys=number, free=free)
                for script, number, free in todo
                for mode in ("Sync", "Async")
            ]
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--seconds", type=float, default=120, help="the time limit of each job")
    parser.add_argument("--standbys", type=int, choices=(0, 1), help="only scripts with this number of standbys")
    parser.add_argument("--pods-per-rank", type=int, default=1, help="pods of each rank; above 1: faults of its pods")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for reading checkpoints here
    standbys = (0, 1) if arguments.standbys is None else (arguments.standbys,)
    done = asyncio.run(measure(arguments.scripts, standbys, arguments.seconds, arguments.pods_per_rank))
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
