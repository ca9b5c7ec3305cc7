"""Policy: what the conditions of a job say. Each function returns statements; `updated` turns them into conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from backstay_spec import contract, status
from backstay_spec.causes import Blocked
from backstay_spec.events import Event, normal, warning
from backstay_spec.names import Slot
from backstay_spec.planner import budgets
from backstay_spec.planner.effects import Effects, Failure, Obstructed, earliest
from backstay_spec.planner.end import Success
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView
from backstay_spec.planner.record import Record, standby_key
from backstay_spec.types_status import Condition

__all__ = [
    "Statement",
    "all_created",
    "checkpointing",
    "ended",
    "pods_created",
    "pods_ready",
    "resumed",
    "running",
    "slow_start",
    "standbys_in_sync",
    "suspended",
    "updated",
]

# Containers that have not started by then are worth a message.
SLOW_START: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one condition says.

    Attributes:
        type: of the condition.
        value: its status; None: Unknown.
        reason, message: as in `Condition`.
        event: sent when the condition's status or reason is new.
    """

    type: str
    value: bool | None
    reason: str
    message: str
    event: Event | None = None


def updated(
    conditions: Mapping[str, Condition], statements: Iterable[Statement], now: datetime, generation: int
) -> tuple[dict[str, Condition], tuple[Event, ...]]:
    """The conditions after some statements, and the events that go with them."""
    after, events = dict(conditions), []
    for said in statements:
        before = after.get(said.type)
        value: Literal["True", "False", "Unknown"] = (
            "Unknown" if said.value is None else "True" if said.value else "False"
        )
        found = status.conditioned(before, said.type, value, said.reason, said.message, now, generation)
        after[said.type] = found
        is_new = before is None or (before.status, before.reason) != (found.status, found.reason)
        if is_new and said.event is not None:
            events.append(said.event)
    return after, tuple(events)


def ended(end: Success | Failure) -> list[Statement]:
    """The job has ended."""
    if isinstance(end, Failure):
        event = warning("Failed", f"{end.reason}: {end.message}")
        first = Statement(status.FAILED, True, end.reason, end.message, event)
    else:
        first = Statement(status.SUCCEEDED, True, end.reason, end.message, normal("Succeeded", end.message))
    return [
        first,
        Statement(status.RUNNING, False, "Finished", end.message),
        Statement(status.PODS_READY, False, "Finished", "the job has ended"),
    ]


def suspended() -> list[Statement]:
    """The job is suspended."""
    event = normal("Suspended", "deleting the workers, then the servers; their state is in the checkpoint")
    return [
        Statement(status.SUSPENDED, True, "Suspended", "spec.runPolicy.suspend is true", event),
        Statement(status.RUNNING, False, "Suspended", "the job is suspended"),
        Statement(status.PODS_READY, False, "Suspended", "the job is suspended"),
    ]


def resumed(facts: Facts) -> list[Statement]:
    """The job is no longer suspended."""
    if not status.holds(facts.conditions, status.SUSPENDED):
        return []
    event = normal("Resumed", "creating the job's pods again")
    return [Statement(status.SUSPENDED, False, "Resumed", "spec.runPolicy.suspend is false", event)]


def checkpointing(facts: Facts) -> list[Statement]:
    """Whether checkpoints are written."""
    progress, kind = facts.progress, status.CHECKPOINTING
    if facts.spec.checkpoint.uri is None and facts.spec.checkpoint.volume is None:
        message = (
            "spec.checkpoint sets neither uri nor volume: no checkpoints are written; losing a server loses its state"
        )
        return [Statement(kind, False, "NotConfigured", message, warning("NotConfigured", message))]
    if progress is not None and progress.checkpoint_error:
        said = progress.checkpoint_error
        return [Statement(kind, False, "WriteFailed", said, warning("CheckpointFailed", said))]
    known = facts.conditions.get(kind)
    if progress is not None or known is None or known.reason != "WriteFailed":
        return [Statement(kind, True, "Configured", "checkpoints are written")]
    return []


def pods_created(facts: Facts, found: Effects) -> list[Statement]:
    """PodsCreated, Unknown from the status that records a new incarnation until all pods are seen: an operator that
    finds it so, and a pod missing, cannot know whether the pod ever existed."""
    kind, before = status.PODS_CREATED, facts.conditions.get(status.PODS_CREATED)
    refusals = (Blocked.REFUSED, Blocked.POD_INVALID)
    refused = next((o for o in found.obstructed if o.obstacle.blocked in refusals), None)
    if refused is not None:
        return [Statement(kind, False, refused.obstacle.blocked, f"{refused.slot.text}: {refused.obstacle.text}")]
    if found.creations:
        if before is None or before.status != "False":
            return [Statement(kind, None, "Creating", "pods are being created")]
    elif not facts.can_create and before is None:
        return [Statement(kind, None, "Preparing", "Secret and Services are being created")]
    return []


def all_created(facts: Facts, record: Record, slots: Sequence[Slot], found: Effects) -> bool:
    """Whether PodsCreated has become True, which is written with the next change of the status."""
    if found.creations or not facts.can_create or _refused(found):
        return False
    pods = ((slot, facts.pod(slot, record.current(slot))) for slot in slots)
    return all(pod is not None or record.waits_until(slot.key) is not None for slot, pod in pods)


def _refused(found: Effects) -> bool:
    return any(o.obstacle.blocked in (Blocked.REFUSED, Blocked.POD_INVALID) for o in found.obstructed)


def pods_ready(facts: Facts, record: Record, slots: Sequence[Slot], obstructed: Sequence[Obstructed]) -> Statement:
    """How many pods are ready, and what keeps the others."""
    kind, ready = status.PODS_READY, len(_ready(facts, record, slots))
    message = f"{ready} of {len(slots)} pods are ready"
    if ready == len(slots):
        return Statement(kind, True, "AllReady", message)
    obstacles = _obstacles(obstructed) or _slow(facts, obstructed)
    if obstacles:
        worst = obstacles[0]
        text = f"{worst.text}: {worst.obstacle.text}"
        event = warning(worst.obstacle.blocked, text)
        return Statement(kind, False, worst.obstacle.blocked, f"{message}; {text}", event)
    waiting = [slot.text for slot in slots if record.waits_until(slot.key) is not None]
    if waiting:
        return Statement(kind, False, "BackingOff", f"{message}; waiting: {', '.join(waiting[:10])}")
    return Statement(kind, False, "NotReady", message)


def slow_start(facts: Facts, obstructed: Sequence[Obstructed]) -> datetime | None:
    """When the next pod that has not started is worth a message; None while another obstacle is reported."""
    if _obstacles(obstructed):
        return None
    not_started = (o.since + SLOW_START for o in obstructed if o.obstacle.blocked is Blocked.NOT_STARTED)
    return earliest(due for due in not_started if facts.now < due)


def _obstacles(obstructed: Sequence[Obstructed]) -> list[Obstructed]:
    """The slots whose pods cannot start or join for a reason that Kubernetes names."""
    starting = (Blocked.NOT_STARTED, Blocked.NOT_JOINED)
    return [o for o in obstructed if o.obstacle.blocked not in starting]


def _slow(facts: Facts, obstructed: Sequence[Obstructed]) -> list[Obstructed]:
    """The slots whose pods take longer to start than one expects."""
    found = (o for o in obstructed if o.obstacle.blocked is Blocked.NOT_STARTED)
    return [o for o in found if facts.now >= o.since + SLOW_START]


def running(facts: Facts, record: Record, slots: Sequence[Slot]) -> list[Statement]:
    """Whether training has begun."""
    kind = status.RUNNING
    if status.holds(facts.conditions, kind):
        return []
    ready = _ready(facts, record, slots)
    servers = all(slot in ready for slot in slots if slot.role == contract.ROLE_SERVER)
    workers = any(slot.role == contract.ROLE_WORKER for slot in ready)
    stepped = facts.progress is not None and (facts.progress.step or 0) > (facts.old.step or 0)
    if (servers and workers) or stepped:
        event = normal("Running", "training has begun")
        return [Statement(kind, True, "Training", "all servers and at least one worker are ready", event)]
    pods = (facts.pod(slot, record.current(slot)) for slot in slots)
    if any(pod is not None and pod.started for pod in pods):
        return [Statement(kind, False, status.REASON_STARTING, "pods are starting")]
    return [Statement(kind, False, status.REASON_PENDING, "no pod has started")]


def _ready(facts: Facts, record: Record, slots: Sequence[Slot]) -> set[Slot]:
    """The slots whose current pod is ready."""

    def is_ready(pod: PodView | None) -> bool:
        return pod is not None and pod.alive and pod.ready

    return {slot for slot in slots if is_ready(facts.pod(slot, record.current(slot)))}


def standbys_in_sync(facts: Facts, record: Record, obstructed: Sequence[Obstructed]) -> list[Statement]:
    """Which shards would lose updates with their active server; nothing for a job without standbys."""
    kind, progress = status.STANDBYS_IN_SYNC, facts.progress
    if not facts.has_standbys:
        return []
    if progress is None or not progress.reached.issuperset(facts.shards):
        if kind in facts.conditions:
            return []
        return [Statement(kind, False, "Starting", "not all servers have answered the operator yet")]
    active = {shard: record.active.get(Slot(contract.ROLE_SERVER, shard).key, 0) for shard in facts.shards}
    behind = [shard for shard in facts.shards if not progress.followed(shard, active[shard])]
    if not behind:
        return [Statement(kind, True, "AllInSync", "each shard's standby holds what its server holds")]
    which = ", ".join(str(shard) for shard in behind[:10])
    stuck = next((o for o in obstructed if o.standby and o.slot.index in behind), None)
    why = f"; {stuck.text}: {stuck.obstacle.text}" if stuck is not None else ""
    spent = any(_given_up(facts, record, shard) for shard in behind)
    budget = " (spec.parameterServers.maxRestarts is used up)" if spent else ""
    reason = stuck.obstacle.blocked if stuck is not None else "BudgetSpent" if spent else "Filling"
    return [Statement(kind, False, reason, f"without a standby that holds all of it: shard {which}{budget}{why}")]


def _given_up(facts: Facts, record: Record, shard: int) -> bool:
    """Whether a shard's standby is dead and gets no successor."""
    slot = Slot(contract.ROLE_SERVER, shard)
    newest = record.newest(slot)
    pod = facts.pod(slot, newest)
    dead = pod is not None and pod.ended and newest > record.active.get(slot.key, 0)
    return dead and budgets.is_spent(facts, record, slot) and record.waits_until(standby_key(slot)) is None
