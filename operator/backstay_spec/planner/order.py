"""Decides the order in which a job's pods are created, which is the servers, then the quorum of workers, then the rest
(O9).

Without its servers a job cannot train, so its other pods must not use up the quota that a server needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from backstay_spec import contract
from backstay_spec.causes import refusal_obstacle
from backstay_spec.names import Slot
from backstay_spec.observed import IN_QUEUE, RefusedCreate
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import NOTHING, Creation, Effects
from backstay_spec.planner.facts import Facts, desired_slots
from backstay_spec.planner.record import Record

__all__ = ["REST", "CreationOrder", "is_quorum", "judge", "stage"]

# The text of a ResourceQuota's refusal: "exceeded quota: gpus, requested: pods=1, used: pods=2, limited: pods=2".
_QUOTA: Final = "exceeded quota"
REST: Final = 2
"""The stage of the pods that are neither the active servers nor the quorum."""


@dataclass(frozen=True, slots=True)
class CreationOrder:
    """The pods that may be created now, and the deletions that make room for others.

    Attributes:
        hold: whether only servers are created, because the API server refuses a server.
        release: deletions that free quota for the refused servers.
    """

    hold: bool = False
    release: Effects = NOTHING


def judge(facts: Facts, record: Record) -> CreationOrder:
    """Returns the consequences of refused servers for the other pods."""
    refused = [refusal for shard in facts.shards if (refusal := _refusal(facts, record, shard)) is not None]
    if not refused:
        return CreationOrder()
    others = [slot for slot in desired_slots(facts.job) if slot.role != contract.ROLE_SERVER]
    pods = [pod for slot in sorted(others, key=_least_needed_first) for pod in facts.pods.get(slot, ())]
    there = [pod for pod in pods if not (pod.terminal or pod.deleting)]
    # One deletion for each refused server, once: if another job takes the free quota, more deletions may not help.
    wanted = sum(_QUOTA in refusal.message for refusal in refused)
    room = len(others) - len({pod.slot for pod in there})
    released = there[: max(0, wanted - room)]
    actions = tuple(action for pod in released for action in deletions(pod, None, "QuotaForServers"))
    return CreationOrder(True, Effects(actions=actions))


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


def _refusal(facts: Facts, record: Record, shard: int) -> RefusedCreate | None:
    """Returns the API server's refusal of the shard's active server, or None if it is not refused, or a retry cannot
    help."""
    slot = Slot(contract.ROLE_SERVER, shard)
    current = record.current(slot)
    refusal = facts.refusal(slot, current)
    if refusal is None or refusal.reason == IN_QUEUE or facts.pod(slot, current) is not None:
        return None
    return None if refusal_obstacle(refusal.reason, refusal.message).blocked.permanent else refusal


def _least_needed_first(slot: Slot) -> tuple[bool, int]:
    """Returns a sort key with evaluators before workers, and the highest rank first."""
    return slot.role == contract.ROLE_WORKER, -slot.index
