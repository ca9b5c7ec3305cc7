"""Implements `JobObjects` with dictionaries, at a time that their owner chooses.

It carries out plans as the API server does. It has a method for each action of a kubelet, a node or a person on a pod.
Tests of the planner use it with a simulated clock, and `backstay.testing` with processes as pods.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract
from backstay_spec.actions import (
    Action,
    CreateNetworkPolicy,
    CreatePod,
    CreateSecret,
    CreateService,
    DeleteJob,
    DeleteNetworkPolicy,
    DeletePod,
    DeleteSecret,
    DeleteService,
    FoundDead,
    HoldPod,
    LookUpPod,
    PatchService,
    Plan,
)
from backstay_spec.events import Event
from backstay_spec.job_memory import JobMemory
from backstay_spec.observed import IN_QUEUE
from backstay_spec.supervision import Done, SeenJob, in_order
from backstay_spec.types import Json, TrainingJob

__all__ = ["ImpossibleAction", "SimulatedJob", "to_seconds"]

_LIVING: Final = ("Pending", "Running")


class ImpossibleAction(Exception):  # noqa: N818  what happened
    """A plan has an action that no job's state allows: the planner has a fault."""


def to_seconds(when: datetime) -> str:
    """Returns a time as the API server writes it, in whole seconds."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


class SimulatedJob:
    """One job and its objects.

    Args:
        manifest: the TrainingJob with its metadata.
        now: the time of day, aware.
        stamp: writes a time into an object.

    Attributes:
        manifest: the TrainingJob, with its status.
        memory: what the supervisor remembers.
        pods, services, policies: the objects by name.
        refuse: prefix of a name -> reason and message with which creates of such objects are refused.
        sent, deaths: the events and the deaths of all plans so far.
        created: the names of all pods that were created.
        actions: all actions that were carried out.
        deleted: whether the job was deleted.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        now: Callable[[], datetime],
        stamp: Callable[[datetime], str] = to_seconds,
    ) -> None:
        self.manifest: Json = copy.deepcopy(dict(manifest))
        self.memory = JobMemory(self.uid)
        self.pods: dict[str, Json] = {}
        self.services: dict[str, Json] = {}
        self.policies: dict[str, Json] = {}
        self.refuse: dict[str, tuple[str, str]] = {}
        self.sent: list[Event] = []
        self.deaths: list[FoundDead] = []
        self.actions: list[Action] = []
        self.deleted = False
        self._now, self._stamp = now, stamp
        self._serial = 0
        self.created: set[str] = set()

    @property
    def uid(self) -> str:
        """The job's uid."""
        uid: str = self.manifest["metadata"]["uid"]
        return uid

    @property
    def job(self) -> TrainingJob:
        """The job, with the status that was last written."""
        return TrainingJob.model_validate(self.manifest)

    @property
    def status(self) -> Json:
        """The status that was last written; empty before the first one."""
        status: Json = self.manifest.get("status", {})
        return status

    def condition(self, kind: str) -> Json:
        """Returns the condition of this type. It is empty if the status has none."""
        found: Json = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), {})
        return found

    # The port.

    async def observed(self) -> SeenJob | None:
        """See `JobObjects`. The planner changes nothing of what it gets, so that no copy is needed."""
        if self.deleted:
            return None
        job = self.job
        pods, services = list(self.pods.values()), list(self.services.values())
        observed = self.memory.observed(pods, services, self.policies.values(), self._now())
        return SeenJob(job.metadata, job.spec, job.status, observed)

    async def write_status(self, planned: Plan) -> bool:
        """See `JobObjects`.

        Raises:
            ImpossibleAction: the incarnation of a slot went back.
        """
        before = self.status.get("incarnations", {})
        self.manifest["status"] = json.loads(json.dumps(planned.status, allow_nan=False))
        after = self.status.get("incarnations", {})
        _require(all(after.get(key, 0) >= value for key, value in before.items()), "an incarnation went back")
        self.memory.status_written = self._now()
        self.sent += planned.events
        self.deaths += planned.deaths
        return True

    async def carry_out(self, planned: Plan) -> Done:
        """See `JobObjects`.

        Raises:
            ImpossibleAction: no job's state allows one of the actions.
        """
        _require(planned.status is not None or not (planned.events or planned.deaths), "events go with a status")
        await in_order(planned.actions, self.memory, self._now, self._carry_out)
        return Done(again=bool(planned.actions))

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        """Carry out one action."""
        self.actions.append(action)
        match action:  # each kind of action is one case
            case CreateSecret():
                if not self.refuses(action.manifest):
                    self.memory.secret_at = self._now()
            case CreateNetworkPolicy():
                self._create(self.policies, action.manifest)
            case CreateService():
                if self._create(self.services, action.manifest):
                    self._serial += 1
                    stored = self.services[action.manifest["metadata"]["name"]]
                    stored["spec"].setdefault("clusterIP", f"10.0.0.{self._serial}")
            case CreatePod():
                self._create_pod(action)
            case HoldPod():
                self.memory.refuse(action.name, IN_QUEUE, action.why, self._now())
            case PatchService():
                _patch(self.services[action.name], action.patch)
            case DeletePod():
                pod = self.pods.get(action.name)
                found = pod is not None and pod["metadata"]["uid"] == action.uid
                _require(found, f"{action.name} does not exist, or is another pod")
                self.delete(action.name, action.grace_seconds)
            case LookUpPod():
                _require(action.name not in self.pods, f"{action.name} is known")
                self.memory.missing.add(action.name)
            case DeleteSecret():
                self.memory.secret_at, self.memory.secret_deleted = None, True
            case DeleteService():
                self._remove(self.services, action.name, action.uid)
            case DeleteNetworkPolicy():
                is_last = len(self.policies) == 1
                _require(
                    self.memory.secret_deleted or not is_last,
                    "nothing would show the next operator that there is a Secret",
                )
                self._remove(self.policies, action.name, action.uid)
            case DeleteJob():
                _require(action.uid == self.uid, "another job")
                self.deleted = True

    def refuses(self, manifest: Mapping[str, Any]) -> bool:
        """Returns whether the API server refuses to create the object; then the refusal is recorded."""
        name = manifest["metadata"]["name"]
        for prefix, (reason, message) in self.refuse.items():
            if name.startswith(prefix):
                self.memory.refuse(name, reason, message, self._now())
                return True
        self.memory.refused.pop(name, None)
        return False

    def _create(self, store: dict[str, Json], manifest: Mapping[str, Any]) -> bool:
        name = manifest["metadata"]["name"]
        _require(manifest["metadata"]["ownerReferences"][0]["uid"] == self.uid, f"{name} has another owner")
        if self.refuses(manifest) or name in store:  # one of this job with that name has been created
            return False
        self._serial += 1
        stored = json.loads(json.dumps(manifest))
        stored["metadata"] |= {"uid": f"uid-{self._serial}", "creationTimestamp": self._stamp(self._now())}
        store[name] = stored
        return True

    def _create_pod(self, action: CreatePod) -> None:
        name, labels = action.manifest["metadata"]["name"], action.manifest["metadata"]["labels"]
        _require(labels[contract.LABEL_INCARNATION] == str(action.incarnation), "labels of another incarnation")
        recorded = self.status["incarnations"][f"{action.role}-{action.index}"]
        _require(recorded >= action.incarnation, f"O2: {name} is not on record")
        if self._create(self.pods, action.manifest):
            _require(name not in self.created, f"O2: two pods of one incarnation: {name}")
            self.created.add(name)
            self.pods[name]["status"] = {"phase": "Pending"}

    @staticmethod
    def _remove(store: dict[str, Json], name: str, uid: str) -> None:
        _require(store.pop(name)["metadata"]["uid"] == uid, f"{name} is another object")

    # Actions of a kubelet, a node or a person.

    def named(self, role: str, index: int, incarnation: int | None = None) -> str:
        """Returns the name of a slot's newest pod, or of one incarnation's."""
        found = {
            int(pod["metadata"]["labels"][contract.LABEL_INCARNATION]): name
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"][contract.LABEL_ROLE] == role
            and pod["metadata"]["labels"][contract.LABEL_INDEX] == str(index)
        }
        return found[max(found) if incarnation is None else incarnation]

    def living(self) -> set[str]:
        """Returns the names of the pods that are neither being deleted nor have ended."""
        return {
            name
            for name, pod in self.pods.items()
            if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] in _LIVING
        }

    def run(self, name: str, *, ready: bool = True) -> None:
        """The pod's container runs, and is ready or not."""
        status = self.pods[name].setdefault("status", {})
        was_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
        running = next((s["state"].get("running") for s in status.get("containerStatuses", ())), None)
        started = running["startedAt"] if running else self._stamp(self._now())
        since = status["conditions"][0]["lastTransitionTime"] if running else started
        since = self._stamp(self._now()) if ready != was_ready else since
        status |= {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}],
            "containerStatuses": [{"name": contract.CONTAINER, "state": {"running": {"startedAt": started}}}],
        }

    def run_all(self) -> None:
        """All pods that have not ended run and are ready."""
        for name, pod in self.pods.items():
            if pod["status"]["phase"] in _LIVING:
                self.run(name)

    def end(self, name: str, code: int = 1, message: str = "", reason: str = "") -> None:
        """The pod's container ended, with this exit code and termination message."""
        if self.pods[name]["status"]["phase"] == "Pending":
            self.run(name, ready=False)
        status = self.pods[name]["status"]
        was_ready = status["conditions"][0]
        if was_ready["status"] == "True":
            was_ready |= {"status": "False", "lastTransitionTime": self._stamp(self._now())}
        started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
        terminated = {
            "exitCode": code,
            "startedAt": started,
            "finishedAt": self._stamp(self._now()),
            "reason": reason or ("Completed" if code == 0 else "Error"),
        }
        if message:
            terminated["message"] = message
        status["containerStatuses"] = [{"name": contract.CONTAINER, "state": {"terminated": terminated}}]
        status["phase"] = "Succeeded" if code == 0 else "Failed"

    def disrupt(self, name: str, reason: str) -> None:
        """The pod is deleted with notice, as by eviction, preemption or a taint."""
        status = self.pods[name]["status"]
        status["conditions"] = [
            *status.get("conditions", ()),
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "so it goes"},
        ]
        self.delete(name)

    def wait(self, name: str, reason: str, message: str = "") -> None:
        """The pod's container cannot start yet."""
        self.pods[name]["status"]["containerStatuses"] = [
            {
                "name": contract.CONTAINER,
                "image": "train:1",
                "state": {"waiting": {"reason": reason, "message": message}},
            }
        ]

    def delete(self, name: str, grace: int | None = None) -> None:
        """The pod is being deleted; `grace` overrides its own grace period."""
        pod = self.pods[name]
        if pod["metadata"].get("deletionTimestamp"):
            return
        seconds = pod["spec"]["terminationGracePeriodSeconds"] if grace is None else grace
        pod["metadata"] |= {
            "deletionTimestamp": self._stamp(self._now() + timedelta(seconds=seconds)),
            "deletionGracePeriodSeconds": seconds,
        }

    def vanish(self, name: str) -> None:
        """The pod no longer exists, without notice."""
        del self.pods[name]

    def bury(self) -> None:
        """Every pod that is being deleted is gone."""
        self.pods = {n: p for n, p in self.pods.items() if not p["metadata"].get("deletionTimestamp")}


def _patch(target: Json, patch: Sequence[Mapping[str, Any]]) -> None:
    for operation in patch:
        *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].lstrip("/").split("/"))
        at = target
        for part in path:
            at = at[part]
        if operation["op"] == "test":
            _require(at[last] == operation["value"], f"{operation['path']} has another value")
        else:
            at[last] = operation["value"]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ImpossibleAction(what)
