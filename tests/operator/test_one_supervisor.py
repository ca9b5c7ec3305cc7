"""O1: one supervisor with three adapters. The same deaths lead to the same decisions and to the same status in each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from backstay import testing
from backstay_operator.bus import Called, Progressed
from backstay_operator.rights import JOBS, PODS
from backstay_spec import contract
from backstay_spec.actions import CreatePod, DeletePod, PatchService
from backstay_spec.job_report import JobReport
from backstay_spec.observed import Contact, PlanSettings, Progress
from backstay_spec.simulated import SimulatedJob
from backstay_spec.supervision import run_without_waiting, settle

from .fake_pods import KEY, run_all

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SCRIPT = Path(__file__).with_name("endless.py")
BUDGET = 2  # restarts of the pods of a role
MISTAKE = """Traceback (most recent call last):
  File "/code/endless.py", line 24, in batches
    raise RuntimeError("the data ends here")
RuntimeError: the data ends here
"""
Decision = tuple[str, str]


class Adapter(Protocol):
    """A job with one server, and what can happen to it."""

    def run(self) -> None:
        """Wait until all pods run, the workers contribute, and the standby holds the state of its server."""

    def kill(self, role: str, index: int) -> None:
        """The active pod of the slot ends by SIGKILL, and the supervisor acts."""

    def kill_standby(self) -> None:
        """The standby ends by SIGKILL, and the supervisor acts."""

    def lose(self, role: str, index: int) -> None:
        """The pod of the slot vanishes with its node, and the supervisor acts."""

    def make_mistake(self) -> None:
        """The script of worker 0 raises, in each of its pods, until the job has ended."""

    def decisions(self) -> list[Decision]:
        """Returns the pods that were created and deleted, and the Services that were changed, in order."""

    def status(self) -> dict[str, Any]:
        """Returns the status of the job."""


def manifest(workers: int, standbys: int) -> dict[str, Any]:
    spec = {
        "image": "none",
        "command": ["none"],
        "parameterServers": {"replicas": 1, "standbys": standbys, "maxRestarts": BUDGET},
        "workers": {"replicas": workers, "maxRestarts": BUDGET},
    }
    metadata = {"name": KEY[1], "namespace": KEY[0], "uid": "5f1c2f0e-0b0a-4d3e-9a41-6f7f0f4b9c11", "generation": 1}
    return {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": metadata, "spec": spec}


def short(name: str) -> str:
    """Returns the name of an object without the job's name and uid, which differ."""
    return "-".join(name.split("-")[1:-1])


def of_actions(objects: SimulatedJob) -> list[Decision]:
    kinds = (CreatePod, DeletePod, PatchService)
    return [
        (type(a).__name__, short(getattr(a, "name", None) or a.manifest["metadata"]["name"]))
        for a in objects.actions
        if isinstance(a, kinds)
    ]


def answers(
    status: dict[str, Any], pods: list[dict[str, Any]], now: datetime, workers: int
) -> tuple[Contact, Progress]:
    """Returns the contact and the progress after three updates."""
    serving = {**status["incarnations"], **status.get("active", {})}
    active = serving[f"{SERVER}-0"]
    newest = status["incarnations"][f"{SERVER}-0"]
    servers = [
        pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"]["labels"][contract.LABEL_ROLE] == SERVER and pod["status"]["phase"] == "Running"
    ]
    progress = Progress(
        taken=now,
        reached=frozenset({0}),
        coordinator=active,
        report=JobReport(term=1, step=3, world=workers),
        in_sync={0: newest} if newest > active else {},
        contributed=dict.fromkeys(range(workers), 1),
    )
    return Contact(now, answered_at=dict.fromkeys(servers, now)), progress


class Simulated:
    def __init__(self, workers: int, standbys: int) -> None:
        self.now = datetime(2026, 3, 1, tzinfo=UTC)
        self.workers = workers
        self.objects = SimulatedJob(manifest(workers, standbys), lambda: self.now)

    def settle(self) -> None:
        self.now += timedelta(seconds=2)
        settings = PlanSettings("", first_wait=timedelta(0))
        while run_without_waiting(settle(self.objects, settings, lambda: self.now)) == 0:
            pass

    def run(self) -> None:
        self.settle()
        self.objects.run_all()
        self.now += timedelta(seconds=2)
        pods, memory = list(self.objects.pods.values()), self.objects.memory
        memory.contact, memory.progress = answers(self.status(), pods, self.now, self.workers)
        self.settle()

    def kill(self, role: str, index: int) -> None:
        self._end(self.objects.named(role, index, self._active(role, index)), 137)

    def kill_standby(self) -> None:
        self._end(self.objects.named(SERVER, 0), 137)

    def lose(self, role: str, index: int) -> None:
        self.objects.vanish(self.objects.named(role, index))
        self.settle()

    def make_mistake(self) -> None:
        self.settle()
        while self.status()["phase"] != "Failed":
            self.objects.run(self.objects.named(SERVER, 0))
            self._end(self.objects.named(WORKER, 0), 1, MISTAKE)

    def decisions(self) -> list[Decision]:
        return of_actions(self.objects)

    def status(self) -> dict[str, Any]:
        return self.objects.status

    def close(self) -> None:
        pass

    def _end(self, name: str, code: int, message: str = "") -> None:
        self.objects.end(name, code, message)
        self.settle()

    def _active(self, role: str, index: int) -> int:
        key = f"{role}-{index}"
        found: int = self.status().get("active", {}).get(key) or self.status()["incarnations"][key]
        return found


class Kubernetes:
    def __init__(self, operator: Any, kube: Any, workers: int, standbys: int) -> None:
        self.kube, self.workers, self.operator = kube, workers, operator
        kube.put(JOBS, KEY[0], manifest(workers, standbys))

    def run(self) -> None:
        self.operator.settle()
        run_all(self.kube)
        self.operator.show()
        self.operator.seconds += 2
        contact, progress = answers(self.status(), self.kube.all(PODS), self.operator.now(), self.workers)
        self.operator.bus.send(Called(KEY, contact))
        self.operator.bus.send(Progressed(KEY, progress))
        self.operator.settle()

    def kill(self, role: str, index: int) -> None:
        key = f"{role}-{index}"
        self._end(role, index, self.status().get("active", {}).get(key) or self.status()["incarnations"][key], 137)

    def kill_standby(self) -> None:
        self._end(SERVER, 0, self.status()["incarnations"][f"{SERVER}-0"], 137)

    def lose(self, role: str, index: int) -> None:
        self.kube.remove(PODS, KEY[0], self._name(role, index, self.status()["incarnations"][f"{role}-{index}"]))
        self.operator.settle()

    def make_mistake(self) -> None:
        self.operator.settle()
        while self.status()["phase"] != "Failed":
            run_all(self.kube)
            self._end(WORKER, 0, self.status()["incarnations"][f"{WORKER}-0"], 1, MISTAKE)

    def decisions(self) -> list[Decision]:
        kinds = {
            ("create", "pods"): "CreatePod",
            ("delete", "pods"): "DeletePod",
            ("patch", "services"): "PatchService",
        }
        found = [(kinds.get((verb, plural)), name) for verb, plural, name in self.kube.requests]
        return [(kind, short(name)) for kind, name in found if kind is not None]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kube.objects["trainingjobs", *KEY]["status"]
        return found

    def close(self) -> None:
        pass

    def _name(self, role: str, index: int, incarnation: int) -> str:
        wanted = {
            contract.LABEL_ROLE: role,
            contract.LABEL_INDEX: str(index),
            contract.LABEL_INCARNATION: str(incarnation),
        }
        (name,) = (
            pod["metadata"]["name"]
            for pod in self.kube.all(PODS)
            if wanted.items() <= pod["metadata"]["labels"].items()
        )
        return str(name)

    def _end(self, role: str, index: int, incarnation: int, code: int, message: str = "") -> None:
        stamp = self.operator.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        terminated = {"exitCode": code, "startedAt": stamp, "finishedAt": stamp, "message": message}
        status: dict[str, Any] = {
            "phase": "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": stamp}],
        }
        self.kube.change(PODS, KEY[0], self._name(role, index, incarnation), {"status": status})
        # A standby is promoted only while it answers.
        contact, _ = answers(self.status(), self.kube.all(PODS), self.operator.now(), self.workers)
        self.operator.bus.send(Called(KEY, contact))
        self.operator.settle()


class Processes:
    def __init__(self, folder: Path, forker: testing.Forker, workers: int, standbys: int) -> None:
        self.argv = [sys.executable, str(SCRIPT)]
        self.folder, self.forker = folder, forker
        self.counts = {"shards": 1, "workers": workers, "standbys": standbys}
        self.job: testing.Job | None = None

    def _start(self, *arguments: str) -> testing.ProcessJob:
        self.job = testing.Job([*self.argv, *arguments], self.folder, self.forker, **self.counts)  # type: ignore[arg-type]
        self.supervisor = testing.Supervisor(self.job, BUDGET // self.counts["workers"])
        self.processes = self.supervisor.processes
        return self.processes

    def run(self) -> None:
        if self.job is None:
            self._start()
        self.supervisor.until(self._runs)

    def _runs(self) -> bool:
        objects = self.processes.objects
        progress, standbys = objects.memory.progress, self.counts["standbys"]
        pods = [objects.pods[name] for name in self.processes.running]
        ready = all(pod["status"].get("conditions", [{}])[0].get("status") == "True" for pod in pods)
        complete = len(pods) == 1 + standbys + self.counts["workers"]
        if progress is None or not (ready and complete and progress.report.step == 3):
            return False
        return not standbys or self.processes.standby(0) == objects.status["incarnations"][f"{SERVER}-0"]

    def kill(self, role: str, index: int) -> None:
        number = self.processes.active(0) if role == SERVER else None
        self._kill(self.processes.pod(role, index, number))

    def kill_standby(self) -> None:
        self._kill(self.processes.pod(SERVER, 0))

    def _kill(self, pod: testing.Pod) -> None:
        count = len(self.processes.objects.deaths)
        pod.process.send_signal(signal.SIGKILL)
        self.supervisor.until(lambda: len(self.processes.objects.deaths) > count)
        self.supervisor.step()

    def lose(self, role: str, index: int) -> None:
        count = len(self.processes.objects.deaths)
        self.processes.lose_node(self.processes.objects.named(role, index))
        self.supervisor.until(lambda: len(self.processes.objects.deaths) > count)

    def make_mistake(self) -> None:
        self._start("--fail")
        self.supervisor.until(lambda: self.supervisor.ended)

    def decisions(self) -> list[Decision]:
        return of_actions(self.processes.objects)

    def status(self) -> dict[str, Any]:
        return self.processes.objects.status

    def close(self) -> None:
        if self.job is not None:
            self.supervisor.close()
            self.job.end()


def worker_killed(job: Adapter) -> None:
    job.run()
    job.kill(WORKER, 1)


def server_killed(job: Adapter) -> None:
    job.run()
    job.kill(SERVER, 0)


def standby_killed(job: Adapter) -> None:
    job.run()
    job.kill_standby()


def node_lost(job: Adapter) -> None:
    job.run()
    job.lose(WORKER, 1)


def crash_loop(job: Adapter) -> None:
    job.run()
    for _ in range(BUDGET + 1):
        job.kill(WORKER, 1)


def script_mistake(job: Adapter) -> None:
    job.make_mistake()


CASES: dict[str, tuple[Callable[[Adapter], None], int, int]] = {  # what happens, workers, standbys
    "worker killed": (worker_killed, 2, 0),
    "server killed": (server_killed, 2, 0),
    "server with a standby killed": (server_killed, 2, 1),
    "standby killed": (standby_killed, 2, 1),
    "node lost": (node_lost, 2, 0),
    "crash loop": (crash_loop, 2, 0),
    "script mistake": (script_mistake, 1, 0),
}


@pytest.fixture(scope="module")
def forker() -> Iterator[testing.Forker]:
    made = testing.Forker({"JAX_PLATFORMS": "cpu"}, SCRIPT)
    yield made
    made.close()


def final(status: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a status that deaths decide."""
    conditions = {each["type"]: each for each in status["conditions"]}
    failed = conditions.get("Failed", {"status": "False"})
    return {
        "failed": failed["status"] == "True" and failed["reason"],
        "incarnations": status["incarnations"],
        "active": status.get("active"),
        "roles": {
            role: {name: counts.get(name, 0) for name in ("desired", "restarts", "disruptions")}
            for role, counts in status["roles"].items()
        },
    }


@pytest.mark.parametrize("case", CASES)
def test_o1_each_adapter_decides_the_same_about_the_same_deaths(
    case: str, kube: Any, operator_on: Any, tmp_path: Path, forker: testing.Forker
) -> None:
    """O1, O2, O4: the same actions in the same order, and the same final status."""
    happens, workers, standbys = CASES[case]
    found = {}
    operator = operator_on(kube, settings=PlanSettings("", first_wait=timedelta(0)))
    for adapter in (
        Simulated(workers, standbys),
        Kubernetes(operator, kube, workers, standbys),
        Processes(tmp_path, forker, workers, standbys),
    ):
        try:
            happens(adapter)
            found[type(adapter).__name__] = adapter.decisions(), final(adapter.status())
        finally:
            adapter.close()
    assert found["Kubernetes"] == found["Simulated"]
    assert found["Processes"] == found["Simulated"]
