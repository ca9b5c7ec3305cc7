"""Decides the order in which a job's pods are created, which is the servers, then the quorum of workers, then the rest
(O9).

Without its servers a job cannot train, so its other pods must not use up the quota that a server needs. Of ranks of
several pods, two could each hold a part of the room that one of them needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from backstay_spec import contract
from backstay_spec.causes import refusal_obstacle
from backstay_spec.names import Slot
from backstay_spec.observed import HELD, IN_QUEUE, RefusedCreate
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import NOTHING, Creation, Effects
from backstay_spec.planner.facts import Facts, desired_slots
from backstay_spec.planner.pods import is_bound_in_part
from backstay_spec.planner.record import Record

__all__ = ["REST", "CreationOrder", "is_quorum", "judge", "lacks_quota", "stage"]

# The text of a ResourceQuota's refusal: "exceeded quota: gpus, requested: pods=1, used: pods=2, limited: pods=2".
_QUOTA: Final = "exceeded quota"
REST: Final = 2
"""The stage of the pods that are neither the active servers nor the quorum."""


@dataclass(frozen=True, slots=True)
class CreationOrder:
    """The pods that may be created now, and the deletions that make room for others.

    Attributes:
        last: the last stage of which pods are created (see `stage`), because the API server refuses a pod of it.
        release: deletions that free quota for the refused servers.
        partial: the ranks of which some pods have room, and others not, the lowest first. The first one waits for
            room, and the others give theirs back.
        filled: the rank for which the quota is kept free, because it has room for some of its pods; None: there is
            none. All pods of workers request the same, so where one pod has no room, no other rank has.
    """

    last: int = REST
    release: Effects = NOTHING
    partial: tuple[Slot, ...] = ()
    filled: int | None = None

    def holds(self, facts: Facts, slot: Slot) -> bool:
        """Returns whether no worker or evaluator of this slot is created now; of a server's slot, no standby."""
        if self.filled is not None and slot.role == contract.ROLE_WORKER and slot.index > self.filled:
            return True
        is_needed = slot.role == contract.ROLE_WORKER and is_quorum(facts, slot)
        return self.last < (1 if is_needed else REST)


def judge(facts: Facts, record: Record) -> CreationOrder:
    """Returns the consequences of refused servers, and of refused workers of the quorum, for the other pods."""
    servers = [Slot(contract.ROLE_SERVER, shard) for shard in facts.shards]
    refused = [refusal for slot in servers if (refusal := _refusal(facts, record, slot)) is not None]
    partial = [slot for slot in desired_slots(facts.job) if _is_partial(facts, record, slot)]
    short = (slot.index for slot in partial if lacks_quota(facts, facts.absent(slot, record.current(slot))))
    known = CreationOrder(partial=tuple(partial), filled=next(short, None))
    if not refused:
        return replace(known, last=1 if _lacks_quorum(facts, record) else REST)
    others = [slot for slot in desired_slots(facts.job) if slot.role != contract.ROLE_SERVER]
    pods = [pod for slot in sorted(others, key=_least_needed_first) for pod in facts.pods.get(slot, ())]
    there = [pod for pod in pods if not (pod.terminal or pod.deleting)]
    # One deletion for each refused server, once: if another job takes the free quota, more deletions may not help.
    wanted = sum(_QUOTA in refusal.message for refusal in refused)
    # A slot that the same quota refused leaves no room.
    full = {slot for slot in others if (found := _refusal(facts, record, slot)) and _QUOTA in found.message}
    room = len(set(others) - full - {pod.slot for pod in there})
    released = there[: max(0, wanted - room)]
    actions = tuple(action for pod in released for action in deletions(pod, None, "QuotaForServers"))
    return replace(known, last=0, release=Effects(actions=actions))


def stage(facts: Facts, record: Record, creation: Creation) -> int:
    """Returns the stage in which a pod is created: 0 with the active servers, 1 with the quorum, 2 with the rest."""
    slot = creation.slot
    if slot.role == contract.ROLE_SERVER:
        return 0 if creation.incarnation == record.current(slot) else REST
    return 1 if is_quorum(facts, slot) else REST


def is_quorum(facts: Facts, slot: Slot) -> bool:
    """Returns whether the job cannot train without this slot: it is a shard's, or one of the quorum of workers."""
    if slot.role == contract.ROLE_SERVER:
        return True
    quorum = facts.spec.update.quorum(facts.spec.workers.replicas)
    return slot.role == contract.ROLE_WORKER and slot.index < quorum


def _lacks_quorum(facts: Facts, record: Record) -> bool:
    """Returns whether too few workers live for an update, and one of the quorum is refused."""
    world = facts.needed_world
    workers = [slot for slot in desired_slots(facts.job) if slot.role == contract.ROLE_WORKER and slot.index < world]
    living = 0
    for slot in workers:
        current = record.current(slot)
        pod = facts.pod(slot, current)
        living += pod is not None and pod.alive and not facts.absent(slot, current)
    if living >= facts.spec.update.quorum(world):
        return False
    return any(is_quorum(facts, slot) and _refusal(facts, record, slot) is not None for slot in workers)


def lacks_quota(facts: Facts, names: Iterable[str]) -> bool:
    """Returns whether one of these pods was refused for a quota, or was held back because another pod was."""
    found = (facts.observed.refused.get(name) for name in names)
    return any(refusal is not None and _QUOTA in refusal.message for refusal in found)


def _is_partial(facts: Facts, record: Record, slot: Slot) -> bool:
    """Returns whether only some pods of a rank have room: the API server refuses others, or the scheduler finds no
    node for them."""
    pod = facts.pod(slot, record.current(slot))
    if pod is None or not pod.members or not pod.alive:
        return False
    refused = (facts.observed.refused.get(name) for name in facts.absent(slot, record.current(slot)))
    return any(refused) or is_bound_in_part(pod)


def _refusal(facts: Facts, record: Record, slot: Slot) -> RefusedCreate | None:
    """Returns the API server's refusal of a pod of this slot, or None if none is refused, or a retry cannot help."""
    for name in facts.absent(slot, record.current(slot)):
        refusal = facts.observed.refused.get(name)
        if refusal is None or refusal.reason in (HELD, IN_QUEUE):
            continue
        return None if refusal_obstacle(refusal.reason, refusal.message).blocked.permanent else refusal
    return None


def _least_needed_first(slot: Slot) -> tuple[bool, int]:
    """Returns a sort key with evaluators before workers, and the highest rank first."""
    return slot.role == contract.ROLE_WORKER, -slot.index
