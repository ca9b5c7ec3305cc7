"""Deaths at chosen moments of a step, one small job each: what became of the witness's parameters.

The chaos run strikes at any time; these are the moments that it seldom meets: between the decision of an update and
its application, between a file's last byte and its name, with the last update, everybody at once.

    python bench/moments.py [--seconds 120] [SCRIPT ...]      a SCRIPT as in docs/faults.md, in place of these
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

from _cluster import Cluster, Job, cluster
from chaos import injected, redone_of, witness_of

STEPS, EVERY_STEPS, STALL_SECONDS = 60, 20, 8
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


async def one(on: Cluster, number: int, mode: str, script: str, seconds: float) -> bool:
    """Train under one script; False when something was lost or applied twice, or the faults did not happen."""
    job = Job(
        on, f"moment-{number}-{mode.lower()}", steps=STEPS, workers=2, servers=2, mode=mode, pause=0.03,
        every_steps=EVERY_STEPS, stall_seconds=STALL_SECONDS, env={"FAULT_INJECTION": script},
    )  # fmt: skip
    began = time.monotonic()
    await job.submit()
    await job.wait_for_end(seconds)
    heard, struck = witness_of(job), sum(injected(job).values())
    print(
        f"{mode:<6}{script:<84}{struck:>7}{heard.lost:>6}{heard.twice:>7}{redone_of(job.updates()):>8}"
        f"{time.monotonic() - began:>8.1f} s",
        flush=True,
    )
    await job.delete()
    return heard.lost == heard.twice == 0 and struck > 0


async def measure(scripts: list[str], seconds: float) -> bool:
    """Each script in both modes."""
    print(f"{'mode':<6}{'FAULT_INJECTION':<84}{'struck':>7}{'lost':>6}{'twice':>7}{'redone':>8}{'took':>10}")
    async with cluster() as on:
        return all(
            [
                await one(on, number, mode, script, seconds)
                for number, script in enumerate(scripts)
                for mode in ("Sync", "Async")
            ]
        )


def main() -> None:
    """Parse arguments, do it, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--seconds", type=float, default=120, help="within which each job must end")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for reading checkpoints here
    sys.exit(0 if asyncio.run(measure(arguments.scripts or list(SCRIPTS), arguments.seconds)) else 1)


if __name__ == "__main__":
    main()
