"""Times of recovery, on the embedded cluster with real processes, all in one run.

1. The time from kill -9 of a worker to the first applied gradient of its replacement, with each part of this time. It
   is measured with pods that are forked and have a compilation cache, and with pods that import JAX and have none.
2. Updates while workers are killed one after another, with a backup. The longest time without an update around each
   death is compared with the time before the first death.
3. The time from kill -9 of a server to the next update, and the redone updates. With ``--standbys 1`` it is also
   measured with a standby.

    python bench/recovery.py [--kills 5] [--standbys 0|1] [--only worker,backup,server] [--pods-per-rank 2]

With ``--pods-per-rank``, the first part kills the last pod of a rank.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from typing import Any

from _cluster import NAMESPACE, BenchCluster, BenchJob, cluster, gaps, incarnation_of, median, row

SETTLE_SECONDS = 3.0
PARTS = (
    "the pod is seen Failed",
    "its replacement is created",
    "its process is started",
    "Python has started",
    "imports are done",
    "joined, parameters pulled",
    "first gradient applied",
)


async def death(job: BenchJob, slot: str) -> dict[str, float]:
    """Kill a worker. Return when each part of its replacement was complete, in seconds since the kill."""
    victim = job.newest(slot)
    assert victim is not None
    killed = time.time()
    job.signal(victim, signal.SIGKILL)
    seen: dict[str, float] = {}
    successor = ""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for pod in await job.cluster.api.pods_of(NAMESPACE, job.name):
            name = pod["metadata"]["name"]
            if name == victim and pod["status"].get("phase") == "Failed":
                seen.setdefault(PARTS[0], time.time() - killed)
            if f"-{slot}-" in name and incarnation_of(name) > incarnation_of(victim):
                seen.setdefault(PARTS[1], time.time() - killed)
                successor = name
        marks = {what.split()[0]: at for at, what in reversed(job.marks(successor))} if successor else {}
        if "step" in marks:
            for part, mark in zip(PARTS[2:], ("process", "python", "imports", "joined", "step"), strict=True):
                seen[part] = marks[mark] - killed
            # The pod may be deleted between two requests.
            seen.setdefault(PARTS[0], seen[PARTS[1]])
            return seen
        await asyncio.sleep(0.02)
    raise SystemExit(f"{victim} was not replaced within 120 s\n{job.describe()}")


async def begin(job: BenchJob) -> None:
    """Submit a job, and wait until it trains."""
    await job.submit()
    await job.wait("it trains", lambda: len(job.updates()) >= 10)
    await asyncio.sleep(SETTLE_SECONDS)


async def workers(on: BenchCluster, kills: int, pods_per_rank: int) -> None:
    """Kill workers of a job without backups. Each next update needs the replacement."""
    slot, goal = "worker-1", "1 s"
    if pods_per_rank > 1:
        slot, goal = f"worker-1-{pods_per_rank - 1}", "1.5 s with a cache"
    for cache in (False, True):
        name = "cached" if cache else "uncached"
        # With the cluster's own cache, pods are forked, as those of `backstay run`. With another one they are executed,
        # and import JAX.
        env = {} if cache else {"JAX_COMPILATION_CACHE_DIR": ""}
        job = BenchJob(on, name, steps=4000, workers=2, pause=0.05, env=env, pods_per_rank=pods_per_rank)
        await begin(job)
        found = []
        for _ in range(kills):
            found.append(await death(job, slot))
            await asyncio.sleep(1.0)
        await job.delete()
        total = [f[PARTS[-1]] for f in found]
        how = "forked, with a compilation cache" if cache else "executed, without a compilation cache"
        row(f"worker killed -> first gradient applied, {how}", f"{median(total):.2f} s", goal)
        row("  the slowest of " + str(kills), f"{max(total):.2f} s")
        before = [0.0] * kills
        for part in PARTS:
            at = [f[part] for f in found]
            row(f"  + until {part}", f"{median([a - b for a, b in zip(at, before, strict=True)]):.2f} s")
            before = at


async def backup(on: BenchCluster, kills: int) -> None:
    """Kill workers of a job with a backup. No update waits for the dead worker (T2)."""
    job = BenchJob(on, "backup", steps=4000, workers=4, backups=1, servers=2, pause=0.1)
    await begin(job)
    began = time.time() - SETTLE_SECONDS
    await asyncio.sleep(5.0)
    quiet = gaps(job.updates(), began, time.time())
    around = []
    for number in range(kills):
        victim = job.newest(f"worker-{number % job.workers}")
        assert victim is not None
        killed = time.time()
        job.signal(victim, signal.SIGKILL)
        slot = f"worker-{number % job.workers}"
        await job.wait(
            "it is replaced and computes",
            lambda slot=slot, old=victim: any(  # type: ignore[misc]
                incarnation_of(pod) > incarnation_of(old) and any(w.startswith("step") for _, w in job.marks(pod))
                for pod in job.pods(slot)
            ),
        )
        await asyncio.sleep(1.0)
        around.append((gaps(job.updates(), killed, killed + 1.0), gaps(job.updates(), killed, time.time())))
    await job.delete()
    row("4 workers, 1 backup, step 0.1 s: longest gap while quiet", f"{quiet:.2f} s")
    row("  longest gap within 1 s of a death, median", f"{median([a for a, _ in around]):.2f} s", "as while quiet")
    row("  until the replacement computes (its start takes CPU), worst", f"{max(b for _, b in around):.2f} s")


async def server(on: BenchCluster, kills: int, standbys: int) -> None:
    """Kill the server of each shard in turn."""
    job = BenchJob(
        on, f"server-{standbys}", steps=4000, workers=2, servers=2, pause=0.1, standbys=standbys, every_steps=20
    )
    await begin(job)
    found: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
    for number in range(kills * 2):
        shard = number % 2
        active = _active(job, shard)
        before = job.updates()[-1].step
        killed = time.time()
        job.signal(active, signal.SIGKILL)
        await job.wait(
            "training continues",
            lambda before=before, killed=killed: (  # type: ignore[misc]
                job.updates()[-1].step > before + 25 and job.updates()[-1].at > killed + 2.0
            ),
        )
        # An update that was decided before the death may end after it. So the outage is the longest time without one
        # that begins soon: a new standby, which starts later, costs time too.
        pairs = [pair for pair in itertools.pairwise(job.updates()) if pair[1].at > killed > pair[0].at - 0.5]
        after = max(pairs, key=lambda pair: pair[1].at - pair[0].at)[1]
        found[shard].append((after.at - killed, max(0, before + 1 - after.step)))
        await asyncio.sleep(SETTLE_SECONDS + (6.0 if standbys else 0.0))  # until a new standby has the whole state
    await job.delete()
    with_standby = "with a standby" if standbys else "without a standby, checkpoint every 20 updates"
    for shard, deaths in found.items():
        what = "server 0 (coordinator)" if shard == 0 else "server 1"
        goal = "0.4 s" if standbys else ""
        row(f"{what} killed -> next update, {with_standby}", f"{median([a for a, _ in deaths]):.2f} s", goal)
        row("  the slowest of " + str(len(deaths)), f"{max(a for a, _ in deaths):.2f} s")
        redone = f"{sum(b for _, b in deaths) / len(deaths):.1f}"
        row("  updates redone, mean", redone, "0" if standbys else "at most 20")


def _active(job: BenchJob, shard: int) -> str:
    """Returns the serving pod of a shard. With standbys, a shard has two pods."""
    living = [pod for pod in job.processes() if f"-ps-{shard}-" in pod]
    if not living:
        raise SystemExit(f"no server of shard {shard} is running")
    return min(living, key=incarnation_of)  # the standby is the younger one


async def measure(arguments: argparse.Namespace) -> None:
    """Run the benchmark."""
    async with cluster(arguments.keep) as on:
        for what in arguments.only.split(","):
            match what:
                case "worker":
                    await workers(on, arguments.kills, arguments.pods_per_rank)
                case "backup":
                    await backup(on, arguments.kills)
                case "server":
                    for standbys in range(arguments.standbys + 1):
                        await server(on, max(1, arguments.kills // 2), standbys)
                case _:
                    raise SystemExit(f"--only {what}: must be some of worker,backup,server")


def main() -> None:
    """Run the command."""
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--standbys", type=int, choices=(0, 1), default=0)
    parser.add_argument("--only", default="worker,backup,server")
    parser.add_argument("--pods-per-rank", type=int, default=1)
    parser.add_argument("--keep", help="a folder for logs and checkpoints, which is kept")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
