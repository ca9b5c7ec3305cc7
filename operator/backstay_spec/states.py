"""The states of jobs and pods, as rows for the docs. Tests compare them with the code.

The conditions of a job, and their reasons, are in `reasons`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from backstay_spec.causes import Blocked, Cause
from backstay_spec.types_status import Phase

__all__ = ["DEATHS", "FIRST", "JOBS", "OBSTACLES", "PODS", "StateDoc", "budget_of", "end_of"]


class StateDoc(NamedTuple):
    """The event that sets a state, and the states that may follow."""

    set_by: str
    next: str


JOBS: Final[Mapping[Phase, StateDoc]] = {
    "Pending": StateDoc(
        "The job was accepted. No container of a pod has started.", "Starting, Running, Succeeded, Failed, Suspended"
    ),
    "Starting": StateDoc(
        "A container has started. A server, or each worker, is not ready.",
        "Pending, Running, Succeeded, Failed, Suspended",
    ),
    "Running": StateDoc(
        "All servers and a worker are ready, or were.", "Pending, Starting, Succeeded, Failed, Suspended"
    ),
    "Suspended": StateDoc("`spec.runPolicy.suspend` is true, and all pods have ended.", "Pending, Failed"),
    "Succeeded": StateDoc("Training is complete, and the script of worker 0 has ended with exit code 0.", "final"),
    "Failed": StateDoc("A reason of the condition Failed.", "final"),
}
"""The phases, and those that the next status may have. A phase is computed from the conditions, which are the state."""

FIRST: Final = "Pending, Suspended, Failed"
"""The phases that the first status of a job may have."""

PODS: Final[Mapping[str, str]] = {
    "Pending": "No container of the pod has started.",
    "Starting": "A container runs, and the condition Ready is not True.",
    "Ready": "The condition Ready is True: the process has joined the job.",
    "Terminating": "The pod is being deleted, and has not ended.",
    "Succeeded": "All containers have ended with exit code 0.",
    "Failed": "All containers have ended, and one of them failed. Or the kubelet or the node ended the pod.",
    "Stopped": "The run on this machine ended first.",
}
"""The words of `backstay status` for a pod, and what sets each."""

DEATHS: Final[Mapping[Cause, str]] = {
    Cause.CRASHED: "An exit code that is not 0, or an init container failed.",
    Cause.OUT_OF_MEMORY: "A container ended as OOMKilled.",
    Cause.EXITED_EARLY: "Exit code 0 before the job was done.",
    Cause.STALLED: "A worker sends no heartbeats, or a server does not answer and another process confirms it.",
    Cause.UNRESPONSIVE: "A server does not answer, and no other process could confirm it. Or the pods of a rank "
    "lost each other.",
    Cause.EVICTED: "The condition DisruptionTarget, or the kubelet needs memory or disk. Or a queue "
    "takes back the place.",
    Cause.PREEMPTED: "The scheduler or the kubelet needs the place for another pod.",
    Cause.NODE_LOST: "The node is gone, or does not know the container any more.",
    Cause.NODE_SHUTDOWN: "The node shuts down.",
    Cause.NOT_ADMITTED: "The kubelet refuses the pod on its node.",
    Cause.DELETED: "A pod was deleted before it ended.",
    Cause.VANISHED: "A pod does not exist any more.",
}
"""The evidence for each cause of the death of a pod. A disruption takes precedence over an exit code."""

OBSTACLES: Final[Mapping[Blocked, StateDoc]] = {
    Blocked.IMAGE_INVALID: StateDoc("The kubelet cannot read the image's name.", ""),
    Blocked.POD_INVALID: StateDoc("The API server finds the pod invalid.", ""),
    Blocked.IMAGE_PULL: StateDoc("The kubelet cannot pull the image.", "the kubelet tries again"),
    Blocked.CONFIG: StateDoc("The kubelet cannot make a container: a Secret is missing.", "the kubelet tries again"),
    Blocked.UNSCHEDULABLE: StateDoc("The scheduler finds no node.", "the scheduler tries again"),
    Blocked.GATED: StateDoc("The pod has scheduling gates.", "the time of the gates does not count"),
    Blocked.REFUSED: StateDoc("The API server refuses the pod, such as for a quota.", "the operator tries again"),
    Blocked.HELD: StateDoc(
        "The queue must first admit other pods of the job, or still counts an old pod.", "the time does not count"
    ),
    Blocked.NOT_STARTED: StateDoc("No container has started, for none of these reasons.", "the kubelet tries again"),
    Blocked.NEVER_STARTED: StateDoc(
        "Pods of the slot died in a row before they started.", "the next pod after a back-off"
    ),
    Blocked.GIVEN_BACK: StateDoc("A rank has room for some of its pods only.", "the rank is tried again within 30 s"),
    Blocked.NOT_JOINED: StateDoc("The pod runs, and its process has not joined the job.", "the pod continues"),
}
"""The reasons why a pod does not start."""


def budget_of(cause: Cause) -> str:
    """Returns the budget to which a death is charged, as a cell of the table."""
    return "`maxRestarts` of the role" if cause.charged else "none"


def end_of(blocked: Blocked) -> str:
    """Returns when an obstacle ends the job, as a cell of the table."""
    if blocked.permanent:
        return "immediately"
    return "no" if blocked in (Blocked.GATED, Blocked.HELD) else "after `spec.runPolicy.pendingDeadlineSeconds`"
