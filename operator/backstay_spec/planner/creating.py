"""Creates a pod, creates it again, looks it up, or reports its death, for `replacement` and `standbys`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from backstay_spec.actions import FoundDead, LookUpPod
from backstay_spec.causes import Cause, Verdict
from backstay_spec.events import MAX_EVENT, Event, one_line, warning
from backstay_spec.names import Slot
from backstay_spec.observed import HELD, IN_QUEUE, RefusedCreate
from backstay_spec.planner import budgets
from backstay_spec.planner.effects import Creation, Decision, Effects
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, has_run
from backstay_spec.planner.record import Record

__all__ = ["LOOK_UP_RETRY", "REFUSED_RETRY", "create", "death_event", "look_up", "lost", "try_again"]

REFUSED_RETRY: Final = timedelta(seconds=5)
LOOK_UP_RETRY: Final = timedelta(seconds=5)


def create(record: Record, slot: Slot, cause: Cause | None) -> Decision:
    """Returns a new pod for the slot, of the next incarnation; `cause` is why its predecessor died."""
    after = record.with_next(slot)
    return Decision(after, Effects(creations=(Creation(slot, after.newest(slot), cause),)))


def try_again(facts: Facts, slot: Slot, incarnation: int, refusal: RefusedCreate) -> Effects:
    """Create again a pod that the API server refused, after the time between two attempts."""
    due = refusal.at if refusal.reason in (HELD, IN_QUEUE) else refusal.at + REFUSED_RETRY
    if facts.now >= due:
        return Effects(creations=(Creation(slot, incarnation),))
    return Effects(wake=due)


def look_up(facts: Facts, slot: Slot, incarnation: int) -> Effects:
    """GET a recorded pod that is not in the index."""
    every = facts.pod_names(slot, incarnation)
    actions = tuple(LookUpPod(name) for name in every if name not in facts.observed.missing)
    return Effects(actions=actions, wake=facts.now + LOOK_UP_RETRY)


def lost(
    facts: Facts, record: Record, pod: PodView, verdict: Verdict, cost: budgets.Cost, *, standby: bool = False
) -> Effects:
    """Returns the death of a pod that is replaced, and an event about it; `record` counts the death already."""
    death = FoundDead(pod.slot.role, pod.slot.index, pod.incarnation, pod.name, verdict.cause, cost.charged)
    event = death_event(facts, record, pod.slot, pod.incarnation, verdict, cost.wait, standby=standby, name=pod.name)
    return Effects(events=(event,), deaths=(death,))


def death_event(
    facts: Facts,
    record: Record,
    slot: Slot,
    incarnation: int,
    verdict: Verdict,
    wait: datetime | None,
    *,
    standby: bool = False,
    name: str = "",
) -> Event:
    """Returns the event that the pod died, and what happens next. `name` is the pod's, or empty if not observed."""
    pod = name or facts.pod_name(slot, incarnation)
    if wait is None:
        # Of a rank of several, the pod with the same index replaces it.
        names = zip(facts.pod_names(slot, incarnation), facts.pod_names(slot, record.newest(slot)), strict=True)
        then = f"replaced by {dict(names).get(pod) or facts.pod_name(slot, record.newest(slot))}"
    else:
        seconds = max(1, round((wait - facts.now).total_seconds()))
        then = f"no report of its training had arrived; its replacement starts in {seconds} s"
    if verdict.cause.charged:
        then += f"; restart {record.restarts_of(slot)} of {budgets.max_restarts(facts.spec, slot.role)}"
    who = f"the standby of {slot.text}" if standby else slot.text
    died, more = f"{who} (pod {pod}) died: ", f"; `kubectl logs {pod}` shows more"
    # A text that is cut once more would lose its reason.
    why = one_line(verdict.text, max(MAX_EVENT // 4, MAX_EVENT - len(died) - len(f"; {then}{more}")))
    if why != verdict.text and (view := facts.pod(slot, incarnation)) is not None and has_run(view):
        then += more
    return warning(verdict.cause, f"{died}{why}; {then}", slot.key, incarnation)
