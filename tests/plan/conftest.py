"""Gives the planner's tests a simulated job. They move its clock, and play its kubelet, its user and its servers."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from backstay_spec import contract, states
from backstay_spec.actions import Action, CreateSecret, DeleteSecret, Plan
from backstay_spec.job_report import JobReport
from backstay_spec.observed import Contact, Observed, PlanSettings, Progress, Silence
from backstay_spec.plan import plan
from backstay_spec.simulated import SimulatedJob, to_seconds
from backstay_spec.supervision import run_without_waiting

UID = "5f1c2f0e-0b0a-4d3e-9a41-6f7f0f4b9c11"
START = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
SETTINGS = PlanSettings(operator_namespace="backstay-system", operator_labels={"app.kubernetes.io/name": "backstay"})
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

stamp = to_seconds


class Cluster(SimulatedJob):
    """One job, its objects, and some that only look like its own."""

    FOLLOWS: Final = {
        *((None, phase) for phase in states.FIRST.split(", ")),
        *((phase, after) for phase, row in states.JOBS.items() for after in row.next.split(", ")),
    }

    def __init__(self, spec: dict[str, Any] | None = None, name: str = "mnist", settings: PlanSettings = SETTINGS):
        self.now = START
        self.settings = settings
        super().__init__(
            {
                "apiVersion": contract.API_VERSION,
                "kind": contract.KIND,
                "metadata": {"name": name, "namespace": "lab", "uid": UID, "generation": 1},
                "spec": {"image": "train:1", "command": ["python", "train.py"], **(spec or {})},
            },
            lambda: self.now,
        )
        self.foreign: list[dict[str, Any]] = []
        self.secrets_deleted = 0  # number of these requests
        self.secrets = 0  # number of requests to create a Secret
        self.called = True  # the operator calls the servers
        self.silent: dict[str, Silence] = {}  # servers that do not answer it, since when; by uid of the pod
        self.never_answered: set[str] = set()  # those of them that never did
        self.reachable: frozenset[int] = frozenset()  # what workers report
        self.unreachable: frozenset[int] = frozenset()
        self.writes = 0
        self.followed: set[tuple[Any, Any]] = set()  # phases of two statuses in a row that differ

    # Actions of the operator.

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(event.reason, event.message) for event in self.sent]

    @property
    def progress(self) -> Progress | None:
        return self.memory.progress

    def observed_now(self) -> Observed:
        self.memory.contact = self.contact()
        pods, job = (*self.pods.values(), *self.foreign), self.job
        status, workers = job.status, job.spec.workers
        self.memory.prune(
            job.metadata.name, status.incarnations, status.active, workers.replicas, workers.pods_per_rank
        )
        return self.memory.observed(pods, self.services.values(), self.policies.values(), self.now)

    def plan(self) -> Plan:
        return plan(self.job, self.observed_now(), self.now, self.settings)

    def contact(self) -> Contact | None:
        """Returns the operator's newest round of calls: each running server answered but those that a test made
        silent."""
        if not self.called:
            return None
        servers = {
            pod["metadata"]["uid"]
            for name, pod in self.pods.items()
            if "-ps-" in name and pod["status"]["phase"] == "Running"
        }
        silent = {uid: self._counted(silence) for uid, silence in self.silent.items() if uid in servers}
        answered = {uid: silent[uid].since if uid in silent else self.now for uid in servers - self.never_answered}
        return Contact(self.now, answered, silent, self.reachable, self.unreachable)

    def _counted(self, silence: Silence) -> Silence:
        """Returns the calls of an operator that was never late: one every 2 s, and a long one beside the second."""
        seconds = (self.now - silence.since).total_seconds()
        return Silence(silence.since, int(seconds / 2), int(seconds >= 10))

    def silence(self, *names: str, since: datetime | None = None, ever_answered: bool = True) -> None:
        """These pods answer the operator no more, since now or `since`."""
        for name in names:
            uid = self.pods[name]["metadata"]["uid"]
            self.silent[uid] = Silence(since or self.now)
            if not ever_answered:
                self.never_answered.add(uid)

    def speak(self, *names: str) -> None:
        """These pods answer the operator again."""
        for name in names:
            self.silent.pop(self.pods[name]["metadata"]["uid"], None)
            self.never_answered.discard(self.pods[name]["metadata"]["uid"])

    def write(self, todo: Plan) -> None:
        if todo.status is None:
            return
        before = self.status.get("phase")
        assert run_without_waiting(self.write_status(todo))
        self.writes += 1
        if (phases := (before, self.status["phase"])) != (before, before):
            assert phases in self.FOLLOWS, "the table of phases lacks this"
            self.followed.add(phases)

    def act(self, action: Action) -> None:
        match action:
            case CreateSecret():
                assert action.with_token("ab")["data"] == {"token": "YWI="}
                self.secrets += 1
            case DeleteSecret():
                assert self.secrets, "there never was one"
                self.secrets_deleted += 1
        super().act(action)
        for name in (*self.pods, *self.services, *self.policies):
            assert DNS_1035.fullmatch(name), name

    def apply(self, todo: Plan) -> None:
        self.write(todo)
        run_without_waiting(self.carry_out(todo))

    def settle(self, rounds: int = 12) -> Plan:
        """Plan and carry out until nothing is left to do now; O1: then planning again changes nothing."""
        for _ in range(rounds):
            todo = self.plan()
            if todo.status is None and not todo.actions:
                assert todo.requeue_after != timedelta(0), "the operator would plan without a pause"
                return todo
            self.apply(todo)
        raise AssertionError(f"still not settled: {todo}")

    # Actions of people, kubelet and nodes.

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def edit(self, **changes: Any) -> None:
        """Change the spec: `edit(workers={"replicas": 3})` merges into that part."""
        for part, value in changes.items():
            known = self.manifest["spec"].get(part)
            self.manifest["spec"][part] = {**known, **value} if isinstance(known, dict) else value
        self.manifest["metadata"]["generation"] += 1

    def train(self, step: int = 9, **fields: Any) -> None:
        """Training ends: shard 0's server leaves its last message; worker 0 has the result."""
        said = {"result": "Succeeded", "step": step, "checkpoint": f"file:///ckpt/{step}", "returned": 1, **fields}
        self.end(self.named(contract.ROLE_SERVER, 0), 0, json.dumps(said))

    def complete(self, step: int = 9, **fields: Any) -> None:
        """Training ends, and the script of worker 0 too."""
        self.train(step, **fields)
        worker = self.named(contract.ROLE_WORKER, 0)
        if worker in self.living():
            self.end(worker, 0, json.dumps({"result": "Trained", "step": step}))

    def gate(self, name: str, *, gated: bool = True) -> None:
        """A queue holds the pod back, or lets it be scheduled (and there is no room)."""
        reason = "SchedulingGated" if gated else "Unschedulable"
        self.pods[name]["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": reason, "message": "0/1 nodes are available"}
        ]

    def restart_operator(self) -> None:
        """The operator's memory is lost."""
        self.memory = type(self.memory)(self.uid)
        self.silent = {uid: Silence(self.now) for uid in self.silent}

    def answer(self, **fields: Any) -> None:
        """The servers answer on the control channel."""
        rows = {"world": self.job.spec.workers.replicas}
        rows |= {name: fields.pop(name) for name in JobReport.model_fields if name in fields}
        defaults = {"taken": self.now, "reached": frozenset({0}), "report": JobReport(**rows)}
        progress = self.memory.progress = Progress(**{**defaults, **fields})
        if (step := progress.report.step) is not None:
            self.memory.reported(step, self.now, progress.coordinator)


@pytest.fixture
def make_cluster() -> type[Cluster]:
    """Returns the class, so that tests make their own with the spec they want."""
    return Cluster


@pytest.fixture
def running(make_cluster: type[Cluster]) -> Any:
    """A function that gives a job whose pods all run and are ready."""

    def make(spec: dict[str, Any] | None = None, **fields: Any) -> Cluster:
        cluster = make_cluster(spec, **fields)
        cluster.settle()
        cluster.tick(5)
        cluster.run_all()
        cluster.tick(5)
        cluster.run_all()
        cluster.settle()
        return cluster

    return make
