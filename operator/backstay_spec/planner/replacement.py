"""Decides which pod fills a slot next (O2, O4).

The newest recorded incarnation is the current one of a slot. Its pod is alive, dead, or not observed:

- dead: it is counted once, by the status write that records the next incarnation, or (while the slot backs off) its
  `notBefore`;
- not observed, though recorded: the pod was deleted, or the operator died between writing the status and creating it.
  A live GET decides. If the pod does not exist, it is dead, and the next incarnation fills the slot, because a pod that
  was force-deleted may still run. The counters need to distinguish the two cases. They do so by the pods that this
  operator has observed, and after its restart by the condition PodsCreated;
- not observed because the API server refused it: the same incarnation is tried again.

The modules `promotion` and `standbys` decide about the standbys of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from backstay_spec import contract, status
from backstay_spec.actions import FoundDead, LookUpPod
from backstay_spec.causes import (
    Blocked,
    Cause,
    Obstacle,
    Verdict,
    is_group_lost,
    may_have_left,
    obstacle_of,
    refusal_obstacle,
    verdict_of,
)
from backstay_spec.names import Slot, fraction
from backstay_spec.observed import UNCOUNTED, RefusedCreate
from backstay_spec.planner import budgets, hung, leaving, order, promotion, standbys
from backstay_spec.planner.admission import NONE_GIVEN_UP, GivenUp
from backstay_spec.planner.creating import LOOK_UP_RETRY, REFUSED_RETRY, create, death_event, look_up, lost, try_again
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import Creation, Decision, Effects, JobFailure, Obstructed
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import (
    PodView,
    cause_due,
    created_at,
    has_node,
    is_bound_in_part,
    is_settled,
    ready_since,
    silent_since,
    started_at,
)
from backstay_spec.planner.promotion import GONE
from backstay_spec.planner.record import Record
from backstay_spec.types_status import Backoff, Condition

__all__ = ["judge"]

_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_TRIES_A_PLACE: Final = 0.25  # of the deadline; an autoscaler may add a node meanwhile
_GIVEN_BACK: Final = timedelta(seconds=30)
_FIRST_TRIES: Final = timedelta(seconds=30)
NOT_JOINED: Final = "the pod runs, but has not joined the job: the script may hang before backstay.train"


def judge(
    facts: Facts,
    record: Record,
    slot: Slot,
    *,
    hold: bool = False,
    yields: bool = False,
    given_up: GivenUp = NONE_GIVEN_UP,
) -> Decision:
    """Returns the pods of one slot after this plan.

    Args:
        hold: whether no worker and no evaluator of this slot is created now, or no standby of it (see `order`).
        yields: whether a lower rank could use the room that this one has for some of its pods.
        given_up: the pods that are created again because of the queue.
    """
    held = hold and slot.role != contract.ROLE_SERVER
    current = facts.pod(slot, record.current(slot))
    if current is not None and current.alive and given_up.has(current) and facts.can_create and not held:
        deleted = Decision(record, _delete(current, "NeverAdmitted"))
        return deleted.then(_create(facts, record, slot, None))
    if not (facts.has_standbys and slot.role == contract.ROLE_SERVER):
        return _judge_slot(facts, record, slot, held=held, yields=yields)
    found = promotion.judge(facts, record, slot)
    if isinstance(found, promotion.StoreFirst | promotion.AskFirst):
        return Decision(record, Effects(wake=found.until))
    decided = Decision(record)
    if isinstance(found, promotion.Promote):
        decided = promotion.promoted(facts, record, slot, found)
    decided = decided.then(_judge_slot(facts, decided.record, slot))
    if decided.effects.failure is not None or hold:
        return decided
    return decided.then(standbys.judge(facts, decided.record, slot, decided.effects.creations, given_up))


def _judge_slot(facts: Facts, record: Record, slot: Slot, *, held: bool = False, yields: bool = False) -> Decision:
    current = record.current(slot)
    pod = facts.pod(slot, current)
    waits = record.waits_until(slot.key)
    outlived = facts.outlived_suspension(slot)
    refused = pod is None and facts.refusal(slot, current) is not None
    if pod is not None and pod.alive and waits is None and not outlived:
        absent = facts.absent(slot, current)
        if absent:
            decided = _judge_incomplete(facts, record, pod, absent, held=held)
        else:
            decided = _judge_living(facts, record, pod)
        is_dead = decided.record.newest(slot) != record.newest(slot) or decided.record.waits_until(slot.key)
        return decided if is_dead or not pod.members else _given_back(facts, decided, pod, absent, yields=yields)
    deleted = Effects()
    if waits is not None and pod is not None and pod.alive:
        deleted = _delete(pod, "Superseded")  # an earlier attempt, which has failed
    if not facts.can_create or held:
        # A death is judged when the pod can be replaced: one status records the death and the replacement.
        return Decision(record, deleted)
    if current == 0 or outlived or (not facts.was_desired(slot) and not refused):
        return _create(facts, record, slot, None)
    if waits is not None:
        obstructed = Effects(obstructed=_row_of_deaths(record, slot) or _no_room(facts, record, slot))
        if facts.now >= waits:
            return _create(facts, record, slot, None).also(obstructed)
        return Decision(record, deleted + obstructed + Effects(wake=waits))
    if pod is not None:
        left = leaving.judge(facts, pod)
        if left.in_order:
            return Decision(record, Effects(wake=left.check_at))
        cause_by = cause_due(pod)
        if cause_by is not None and facts.now < cause_by:
            return Decision(record, Effects(wake=cause_by))
        absent = facts.absent(slot, current)
        if absent and (is_group_lost(pod.raw) or may_have_left(pod.raw)):
            return _die(facts, record, replace(pod, name=absent[0]), GONE)
        return _die(facts, record, pod, verdict_of(pod.raw))
    return _judge_unseen(facts, record, slot, current)


def _judge_incomplete(facts: Facts, record: Record, pod: PodView, absent: Sequence[str], *, held: bool) -> Decision:
    """Judge a rank of which some pods are not observed. A pod that could not be created is an obstacle and no death."""
    slot, incarnation = pod.slot, pod.incarnation
    decided = _judge_living(facts, record, pod)
    if not facts.can_create or held or decided.record is not record or decided.effects.failure is not None:
        return decided
    by_name = dict(zip(facts.pod_names(slot, incarnation), facts.members(slot), strict=True))
    again: list[int] = []
    for name in absent:
        member = by_name[name] or 0
        if (refusal := facts.observed.refused.get(name)) is not None:
            found = _not_created(facts, slot, incarnation, name, refusal)
            again += [member] if found.creations else []
            decided = decided.also(replace(found, creations=()))
        elif name not in facts.observed.missing:
            decided = decided.also(Effects(actions=(LookUpPod(name),), wake=facts.now + LOOK_UP_RETRY))
        elif name in facts.observed.witnessed or status.holds(facts.conditions, status.PODS_CREATED):
            gone = _die(facts, record, replace(pod, name=name), GONE)
            return Decision(record, _delete(pod, Cause.VANISHED)).then(gone)
        else:  # it may never have existed, as in `_judge_unseen`
            return Decision(record, _delete(pod, "Superseded")).then(_create(facts, record, slot, None))
    if again:
        decided = decided.also(Effects(creations=(Creation(slot, incarnation, members=tuple(again)),)))
    return decided


def _judge_living(facts: Facts, record: Record, pod: PodView) -> Decision:
    # Each branch is one state of a pod that has not ended, and the first that is true decides: their order is the rule.
    stalled = hung.reported_stalled(facts, pod)
    if stalled is not None:
        return _end_hung(facts, record, pod, stalled)
    record = _with_room(facts, record, pod)
    known = record.backoff.get(pod.slot.key)
    if known is not None and not budgets.is_brief(facts, pod, known) and is_settled(pod, facts.progress):
        record = record.with_backoff(pod.slot.key, None)
    obstacle = None if pod.ready else obstacle_of(pod.raw)
    if obstacle is None:
        return _judge_running(facts, record, pod)
    since = _may_start_since(facts, pod)
    other_place, required = None, _has_required_place(facts)
    if required and facts.can_create and is_bound_in_part(pod):
        other_place = _tries_until(facts, pod, since)
        if facts.now >= other_place:
            key = facts.spec.scheduling.group_topology_key
            text = f"its pods do not fit on nodes with one value of {key}: {obstacle.text}"
            elsewhere = Decision(record, _delete(pod, Cause.NOT_ADMITTED))
            return elsewhere.then(_die(facts, record, pod, Verdict(Cause.NOT_ADMITTED, text)))
    if obstacle.blocked is Blocked.UNSCHEDULABLE and (lacks := _no_room_since(known)) is not None:
        since = lacks + (since - (created_at(pod) or since))  # the time in a queue does not count
    found: tuple[Obstructed, ...] = (Obstructed(pod.slot, obstacle, since),)
    if obstacle.blocked in (Blocked.NOT_STARTED, Blocked.UNSCHEDULABLE):
        found = _row_of_deaths(record, pod.slot) or found
    effects = Effects(obstructed=found, wake=other_place)
    if obstacle.blocked.permanent:
        text = f"{pod.slot.text} (pod {pod.name}) cannot start: {obstacle.text}"
        effects = replace(effects, failure=JobFailure(obstacle.blocked, text))
    return Decision(record, effects)


def _has_required_place(facts: Facts) -> bool:
    """Returns whether the pods of a rank must lie near each other, so that another place may have room for all."""
    return facts.spec.scheduling.group_topology_key is not None and facts.spec.scheduling.group_topology == "Required"


def _given_back(facts: Facts, decided: Decision, pod: PodView, absent: Sequence[str], *, yields: bool) -> Decision:
    """Delete the pods of a rank that has no room for the others, and create all of them again later.

    Two ranks, of one job or of two, could each hold what the other one needs. Of one job, the lowest rank waits for
    longest. The planners of two jobs do not see each other, so this time depends on the job. Nothing of this is a
    death.
    """
    refused = any(name in facts.observed.refused for name in absent)
    found = [o for o in decided.effects.obstructed if o.obstacle.blocked in (Blocked.REFUSED, Blocked.UNSCHEDULABLE)]
    in_part = is_bound_in_part(pod) and not _has_required_place(facts)
    if yields and order.lacks_quota(facts, absent):
        due = facts.now
    elif in_part or (found and refused):
        # Nodes and refusals without a quota may fit one rank only, so a higher one may start where a lower one cannot.
        since = _may_start_since(facts, pod)
        due = since + _share(facts) if yields else max(_tries_until(facts, pod, since), _left_until(decided.record))
    else:
        return decided
    if not facts.can_create or decided.effects.failure is not None:
        return decided
    if facts.now < due:
        return decided.also(Effects(wake=due))
    slot = pod.slot
    known = decided.record.backoff.get(slot.key) or Backoff()
    # The time to start continues. Otherwise a job that has room for parts of ranks only would never end.
    since = min((o.since for o in found), default=known.no_room_since or facts.now)
    waits = known.model_copy(update={"no_room_since": since, "not_before": facts.now + _given_back_for(facts)})
    record = decided.record.with_backoff(slot.key, waits)
    effects = replace(
        decided.effects, creations=(), obstructed=decided.effects.obstructed or _no_room(facts, record, slot)
    )
    return Decision(record, effects + _delete(pod, "GivenBack"))


def _may_start_since(facts: Facts, pod: PodView) -> datetime:
    """Returns when the pods were created, or were released by a queue."""
    return max(created_at(pod) or facts.now, facts.observed.gated.get(pod.uid) or _LONG_AGO)


def _no_room_since(known: Backoff | None) -> datetime | None:
    return None if known is None else known.no_room_since


def _with_room(facts: Facts, record: Record, pod: PodView) -> Record:
    """Returns the record after all pods of a rank have nodes."""
    known = record.backoff.get(pod.slot.key)
    if known is None or known.no_room_since is None or not _is_placed(facts, pod):
        return record
    return record.with_backoff(pod.slot.key, known.model_copy(update={"no_room_since": None}))


def _is_placed(facts: Facts, pod: PodView) -> bool:
    return _have_nodes(pod) and not facts.absent(pod.slot, pod.incarnation)


def _have_nodes(pod: PodView) -> bool:
    return all(has_node(one) or one.started for one in pod.pods)


def _lacked_room(facts: Facts, pod: PodView) -> bool:
    """Returns whether a pod of the rank was refused, or got no node. A pod that is not there any more may have run."""
    refused = any(name in facts.observed.refused for name in facts.absent(pod.slot, pod.incarnation))
    return refused or not _have_nodes(pod)


def _without_room(record: Record, slot: Slot, after: Backoff | None, since: datetime | None = None) -> Backoff | None:
    """Returns the back-off after a death, which does not end the time without room for all pods of a rank."""
    since = _no_room_since(record.backoff.get(slot.key)) or since
    return after if since is None else (after or Backoff()).model_copy(update={"no_room_since": since})


def _given_back_for(facts: Facts) -> timedelta:
    """Returns how long a rank leaves its room to others, which try again before that."""
    return max(REFUSED_RETRY + timedelta(seconds=1), min(_GIVEN_BACK, _share(facts)))


def _share(facts: Facts) -> timedelta:
    """Returns how long the pods of a rank try one place."""
    return _TRIES_A_PLACE * _pending_limit(facts)


def _left_until(record: Record) -> datetime:
    """Returns until when ranks of the job leave their room to the lowest one."""
    found = (known.not_before for known in record.backoff.values() if known.no_room_since is not None)
    return max((at for at in found if at is not None), default=_LONG_AGO)


def _tries_until(facts: Facts, pod: PodView, since: datetime) -> datetime:
    """Returns the end of a time that depends on the rank's name: two jobs that hold what each other needs must not
    always act together."""
    return since + (1 + fraction(facts.pod_name(pod.slot, pod.incarnation))) * _share(facts)


def _no_room(facts: Facts, record: Record, slot: Slot) -> tuple[Obstructed, ...]:
    """Returns the obstacle of a rank that has given its room back, and waits; empty for other slots."""
    known = record.backoff.get(slot.key)
    if known is None or known.no_room_since is None:
        return ()
    seconds = round(_given_back_for(facts).total_seconds())
    text = f"there is room for some of its pods only, so all are created again {seconds} s later"
    return (Obstructed(slot, Obstacle(Blocked.GIVEN_BACK, text), known.no_room_since),)


def _judge_running(facts: Facts, record: Record, pod: PodView) -> Decision:
    """Judge a running pod. If it never joins, because its script hangs before `train`, it has a deadline (T8). Before
    the first update that ends the job; later the pod is replaced."""
    since = silent_since(pod)
    if since is not None and facts.absent(pod.slot, pod.incarnation):
        return Decision(record)  # it cannot join without the other pods of its rank, which are the obstacle
    # Only for a pod that seems late: in a large job, each of a thousand workers would look at all servers.
    if since is not None and facts.now >= since + _pending_limit(facts):
        since = max(since, _could_join(facts, record, pod.slot))
    silence: hung.Liveness
    if since is None:
        if pod.slot.role == contract.ROLE_SERVER:
            silence = hung.judge_server(facts, record, pod, "its server")
        elif pod.slot.role == contract.ROLE_WORKER:
            silence = hung.judge_worker(facts, record, pod)
        else:
            silence = hung.Alive()
    elif not facts.trained:
        found = Obstructed(pod.slot, Obstacle(Blocked.NOT_JOINED, NOT_JOINED), since)
        return Decision(record, Effects(obstructed=(found,)))
    else:
        silence = hung.never_joined(facts, since, NOT_JOINED)
    if isinstance(silence, hung.Hung):
        return _end_hung(facts, record, pod, silence)
    return Decision(record, Effects(wake=silence.check_at))


def _pending_limit(facts: Facts) -> timedelta:
    return timedelta(seconds=facts.spec.run_policy.pending_deadline_seconds)


def _could_join(facts: Facts, record: Record, slot: Slot) -> datetime:
    """Returns since when a pod can join: the servers run, and serve workers. One may be in a queue for hours."""
    times = [_LONG_AGO]
    for shard in facts.shards:
        other = Slot(contract.ROLE_SERVER, shard)
        server = facts.pod(other, record.current(other))
        if other == slot:
            continue
        at = None
        if server is not None and server.alive:
            at = started_at(server) if slot.role == contract.ROLE_SERVER else ready_since(server)
        times.append(facts.now if at is None else at)
    return max(times)


def _end_hung(facts: Facts, record: Record, pod: PodView, found: hung.Hung) -> Decision:
    if not facts.can_create:
        return Decision(record)
    if facts.has_standbys:
        successor = promotion.successor(facts, record, pod.slot, pod.name, found.verdict)
        if isinstance(successor, promotion.AskFirst):
            return Decision(record, Effects(wake=successor.until))
    deleted = Decision(record, _delete(pod, Cause.STALLED))
    return deleted.then(_die(facts, record, pod, found.verdict))


def _judge_unseen(facts: Facts, record: Record, slot: Slot, incarnation: int) -> Decision:
    name = facts.pod_name(slot, incarnation)
    every = facts.pod_names(slot, incarnation)
    refusal = facts.refusal(slot, incarnation)
    if refusal is not None and facts.observed.witnessed.isdisjoint(every):
        return Decision(record, _not_created(facts, slot, incarnation, name, refusal))
    if not facts.observed.missing.issuperset(every):
        return Decision(record, look_up(facts, slot, incarnation))
    if not (status.holds(facts.conditions, status.PODS_CREATED) or not facts.observed.witnessed.isdisjoint(every)):
        # It may never have existed: the operator can die between the status write and the create.
        return _create(facts, record, slot, None)
    started = slot.role == contract.ROLE_WORKER and _has_reported(facts, slot.index, incarnation)
    backoff = budgets.backed_off(facts, record.backoff.get(slot.key), GONE, started=started)
    after = record.with_death(slot, GONE.cause, charged=False)
    after = after.with_backoff(slot.key, _without_room(record, slot, backoff))
    wait = backoff.not_before
    decided = Decision(after, Effects(wake=wait)) if wait is not None else _create(facts, after, slot, GONE.cause)
    death = FoundDead(slot.role, slot.index, incarnation, name, GONE.cause, charged=False)
    event = death_event(facts, decided.record, slot, incarnation, GONE, wait)
    return decided.also(Effects(events=(event,), deaths=(death,)))


def _has_reported(facts: Facts, rank: int, incarnation: int) -> bool:
    """Returns whether the servers have received something of this worker, so that it ran."""
    known = facts.progress
    return known is not None and incarnation in (known.beating.get(rank), known.contributed.get(rank))


def _not_created(facts: Facts, slot: Slot, incarnation: int, name: str, refusal: RefusedCreate) -> Effects:
    """Returns the obstacle of a slot whose pod `name` the API server has refused, and the next attempt to create it."""
    obstacle = refusal_obstacle(refusal.reason, refusal.message)
    since, begun = refusal.since or refusal.at, facts.observed.begun
    created = facts.conditions.get(status.PODS_CREATED)
    # An operator that has started again finds in the status since when its predecessor tried.
    if begun is not None and since - begun < _FIRST_TRIES and created is not None and created.status == "False":
        since = min(since, _reported_at(facts, slot, obstacle, created) or since)
    since = facts.now if refusal.reason in UNCOUNTED else _no_room_since(facts.old.backoff.get(slot.key)) or since
    effects = Effects(obstructed=(Obstructed(slot, obstacle, since),))
    if obstacle.blocked.permanent:
        text = f"{slot.text} (pod {name}) cannot be created: {obstacle.text}"
        return replace(effects, failure=JobFailure(obstacle.blocked, text))
    return effects + try_again(facts, slot, incarnation, refusal)


def _reported_at(facts: Facts, slot: Slot, obstacle: Obstacle, created: Condition) -> datetime | None:
    """Returns since when this obstacle of the slot is in the history, or None if it is not.

    Args:
        created: the condition PodsCreated, which is False. Another slot may have been refused for longer.
    """
    if not created.message.startswith(f"{slot.text}:"):
        return None
    died = (entry.time for entry in facts.old.history if entry.slot == slot.key)
    after = max((created.last_transition_time, *died))  # the slot had a pod until then
    for entry in facts.old.history:
        is_it = entry.reason == obstacle.blocked and entry.message.startswith(f"{slot.text}: ")
        if is_it and entry.time >= after:
            return entry.time
    return None


def _row_of_deaths(record: Record, slot: Slot) -> tuple[Obstructed, ...]:
    """Returns the obstacle of a slot whose pods die before they start; empty for other slots."""
    known = record.backoff.get(slot.key)
    if known is None or known.unstarted_since is None or (known.deaths or 0) <= budgets.UNPACED:
        return ()
    text = f"{known.deaths} pods in a row ended before they started, the last with {known.last}"
    return (Obstructed(slot, Obstacle(Blocked.NEVER_STARTED, text), known.unstarted_since),)


def _die(facts: Facts, record: Record, pod: PodView, verdict: Verdict) -> Decision:
    slot = pod.slot
    if facts.has_standbys:
        found = promotion.successor(facts, record, slot, pod.name, verdict)
        if isinstance(found, promotion.Promote):
            return promotion.promoted(facts, record, slot, found)
    cost = budgets.cost_of_pod(facts, record, pod, verdict)
    if isinstance(cost, JobFailure):
        death = FoundDead(slot.role, slot.index, pod.incarnation, pod.name, verdict.cause, charged=False)
        return Decision(record, Effects(deaths=(death,), failure=cost))
    backoff = cost.backoff
    if pod.members and not _is_placed(facts, pod):
        since = _may_start_since(facts, pod) if _lacked_room(facts, pod) else None
        backoff = _without_room(record, slot, backoff, since)
    after = record.with_backoff(slot.key, backoff).with_death(slot, verdict.cause, charged=cost.charged)
    if cost.wait is None:
        decided = _create(facts, after, slot, verdict.cause)
    else:
        decided = Decision(after, Effects(wake=cost.wait))
    # The other pods of its rank end too, or wait for it in a collective. They are deleted already if it lived.
    rest = () if pod.alive else deletions(pod, hung.STALLED_GRACE, "GroupLost", {pod.uid})
    return decided.also(lost(facts, decided.record, pod, verdict, cost) + Effects(actions=rest))


def _create(facts: Facts, record: Record, slot: Slot, cause: Cause | None) -> Decision:
    created = create(record, slot, cause)
    after = created.record
    if facts.has_standbys and slot.role == contract.ROLE_SERVER:
        after = after.with_active(slot, after.newest(slot))
    return Decision(after.without_wait(slot.key), created.effects)


def _delete(pod: PodView, reason: str) -> Effects:
    return Effects(actions=deletions(pod, hung.STALLED_GRACE, reason))
