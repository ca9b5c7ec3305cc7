"""Collects the facts about a job's pods, which are the pods that it owns, the slot of each, and its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract
from backstay_spec.causes import (
    UNKNOWN_STATE,
    Blocked,
    Cause,
    condition_of,
    has_ended,
    is_aborted,
    is_group_lost,
    may_have_left,
    obstacle_of,
    outcome_of,
    parse_time,
    parsed,
    terminated_state,
    verdict_of,
)
from backstay_spec.contract import TRAINED
from backstay_spec.goodput import WorkerPod, is_measured
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Manifest, Progress

_CAUSE_WAIT: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the job.

    Attributes:
        raw: its manifest.
        name, uid, slot, incarnation: its identity.
        deleting: whether the pod has a deletionTimestamp.
        terminal: its phase is Succeeded or Failed, or will be, because all its containers have ended.
        ended: terminal, or its container `trainer` has ended while a side-car continues.
        ready: its condition Ready is True.
        started: a container of it runs or ran.
        member: its index inside its rank.
        members: the pods of a rank of several, of which this is the one that explains the state of all (`together`);
            empty: this is a pod by itself.
    """

    raw: Manifest
    name: str
    uid: str
    slot: Slot
    incarnation: int
    deleting: bool
    terminal: bool
    ended: bool
    ready: bool
    started: bool
    member: int = 0
    members: tuple[PodView, ...] = ()

    @property
    def pods(self) -> tuple[PodView, ...]:
        """The pods that this view is of."""
        return self.members or (self,)

    @property
    def first(self) -> PodView:
        """The pod that has the lowest index in its rank. The first pod of a rank reports for all."""
        return self.pods[0]

    @property
    def alive(self) -> bool:
        """Whether it counts as alive. A pod that is being deleted is dead, however long its deletion takes (O2)."""
        return not (self.deleting or self.ended)


def is_owned(manifest: Manifest, uid: str) -> bool:
    """Returns whether the object's controller is the job with this uid."""
    references = (manifest.get("metadata") or {}).get("ownerReferences") or ()
    return any(r.get("uid") == uid and r.get("controller") is True for r in references)


def is_deleting(manifest: Manifest) -> bool:
    """Returns whether the object has a deletionTimestamp."""
    return bool((manifest.get("metadata") or {}).get("deletionTimestamp"))


def own_pods(pods: Iterable[Manifest], uid: str) -> dict[Slot, list[PodView]]:
    """Returns the job's pods by slot, oldest incarnation first. Other owners' pods and pods without our labels are left
    out."""
    found: dict[Slot, list[PodView]] = {}
    for raw in pods:
        if is_owned(raw, uid) and (view := _view(raw)) is not None:
            found.setdefault(view.slot, []).append(view)
    return {slot: _by_incarnation(views) for slot, views in found.items()}


def _by_incarnation(views: Sequence[PodView]) -> list[PodView]:
    """Returns one view for each incarnation of a slot, the oldest first."""
    found: dict[int, list[PodView]] = {}
    for view in views:
        found.setdefault(view.incarnation, []).append(view)
    return [together(found[incarnation]) for incarnation in sorted(found)]


def together(pods: Sequence[PodView]) -> PodView:
    """Returns the pods of one incarnation of a rank, as one view.

    The rank is alive while each of its pods is. A pod that ended in order before the first one of its rank has not
    died, because the exit code of the first one counts. The view has the manifest of the pod that explains the state.
    Of a dead rank, that is a pod that did not end because of another one. Of a rank that does not start, it is a pod
    that does not start.
    """
    if len(pods) == 1 and contract.LABEL_MEMBER not in ((pods[0].raw.get("metadata") or {}).get("labels") or {}):
        return pods[0]
    members = tuple(sorted(pods, key=lambda pod: pod.member))
    first = members[0]
    dead = [pod for pod in members if not pod.alive and (pod is first or not _ended_in_order(pod))]
    there = [pod for pod in members if pod.alive]
    if dead:
        # The others ended because of the first death, and their exit codes would be charged to the script.
        shown = min(dead, key=_how_late)
    else:
        waiting = [pod for pod in there if not pod.ready]
        found = [(obstacle.blocked, pod) for pod in waiting if (obstacle := obstacle_of(pod.raw)) is not None]
        blocked = [pod for why, pod in found if why is Blocked.UNSCHEDULABLE] or [pod for _, pod in found]
        shown = (blocked or waiting or [first])[0]
    return replace(
        shown,
        deleting=any(pod.deleting for pod in dead),
        terminal=all(pod.terminal for pod in members),
        ended=any(pod.ended for pod in dead),
        ready=not dead and all(pod.ready for pod in there),
        started=all(pod.started for pod in members),
        members=members,
    )


def _how_late(pod: PodView) -> tuple[bool, bool, bool, bool, int]:
    """Returns a sort key that has the pod with the cause of its rank's death first. JAX may abort the others with no
    message, and they leave together with one that is deleted. Their scripts may fail because of one that was evicted
    or had no memory: as in `verdict_of`, an exit code comes last."""
    has_crashed = verdict_of(pod.raw).cause is Cause.CRASHED
    return is_group_lost(pod.raw), may_have_left(pod.raw), is_aborted(pod.raw), has_crashed, pod.member


def _ended_in_order(pod: PodView) -> bool:
    """Returns whether the script of a pod has ended after training. Without a message, `train` has not returned in
    it."""
    state = terminated_state(pod.raw) or {}
    found = outcome_of(pod.raw)  # None, too, if the script has replaced the message
    has_returned = bool(state.get("message")) if found is None else found.returned_from_train
    return state.get("exitCode") == 0 and has_returned


def _view(raw: Manifest) -> PodView | None:
    metadata: Mapping[str, Any] = raw.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    role = labels.get(contract.LABEL_ROLE, "")
    index, incarnation = labels.get(contract.LABEL_INDEX, ""), labels.get(contract.LABEL_INCARNATION, "")
    if role not in ROLE_OF_LABEL or not _is_number(index) or not _is_number(incarnation):
        return None
    status: Mapping[str, Any] = raw.get("status") or {}
    phase = status.get("phase")
    terminal = phase in ("Succeeded", "Failed") or has_ended(raw)
    return PodView(
        raw=raw,
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        slot=Slot(role, int(index)),
        incarnation=int(incarnation),
        deleting=is_deleting(raw),
        terminal=terminal,
        ended=terminal or terminated_state(raw) is not None,
        ready=condition_of(raw, "Ready").get("status") == "True",
        started=phase not in (None, "Pending"),
        member=int(member) if _is_number(member := labels.get(contract.LABEL_MEMBER, "0")) else 0,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _turned_at(view: PodView) -> datetime | None:
    """Returns when its condition Ready changed last."""
    return parse_time(condition_of(view.raw, "Ready").get("lastTransitionTime"))


def has_node(pod: PodView) -> bool:
    """Returns whether the scheduler has found a node for one pod."""
    return bool((pod.raw.get("spec") or {}).get("nodeName"))


def is_bound_in_part(view: PodView) -> bool:
    """Returns whether some pods of a rank have nodes, and the scheduler finds none for others."""
    found = None if view.ready else obstacle_of(view.raw)
    is_bound = any(has_node(member) for member in view.members)
    return is_bound and found is not None and found.blocked is Blocked.UNSCHEDULABLE


def created_at(view: PodView) -> datetime | None:
    """Returns when the pod was created."""
    return parse_time((view.raw.get("metadata") or {}).get("creationTimestamp"))


def gone_by(view: PodView) -> datetime | None:
    """Returns when the grace period of a pod that is being deleted ends."""
    return parse_time((view.raw.get("metadata") or {}).get("deletionTimestamp"))


def ended_at(view: PodView) -> datetime | None:
    """Returns when its container `trainer` ended."""
    state = terminated_state(view.raw)
    return parse_time(state.get("finishedAt")) if state is not None else None


def lost_at(view: PodView | None) -> datetime | None:
    """Returns when a pod ended, or ends at the latest, or None if there is none or it lives."""
    return None if view is None else ended_at(view) or gone_by(view)


def cause_due(view: PodView) -> datetime | None:
    """Returns the time until which the planner waits for the pod that ended a rank, or None if it is known, or there is
    none.

    The pods of a rank end within milliseconds of each other, but each kubelet reports its own. The pod that has the
    cause may still seem to run. On a lost node it does so for long. After training, the exit code of the first pod
    counts.
    """
    if not view.members or all(pod.ended or pod.deleting for pod in view.members):
        return None
    raw, found = view.raw, outcome_of(view.raw)
    is_late = view.member != view.first.member and found is not None and found.result == TRAINED
    if not (is_late or is_group_lost(raw) or may_have_left(raw) or is_aborted(raw)):
        return None
    ends = [at for pod in view.members if (at := ended_at(pod)) is not None]
    return min(ends) + _CAUSE_WAIT if ends else None


def worker_pods(pods: Iterable[Manifest], uid: str, now: datetime) -> list[WorkerPod]:
    """Returns the job's worker pods that have a node, or had one, for the account of goodput."""
    found = []
    for slot, views in own_pods(pods, uid).items():
        for view in views if slot.role == contract.ROLE_WORKER else ():
            status = view.raw.get("status") or {}
            start = parse_time(status.get("startTime"))
            if start is None and not (view.raw.get("spec") or {}).get("nodeName"):
                continue
            ended = (ended_at(view) or now).timestamp() if view.ended else None
            state = terminated_state(view.raw) or {}
            found.append(
                WorkerPod(
                    (slot.index, view.incarnation),
                    (start or now).timestamp(),
                    ended,
                    succeeded=view.ended and state.get("exitCode") == 0,
                    measured=_measured(state.get("message")),
                )
            )
    return found


def _measured(message: Any) -> tuple[float, ...]:
    """Returns the worker seconds of a termination message, or an empty tuple if it has none."""
    try:
        found = tuple(float(value) for value in (parsed(message or "") or {}).get("workerSeconds") or ())
    except (OverflowError, TypeError, ValueError):
        return ()
    return found if is_measured(found) else ()


def has_run(view: PodView) -> bool:
    """Returns whether a container of the pod runs or ran, init containers included."""
    status: Mapping[str, Any] = view.raw.get("status") or {}
    states = (
        container.get("state") or {}
        for kind in ("initContainerStatuses", "containerStatuses")
        for container in status.get(kind) or ()
    )
    return any(
        "running" in state or ("terminated" in state and state["terminated"].get("reason") != UNKNOWN_STATE)
        for state in states
    )


def has_worked(view: PodView, progress: Progress | None) -> bool:
    """Returns whether the pod did any work, before now or before it died. If not, its crash backs off (O4).

    A worker has worked once it has contributed, which the servers report (`Progress.contributed`). Without an answer of
    theirs that is newer than the pod's start, and always for servers, the criterion is whether the pod has been Ready.
    The Ready condition of a dead pod is False, but its transition is then later than the container's start. If the pod
    never was Ready, the transition is earlier. No process waits for an evaluator, so its crashes always back off.
    """
    started = started_at(view)
    if view.slot.role == contract.ROLE_WORKER and progress is not None:
        if progress.contributed.get(view.slot.index) == view.incarnation:
            return True
        if started is not None and 0 in progress.reached and progress.taken >= started:
            return False
    if view.slot.role == contract.ROLE_EVALUATOR:
        return False
    if view.ready:
        return True
    turned = _turned_at(view)
    return started is not None and turned is not None and turned > started


def is_settled(view: PodView, progress: Progress | None) -> bool:
    """Returns whether a pod of a slot that backs off has worked, by an answer of the servers that is newer than its
    start.

    An older answer cannot say what this pod did, and the next one comes within seconds. A worker may be Ready, and then
    crash in its first step: it has not worked.
    """
    started = started_at(view)
    if view.slot.role == contract.ROLE_WORKER and progress is not None and started is not None:
        is_old = 0 in progress.reached and progress.taken < started
        # The clock of the pod's node may be ahead of the operator's: then a newer answer looks old.
        if is_old and progress.contributed.get(view.slot.index) != view.incarnation:
            return False
    return has_worked(view, progress)


def is_restored(view: PodView) -> bool:
    """Returns whether the pod was created after training: it gets the result from the last checkpoint."""
    containers = (view.raw.get("spec") or {}).get("containers") or ()
    return any(v.get("name") == contract.ENV_TRAINED for c in containers for v in c.get("env") or ())


def silent_since(view: PodView) -> datetime | None:
    """Returns since when a pod runs without ever having been Ready; None for other pods. A pod is Ready when it has
    joined.

    The pods of a rank join together, so their time begins when the last of them has started.
    """
    started = started_at(view)
    if view.ready or view.ended or started is None:
        return None
    turned = _turned_at(view)
    if turned is not None and turned > started:
        return None
    times = [started_at(pod) for pod in view.pods]
    return None if None in times else max(at for at in times if at is not None)


def unready_since(view: PodView) -> datetime | None:
    """Returns since when a running pod that has been Ready is no longer Ready; None for other pods."""
    started = started_at(view)
    turned = _turned_at(view)
    if view.ready or view.ended or started is None or turned is None or turned <= started:
        return None
    return turned


def ready_since(view: PodView) -> datetime | None:
    """Returns the time since which a pod is Ready, or None if it is not Ready."""
    return _turned_at(view) if view.ready else None


def is_node_silent(view: PodView) -> bool:
    """Returns whether the pod's node does not answer. Then the node controller sets Ready to False without a reason.
    But ContainersReady, which only the kubelet sets, stays True."""
    ready, containers = condition_of(view.raw, "Ready"), condition_of(view.raw, "ContainersReady")
    return ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"


def started_at(view: PodView) -> datetime | None:
    """Returns when its container `trainer` started."""
    for container in (view.raw.get("status") or {}).get("containerStatuses") or ():
        if container.get("name") == contract.CONTAINER:
            state = container.get("state") or {}
            running = state.get("running") or state.get("terminated") or {}
            return parse_time(running.get("startedAt"))
    return None
