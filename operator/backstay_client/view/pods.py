"""Makes one row for each pod of a job, with its slot, its state, and its current activity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backstay_client.view.follow import STOPPED, JobView, PodActivity
from backstay_client.view.starting import is_ready
from backstay_client.words import duration, on_one_line
from backstay_spec import contract
from backstay_spec.causes import condition_of

__all__ = ["NAMES", "PodRow", "active_pods", "has_ended", "rows", "slot_of", "slot_words"]

_ORDER = {contract.ROLE_SERVER: 0, contract.ROLE_WORKER: 1, contract.ROLE_EVALUATOR: 2}
NAMES = {contract.ROLE_SERVER: "server", contract.ROLE_WORKER: "worker", contract.ROLE_EVALUATOR: "evaluator"}
_ACTIVITIES = {
    "STARTING": "starts",
    "COMPILING": "compiles",
    "TRAINING": "computes",
    "WAITING": "waits",
    "LEAVING": "leaves",
}
_SILENT_SECONDS = 6.0


@dataclass(frozen=True)
class PodRow:
    """A pod.

    Attributes:
        slot: the slot in words, such as ``worker 3`` or ``server 0 (standby)``.
        pod: its name.
        state: one word of `backstay_spec.states.PODS`.
        does: its current activity; empty: not known.
        node: where it runs.
        incarnation: its number in its slot.
    """

    slot: str
    pod: str
    state: str
    does: str
    node: str
    incarnation: int


def slot_of(pod: dict[str, Any]) -> tuple[str, int, int]:
    """Returns a pod's role (the label's value), index and incarnation."""
    labels = pod["metadata"].get("labels", {})

    def whole(label: str) -> int:
        text = str(labels.get(label, "0"))
        return int(text) if text.isdigit() else 0

    return str(labels.get(contract.LABEL_ROLE, "")), whole(contract.LABEL_INDEX), whole(contract.LABEL_INCARNATION)


def member_of(pod: dict[str, Any]) -> int | None:
    """Returns the index of a pod inside its rank, or None if the rank has one pod."""
    text = str(pod["metadata"].get("labels", {}).get(contract.LABEL_MEMBER, ""))
    return int(text) if text.isdigit() else None


def slot_words(key: str) -> str:
    """``worker-3`` as ``worker 3``, ``parameter-server-0`` as ``server 0``."""
    role, _, index = key.rpartition("-")
    return f"{NAMES.get(role, role)} {index}"


def active_pods(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the newest pod of each slot, or its newest pods, and a shard's server with its standby; in order of role
    and index."""
    by_slot: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for pod in sorted(pods, key=slot_of):
        by_slot.setdefault((*slot_of(pod)[:2], member_of(pod) or 0), []).append(pod)
    found = []
    for (role, *_), slot in sorted(by_slot.items(), key=lambda item: (_ORDER.get(item[0][0], 9), item[0][1:])):
        living = [pod for pod in slot if not has_ended(pod) and not pod["metadata"].get("deletionTimestamp")]
        found += (living if role == contract.ROLE_SERVER else living[-1:]) or slot[-1:]
    return found


def rows(view: JobView) -> list[PodRow]:
    """Returns the current pods of a job."""
    active = (view.job.get("status") or {}).get("active") or {}
    return [_row(view, pod, active) for pod in active_pods(view.pods)]


def _row(view: JobView, pod: dict[str, Any], active: dict[str, int]) -> PodRow:
    role, index, incarnation = slot_of(pod)
    serving = active.get(f"{role}-{index}")
    standby = role == contract.ROLE_SERVER and serving is not None and incarnation > serving
    state = _state(pod)
    own = "" if (member := member_of(pod)) is None else f".{member}"
    return PodRow(
        slot=f"{NAMES.get(role, role)} {index}" + own + (" (standby)" if standby else ""),
        pod=pod["metadata"]["name"],
        state=state,
        does=_does(view, pod, role, state, standby=standby),
        node=pod.get("spec", {}).get("nodeName") or "",
        incarnation=incarnation,
    )


def _state(pod: dict[str, Any]) -> str:
    status = pod.get("status", {})
    phase = str(status.get("phase") or "Pending")
    if pod["metadata"].get("deletionTimestamp") and not has_ended(pod):
        return "Terminating"
    if phase != "Running":
        return phase
    return "Ready" if is_ready(pod) else "Starting"


def has_ended(pod: dict[str, Any]) -> bool:
    """Returns whether the phase of a pod is final."""
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed", STOPPED}


def _does(view: JobView, pod: dict[str, Any], role: str, state: str, *, standby: bool) -> str:
    if state in {"Pending", "Failed", "Succeeded", STOPPED}:
        return obstacle(pod) or how_it_ended(pod)
    if role == contract.ROLE_SERVER:
        return _server_does(view, state, standby=standby)
    doing = view.doings.get(pod["metadata"]["name"])
    if doing is None:
        return "starts Python and JAX" if state == "Starting" else ""
    return doing_words(doing)


def _server_does(view: JobView, state: str, *, standby: bool) -> str:
    if state != "Ready":
        return "follows its server" if standby else "prepares its parameters"
    if standby:
        return "has the same state as its server"
    return f"serves step {view.report.step:,}" if view.report.step is not None else "serves"


def doing_words(doing: PodActivity) -> str:
    """Returns the current activity in words, such as ``computes step 12, for 3 s``."""
    if doing.heartbeat >= _SILENT_SECONDS:
        return f"no heartbeat for {duration(doing.heartbeat)}"
    text = contract.DOES.get(doing.point) or doing.point.replace("_", " ") or _ACTIVITIES.get(doing.activity, "")
    if text and doing.member:
        text = f"waits for pod {doing.member}, which {text}"
    if text and doing.step is not None:
        text += f", its step {doing.step:,}"
    return f"{text}, for {duration(doing.seconds)}" if text and doing.seconds >= 2 * _SILENT_SECONDS else text


def how_it_ended(pod: dict[str, Any]) -> str:
    """Returns the way a container ended, such as ``exit code 137 (OOMKilled)``, or an empty text if it has not
    ended."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated")
        if ended is not None and container.get("name") == contract.CONTAINER:
            return f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
    return str(status.get("reason") or "") if status.get("phase") == "Failed" else ""


def obstacle(pod: dict[str, Any]) -> str:
    """Returns the reason of Kubernetes why a pod does not start, or an empty text if none is reported."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason and reason not in {"ContainerCreating", "PodInitializing"}:
            return on_one_line(f"{reason} {waiting.get('message', '')}")
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return on_one_line(f"{scheduled.get('reason', '')} {scheduled.get('message', '')}")
    return ""


def summary(found: Sequence[PodRow]) -> str:
    """Returns a summary of the pods that are not shown, such as ``5 more: 4 Ready, 1 Pending``."""
    counts: dict[str, int] = {}
    for row in found:
        counts[row.state] = counts.get(row.state, 0) + 1
    return f"{len(found)} more: " + ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
