"""Decides that each shard whose active server is alive, or is being created, has a standby (O2, O4).

The job can continue without standbys. So a standby that cannot be started does not fail the job, and a spent budget
ends only the standbys. `promotion` decides when a standby becomes the active server.
"""

from __future__ import annotations

from collections.abc import Iterable

from backstay_spec.actions import DeletePod
from backstay_spec.causes import Cause, Verdict, obstacle_of, refusal_obstacle, verdict_of
from backstay_spec.names import Slot
from backstay_spec.planner import budgets, hung, leaving
from backstay_spec.planner.admission import NONE_GIVEN_UP, GivenUp
from backstay_spec.planner.creating import create, look_up, lost, try_again
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import Creation, Decision, Effects, Obstructed
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, created_at, has_worked, silent_since
from backstay_spec.planner.promotion import standby_of
from backstay_spec.planner.record import Record, standby_key

__all__ = ["judge"]


def judge(
    facts: Facts, record: Record, slot: Slot, creations: Iterable[Creation], given_up: GivenUp = NONE_GIVEN_UP
) -> Decision:
    """Returns the shard's standby after this plan.

    Args:
        creations: the pods that this plan creates for the slot already.
        given_up: the pods that are created again because of the queue.
    """
    if not facts.can_create or slot.key not in record.active or record.waits_until(slot.key) is not None:
        return Decision(record)
    active, newest = record.active[slot.key], record.newest(slot)
    created = {creation.incarnation for creation in creations}
    if newest <= active:
        return _create(record, slot, None)
    if newest in created:
        return Decision(record)
    standby = standby_of(facts, record, slot)
    if (not_before := record.waits_until(standby_key(slot))) is not None:
        if facts.now >= not_before:
            return _create(record, slot, None)
        return Decision(record, Effects(wake=not_before))
    if standby is not None and standby.incarnation == newest:
        if standby.alive and given_up.has(standby):
            deleted = Effects(actions=deletions(standby, None, "NeverAdmitted"))
            return Decision(record, deleted).then(_create(record, slot, None))
        return _judge_pod(facts, record, slot, standby)
    if facts.pod_name(slot, newest) in facts.observed.missing:
        return _create(record, slot, None)
    if (refusal := facts.refusal(slot, newest)) is not None:
        obstacle = refusal_obstacle(refusal.reason, refusal.message)
        found = Obstructed(slot, obstacle, refusal.since or refusal.at, standby=True)
        return Decision(record, try_again(facts, slot, newest, refusal) + Effects(obstructed=(found,)))
    return Decision(record, look_up(facts, slot, newest))


def _judge_pod(facts: Facts, record: Record, slot: Slot, standby: PodView) -> Decision:
    if not standby.alive:
        return _lose(facts, record, slot, standby, verdict_of(standby.raw))
    if has_worked(standby, facts.progress):
        record = record.with_backoff(standby_key(slot), None)
    silence = hung.judge_server(facts, record, standby, "it")
    if isinstance(silence, hung.Hung):
        return _end(facts, record, slot, standby, silence.verdict)
    checked = Effects(wake=silence.check_at)
    if not standby.ready and (obstacle := obstacle_of(standby.raw)) is not None:
        found = Obstructed(slot, obstacle, created_at(standby) or facts.now, standby=True)
        return Decision(record, checked + Effects(obstructed=(found,)))
    if (since := silent_since(standby)) is not None:
        joined = hung.never_joined(facts, since, "the standby runs, but its server could not send it the whole state")
        if isinstance(joined, hung.Hung):
            return _end(facts, record, slot, standby, joined.verdict)
        checked += Effects(wake=joined.check_at)
    return Decision(record, checked)


def _end(facts: Facts, record: Record, slot: Slot, standby: PodView, verdict: Verdict) -> Decision:
    deleted = Effects(actions=(DeletePod(standby.name, standby.uid, hung.STALLED_GRACE, Cause.STALLED),))
    return Decision(record, deleted).then(_lose(facts, record, slot, standby, verdict))


def _lose(facts: Facts, record: Record, slot: Slot, standby: PodView, verdict: Verdict) -> Decision:
    """Charge and replace a standby as any server; if the budget is spent, training continues without one."""
    left = leaving.judge(facts, standby)
    if left.in_order:
        return Decision(record, Effects(wake=left.check_at))
    cost = budgets.cost_of_standby(facts, record, standby, verdict)
    if isinstance(cost, budgets.NoReplacement):
        return Decision(record)
    after = record.with_backoff(standby_key(slot), cost.backoff)
    after = after.with_death(slot, verdict.cause, charged=cost.charged)
    decided = _create(after, slot, verdict.cause) if cost.wait is None else Decision(after, Effects(wake=cost.wait))
    return decided.also(lost(facts, decided.record, standby, verdict, cost, standby=True))


def _create(record: Record, slot: Slot, cause: Cause | None) -> Decision:
    return create(record.without_wait(standby_key(slot)), slot, cause)
