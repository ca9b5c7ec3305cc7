"""A cluster in a dictionary: carries out plans as API server and operator would, and lets tests play the kubelet."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from backstay_spec import contract
from backstay_spec.actions import (
    CreateNetworkPolicy,
    CreatePod,
    CreateSecret,
    CreateService,
    DeleteJob,
    DeleteNetworkPolicy,
    DeletePod,
    DeleteSecret,
    DeleteService,
    LookUpPod,
    PatchService,
    Plan,
)
from backstay_spec.observed import HELD, Contact, Observed, PlanSettings, Progress, Refusal, Silence, Updates
from backstay_spec.plan import plan
from backstay_spec.types import TrainingJob

UID = "5f1c2f0e-0b0a-4d3e-9a41-6f7f0f4b9c11"
START = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
SETTINGS = PlanSettings(operator_namespace="backstay-system", operator_labels={"app.kubernetes.io/name": "backstay"})
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def stamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """One job, its objects, and some that only look like its own."""

    def __init__(self, spec: dict[str, Any] | None = None, name: str = "mnist", settings: PlanSettings = SETTINGS):
        self.now = START
        self.settings = settings
        self.manifest: dict[str, Any] = {
            "apiVersion": contract.API_VERSION,
            "kind": contract.KIND,
            "metadata": {"name": name, "namespace": "lab", "uid": UID, "generation": 1},
            "spec": {"image": "train:1", "command": ["python", "train.py"], **(spec or {})},
        }
        self.pods: dict[str, dict[str, Any]] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.foreign: list[dict[str, Any]] = []
        self.secret_ensured = False
        self.secret_at: datetime | None = None
        self.witnessed: set[str] = set()
        self.secret_deleted = False
        self.secrets_deleted = 0  # number of these requests
        self.secrets = 0  # number of requests to create a Secret
        self.progress: Progress | None = None
        self.updates: Updates | None = None
        self.gated: dict[str, datetime] = {}
        self.called = True  # the operator calls the servers
        self.silent: dict[str, Silence] = {}  # servers that do not answer it, since when; by uid of the pod
        self.never_answered: set[str] = set()  # those of them that never did
        self.reachable: frozenset[int] = frozenset()  # what workers report
        self.unreachable: frozenset[int] = frozenset()
        self.missing: set[str] = set()
        self.refused: dict[str, Refusal] = {}
        self.status_written: datetime | None = None
        self.refuse: dict[str, tuple[str, str]] = {}  # prefix of a name -> how its create is answered
        self.ever: dict[str, int] = {}  # pod name -> how often it was created
        self.events: list[tuple[str, str]] = []
        self.deaths: list[Any] = []
        self.writes = 0
        self.job_deleted = False
        self._serial = 0

    # Actions of the operator.

    @property
    def job(self) -> TrainingJob:
        return TrainingJob.model_validate(self.manifest)

    @property
    def status(self) -> dict[str, Any]:
        return self.manifest.get("status", {})

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    def observed(self) -> Observed:
        return Observed(
            pods=(*copy.deepcopy(list(self.pods.values())), *self.foreign),
            services=tuple(copy.deepcopy(list(self.services.values()))),
            network_policies=tuple(self.policies.values()),
            secret_ensured=self.secret_ensured,
            secret_at=self.secret_at,
            secret_deleted=self.secret_deleted,
            witnessed=frozenset(self.witnessed),
            progress=self.progress,
            contact=self.contact(),
            updates=self.updates,
            gated=dict(self.gated),
            missing=frozenset(self.missing),
            refused=dict(self.refused),
            status_written=self.status_written,
        )

    def plan(self) -> Plan:
        self.witnessed |= set(self.pods)
        return plan(self.job, self.observed(), self.now, self.settings)

    def contact(self) -> Contact | None:
        """The operator's newest round of calls: each running server answered but those that a test made silent."""
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
        """The calls of an operator that was never late: one every 2 s, and a long one beside the second."""
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

    def write_status(self, todo: Plan) -> None:
        if todo.status is None:
            assert not todo.events, "events go with a status"
            assert not todo.deaths, "deaths go with a status"
            return
        before = self.status.get("incarnations", {})
        self.manifest["status"] = json.loads(json.dumps(todo.status, allow_nan=False))
        after = self.status.get("incarnations", {})
        assert all(after.get(key, 0) >= value for key, value in before.items()), "an incarnation went back"
        self.status_written = self.now
        self.writes += 1
        self.events += [(e.reason, e.message) for e in todo.events]
        self.deaths += todo.deaths

    def act(self, action: Any) -> None:
        match action:
            case CreateSecret():
                if not self._refuses(action.manifest):
                    assert action.with_token("ab")["data"] == {"token": "YWI="}
                    self.secret_ensured, self.secret_at = True, self.now
                    self.secrets += 1
            case CreateNetworkPolicy():
                self._create(self.policies, action.manifest)
            case CreateService():
                if self._create(self.services, action.manifest):
                    self._serial += 1
                    stored = self.services[action.manifest["metadata"]["name"]]
                    stored["spec"].setdefault("clusterIP", f"10.0.0.{self._serial}")
            case CreatePod():
                self._create_pod(action)
            case PatchService():
                self._patch(self.services[action.name], action.patch)
            case DeletePod():
                pod = self.pods.get(action.name)
                assert pod is not None, f"{action.name} is not there, or is not ours"
                assert pod["metadata"]["uid"] == action.uid
                self.delete(action.name, action.grace_seconds)
            case LookUpPod():
                assert action.name not in self.pods
                self.missing.add(action.name)
            case DeleteSecret():
                assert self.secrets, "there never was one"
                self.secret_ensured, self.secret_at, self.secret_deleted = False, None, True
                self.secrets_deleted += 1
            case DeleteService():
                assert self.services.pop(action.name)["metadata"]["uid"] == action.uid
            case DeleteNetworkPolicy():
                assert self.secret_deleted, "nothing would tell the next operator that there is a Secret"
                assert self.policies.pop(action.name)["metadata"]["uid"] == action.uid
            case DeleteJob():
                assert action.uid == UID
                self.job_deleted = True

    def apply(self, todo: Plan) -> None:
        self.write_status(todo)
        first, stage = "", 0
        for action in todo.actions:
            if isinstance(action, CreatePod):
                name = action.manifest["metadata"]["name"]
                if first and action.stage > stage:
                    self.refused[name] = Refusal(HELD, first, self.now).after(self.refused.get(name))
                    continue
                self.act(action)
                if name in self.refused:
                    first, stage = first or self.refused[name].message, action.stage
            else:
                self.act(action)

    def settle(self, rounds: int = 12) -> Plan:
        """Plan and carry out until nothing is left to do now; O1: then planning again changes nothing."""
        for _ in range(rounds):
            todo = self.plan()
            if todo.status is None and not todo.actions:
                return todo
            self.apply(todo)
        raise AssertionError(f"still not settled: {todo}")

    def _refuses(self, manifest: dict[str, Any]) -> bool:
        name = manifest["metadata"]["name"]
        for prefix, (reason, message) in self.refuse.items():
            if name.startswith(prefix):
                self.refused[name] = Refusal(reason, message, self.now).after(self.refused.get(name))
                return True
        self.refused.pop(name, None)
        return False

    def _create(self, store: dict[str, dict[str, Any]], manifest: dict[str, Any]) -> bool:
        name = manifest["metadata"]["name"]
        assert DNS_1035.fullmatch(name), name
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == UID
        if self._refuses(manifest):
            return False
        if name in store:
            return False  # 409, ours
        self._serial += 1
        stored = json.loads(json.dumps(manifest))
        stored["metadata"] |= {"uid": f"uid-{self._serial}", "creationTimestamp": stamp(self.now)}
        store[name] = stored
        return True

    def _create_pod(self, action: CreatePod) -> None:
        labels = action.manifest["metadata"]["labels"]
        key = f"{action.role}-{action.index}"
        assert labels[contract.LABEL_INCARNATION] == str(action.incarnation)
        assert self.status["incarnations"][key] >= action.incarnation, "O2: recorded before it is created"
        if self._create(self.pods, action.manifest):
            name = action.manifest["metadata"]["name"]
            self.ever[name] = self.ever.get(name, 0) + 1
            assert self.ever[name] == 1, f"O2: two pods of one incarnation: {name}"
            self.pods[name]["status"] = {"phase": "Pending"}

    def _patch(self, target: dict[str, Any], patch: tuple[dict[str, Any], ...]) -> None:
        for operation in patch:
            *path, last = (
                part.replace("~1", "/").replace("~0", "~") for part in operation["path"].lstrip("/").split("/")
            )
            at = target
            for part in path:
                at = at[part]
            if operation["op"] == "test":
                assert at[last] == operation["value"]
            else:
                at[last] = operation["value"]

    # Actions of people, kubelet and nodes.

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def edit(self, **changes: Any) -> None:
        """Change the spec: `edit(workers={"replicas": 3})` merges into that part."""
        for part, value in changes.items():
            known = self.manifest["spec"].get(part)
            self.manifest["spec"][part] = {**known, **value} if isinstance(known, dict) else value
        self.manifest["metadata"]["generation"] += 1

    def named(self, role: str, index: int, incarnation: int | None = None) -> str:
        """The name of a place's newest pod, or of one incarnation's."""
        found = [
            (int(p["metadata"]["labels"][contract.LABEL_INCARNATION]), name)
            for name, p in self.pods.items()
            if p["metadata"]["labels"][contract.LABEL_ROLE] == role
            and p["metadata"]["labels"][contract.LABEL_INDEX] == str(index)
        ]
        if incarnation is not None:
            return dict(found)[incarnation]
        return max(found)[1]

    def run(self, name: str, *, ready: bool = True) -> None:
        status = self.pods[name].setdefault("status", {})
        was_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
        running = next((s["state"]["running"] for s in status.get("containerStatuses", ())), None)
        started = running["startedAt"] if running else stamp(self.now)
        since = stamp(self.now) if ready != was_ready else started
        status |= {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}],
            "containerStatuses": [{"name": "trainer", "state": {"running": {"startedAt": started}}}],
        }

    def run_all(self) -> None:
        for name, pod in self.pods.items():
            if pod["status"]["phase"] in ("Pending", "Running"):
                self.run(name)

    def end(self, name: str, code: int = 1, message: str = "", reason: str = "") -> None:
        status = self.pods[name]["status"]
        if status["phase"] == "Pending":
            self.run(name, ready=False)
        was_ready = status["conditions"][0]
        if was_ready["status"] == "True":
            was_ready |= {"status": "False", "lastTransitionTime": stamp(self.now)}
        started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
        terminated = {
            "exitCode": code,
            "startedAt": started,
            "finishedAt": stamp(self.now),
            "reason": reason or ("Completed" if code == 0 else "Error"),
        }
        if message:
            terminated["message"] = message
        status["containerStatuses"] = [{"name": "trainer", "state": {"terminated": terminated}}]
        status["phase"] = "Succeeded" if code == 0 else "Failed"

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

    def disrupt(self, name: str, reason: str) -> None:
        """Deleted with notice, as by eviction, preemption or a taint."""
        status = self.pods[name]["status"]
        status["conditions"] = [
            *status.get("conditions", ()),
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "so it goes"},
        ]
        self.delete(name)

    def gate(self, name: str, *, gated: bool = True) -> None:
        """A queue holds the pod back, or lets it be scheduled (and there is no room)."""
        reason = "SchedulingGated" if gated else "Unschedulable"
        self.pods[name]["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": reason, "message": "0/1 nodes are available"}
        ]
        self.gated[self.pods[name]["metadata"]["uid"]] = self.now

    def wait(self, name: str, reason: str, message: str = "") -> None:
        self.pods[name]["status"]["containerStatuses"] = [
            {"name": "trainer", "image": "train:1", "state": {"waiting": {"reason": reason, "message": message}}}
        ]

    def delete(self, name: str, grace: int | None = None) -> None:
        pod = self.pods[name]
        if pod["metadata"].get("deletionTimestamp"):
            return
        seconds = pod["spec"]["terminationGracePeriodSeconds"] if grace is None else grace
        pod["metadata"] |= {
            "deletionTimestamp": stamp(self.now + timedelta(seconds=seconds)),
            "deletionGracePeriodSeconds": seconds,
        }

    def vanish(self, name: str) -> None:
        del self.pods[name]

    def bury(self) -> None:
        """Every pod that is being deleted is gone."""
        self.pods = {n: p for n, p in self.pods.items() if not p["metadata"].get("deletionTimestamp")}

    def restart_operator(self) -> None:
        """The operator's memory is lost."""
        self.secret_ensured, self.secret_at, self.secret_deleted = False, None, False
        self.witnessed = set()
        self.missing = set()
        self.refused = {}
        self.progress = None
        self.updates = None
        self.status_written = None
        self.silent = {uid: Silence(self.now) for uid in self.silent}

    def answer(self, **fields: Any) -> None:
        """The servers answer on the control channel."""
        defaults = {"taken": self.now, "reached": frozenset({0}), "world": self.job.spec.workers.replicas}
        self.progress = Progress(**{**defaults, **fields})
        if (step := self.progress.step) is not None:
            server, before = self.progress.coordinator, self.updates
            self.updates = (
                Updates(step, self.now, coordinator=server) if before is None else before.after(step, self.now, server)
            )

    def living(self) -> set[str]:
        return {
            n
            for n, p in self.pods.items()
            if not p["metadata"].get("deletionTimestamp") and p["status"]["phase"] in ("Pending", "Running")
        }


@pytest.fixture
def make_cluster() -> type[Cluster]:
    """The class: tests make their own, with the spec they want."""
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
