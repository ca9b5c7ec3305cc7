"""The PodStatus from the records of a pod's containers. Pure; the rules are those of Kubernetes' kubelet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay_cluster.kubelet.objects import Object

OURS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
EPOCH = "1970-01-01T00:00:00Z"


@dataclass
class ContainerRecord:
    """The state of one container.

    Attributes:
        init: whether it is an init container.
        sidecar: whether it is an init container that runs beside the others: one with `restartPolicy: Always`.
        started: whether it runs and its startup probe has succeeded.
    """

    name: str
    image: str
    init: bool = False
    sidecar: bool = False
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    id: str = ""

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """The exit code; None unless the container has ended and will not be started again."""
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    @property
    def begun(self) -> bool:
        """Whether a process of it runs or has ended."""
        return self.running or self.exit_code is not None or bool(self.last_state)

    @property
    def complete(self) -> bool:
        """Whether the containers after this init container may start."""
        return self.started if self.sidecar else self.exit_code == 0

    def as_status(self) -> Object:
        """Returns a ContainerStatus."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "containerID": f"process://{self.id}" if self.id else "",
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.complete if self.init and not self.sidecar else self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }


def terminated(
    code: int, reason: str, message: str, *, started: str = EPOCH, finished: str, container: str = ""
) -> Object:
    """Returns a ContainerState of a container that has ended."""
    state: Object = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": finished}
    if message:
        state["message"] = message
    if container:
        state["containerID"] = f"process://{container}"
    return {"terminated": state}


def waiting(reason: str, message: str = "") -> Object:
    """Returns a ContainerState of a container that does not run yet, or that waits for its next start."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def covers(have: Any, want: Any) -> bool:
    """Returns whether the API's object contains all of `want`; fields that a server adds are ignored."""
    if not want:
        return not have
    if isinstance(want, Mapping):
        return isinstance(have, Mapping) and all(covers(have.get(name), value) for name, value in want.items())
    if isinstance(want, list):
        return isinstance(have, list) and len(have) == len(want) and all(map(covers, have, want))
    return bool(have == want)


def phase_of(policy: str, init: Sequence[ContainerRecord], containers: Sequence[ContainerRecord]) -> str:
    """Pending, Running, Succeeded or Failed.

    Args:
        policy: the pod's restartPolicy.
        init: the init containers, in order.
        containers: the records of the other containers.
    """
    # A pod ends after its sidecars, but their exit codes do not count.
    beside = any(record.sidecar and record.begun and record.exit_code is None for record in init)
    for record in init:
        if record.sidecar:
            continue
        if record.exit_code is None:
            return "Pending"
        if record.exit_code != 0:
            return "Failed" if policy == "Never" and not beside else "Pending"
    codes = [record.exit_code for record in containers]
    if any(code is None for code in codes):
        return "Running" if all(record.begun for record in containers) else "Pending"
    if policy == "Always" or beside:
        return "Running"
    if all(code == 0 for code in codes):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def conditions_of(
    previous: Sequence[Mapping[str, Any]],
    phase: str,
    init: Sequence[ContainerRecord],
    containers: Sequence[ContainerRecord],
    *,
    has_address: bool,
    now: str,
) -> list[Object]:
    """Returns the pod's conditions, with the kubelet's current values, and all others unchanged.

    Args:
        previous: the conditions as last read.
        phase: the pod's phase.
        init: the init containers.
        containers: the records of the other containers.
        has_address: whether the pod has an address and folders.
        now: metav1.Time, the transition time of what changes.
    """
    # A sidecar that restarts does not change a pod back to one that initializes.
    begun = any(record.begun for record in containers)
    incomplete = [record.name for record in init if not record.complete and not (begun and record.sidecar)]
    sidecars = [record for record in init if record.sidecar]
    unready = [record.name for record in [*sidecars, *containers] if not record.ready]
    ended = phase in ("Succeeded", "Failed")
    if phase == "Succeeded":
        why = ("PodCompleted", "")
    elif phase == "Failed":
        why = ("PodFailed", "")
    else:
        why = ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    wanted: dict[str, tuple[bool, str, str]] = {
        "PodReadyToStartContainers": (has_address and not ended, "", ""),
        "Initialized": (
            (True, "PodCompleted" if phase == "Succeeded" else "", "")
            if not incomplete
            else (False, "ContainersNotInitialized", f"containers with incomplete status: [{' '.join(incomplete)}]")
        ),
        "Ready": (not unready and not ended, *why),
        "ContainersReady": (not unready and not ended, *why),
    }
    before = {condition["type"]: condition for condition in previous}
    result: list[Object] = []
    for kind, (holds, reason, message) in wanted.items():
        status = "True" if holds else "False"
        old = before.get(kind)
        same = old is not None and old.get("status") == status
        condition: Object = {
            "type": kind,
            "status": status,
            "lastProbeTime": None,
            "lastTransitionTime": old["lastTransitionTime"] if same and old else now,
        }
        if reason and not (holds and kind != "Initialized"):
            condition["reason"] = reason
        if message and not holds:
            condition["message"] = message
        result.append(condition)
    return result + [dict(condition) for condition in previous if condition["type"] not in OURS]
