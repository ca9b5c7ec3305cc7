"""Starts an embedded cluster with jobs of witness.py for benchmarks of whole jobs, and observes deaths of pods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from backstay_client.embedded.preload import preload
from backstay_client.embedded.session import start_session
from backstay_client.kube import JOBS, ApiCalls, ApiRequestError
from backstay_spec import contract
from backstay_spec.records import merged

SCRIPTS = Path(__file__).resolve().parent / "scripts"
NAMESPACE = "default"
PLATFORM = {"JAX_PLATFORMS": "cpu"}
_UNAVAILABLE = (aiohttp.ClientError, TimeoutError, OSError)


def row(what: str, value: str, goal: str = "") -> None:
    """Print one line of a table."""
    print(f"{what:<66}  {value:>16}  {goal}".rstrip(), flush=True)


@dataclass
class BenchCluster:
    """An embedded cluster with the operator."""

    folder: Path
    kubeconfig: Path
    api: ApiCalls
    operators: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def try_request(self, method: str, path: str, body: Any = None, **parameters: str) -> Any:
        """Returns the answer, or None when the API server refuses the request or does not answer."""
        try:
            return await self.api.request(method, path, body, **parameters)
        except (ApiRequestError, *_UNAVAILABLE):
            return None

    def part(self, module: str) -> psutil.Process | None:
        """Returns the running process of ``backstay_operator`` or ``backstay_cluster``."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    async def start_operator(self) -> None:
        """Start an operator after the previous one was killed."""
        with (self.folder / "operator.log").open("ab") as log:
            self.operators.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "backstay_operator", "--kubeconfig", str(self.kubeconfig),
                    "--key-file", str(self.folder / "operator.key"), "--bind", "127.0.0.1", "--metrics-port", "0",
                    "--die-with-parent", stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip


@contextlib.asynccontextmanager
async def cluster(keep: str | None = None, *, forked: bool = True) -> AsyncIterator[BenchCluster]:
    """A cluster in a folder that is deleted at the end, or in `keep`.

    Args:
        keep: a folder that is kept.
        forked: whether pods are forked from a process that has imported their libraries.
    """
    with contextlib.ExitStack() as files:
        folder = (
            Path(keep) if keep else Path(files.enter_context(tempfile.TemporaryDirectory(prefix="backstay-bench-")))
        )
        modules = preload(environ=PLATFORM) if forked else None
        async with start_session(folder, preload=modules) as session:
            made = BenchCluster(folder, session.kubeconfig, session.api)
            try:
                yield made
            finally:
                if stopped := made.part("backstay_cluster"):
                    stopped.send_signal(signal.SIGCONT)
                for operator in made.operators:
                    with contextlib.suppress(ProcessLookupError):
                        operator.terminate()
                    await operator.wait()


@dataclass
class BenchUpdate:
    """One update in the coordinator's log."""

    at: float
    step: int
    pod: str


@dataclass
class Fact:
    """A fact that a pod reported about the job.

    Attributes:
        notes: with its name, `point`; see `backstay._instrument.report`.
    """

    at: float
    pod: str
    notes: dict[str, Any]


class BenchJob:
    """A job of one of the scripts; the default is witness.py."""

    def __init__(
        self,
        on: BenchCluster,
        name: str,
        *,
        steps: int,
        workers: int,
        servers: int = 1,
        backups: int = 0,
        mode: str = "Sync",
        overlap: bool = False,
        standbys: int = 0,
        pause: float = 0.1,
        every_steps: int = 20,
        env: dict[str, str] | None = None,
        stall_seconds: int = 300,
        script: str = "witness.py",
        grace: str = "0s",
        local: int = 0,
        wire: dict[str, Any] | None = None,
        pods_per_rank: int = 1,
    ) -> None:
        self.cluster, self.name, self.local = on, name, local
        self.steps, self.workers, self.servers, self.backups, self.mode = steps, workers, servers, backups, mode
        self.checkpoints = on.folder / "checkpoints" / name
        self.timeline = on.folder / "timelines" / name
        self.timeline.mkdir(parents=True)
        variables = {
            "STEPS": str(steps),
            "WORLD": str(workers),
            "BACKUPS": str(backups),
            "MODE": mode,
            "PAUSE": str(pause),
            "LOCAL": str(local),
            "TIMELINE": str(self.timeline),
            **PLATFORM,
            **(env or {}),
        }
        update: dict[str, Any] = {"mode": mode} | ({"backups": backups} if mode == "Sync" else {"overlap": overlap})
        self.spec: dict[str, Any] = {
            "image": "backstay.dev/trainer:local",
            "command": ["python", script],
            "workingDir": str(SCRIPTS),
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "parameterServers": {"replicas": servers, "maxRestarts": 10_000, "standbys": standbys},
            "workers": {"replicas": workers, "maxRestarts": 10_000, "stallSeconds": stall_seconds},
            "update": update | ({} if grace == "0s" else {"grace": grace}),
            "wire": wire or {},
            "checkpoint": {"uri": str(self.checkpoints), "everySteps": every_steps},
        }
        if pods_per_rank > 1:
            self.spec["workers"]["podsPerRank"] = pods_per_rank
        self._path = f"{JOBS}/namespaces/{NAMESPACE}/{contract.PLURAL}"
        self.status: dict[str, Any] = {}
        self.history: list[Any] = []

    async def submit(self) -> None:
        meta = {"name": self.name}
        body = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": self.spec}
        await self.cluster.api.request("POST", self._path, body)

    async def look(self) -> dict[str, Any]:
        """Returns the status of the job, or the last one that was read while the API server does not answer."""
        found = await self.cluster.try_request("GET", f"{self._path}/{self.name}")
        if found is not None:
            self.status = found.get("status") or {}
            self.history = merged(self.history, self.status.get("history") or ())  # the status keeps the newest ones
        return self.status

    async def wait(self, what: str, condition: Callable[[], Any], seconds: float = 180) -> Any:
        """Wait until `condition` returns a true value, and return that value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if (await self.look()).get("phase") == "Failed" or time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: failed, or timed out, before: {what}\n{self.describe()}")
            await asyncio.sleep(0.05)
        return found

    async def wait_for_end(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (await self.look()).get("phase") not in {"Succeeded", "Failed"}:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not end within {seconds:.0f} s\n{self.describe()}")
            await asyncio.sleep(0.25)
        if self.status["phase"] == "Failed":
            raise SystemExit(f"{self.name} failed\n{self.describe()}")
        return self.status

    def describe(self) -> str:
        """Returns the status of a job, and the end of its pods' logs."""
        lines = [json.dumps(self.status, indent=1)]
        logs = sorted((self.cluster.folder / "pods" / NAMESPACE).glob(f"{self.name}-*/trainer.log"))
        lines += [f"--- {log.parent.name}\n{log.read_text(errors='replace')[-1200:]}" for log in logs]
        return "\n".join(lines)

    async def delete(self) -> None:
        await self.cluster.try_request("DELETE", f"{self._path}/{self.name}", propagationPolicy="Background")
        for _ in range(600):
            if not await self.cluster.api.pods_of(NAMESPACE, self.name):
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"{self.name} was deleted a minute ago, and its pods are still there")

    def release(self) -> None:
        """Allow the script to continue after HOLD."""
        (self.timeline / "go").touch()

    def marks(self, pod: str) -> list[tuple[float, str]]:
        """Returns the marks that a pod wrote, each with its time and name."""
        return marks_in(self.timeline / pod)

    def pods(self, slot: str) -> list[str]:
        """Returns the pods that ran in a slot, such as ``worker-1``, in order of incarnation."""
        found = [path.name for path in self.timeline.iterdir() if f"-{slot}-" in path.name]
        return sorted(found, key=lambda name: min(at for at, _ in self.marks(name)))

    def updates(self) -> list[BenchUpdate]:
        """Returns every update that was decided, in order of time. The list has an update twice if it was lost and
        redone."""
        found = [
            BenchUpdate(at, int(what.split()[1]), pod)
            for pod in self.pods("ps-0")
            for at, what in self.marks(pod)
            if what.startswith("step ") and what.split()[1].isdigit()
        ]
        return sorted(found, key=lambda update: update.at)

    def facts(self, point: str) -> list[Fact]:
        """Returns the facts of one name that all pods reported, in order of time."""
        found = [
            Fact(at, file.name, notes)
            for file in self.timeline.iterdir()
            for at, what in self.marks(file.name)
            if what.startswith("fact ") and (notes := json.loads(what.partition(" ")[2]))["point"] == point
        ]
        return sorted(found, key=lambda fact: fact.at)

    def processes(self) -> dict[str, int]:
        """Returns the running processes of this job's pods."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                pairs = (entry / "environ").read_bytes().split(b"\0")
                if (
                    f"{contract.ENV_JOB}={self.name}".encode() in pairs
                    and f"TIMELINE={self.timeline}".encode() in pairs
                ):
                    name = next(pair for pair in pairs if pair.startswith(contract.ENV_POD_NAME.encode()))
                    pod = name.partition(b"=")[2].decode()
                    # The helper process of a fault has the same environment. The pod's process is the older one.
                    found[pod] = min(int(entry.name), found.get(pod, 1 << 30))
        return found

    def newest(self, slot: str) -> str | None:
        """Returns the running pod of a slot with the highest incarnation."""
        living = [pod for pod in self.processes() if f"-{slot}-" in pod]
        return max(living, key=incarnation_of, default=None)

    def signal(self, pod: str, number: signal.Signals) -> bool:
        """Send a signal to the process of a pod, and return whether the process existed."""
        pid = self.processes().get(pod)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False


def marks_in(file: Path) -> list[tuple[float, str]]:
    """Returns the marks in a file of a timeline (`scripts/_timeline.py`), each with its time and name. None if the file
    does not exist."""
    lines = file.read_text().splitlines() if file.exists() else []
    # A killed process may leave half a line.
    return [(float(at), what) for at, _, what in (line.partition(" ") for line in lines) if what]


def incarnation_of(pod: str) -> int:
    """Returns the incarnation in a pod's name, which has the form ``<job>-worker-3-<incarnation>-<hash>``."""
    return int(pod.rsplit("-", 2)[1])


def shard_of(pod: str) -> int | None:
    """Returns the shard in the name of a server's pod, ``<job>-ps-1-<incarnation>-<hash>``, and None for another
    pod."""
    role, shard = pod.rsplit("-", 4)[1:3]
    return int(shard) if role == "ps" else None


def gaps(updates: Sequence[BenchUpdate], begin: float, end: float) -> float:
    """Returns the longest time without an update that overlaps an interval, in seconds."""
    times = [update.at for update in updates]
    return max((b - a for a, b in itertools.pairwise(times) if b > begin and a < end), default=0.0)


def seconds_per_step(updates: Sequence[BenchUpdate]) -> float:
    """Mean seconds of an update, from the first one to the last. Redone updates count once."""
    return (updates[-1].at - updates[0].at) / max(1, updates[-1].step - updates[0].step)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


async def alone(script: str, arguments: Sequence[str] = (), **environment: str) -> list[tuple[float, str]]:
    """Run one of `scripts/` in one process: what it marked (`scripts/_timeline.py`), each with its Unix time.

    Raises:
        SystemExit: the script failed.
    """
    with tempfile.TemporaryDirectory(prefix="backstay-bench-") as folder:
        variables = {**os.environ, **environment, "TIMELINE": folder, "JAX_PLATFORMS": "cpu"}
        process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPTS / script), *arguments, env=variables)
        try:
            if status := await process.wait():
                raise SystemExit(f"the script in one process ended with status {status}")
        finally:
            if process.returncode is None:
                process.kill()
        return marks_in(Path(folder) / "alone")


def stored(job: BenchJob) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the step and the parameters of the job's last checkpoint."""
    import backstay

    checkpoint = backstay.load(str(job.checkpoints))
    return checkpoint.step, {key: np.asarray(value) for key, value in checkpoint.params.items()}
