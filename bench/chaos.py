"""Random faults by a seed on the embedded cluster, and the result of the training.

A job of bench/scripts/witness.py trains, and has a fault about every 3 s. A pod or process is killed, stopped, cut off,
deleted or evicted, or its disk is full. Then the same job trains without faults. The last checkpoint shows how often
each gradient was applied. In Sync mode, both checkpoints must have the same bits. Async mode compares no bits.

    python bench/chaos.py [--seconds 600] [--seed 0] [--standbys 0|1] [--mode both|Sync|Async] [--overlap]

Further options: --gradients Int8, --parameters BFloat16, --backups 1, --grace Auto, --local 4.

No bits are compared with backups, where the sets of ranks depend on time, nor with error feedback.
The exit status is 1 when an update was lost, a gradient applied twice, or the bits differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from _cluster import (
    NAMESPACE,
    BenchCluster,
    BenchJob,
    BenchUpdate,
    cluster,
    gaps,
    incarnation_of,
    median,
    row,
    seconds_per_step,
    shard_of,
    stored,
)
from _witness import COUNTS, Applied, count_applied

from backstay_spec import contract

STEP_SECONDS = 0.1
EVERY_SECONDS = 3.0
LIFE_SECONDS = 12.0  # of a pod, about
AFTER_PAUSE_SECONDS = 10.0  # a pause that ended earlier than this is not the cause of a rollback
_ORDER = ("Sync", "Async")


@dataclass(frozen=True)
class ChaosTarget:
    """The target of a fault from outside the pods; false: there is none now.

    Attributes:
        pods: the names of the pods; empty: the target is a part of the cluster.
        seconds: how long the target is stopped or away; None: forever.
    """

    pods: tuple[str, ...] = ()
    seconds: float | None = None

    def __bool__(self) -> bool:
        return bool(self.pods) or self.seconds is not None

    def __str__(self) -> str:
        return " ".join([*self.pods, *([] if self.seconds is None else [f"for {self.seconds:.1f} s"])])


NOTHING = ChaosTarget()


@dataclass
class ChaosFault:
    """A fault that this benchmark causes from outside the pods."""

    at: float
    kind: str
    target: ChaosTarget


class Chaos:
    """Causes faults in a job by a seed, and records them."""

    def __init__(self, on: BenchCluster, job: BenchJob, seed: int, standbys: int) -> None:
        self.on, self.job = on, job
        self.rng = random.Random(seed)
        self.faults: list[ChaosFault] = []
        self._later: set[asyncio.Task[None]] = set()
        # Rare faults are in the list once, and frequent ones several times.
        self._kinds: list[Callable[[], Awaitable[ChaosTarget]]] = [
            *[self.kill_worker] * 5,
            *[self.stop_worker] * 2,
            self.lose_worker,
            *[self.delete_worker] * 2,
            self.delete_worker_immediately,
            *[self.evict_worker] * 2,
            *[self.kill_server] * (3 if standbys else 2),
            self.stop_server,
            self.delete_server,
            self.kill_several,
            *[self.kill_operator] * 2,
            self.stop_api_server,
        ]

    async def run(self, until: float, every: float) -> None:
        """Cause a fault about every `every` seconds, until the time `until` or the end of the job."""
        while time.monotonic() < until:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * every)
            if (await self.job.look()).get("phase") in {"Succeeded", "Failed"}:
                break
            await self.cause(self.rng.choice(self._kinds))
        await asyncio.gather(*self._later)

    async def cause(self, what: Callable[[], Awaitable[ChaosTarget]]) -> None:
        at = time.time()
        if target := await what():
            self.faults.append(ChaosFault(at, what.__name__.replace("_", " "), target))
            print(f"  {time.strftime('%H:%M:%S')}  {self.faults[-1].kind}: {target}", file=sys.stderr, flush=True)

    def _pick(self, role: str) -> str:
        """Returns a running pod of a role, or an empty string."""
        return self.rng.choice(sorted(pod for pod in self.job.processes() if f"-{role}-" in pod) or [""])

    def _kill(self, pod: str) -> ChaosTarget:
        return ChaosTarget((pod,)) if pod and self.job.signal(pod, signal.SIGKILL) else NOTHING

    def _in(self, seconds: float, what: Callable[[], Any]) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            done = what()
            if asyncio.iscoroutine(done):
                await done

        task = asyncio.ensure_future(later())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _pause(self, pod: str, seconds: float) -> ChaosTarget:
        if not pod or not self.job.signal(pod, signal.SIGSTOP):
            return NOTHING
        self._in(seconds, lambda: self.job.signal(pod, signal.SIGCONT))
        return ChaosTarget((pod,), seconds)

    async def _delete(self, pod: str, **parameters: str) -> ChaosTarget:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"
        deleted = pod and await self.on.try_request("DELETE", path, **parameters) is not None
        return ChaosTarget((pod,)) if deleted else NOTHING

    async def kill_worker(self) -> ChaosTarget:
        return self._kill(self._pick("worker"))

    async def stop_worker(self) -> ChaosTarget:
        return self._pause(self._pick("worker"), self.rng.uniform(0.5, 4))

    async def lose_worker(self) -> ChaosTarget:
        """Stop a worker until it has been replaced, and continue it afterwards."""
        return self._pause(self._pick("worker"), 25)

    async def delete_worker(self) -> ChaosTarget:
        return await self._delete(self._pick("worker"))

    async def delete_worker_immediately(self) -> ChaosTarget:
        return await self._delete(self._pick("worker"), gracePeriodSeconds="0")

    async def evict_worker(self) -> ChaosTarget:
        pod = self._pick("worker")
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        evicted = pod and await self.on.try_request("POST", path, body) is not None
        return ChaosTarget((pod,)) if evicted else NOTHING

    async def kill_server(self) -> ChaosTarget:
        return self._kill(self._pick("ps"))

    async def kill_active_server(self) -> ChaosTarget:
        """Kill the server of a shard that serves, and not its standby."""
        shard = self.rng.randrange(self.job.servers)
        active = ((await self.job.look()).get("active") or {}).get(f"parameter-server-{shard}")
        return self._kill(self._pick(f"ps-{shard}" if active is None else f"ps-{shard}-{active}"))

    async def stop_server(self) -> ChaosTarget:
        return self._pause(self._pick("ps"), self.rng.uniform(0.5, 6))

    async def delete_server(self) -> ChaosTarget:
        return await self._delete(self._pick("ps"))

    async def kill_several(self) -> ChaosTarget:
        pods = sorted(self.job.processes())
        some = self.rng.sample(pods, min(len(pods), self.rng.randint(2, 4)))
        return ChaosTarget(tuple(pod for pod in sorted(some) if self._kill(pod)))

    async def kill_operator(self) -> ChaosTarget:
        operator = self.on.part("backstay_operator")
        if operator is None:
            return NOTHING
        operator.kill()
        away = self.rng.uniform(0, 5)
        self._in(away, self.on.start_operator)
        return ChaosTarget(seconds=away)

    async def stop_api_server(self) -> ChaosTarget:
        server = self.on.part("backstay_cluster")
        if server is None or self._later:  # only when no other process is stopped
            return NOTHING
        away = self.rng.uniform(1, 6)
        server.suspend()
        self._in(away, server.resume)
        return ChaosTarget(seconds=away)


def inside(rng: random.Random, steps: int, workers: Sequence[str], servers: int, standbys: int, seconds: float) -> str:
    """Returns a fault script with points of a step that cannot be timed from outside the pods."""
    script = []
    pods = 1 + standbys  # of a shard at the same time, so each replacement of both uses that many incarnations
    for _ in range(max(6, int(seconds / 8))):
        step = rng.randrange(5, max(6, steps))
        # An estimate of the incarnation that runs then. A later one has the fault when it starts.
        life = 1 + round(rng.uniform(0.4, 1.0) * seconds * step / steps / LIFE_SECONDS)
        worker, server = f"worker/{rng.choice(workers)}#{life}", f"server/{rng.randrange(servers)}#{life * pods}"
        only_with_standbys = [
            f"kill {server} @{step} norm",
            f"stop {server} @{step} norm {rng.uniform(0.5, 3):.1f}s",
            f"kill {server} @{step} follow",
            f"delay {server} @{step} follow {rng.uniform(0.2, 2):.1f}s",
            f"kill {server} @{step} manifest",
        ]
        script.append(
            rng.choice(
                [
                    *(only_with_standbys if standbys else []),
                    f"kill {worker} @{step} push",
                    f"delay {worker} @{step} {rng.uniform(0.2, 3):.1f}s",
                    f"cut {worker} @{step}",
                    f"corrupt {worker} @{step}",
                    f"exit {worker} @{step} 137",
                    f"hang {worker} @{step}",
                    f"cut {server} @{step}",
                    f"corrupt {server} @{step}",
                    f"fill {server} @{step} {rng.uniform(2, 8):.1f}s",
                    f"kill {server} @{step} commit",
                    f"kill {server} @{step} rename",
                    f"stop {server} @{step} commit {rng.uniform(0.5, 3):.1f}s",
                ]
            )
        )
    return "; ".join(script)


def witness_of(job: BenchJob) -> Applied:
    """Returns the lost and repeated gradients in the job's last checkpoint."""
    step, params = stored(job)
    if step != job.steps:
        raise SystemExit(f"{job.name} ended, but its newest checkpoint is of step {step} instead of {job.steps}")
    quorum = max(1, job.workers - job.backups) if job.mode == "Sync" else None
    rows = job.steps * max(1, job.local)
    return count_applied(
        [params[name] for name in COUNTS], steps=rows, quorum=quorum, grace="grace" in job.spec["update"]
    )


def injected(job: BenchJob) -> Counter[str]:
    """Returns the number of injected faults of each kind."""
    faults = [fact.notes for fact in job.facts("fault")]
    return Counter(f"inside: {fault['action']} {fault['role']} at {fault['where']}" for fault in faults)


def unprotected(
    backs: Sequence[float], faulted: Sequence[tuple[float, float, int, str]], filled: Sequence[tuple[float, int | None]]
) -> int:
    """Returns how many rollbacks one standby for each shard cannot prevent.

    Before such a rollback, two pods of one shard had a fault since its standby last had the whole state. They are the
    server and its standby, or the server that took over and a standby that did not have the whole state yet.

    Args:
        backs: when training went back to a checkpoint, in seconds.
        faulted: when each pod of a shard died, or was killed, stopped or deleted, and until when that may have an
            effect: (seconds, seconds, shard, pod).
        filled: when the standby of each shard had the whole state: (seconds, shard).
    """
    found = 0
    for back in backs:
        for shard in {shard for _, _, shard, _ in faulted}:
            since = max((at for at, of in filled if of == shard and at < back), default=float("-inf"))
            pods = {pod for at, until, of, pod in faulted if of == shard and since <= at <= back <= until}
            if len(pods) > 1:
                found += 1
                break
    return found


def explained(job: BenchJob, faults: Sequence[ChaosFault]) -> int:
    """Returns how many rollbacks of the job one standby cannot prevent, from the faults, its history and its pods'
    reports."""
    began: dict[int, float] = {}  # by term; a coordinator that takes over continues the term
    for fact in (*job.facts("start"), *job.facts("rollback")):
        term = fact.notes["term"]
        began[term] = min(fact.at, began.get(term, fact.at))
    backs = sorted(at for term, at in began.items() if term > 1)
    filled = [(fact.at, shard_of(fact.pod)) for fact in job.facts("in_sync")]
    killed = [fact for fact in job.facts("fault") if fact.notes["action"] in ("kill", "exit")]
    hit = [(fact.at, float("inf"), fact.pod) for fact in killed]
    for fault in faults:
        paused = fault.target.seconds
        until = float("inf") if paused is None else fault.at + paused + AFTER_PAUSE_SECONDS
        hit += [(fault.at, until, pod) for pod in fault.target.pods]
    faulted = [
        (at, until, shard, f"{shard}#{incarnation_of(pod)}")
        for at, until, pod in hit
        if (shard := shard_of(pod)) is not None
    ]
    for entry in job.history:
        role, _, index = entry.get("slot", "").rpartition("-")
        if role == contract.ROLE_SERVER and "incarnation" in entry:
            at = datetime.fromisoformat(entry["time"]).timestamp()
            faulted.append((at, float("inf"), int(index), f"{index}#{entry['incarnation']}"))
    return unprotected(backs, faulted, filled)


def print_gaps(faults: Sequence[ChaosFault], updates: Sequence[BenchUpdate]) -> None:
    """Print a table of the faults by kind, with the time without an update around each fault."""
    print(f"\n{'faults by kind':<40}{'times':>8}{'without an update, median':>28}{'worst':>10}")
    for kind in sorted({fault.kind for fault in faults}):
        of_kind = [fault for fault in faults if fault.kind == kind]
        around = []
        for fault in of_kind:
            later = [other.at for other in faults if other.at > fault.at]
            around.append(gaps(updates, fault.at, min([fault.at + 10.0, *later])))
        print(f"{kind:<40}{len(of_kind):>8}{median(around):>26.2f} s{max(around):>8.2f} s")


def redone_of(updates: Sequence[BenchUpdate]) -> int:
    """Returns the number of updates that were computed again after a rollback."""
    return len(updates) - len({update.step for update in updates})


def rate_of(updates: Sequence[BenchUpdate], begin: float, end: float) -> float:
    """Returns the seconds of an update between two times. Updates that a rollback lost in this interval do not
    count."""
    before = max((update.step for update in updates if update.at <= begin), default=0)
    after = [update for update in updates if update.at <= end][-1]
    return (end - begin) / max(1, after.step - before)


async def train(job: BenchJob, chaos: Chaos | None, seconds: float, every: float) -> tuple[list[BenchUpdate], float]:
    """Run the job from beginning to end. Return its updates, and the seconds of an update during the chaos."""
    await job.submit()
    await job.wait("it trains", lambda: len(job.updates()) >= 5)
    began = time.time()
    if chaos is not None:
        await chaos.run(time.monotonic() + seconds, every)
    ended = time.time()
    await job.wait_for_end(max(180.0, seconds * 2))
    updates = job.updates()
    if chaos is None:
        return updates, seconds_per_step(updates)
    return updates, rate_of(updates, began, min(ended, updates[-1].at))


async def mixed(on: BenchCluster, mode: str, arguments: argparse.Namespace, seconds: float) -> bool:
    """Run the job with faults of every kind, and then without faults."""
    steps = int(seconds / STEP_SECONDS) * (1 if mode == "Sync" else arguments.workers)
    shape: dict[str, Any] = {
        "steps": steps,
        "workers": arguments.workers,
        "pods_per_rank": arguments.pods_per_rank,
        "servers": 2,
        "mode": mode,
        "overlap": arguments.overlap,
        "standbys": arguments.standbys,
        "every_steps": 20,
        "stall_seconds": 12,
        "backups": arguments.backups if mode == "Sync" else 0,
        "grace": arguments.grace if mode == "Sync" else "0s",
        "local": arguments.local,
        "wire": {"gradients": arguments.gradients, "parameters": arguments.parameters},
    }
    rng = random.Random(arguments.seed)
    names = [str(rank) for rank in range(arguments.workers)]
    if arguments.pods_per_rank > 1:
        names = [f"{rank}.{member}" for rank in names for member in range(arguments.pods_per_rank)]
    script = inside(rng, steps, names, 2, arguments.standbys, seconds)
    print(f"\n{mode}: {steps} updates, 2 servers, {arguments.standbys} standbys, {arguments.workers} workers, "
          f"seed {arguments.seed}\nFAULT_INJECTION={script!r}", flush=True)  # fmt: skip
    job = BenchJob(on, f"chaos-{mode.lower()}", env={"FAULT_INJECTION": script}, **shape)
    chaos = Chaos(on, job, arguments.seed, arguments.standbys)
    updates, noisy = await train(job, chaos, seconds, arguments.every)
    status = dict(job.status)
    counted = witness_of(job)
    print_gaps(chaos.faults, updates)
    for kind, times in sorted(injected(job).items()):
        print(f"{kind:<40}{times:>8}")
    print()
    row("gradients that are missing in the parameters (lost)", str(counted.lost), "0")
    row("gradients that are in them more than once (applied twice)", str(counted.twice), "0")
    rollbacks = int(status.get("term") or 1) - 1
    row("times training went back to a checkpoint", str(rollbacks))
    beyond = explained(job, chaos.faults)
    row("  of them after faults of two servers of one shard", str(beyond))
    row("  for any other reason", str(rollbacks - beyond), "0 with standbys")
    row("  updates redone after that", str(redone_of(updates)))
    pods = {role: f"{r.get('restarts', 0)} + {r.get('disruptions', 0)}" for role, r in status["roles"].items()}
    row("workers replaced: crashes + disruptions", pods.get("Worker", ""))
    row("servers replaced: crashes + disruptions", pods.get("ParameterServer", ""))
    await job.delete()
    quiet = BenchJob(on, f"quiet-{mode.lower()}", **shape)
    _, peaceful = await train(quiet, None, seconds, 0)
    row("goodput in the chaos against the quiet run", f"{peaceful / noisy:.1%}")
    row("  seconds an update, chaos and quiet", f"{noisy:.3f} {peaceful:.3f}")
    fine = counted.lost == counted.twice == 0
    feedback = arguments.local and arguments.gradients in ("Int8", "Int4")  # a dead worker's residual is lost
    if mode == "Sync" and not arguments.backups and not feedback:
        ours, theirs = stored(job)[1], stored(quiet)[1]
        equal = all(np.array_equal(ours[key].view(np.uint32), theirs[key].view(np.uint32)) for key in theirs)
        row("the parameters are bit for bit those of the quiet run", "yes" if equal else "NO", "yes")
        fine = fine and equal
    await quiet.delete()
    return fine


async def measure(arguments: argparse.Namespace) -> bool:
    """Run the benchmark. Return whether no update was lost."""
    async with cluster(arguments.keep) as on:
        modes = _ORDER if arguments.mode == "both" else (arguments.mode,)
        share = {"Sync": 2 / 3, "Async": 1 / 3} if len(modes) > 1 else dict.fromkeys(modes, 1.0)
        return all([await mixed(on, mode, arguments, arguments.seconds * share[mode]) for mode in modes])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--standbys", type=int, choices=(0, 1), default=0)
    parser.add_argument("--mode", choices=("both", *_ORDER), default="both")
    parser.add_argument("--overlap", action="store_true", help="train in Async mode, with update.overlap")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pods-per-rank", type=int, default=1)
    parser.add_argument("--gradients", choices=("Exact", "BFloat16", "Int8", "Int4"), default="Exact")
    parser.add_argument("--parameters", choices=("Exact", "BFloat16"), default="Exact")
    parser.add_argument("--backups", type=int, default=0, help="backup workers, in Sync mode")
    parser.add_argument("--grace", default="0s", help="the grace in Sync mode, such as 200ms or Auto")
    parser.add_argument("--local", type=int, default=0, help="local steps between two updates; 0: gradients")
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, help="seconds between faults from outside")
    parser.add_argument("--keep", help="a folder for logs and checkpoints, which is kept")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for reading checkpoints here
    sys.exit(0 if asyncio.run(measure(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
