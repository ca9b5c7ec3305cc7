"""Runs short jobs many times, and reports how they end (O10). `docs/decisions/0062` has what was measured.

    python bench/ends.py [--times 20] [--only TEXT] [--load 2] [--operator pause|kill]

`--load` starts so many processes that only compute. `--operator` stops the operator, or kills it and starts another
one, after all pods have started: it observes the ends of the pods only later. The exit status is 1 when a job failed,
was interrupted, or had a pod replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from _cluster import NAMESPACE, BenchCluster, BenchJob, cluster, median
from _common import table

LIMIT = 240.0
LATE = 4.0  # the operator continues so many seconds after the last pod has ended


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        seconds: how long `evaluate` takes; None: the job has none.
    """

    name: str
    steps: int
    servers: int
    workers: int = 2
    standbys: int = 0
    stores: bool = False
    evaluator: bool = False
    seconds: float | None = None


CASES = (
    Case("1 update, 1 server", 1, 1, 1),
    Case("30 updates, 3 servers, checkpoint", 30, 3, stores=True),
    Case("30 updates, 3 servers", 30, 3),
    Case("10 updates, 2 servers, standbys", 10, 2, standbys=1),
    Case("10 updates, 2 servers, standbys, checkpoint", 10, 2, standbys=1, stores=True),
    Case("3 updates, 5 servers, checkpoint", 3, 5, stores=True),
    Case("5 updates, 2 servers, evaluator", 5, 2, stores=True, evaluator=True, seconds=0.0),
    Case("20 updates, 2 servers, evaluate 25 s", 20, 2, seconds=25.0),
)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Processes that only compute."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def phases(pods: list[dict[str, Any]]) -> set[str]:
    return {pod.get("status", {}).get("phase", "Pending") for pod in pods}


async def without_operator(on: BenchCluster, job: BenchJob, how: str, case: Case) -> None:
    """Stop or kill the operator when all pods have started, until all but the standbys have ended. These wait for the
    operator, which deletes them."""
    standbys = case.servers * case.standbys
    pods = case.servers + standbys + case.workers + case.evaluator
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = await on.api.pods_of(NAMESPACE, job.name)
        if len(found) >= pods and "Pending" not in phases(found):
            break
        await asyncio.sleep(0.05)
    operator = on.part("backstay_operator")
    assert operator is not None
    operator.send_signal(signal.SIGSTOP if how == "pause" else signal.SIGKILL)
    while time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        found = await on.api.pods_of(NAMESPACE, job.name)
        if sum(one.get("status", {}).get("phase") in {"Succeeded", "Failed"} for one in found) >= len(found) - standbys:
            break
    await asyncio.sleep(LATE)
    if how == "pause":
        operator.send_signal(signal.SIGCONT)
    else:
        await on.start_operator()


async def run(on: BenchCluster, case: Case, name: str, how: str) -> tuple[str, float]:
    """Run a job of one case. Returns how it ended, and its seconds."""
    env = {"STEPS": str(case.steps)} | ({} if case.seconds is None else {"EVALUATE": str(case.seconds)})
    shape = {"steps": case.steps, "servers": case.servers, "workers": case.workers, "standbys": case.standbys}
    job = BenchJob(on, name, script="short.py", env=env, **shape)  # type: ignore[arg-type]
    if not case.stores:
        job.spec["checkpoint"] = {}
    if case.evaluator:
        job.spec["evaluator"] = {}
    began = time.monotonic()
    await job.submit()
    if how:
        await without_operator(on, job, how, case)
    while time.monotonic() < began + LIMIT:
        if (await job.look()).get("phase") in {"Succeeded", "Failed"}:
            break
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    ended = [job.status.get("phase", "Pending")]
    if ended[0] == "Failed":
        ended += [c["reason"] for c in job.status["conditions"] if c["type"] == "Failed"]
    uid = (await on.api.get_job(NAMESPACE, name))["metadata"]["uid"]
    reasons = {event["reason"] for event in await on.api.events_of(NAMESPACE, uid)}
    ended += sorted(reasons & {"TrainingInterrupted"})
    if any(role.get("restarts") for role in job.status.get("roles", {}).values()):
        ended.append("restarts")
    if ended != ["Succeeded"]:
        print(f"{name} ({case.name}): {', '.join(ended)}\n{job.describe()}", flush=True)
    await job.delete()
    return ", ".join(ended), seconds


async def main(arguments: argparse.Namespace) -> int:
    rows, bad = [], 0
    with load(arguments.load):
        async with cluster() as on:
            for number, case in enumerate(CASES):
                if arguments.only not in case.name:
                    continue
                ends = [
                    await run(on, case, f"end-{number}-{one}", arguments.operator) for one in range(arguments.times)
                ]
                counts = Counter(end for end, _ in ends)
                bad += sum(counts.values()) - counts["Succeeded"]
                text = "; ".join(f"{count} {end}" for end, count in counts.most_common())
                rows.append([case.name, str(len(ends)), text, f"{median([seconds for _, seconds in ends]):.1f}"])
                print("  ".join(rows[-1]), flush=True)
    print(table([["job", "runs", "ended", "seconds"], *rows]))
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="runs of each job")
    parser.add_argument("--only", default="", help="only jobs whose name has this text")
    parser.add_argument("--load", type=int, default=0, help="processes that only compute")
    parser.add_argument("--operator", choices=("", "pause", "kill"), default="", help="what happens to the operator")
    sys.exit(asyncio.run(main(parser.parse_args())))
