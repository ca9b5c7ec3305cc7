"""Decides which pods the job no longer needs."""

from __future__ import annotations

from collections.abc import Collection

from backstay_spec import contract, status
from backstay_spec.actions import DeletePod
from backstay_spec.events import normal
from backstay_spec.names import Slot
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import Effects
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.record import Record

__all__ = ["judge"]


def judge(
    facts: Facts, record: Record, wanted: Collection[Slot], deleted: Collection[str], does: str = "fills the slot"
) -> Effects:
    """Delete older incarnations that still run, and dead pods except the last of each slot, which is kept for its log.
    Delete the pods of slots that the job no longer has, highest rank first: a worker only after the world is smaller.

    Args:
        wanted: the slots that the job has.
        deleted: uids of the pods that this plan deletes already.
        does: what a pod does in the place of an older one that still runs.
    """
    actions: list[DeletePod] = []
    events = []
    for slot in sorted(facts.pods, reverse=True):
        current, newest = record.current(slot), record.newest(slot)
        for pod in facts.pods[slot]:
            reason = ""
            if slot not in wanted:
                if pod.ended or _has_left_world(facts, slot):
                    reason = "Superfluous"
            elif pod.incarnation < current and not pod.terminal:
                reason = "Superseded"
            elif current < pod.incarnation < newest and pod.alive and not pod.started:
                reason = "Superseded"  # a standby that another one follows
            elif pod.incarnation < current - 1 or (pod.terminal and current < pod.incarnation < newest - 1):
                reason = "Outdated"
            found = deletions(pod, None, reason, deleted, terminal=reason != "Superseded") if reason else ()
            if found and reason == "Superseded" and pod.alive and current > Record.of(facts.old).current(slot):
                taken = facts.pod_name(slot, current)
                events.append(
                    normal(reason, f"{slot.text} is replaced as intended: {taken} {does}, so {pod.name} is deleted")
                )
            actions += found
    return Effects(actions=tuple(actions), events=tuple(events))


def _has_left_world(facts: Facts, slot: Slot) -> bool:
    if slot.role != contract.ROLE_WORKER:
        return True
    if facts.progress is not None and facts.progress.report.world is not None:
        return slot.index >= facts.progress.report.world
    # No server has reported the world in force. Before training begins, no update needs the rank; later one may.
    return facts.old.world is None and not status.holds(facts.conditions, status.RUNNING)
