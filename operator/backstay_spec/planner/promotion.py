"""Decides whether the standby of a shard becomes its active server (O2, O3, T6).

A shard with a standby has two pods with different incarnations. `status.active` names the active server; a newer
incarnation is its standby. When the active server is dead and the standby runs, one status write makes the standby the
active server. The Service is patched and the servers are informed afterwards. So an operator that dies in between
finishes the promotion after its restart.

A standby without the complete state of its server is promoted too: it starts from the newest checkpoint, as any other
server would, but sooner. That holds for a standby whose pod was created a moment ago and is starting.

One case waits: the server was requested to stop, still answers, and is storing a checkpoint. The checkpoint comes
first, within the server's grace period.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from backstay_spec.actions import FoundDead
from backstay_spec.causes import Blocked, Cause, Verdict, obstacle_of, outcome_of, verdict_of
from backstay_spec.events import warning
from backstay_spec.names import Slot
from backstay_spec.planner import budgets, hung, leaving
from backstay_spec.planner.effects import Decision, Effects
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, created_at, gone_by
from backstay_spec.planner.record import Record, standby_key

__all__ = ["GONE", "AskFirst", "Keep", "Promote", "StoreFirst", "judge", "promoted", "standby_of", "successor"]

# After this many unanswered calls (about a minute), a standby is not waited for: another server takes the slot.
GIVEN_UP_CALLS: Final = 30
ASK_AGAIN: Final = timedelta(milliseconds=250)
# A standby whose pod is younger is waited for until its container runs: another pod would start later. A pod without a
# place, or whose image is pulled for longer, is not.
STARTS_WITHIN: Final = timedelta(seconds=10)
GONE: Final = Verdict(Cause.VANISHED, "it no longer exists")


@dataclass(frozen=True, slots=True)
class Keep:
    """The shard keeps its active server, or has no standby that can take over."""


@dataclass(frozen=True, slots=True)
class StoreFirst:
    """The active server is dead, but it is storing a checkpoint. Until then the shard stays unchanged."""

    until: datetime


@dataclass(frozen=True, slots=True)
class AskFirst:
    """The active server is dead, but the standby is starting, or has not answered the newest call. A silent standby is
    never promoted, so the operator calls again before it decides."""

    until: datetime


@dataclass(frozen=True, slots=True)
class Promote:
    """The standby becomes the active server.

    Attributes:
        standby: its pod.
        pod, verdict: name of the pod that was the active server, and why it died.
        counted: its death is recorded already.
        in_sync: the standby had the complete state of the active server at that server's last report.
    """

    standby: PodView
    pod: str
    verdict: Verdict
    counted: bool
    in_sync: bool


Promotion: TypeAlias = Keep | StoreFirst | AskFirst | Promote


def judge(facts: Facts, record: Record, slot: Slot) -> Promotion:
    """Returns whether the shard's standby takes over from an active server that is dead."""
    if not facts.can_create or slot.key not in record.active or facts.outlived_suspension(slot):
        return Keep()
    server, name = facts.pod(slot, record.current(slot)), facts.pod_name(slot, record.active[slot.key])
    if server is None:
        missing = name in facts.observed.missing  # otherwise it is looked up first
        return (successor(facts, record, slot, name, GONE) or Keep()) if missing else Keep()
    if server.alive or leaving.judge(facts, server).in_order or outcome_of(server.raw) is not None:
        return Keep()
    until = _stores_until(facts, record, slot, server)
    if until is not None:
        return StoreFirst(until)
    return successor(facts, record, slot, name, verdict_of(server.raw)) or Keep()


def successor(facts: Facts, record: Record, slot: Slot, pod: str, verdict: Verdict) -> Promote | AskFirst | None:
    """Returns the promotion of the shard's standby after its active server (pod `pod`) died, or None if none can take
    over.

    It is `AskFirst` while the standby starts.
    """
    standby = standby_of(facts, record, slot) if slot.key in record.active else None
    if standby is None or not standby.alive:
        return None
    if not standby.started:
        return AskFirst(facts.now + ASK_AGAIN) if _starts_soon(facts, standby) else None
    if isinstance(hung.judge_server(facts, record, standby, "it"), hung.Hung):
        return None
    if facts.contact is None or not facts.contact.answers(standby.uid):
        silence = facts.contact.silent.get(standby.uid) if facts.contact is not None else None
        given_up = silence is not None and silence.calls >= GIVEN_UP_CALLS
        return None if given_up else AskFirst(facts.now + ASK_AGAIN)
    counted = record.waits_until(slot.key) is not None
    if verdict.cause.charged and not counted and budgets.is_spent(facts, record, slot):
        return None  # `replacement` ends the job
    return Promote(standby, pod, verdict, counted, _in_sync(facts, slot, standby))


def promoted(facts: Facts, record: Record, slot: Slot, found: Promote) -> Decision:
    """Returns the record and the effects of a promotion. If the standby has done no work yet, the next one may have to
    wait."""
    before, charged = record.active[slot.key], found.verdict.cause.charged
    row = None
    if not found.standby.ready:
        known = record.backoff.get(standby_key(slot))
        row = budgets.backed_off(facts, known, found.verdict, started=True)
    after = record.with_backoff(slot.key, None).with_backoff(standby_key(slot), row)
    after = after.with_active(slot, found.standby.incarnation)
    held = "" if found.in_sync else " from the newest checkpoint, unless it has caught up since"
    text = (
        f"{slot.text} (pod {found.pod}) died: {found.verdict.text}; its standby {found.standby.name} takes over{held}"
    )
    event = warning(found.verdict.cause, text, slot.key)
    deaths: tuple[FoundDead, ...] = ()
    if not found.counted:
        event = replace(event, incarnation=before)
        after = after.with_death(slot, found.verdict.cause, charged=charged)
        deaths = (FoundDead(slot.role, slot.index, before, found.pod, found.verdict.cause, charged),)
    return Decision(after, Effects(events=(event,), deaths=deaths))


def standby_of(facts: Facts, record: Record, slot: Slot) -> PodView | None:
    """Returns the newest pod of a shard that is newer than its active server."""
    pods = facts.pods.get(slot, ())
    return pods[-1] if pods and pods[-1].incarnation > record.current(slot) else None


def _stores_until(facts: Facts, record: Record, slot: Slot, server: PodView) -> datetime | None:
    """Returns when a server that stops must have stored its checkpoint, or None if it has no time left."""
    standby, until = standby_of(facts, record, slot), gone_by(server)
    if server.ended or until is None:
        return None
    if (standby is not None and _in_sync(facts, slot, standby)) or verdict_of(server.raw).cause is Cause.NODE_LOST:
        return None
    contact = facts.observed.contact
    if contact is None or server.uid not in contact.answered_at:
        return None
    silence = contact.silent.get(server.uid)
    if silence is not None and hung.is_unanswered(silence):
        return None
    return until if facts.now < until else None


def _starts_soon(facts: Facts, standby: PodView) -> bool:
    created, obstacle = created_at(standby), obstacle_of(standby.raw)
    if created is None or (obstacle is not None and obstacle.blocked is not Blocked.NOT_STARTED):
        return False
    # The two times come from two clocks, which may differ by any amount.
    return abs(facts.now - created) < STARTS_WITHIN


def _in_sync(facts: Facts, slot: Slot, standby: PodView) -> bool:
    """Returns whether the shard's server last reported that this standby has the server's complete state."""
    return facts.progress is not None and facts.progress.in_sync.get(slot.index) == standby.incarnation
