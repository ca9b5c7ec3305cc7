"""Decides which pods a queue (Kueue) admits together, and which new pods wait for the end of an old one.

The servers and the quorum of workers are one group, so that no job holds a part of the room that another one needs
(O9). Kueue admits a group when all its pods exist, and gives the place of a failed pod to the next one of its role. It
counts a pod until its phase is Failed, and deletes a new pod that has no place in the group. When all pods of a group
have ended, Kueue ends it, and the next pods are another group.

https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract, names
from backstay_spec.actions import HoldPod
from backstay_spec.manifests_pod import is_grouped
from backstay_spec.names import Slot
from backstay_spec.observed import IN_QUEUE
from backstay_spec.planner import leaving, order
from backstay_spec.planner.effects import NOTHING, Creation, Effects, earliest
from backstay_spec.planner.facts import Facts, desired_slots
from backstay_spec.planner.pods import PodView, created_at, ended_at, gone_by
from backstay_spec.planner.record import Record
from backstay_spec.types import KUEUE_FINALIZER, KUEUE_GATE, KUEUE_GROUP_NAME, QueueGroup

__all__ = ["NONE_GIVEN_UP", "AdmittedPods", "GivenUp", "given_up", "judge", "rank_group"]

_ENDS: Final = timedelta(seconds=10)
"""How long after its grace period a pod may still be reported as running. A lost node reports nothing."""
_ADMITS: Final = timedelta(seconds=10)
"""In this time Kueue admits a pod that has a place in an admitted group."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The pods that are created again, because the queue would admit them too late or never.

    Attributes:
        uids: the uids of the pods.
        wake: look again at this time at the latest; None: no need.
    """

    uids: frozenset[str] = frozenset()
    wake: datetime | None = None

    def has(self, view: PodView) -> bool:
        """Returns whether the pods of a view are created again."""
        return any(pod.uid in self.uids for pod in view.pods)


NONE_GIVEN_UP: Final = GivenUp()


@dataclass(frozen=True, slots=True)
class AdmittedPods:
    """The pods that may be created now.

    Attributes:
        created: the creations, each with the group of its pods; None: the queue admits them one by one.
        effects: pods that wait.
    """

    created: tuple[tuple[Creation, QueueGroup | None], ...]
    effects: Effects = NOTHING


def given_up(facts: Facts, record: Record) -> GivenUp:
    """Returns the pods that are created again, which does not count as their death.

    While no server runs, these are all pods outside of the group that waits. Otherwise they are pods in groups that
    have ended, and pods by themselves for which a group has a place. If one that training needs waits by itself, the
    other pods of the job give their room.
    """
    if facts.spec.scheduling.queue is None:
        return NONE_GIVEN_UP
    places = _Places(facts, record, ())
    alive = (view for views in facts.pods.values() for view in views if view.alive)
    outside = [view for view in alive if _group_name(view.first) not in places.names]
    outside = [view for view in outside if is_grouped(facts.spec, view.slot.role)]
    if not (places.forms_group or places.is_waited_for):
        outside = places.better_off(outside)
    due = {pod.uid: at for group in places.ended for pod, at in group.ends(facts.now)}
    uids = {uid for uid, at in due.items() if at <= facts.now} | {pod.uid for view in outside for pod in view.pods}
    wake = earliest(at for at in due.values() if at > facts.now)
    return GivenUp(frozenset(uids), earliest((wake, places.looks_again)))


def judge(facts: Facts, record: Record, creations: Sequence[Creation], deleted: Collection[str]) -> AdmittedPods:
    """Returns the groups of new pods, which come in the order of `order.stage`.

    Args:
        deleted: uids of the pods that this plan deletes.
    """
    if facts.spec.scheduling.queue is None:
        return AdmittedPods(tuple((creation, None) for creation in creations))
    places = _Places(facts, record, creations, deleted)
    effects = NOTHING
    created: list[tuple[Creation, QueueGroup | None]] = []
    for creation in creations:
        if (why := places.why_held(creation)) is not None:
            effects += _hold(facts, creation, why) + Effects(wake=places.frees_at)
        else:
            created.append((creation, places.group_for(creation)))
    return AdmittedPods(tuple(created), effects)


def rank_group(facts: Facts, creation: Creation) -> QueueGroup | None:
    """Returns the group of the pods of a rank, or None for a rank of one pod, and for other pods."""
    slot = creation.slot
    count = len(facts.members(slot))
    if facts.spec.scheduling.queue is None or count == 1 or not is_grouped(facts.spec, slot.role):
        return None
    name = names.pod_name(facts.meta.name, facts.meta.uid, slot, creation.incarnation)
    return QueueGroup(name, 0, count, is_of_job=False)


class _KueueGroup:
    """A group of this job that has pods.

    Attributes:
        group: its name and size.
        pods: its pods that exist.
        places: role -> places without a pod, as Kueue counts them.
        is_waiting: whether the queue has not admitted it.
        is_open: whether more pods may join it. A group of which no pod runs ends when the last one has ended.
    """

    def __init__(self, group: QueueGroup, pods: Sequence[PodView], deleted: Collection[str] = ()) -> None:
        self.group, self.pods = group, [pod for pod in pods if not (_is_gated(pod) and pod.uid in deleted)]
        sizes = {contract.ROLE_SERVER: group.servers, contract.ROLE_WORKER: group.workers}
        self.places = {role: size - sum(_is_counted(pod, role) for pod in self.pods) for role, size in sizes.items()}
        self.is_waiting = all(_is_gated(pod) for pod in self.pods)
        is_finished = any(_is_gated(pod) and not _has_finalizer(pod) for pod in self.pods)
        self.is_open = (self.is_waiting and not is_finished) or any(_is_running(pod) for pod in self.pods)

    def ends(self, now: datetime) -> Iterable[tuple[PodView, datetime]]:
        """Yields the waiting pods of a group that is not open, and when each is given up. A pod that joined when the
        last other one ended may still be admitted. When Kueue has ended the group, it removes its finalizer."""
        for pod in (pod for pod in self.pods if not pod.deleting and _is_gated(pod)):
            yield pod, now if self.is_waiting or not _has_finalizer(pod) else (created_at(pod) or now) + _ADMITS


class _Places:
    """The places for new pods in the groups of a job, as one plan gives them away.

    Args:
        creations: the pods that this plan creates.
        deleted: uids of the pods that this plan deletes.

    Attributes:
        names: the names of all groups.
        ended: the groups that no pod may join.
        forms_group: whether the next pods that the job needs are a new group, because no server runs.
        lacks_room: whether a pod that training needs waits by itself.
        frees_at: when the next place should be free; None: not known.
        looks_again: when `lacks_room` may become true; None: not by time alone.
    """

    def __init__(
        self, facts: Facts, record: Record, creations: Sequence[Creation], deleted: Collection[str] = ()
    ) -> None:
        self._facts, self._record, self._deleted = facts, record, deleted
        self._needed = _needed_slots(facts, record, creations)
        self._size = _size(facts, self._needed)
        every = [_KueueGroup(group, pods, deleted) for group, pods in _groups(facts)]
        self._open = _open_groups(every, self._size)
        self.names = frozenset(group.group.name for group in every)
        self.ended = [group for group in every if group not in self._open]
        self.forms_group = not self._open and sum(self._size) > 1 and not _runs_any(facts, self._needed)
        self._expected = {slot for slot in self._needed if not any(view.alive for view in facts.pods.get(slot, ()))}
        self._leaving: dict[str, list[PodView]] = {}
        for pod in (pod for group in self._open for pod in group.pods if self._leaves(pod)):
            self._leaving.setdefault(pod.slot.role, []).append(pod)
        self.frees_at = earliest(_late_at(pod) for pods in self._leaving.values() for pod in pods)
        waits = [since + _ADMITS for slot in self._needed if (since := self._waits_alone(slot)) is not None]
        self.lacks_room = any(at <= facts.now for at in waits)
        self.looks_again = earliest(at for at in waits if at > facts.now)

    @property
    def is_waited_for(self) -> bool:
        """Whether the queue has not yet admitted what the job needs."""
        return any(group.is_waiting for group in self._open)

    def is_needed(self, slot: Slot, incarnation: int) -> bool:
        """Returns whether the job cannot train without a pod. A standby has the slot of a pod that it needs."""
        return slot in self._needed and incarnation == self._record.current(slot) and not self._joins_later(slot)

    def is_extra(self, view: PodView) -> bool:
        """Returns whether the job can train without a pod. A standby may become the server of its shard."""
        if view.slot not in self._needed or self._joins_later(view.slot):
            return True
        current = self._facts.pod(view.slot, self._record.current(view.slot))
        return view.incarnation != self._record.current(view.slot) and current is not None and current.alive

    def why_held(self, creation: Creation) -> str | None:
        """Returns why pods must wait for the queue, or for the end of old pods, or None if they may be created."""
        slot, count = creation.slot, self._count(creation)
        if not is_grouped(self._facts.spec, slot.role) or creation.members is not None:
            return None
        needed = self.is_needed(slot, creation.incarnation)
        if not needed and (self.forms_group or self.is_waited_for or self.lacks_room):
            # Of two jobs, each could hold the room that the other one needs.
            return "the queue must first admit the servers and the quorum"
        if self._with_places(slot, count, needed=needed) is not None:
            return None
        leaving_pods = self._leaving.get(slot.role, [])
        if not needed:  # the standby of a promoted server gets the place of the old server
            leaving_pods = [pod for pod in leaving_pods if pod.slot == slot]
        if leaving_pods and len(leaving_pods) + max(group.places[slot.role] for group in self._open) >= count:
            return f"the queue counts pod {leaving_pods[0].name} of this job until it has ended"
        return None

    def better_off(self, outside: Sequence[PodView]) -> list[PodView]:
        """Returns the pods by themselves for which a group has a place, and the others whose room the job needs."""
        gated = sorted((view for view in outside if _is_gated(view.first)), key=self.is_extra)
        joins = [v for v in gated if self.take(v.slot, len(v.pods), needed=not self.is_extra(v)) is not None]
        return [*joins, *(view for view in outside if self.lacks_room and self.is_extra(view))]

    def _joins_later(self, slot: Slot) -> bool:
        """Returns whether the job trains without a worker, because its rank is not in force yet."""
        world = self._facts.old.world
        begins = self.forms_group or self.is_waited_for
        return slot.role == contract.ROLE_WORKER and world is not None and slot.index >= world and not begins

    def _waits_alone(self, slot: Slot) -> datetime | None:
        """Returns since when a pod waits in no group, without which training does not continue; else None."""
        view = self._facts.pod(slot, self._record.current(slot))
        if view is None or not view.alive or self._joins_later(slot):
            return None
        return created_at(view) if _is_gated(view.first) and _group_name(view.first) not in self.names else None

    def group_for(self, creation: Creation) -> QueueGroup | None:
        """Returns the group of the pods, in which they get their places."""
        facts, slot = self._facts, creation.slot
        if not is_grouped(facts.spec, slot.role):
            return None
        if creation.members is not None:  # its other pods exist
            view = facts.pod(slot, creation.incarnation)
            joined = "" if view is None else _group_name(view.first)
            found = next((group for group in self._open if group.group.name == joined), None)
            return rank_group(facts, creation) if found is None else found.group
        needed = self.is_needed(slot, creation.incarnation)
        if needed and self.forms_group:
            name = names.queue_group_name(facts.meta.name, facts.meta.uid, sum(self._record.incarnations.values()))
            self._open.append(_KueueGroup(QueueGroup(name, *self._size), ()))
            self.forms_group = False
        joins = self.take(slot, self._count(creation), needed=needed)
        return rank_group(facts, creation) if joins is None else joins

    def take(self, slot: Slot, count: int, *, needed: bool) -> QueueGroup | None:
        """Returns the group in which the pods of a slot get places, or None if none has them."""
        self._expected.discard(slot)
        found = self._with_places(slot, count, needed=needed)
        if found is None:
            return None
        found.places[slot.role] -= count
        return found.group

    def _with_places(self, slot: Slot, count: int, *, needed: bool) -> _KueueGroup | None:
        # A pod that is not needed does not take the place of one that is.
        if not needed and any(other.role == slot.role for other in self._expected):
            return None
        may = (group for group in self._open if needed or not group.is_waiting)
        return next((group for group in may if group.places.get(slot.role, 0) >= count), None)

    def _count(self, creation: Creation) -> int:
        return len(self._facts.members(creation.slot)) if creation.members is None else len(creation.members)

    def _leaves(self, pod: PodView) -> bool:
        """Returns whether a pod gives its place back soon. A pod on a lost node may never be reported as ended."""
        if not _is_counted(pod, pod.slot.role) or _phase(pod) == "Succeeded":
            return False
        if pod.deleting or pod.terminal:
            late = _late_at(pod)
            return late is not None and self._facts.now < late
        return pod.uid in self._deleted or pod.incarnation < self._record.current(pod.slot)


def _open_groups(every: Sequence[_KueueGroup], size: tuple[int, int]) -> list[_KueueGroup]:
    """Returns the groups that more pods may join. These are the groups of which a pod runs. If none does, it is the
    newest group that waits, if it has the size that the job needs now."""
    found = [group for group in every if group.is_open and group.pods]
    running = [group for group in found if not group.is_waiting]
    return running or [group for group in found[-1:] if size == (group.group.servers, group.group.workers)]


def _hold(facts: Facts, creation: Creation, why: str) -> Effects:
    known = facts.observed.refused
    every = facts.pod_names(creation.slot, creation.incarnation)
    again = (
        name for name in every if name not in known or (known[name].reason, known[name].message) != (IN_QUEUE, why)
    )
    return Effects(actions=tuple(HoldPod(name, why) for name in again))


def _groups(facts: Facts) -> Iterable[tuple[QueueGroup, list[PodView]]]:
    """Yields the groups of the job that have pods, the oldest first."""
    found: dict[str, tuple[QueueGroup, list[PodView]]] = {}
    pods = [pod for views in facts.pods.values() for view in views for pod in view.pods]
    for pod in sorted(pods, key=lambda pod: created_at(pod) or facts.now):
        name, size = _group_name(pod), _labels(pod).get(contract.LABEL_TOGETHER, "").split(".")
        if name and len(size) == 2 and all(part.isdecimal() for part in size):
            group = QueueGroup(name, int(size[0]), int(size[1]))
            found.setdefault(name, (group, []))[1].append(pod)
    return found.values()


def _needed_slots(facts: Facts, record: Record, creations: Sequence[Creation]) -> frozenset[Slot]:
    """Returns the slots of a queue without whose pods the job does not train."""
    made = {each.slot for each in creations if order.stage(facts, record, each) < order.REST}
    queued = (slot for slot in desired_slots(facts.job) if is_grouped(facts.spec, slot.role))
    slots = (slot for slot in queued if order.is_quorum(facts, slot))
    return frozenset(slot for slot in slots if slot in made or not _has_left(facts, record, slot))


def _has_left(facts: Facts, record: Record, slot: Slot) -> bool:
    """Returns whether the slot needs no other pod, because training is complete."""
    view = facts.pod(slot, record.current(slot))
    return view is not None and not view.alive and leaving.judge(facts, view).in_order


def _runs_any(facts: Facts, needed: Collection[Slot]) -> bool:
    """Returns whether a server runs, or a worker if the servers are in no queue."""
    slots = [slot for slot in needed if slot.role == contract.ROLE_SERVER] or needed
    views = (view for slot in slots for view in facts.pods.get(slot, ()) if view.alive)
    return any(_is_running(pod) for view in views for pod in view.pods)


def _size(facts: Facts, slots: Collection[Slot]) -> tuple[int, int]:
    """Returns how many servers and workers these slots have."""
    servers = sum(slot.role == contract.ROLE_SERVER for slot in slots)
    return servers, sum(len(facts.members(slot)) for slot in slots if slot.role == contract.ROLE_WORKER)


def _late_at(pod: PodView) -> datetime | None:
    """Returns when a pod that ends should be reported as ended, or None if that is not known."""
    ends = gone_by(pod) if pod.deleting else ended_at(pod)
    return None if ends is None else ends + _ENDS


def _is_counted(pod: PodView, role: str) -> bool:
    """Returns whether Kueue counts a pod as one of its group."""
    has_node = bool((pod.raw.get("spec") or {}).get("nodeName"))
    return pod.slot.role == role and _phase(pod) != "Failed" and (has_node or not pod.deleting)


def _is_running(pod: PodView) -> bool:
    """Returns whether the queue has admitted a pod, and it has not ended and is not being deleted."""
    return not (pod.deleting or pod.terminal or _is_gated(pod))


def _is_gated(pod: PodView) -> bool:
    gates: list[Any] = (pod.raw.get("spec") or {}).get("schedulingGates") or []
    return any(gate.get("name") == KUEUE_GATE for gate in gates)


def _has_finalizer(pod: PodView) -> bool:
    return KUEUE_FINALIZER in ((pod.raw.get("metadata") or {}).get("finalizers") or ())


def _phase(pod: PodView) -> str:
    return str((pod.raw.get("status") or {}).get("phase", ""))


def _labels(pod: PodView) -> dict[str, str]:
    return (pod.raw.get("metadata") or {}).get("labels") or {}


def _group_name(pod: PodView) -> str:
    return _labels(pod).get(KUEUE_GROUP_NAME, "")
