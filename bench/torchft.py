"""Jobs of torchft and of Backstay with the same computation, in quiet runs and while workers are killed.

The jobs run in turns on this machine, with the same times of the kills and the same killed ranks. Each has 4 workers
(replicas in torchft), 0.2 s of computation without a processor for each gradient, and 1 MB of parameters. Those count
the applied gradients: bench/scripts/replica.py for torchft and bench/scripts/witness.py for Backstay.

    python bench/torchft.py --torchft PYTHON [--seconds 60] [--seed 0] [--keep FOLDER]

PYTHON is the interpreter of an environment that has torch and torchft. torchft has the settings of its example of DDP
with Gloo: the process group has a timeout of 5 s. The lighthouse has its default, 5 s without a heartbeat. `1 s` sets
both to 1 s. A supervisor immediately starts a replica that ended again. Backstay has 2 shards with standbys. Every
replacement of a worker is a new process that imports its libraries. Only in the row `forked pods`, it is forked from a
process with these imports, which is the default of the embedded cluster.

The window begins after 5 s in which all workers train, and has `--seconds`. A worker is killed at its begin and every
10 s after it. `useful` is the number of applied gradients times 0.2 s, as a share of the time of 4 workers. The exit
status is 1 when an update of the window has no gradient, or Backstay lost a gradient or applied it twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _cluster import SCRIPTS, BenchJob, BenchUpdate, cluster, gaps, marks_in, median, stored
from _common import free_address, table
from chaos import witness_of
from goodput import all_train

WORKERS = 4
COMPUTE = 0.2
SIZE = 250_000
SETTLE = 5.0
EVERY = 10.0
START = 120.0


@dataclass(frozen=True)
class Running:
    """A job that trains.

    Attributes:
        updates: all updates until now, in order of time.
        kill: ends the process of a worker; whether there was one.
        finish: ends the job; returns the number of gradients of each update, int[steps].
    """

    updates: Callable[[], list[BenchUpdate]]
    kill: Callable[[int], bool]
    finish: Callable[[], Awaitable[np.ndarray]]


@dataclass(frozen=True)
class TorchftCase:
    """One row.

    Attributes:
        name: the name in the table.
        start: the job, which trains with all workers.
        kills: whether workers are killed.
    """

    name: str
    start: Callable[[], contextlib.AbstractAsyncContextManager[Running]]
    kills: bool


class Replicas:
    """The processes of a job of torchft. A replica that ends before the job is immediately started again."""

    def __init__(self, python: str, folder: Path, seconds: float, timeout: float) -> None:
        self._python, self._folder, self._timeout = Path(python), folder, timeout
        self._lighthouse = free_address()
        self._rows = max(1024, int((seconds + START) / COMPUTE))
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def _start(self, name: str, *command: str | Path, **variables: str) -> asyncio.subprocess.Process:
        with (self._folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        self._processes[name] = process
        return process

    async def lighthouse(self) -> None:
        """Start the lighthouse with the options of torchft's README."""
        options = {"bind": self._lighthouse, "min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}
        options["heartbeat_timeout_ms"] = int(self._timeout * 1000)
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        await self._start("lighthouse", self._python.with_name("torchft_lighthouse"), *words)

    async def keep(self, rank: int) -> None:
        """Run a replica until it ends by itself."""
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://{self._lighthouse}",
            "RANK_OF_JOB": str(rank),
            "REPLICAS": str(WORKERS),
            "ROWS": str(self._rows),
            "SIZE": str(SIZE),
            "COMPUTE": str(COMPUTE),
            "TIMEOUT": str(self._timeout),
            "TIMELINE": str(self._folder),
            "BACKSTAY_POD_NAME": self._name(rank),
        }
        while True:
            process = await self._start(self._name(rank), self._python, SCRIPTS / "replica.py", **variables)
            if await process.wait() == 0:
                return

    @staticmethod
    def _name(rank: int) -> str:
        return f"replica-{rank}"

    def _steps(self, rank: int) -> list[BenchUpdate]:
        name = self._name(rank)
        marks = marks_in(self._folder / name)
        return [BenchUpdate(at, int(what.split()[1]), name) for at, what in marks if what.startswith("step ")]

    def all_train(self) -> bool:
        """Returns whether every replica has made an update."""
        return all(self._steps(rank) for rank in range(WORKERS))

    def updates(self) -> list[BenchUpdate]:
        """Returns the first mark of each update."""
        first: dict[int, BenchUpdate] = {}
        for update in sorted((u for rank in range(WORKERS) for u in self._steps(rank)), key=lambda u: u.at):
            first.setdefault(update.step, update)
        return list(first.values())

    def kill(self, rank: int) -> bool:
        """End a replica with kill -9."""
        process = self._processes[self._name(rank)]
        if process.returncode is None:
            process.kill()
        return process.returncode is None

    def counted(self) -> np.ndarray:
        """Returns the number of gradients of each update, from the parameters, int[steps].

        Raises:
            SystemExit: the replicas do not have the same parameters.
        """
        found = [json.loads((self._folder / f"count-{rank}.json").read_text()) for rank in range(WORKERS)]
        if any(one != found[0] for one in found):
            raise SystemExit("the replicas of torchft do not have the same parameters")
        return (np.array(found[0]) > 0).sum(axis=1)

    async def end(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def torchft(python: str, folder: Path, seconds: float, timeout: float) -> AsyncIterator[Running]:
    """A job of torchft.

    Args:
        python: the interpreter of an environment that has torchft.
        folder: a folder for logs and marks, which does not exist yet.
        seconds: the length of the window.
        timeout: how long the process group waits, and the lighthouse for a heartbeat; in seconds.
    """
    folder.mkdir(parents=True)
    replicas = Replicas(python, folder, seconds, timeout)
    await replicas.lighthouse()
    kept = asyncio.gather(*(replicas.keep(rank) for rank in range(WORKERS)))

    async def finish() -> np.ndarray:
        (folder / "part").write_text(str(replicas.updates()[-1].step + 10))
        (folder / "part").rename(folder / "last")
        await asyncio.wait_for(kept, START)
        return replicas.counted()

    try:
        deadline = time.monotonic() + START
        while not replicas.all_train():
            if time.monotonic() > deadline:
                raise SystemExit((folder / "replica-0.log").read_text()[-3000:])
            await asyncio.sleep(0.1)
        yield Running(replicas.updates, replicas.kill, finish)
    finally:
        kept.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await kept
        await replicas.end()


@contextlib.asynccontextmanager
async def backstay(keep: Path, seconds: float, backups: int, *, forked: bool = False) -> AsyncIterator[Running]:
    """A job of Backstay in its own cluster.

    Args:
        keep: the folder of the cluster, which does not exist yet.
        seconds: the length of the window.
        backups: the number of backups; with backups, the grace is `Auto`.
        forked: whether pods are forked from a process with imports.
    """
    keep.mkdir(parents=True)
    async with cluster(str(keep), forked=forked) as on:
        job = BenchJob(
            on,
            "compared",
            steps=int((SETTLE + seconds + EVERY) / COMPUTE),
            workers=WORKERS,
            backups=backups,
            grace="Auto" if backups else "0s",
            servers=2,
            standbys=1,
            pause=0.0,
            every_steps=50,
            env={"COMPUTE": str(COMPUTE), "SIZE": str(SIZE)},
        )

        def kill(rank: int) -> bool:
            pod = job.newest(f"worker-{rank}")
            return pod is not None and job.signal(pod, signal.SIGKILL)

        async def finish() -> np.ndarray:
            await job.wait_for_end(START)
            found = witness_of(job)
            if found.lost or found.twice:
                raise SystemExit(f"{found.lost} gradients were lost, {found.twice} applied twice")
            return np.asarray((stored(job)[1]["a_count"] > 0).sum(axis=1))

        await job.submit()
        await job.wait("all of them train", lambda: all_train(job), START)
        yield Running(job.updates, kill, finish)


async def measure(case: TorchftCase, seconds: float, seed: int) -> tuple[str, ...]:
    """Returns the row of one case.

    Raises:
        SystemExit: an update of the window has no gradient.
    """
    rng = random.Random(seed)
    killed: list[float] = []
    async with case.start() as job:
        await asyncio.sleep(SETTLE)
        begin = time.time()
        end = begin + seconds
        while case.kills and (at := begin + EVERY * len(killed)) < end:
            await asyncio.sleep(max(0.0, at - time.time()))
            killed.append(time.time())
            if not job.kill(rank := rng.randrange(WORKERS)):
                raise SystemExit(f"worker {rank} of {case.name} did not run when it was to be killed")
        await asyncio.sleep(end - time.time())
        gradients = await job.finish()
        updates = job.updates()
    first, last = (max(update.step for update in updates if update.at <= at) for at in (begin, end))
    window = gradients[first:last]
    if not window.all():
        raise SystemExit(f"{case.name}: an update has no gradient: {window}")
    waits = [min(update.at for update in updates if update.at > at) - at for at in killed]
    around = [gaps(updates, at, min(at + EVERY, end)) for at in killed]
    row = (
        case.name,
        str(len(killed)),
        f"{window.sum() * COMPUTE / (WORKERS * seconds):.1%}",
        f"{len(window) / seconds:.2f}",
        f"{window.mean():.2f}",
        *(f"{value:.2f}" for times in (waits, around) if times for value in (median(times), max(times))),
    )
    print(*row, sep="  ", file=sys.stderr, flush=True)
    return row


def cases(python: str, folder: Path, seconds: float) -> list[TorchftCase]:
    """Returns all rows in the order in which they run."""

    def theirs(timeout: float, name: str) -> Callable[[], contextlib.AbstractAsyncContextManager[Running]]:
        return lambda: torchft(python, folder / name, seconds, timeout)

    def ours(
        backups: int, name: str, forked: bool = False
    ) -> Callable[[], contextlib.AbstractAsyncContextManager[Running]]:
        return lambda: backstay(folder / name, seconds, backups, forked=forked)

    return [
        made
        for kills, suffix in ((False, "quiet"), (True, "killed"))
        for made in (
            TorchftCase(f"torchft, defaults, {suffix}", theirs(5.0, f"torchft-{suffix}"), kills),
            TorchftCase(f"Backstay, no backups, {suffix}", ours(0, f"backstay-0-{suffix}"), kills),
            TorchftCase(f"torchft, 1 s, {suffix}", theirs(1.0, f"torchft-1s-{suffix}"), kills),
            TorchftCase(f"Backstay, 1 backup, grace Auto, {suffix}", ours(1, f"backstay-1-{suffix}"), kills),
        )
    ] + [TorchftCase("Backstay, no backups, killed, forked pods", ours(0, "backstay-forked", True), True)]


async def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all rows and print the table."""
    head = ("", "kills", "useful", "updates/s", "gradients", "next update", "worst", "longest gap", "worst")
    rows = [
        await measure(case, arguments.seconds, arguments.seed)
        for case in cases(arguments.torchft, folder, arguments.seconds)
    ]
    print(table([head, *((*row, *[""] * (len(head) - len(row))) for row in rows)]))


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torchft", metavar="PYTHON", required=True, help="the interpreter of an environment that has torchft"
    )
    parser.add_argument("--seconds", type=float, default=60, help="the length of the window of each row")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the killed ranks")
    parser.add_argument("--keep", help="an empty folder for logs and checkpoints, which is kept")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for reading checkpoints here
    with contextlib.ExitStack() as files:
        folder = arguments.keep or files.enter_context(tempfile.TemporaryDirectory(prefix="backstay-bench-"))
        asyncio.run(compare(arguments, Path(folder)))


if __name__ == "__main__":
    main()
