"""Decides the conditions of a job. Each function returns statements; `updated` turns them into conditions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from backstay_spec import contract, status
from backstay_spec.causes import Blocked
from backstay_spec.events import Event, normal, one_line, shortened, warning
from backstay_spec.names import Slot
from backstay_spec.observed import Updates
from backstay_spec.planner import budgets
from backstay_spec.planner.effects import Effects, JobFailure, Obstructed, earliest
from backstay_spec.planner.end import Success
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.last_messages import SHARD_0
from backstay_spec.planner.new_status import ALL_CREATED
from backstay_spec.planner.pods import PodView, has_worked
from backstay_spec.planner.record import Record, standby_key
from backstay_spec.status_model import format_time
from backstay_spec.types_status import Condition

__all__ = [
    "Statement",
    "Training",
    "all_created",
    "checkpointing",
    "ended",
    "pods_created",
    "pods_created_at_the_end",
    "pods_ready",
    "resumed",
    "slow_start",
    "standbys_in_sync",
    "suspended",
    "training",
    "updated",
]

# After this time, containers that have not started are reported.
SLOW_START: Final = timedelta(seconds=30)
# Without an update for this time, a job whose servers or workers are not ready does not train.
INTERRUPTED: Final = timedelta(seconds=10)
# The same while all are ready; also at least a multiple of the duration of an update.
NO_UPDATE: Final = timedelta(seconds=30)
_NOT_CREATED: Final = (Blocked.REFUSED, Blocked.HELD, Blocked.POD_INVALID)
_SINCE: Final = "no update since"
_INTERRUPTIONS: Final = ("NoUpdate", status.REASON_SERVERS, status.REASON_WORKERS)
_UPDATES: Final = 5
# Together shorter than a condition's message may be, so that neither cuts the other one.
_MAX_SUMMARY: Final = 600
_MAX_DETAIL: Final = 1300
_LASTS: Final = re.compile(r",? for \d+ s\b")


@dataclass(frozen=True, slots=True)
class Statement:
    """The content of one condition.

    Attributes:
        type: the condition's type.
        value: the condition's status; None: Unknown.
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
    """Returns the conditions after some statements, and the events that go with them."""
    after, events = dict(conditions), []
    for statement in statements:
        before = after.get(statement.type)
        value: Literal["True", "False", "Unknown"] = (
            "Unknown" if statement.value is None else "True" if statement.value else "False"
        )
        found = status.conditioned(before, statement.type, value, statement.reason, statement.message, now, generation)
        after[statement.type] = found
        is_new = before is None or (before.status, before.reason) != (found.status, found.reason)
        if is_new and statement.event is not None:
            events.append(statement.event)
    return after, tuple(events)


def ended(end: Success | JobFailure, known: Mapping[str, Condition], step: int | None = None) -> list[Statement]:
    """Returns the conditions of a job that has ended.

    Args:
        known: its conditions until now.
        step: the last step of a job that failed, for its event; None: it is not known.
    """
    if isinstance(end, JobFailure):
        event = warning("Failed", f"{end.reason}: {end.message}" + ("" if step is None else f" (last step: {step})"))
        text = end.message
        if end.detail:
            text = f"{one_line(text, _MAX_SUMMARY)}\n{shortened(end.detail, _MAX_DETAIL)}"
        first = Statement(status.FAILED, True, end.reason, text, event)
    else:
        first = Statement(status.SUCCEEDED, True, end.reason, end.message, normal("Succeeded", end.message))
    return [
        first,
        Statement(status.RUNNING, False, "Finished", end.message),
        Statement(status.TRAINING, False, "Finished", "the job has ended"),
        Statement(status.PODS_READY, False, "Finished", "the job has ended"),
        *(
            Statement(kind, False, "Finished", "the job has ended")
            for kind in (status.STANDBYS_IN_SYNC,)
            if kind in known
        ),
    ]


def suspended(facts: Facts, *, running: bool) -> list[Statement]:
    """Returns the conditions of a job that is suspended, or is being suspended.

    Args:
        running: whether a pod may still run. The servers store their state before they end, so only without pods are
            the step and the checkpoint in the status the last ones.
    """
    if running:
        event = normal("Suspending", "deleting the workers, then the servers, which store a checkpoint")
        return [
            Statement(status.SUSPENDED, False, "Suspending", "the pods are ending; servers store a checkpoint", event),
            Statement(status.TRAINING, False, "Suspended", "the job is being suspended"),
            Statement(status.PODS_READY, False, "Suspended", "the job is being suspended"),
        ]
    # The last report of a server may be newer than the status, which this plan writes.
    reported = None if facts.progress is None else facts.progress.report.checkpoint
    checkpoint = reported or facts.old.checkpoint
    then = "no checkpoint is stored, so training begins again"
    if checkpoint is not None:
        then = f"the job continues from the checkpoint of step {checkpoint.step}"
    event = normal("Suspended", f"no pod runs any more; {then}")
    return [
        Statement(status.SUSPENDED, True, "Suspended", "spec.runPolicy.suspend is true, and no pod runs", event),
        Statement(status.RUNNING, False, "Suspended", "the job is suspended"),
        Statement(status.TRAINING, False, "Suspended", "the job is suspended"),
        Statement(status.PODS_READY, False, "Suspended", "the job is suspended"),
        *(
            Statement(kind, False, "Suspended", "the job is suspended")
            for kind in (status.PODS_CREATED, status.TRAINED, status.AFTER_TRAINING_COMPLETE, status.STANDBYS_IN_SYNC)
            if kind in facts.conditions
        ),
    ]


def resumed(facts: Facts) -> list[Statement]:
    """Returns the condition of a job that is no longer suspended."""
    known = facts.conditions.get(status.SUSPENDED)
    if known is None or known.reason == "Resumed":
        return []
    event = normal("Resumed", "creating the job's pods again")
    return [Statement(status.SUSPENDED, False, "Resumed", "spec.runPolicy.suspend is false", event)]


def checkpointing(facts: Facts) -> list[Statement]:
    """Returns whether checkpoints are written."""
    progress, kind = facts.progress, status.CHECKPOINTING
    if facts.spec.checkpoint.uri is None and facts.spec.checkpoint.volume is None:
        message = (
            "no checkpoints are written, because spec.checkpoint has neither uri nor volume. "
            "After the loss of a server without a standby, training starts again at step 0"
        )
        return [Statement(kind, False, "NotConfigured", message, warning("NotConfigured", message))]
    if progress is not None and progress.report.checkpoint_error:
        error = progress.report.checkpoint_error
        return [Statement(kind, False, "WriteFailed", error, warning("CheckpointFailed", error))]
    known = facts.conditions.get(kind)
    if progress is not None or known is None or known.reason != "WriteFailed":
        return [Statement(kind, True, "Configured", "checkpoints are written")]
    return []


def pods_created(facts: Facts, found: Effects) -> list[Statement]:
    """PodsCreated is Unknown from the status that records a new incarnation until all pods are observed. An operator
    that finds it Unknown, and a pod missing, cannot determine whether the pod ever existed."""
    kind, before = status.PODS_CREATED, facts.conditions.get(status.PODS_CREATED)
    refused = next((o for o in found.obstructed if o.obstacle.blocked in _NOT_CREATED), None)
    if refused is not None:
        return [Statement(kind, False, refused.obstacle.blocked, f"{refused.text}: {refused.obstacle.text}")]
    begins = before is None or before.reason == "Suspended"
    if found.creations:
        if before is None or begins or before.status != "False":
            return [Statement(kind, None, "Creating", "pods are being created")]
    elif not facts.can_create and begins:
        return [Statement(kind, None, "Preparing", "Secret and Services are being created")]
    return []


def pods_created_at_the_end(facts: Facts, record: Record, slots: Sequence[Slot]) -> list[Statement]:
    """Record PodsCreated. A job may end between the creation of its pods and the next plan, which would do so."""
    known = facts.conditions.get(status.PODS_CREATED)
    if known is None or known.status == "True":
        return []
    if all_created(facts, record, slots, Effects()):
        return [Statement(status.PODS_CREATED, True, "AllCreated", ALL_CREATED)]
    if known.status == "False":
        return []  # it has the reason
    return [Statement(status.PODS_CREATED, False, "Finished", "the job ended before all pods were observed")]


def all_created(facts: Facts, record: Record, slots: Sequence[Slot], found: Effects) -> bool:
    """Returns whether PodsCreated has become True, which is written with the next change of the status."""
    if found.creations or not facts.can_create or _refused(found):
        return False
    lacking = (slot for slot in slots if facts.absent(slot, record.current(slot)))
    return all(record.waits_until(slot.key) is not None and not record.lacks_room(slot) for slot in lacking)


def _refused(found: Effects) -> bool:
    return any(o.obstacle.blocked in _NOT_CREATED for o in found.obstructed)


def pods_ready(facts: Facts, record: Record, slots: Sequence[Slot], obstructed: Sequence[Obstructed]) -> Statement:
    """Returns how many pods are ready, including standbys, and why the others are not."""
    kind = status.PODS_READY
    standbys = [slot for slot in slots if facts.has_standbys and slot.role == contract.ROLE_SERVER]
    ready = sum(_ready_pods(facts, record, slot) for slot in slots)
    ready += sum(_has_ready_standby(facts, record, slot) for slot in standbys)
    wanted = sum(len(facts.members(slot)) for slot in slots) + len(standbys)
    message = f"{ready} of {wanted} pods are ready"
    if ready == wanted:
        return Statement(kind, True, "AllReady", message)
    obstacles = _obstacles(obstructed) or _slow(facts, obstructed)
    if obstacles:
        worst = obstacles[0]
        text = f"{worst.text}: {worst.obstacle.text}"
        # A wait for the queue is usual.
        event = None if worst.obstacle.blocked is Blocked.HELD else warning(worst.obstacle.blocked, text)
        return Statement(kind, False, worst.obstacle.blocked, f"{message}; {text}", event)
    waiting = [slot.text for slot in slots if record.waits_until(slot.key) is not None]
    waiting += [f"the standby of {slot.text}" for slot in standbys if record.waits_until(standby_key(slot)) is not None]
    if waiting:
        return Statement(kind, False, "BackingOff", f"{message}; waiting: {', '.join(waiting[:10])}")
    return Statement(kind, False, "NotReady", message)


def _has_ready_standby(facts: Facts, record: Record, slot: Slot) -> bool:
    pod = facts.pod(slot, record.newest(slot))
    return pod is not None and pod.alive and pod.ready and pod.incarnation > record.current(slot)


def slow_start(facts: Facts, obstructed: Sequence[Obstructed]) -> datetime | None:
    """Returns when the next pod that has not started must be reported; None while another obstacle is reported."""
    if _obstacles(obstructed):
        return None
    not_started = (o.since + SLOW_START for o in obstructed if o.obstacle.blocked is Blocked.NOT_STARTED)
    return earliest(due for due in not_started if facts.now < due)


def _obstacles(obstructed: Sequence[Obstructed]) -> list[Obstructed]:
    """Returns the slots whose pods cannot start or join for a reason that Kubernetes names."""
    starting = (Blocked.NOT_STARTED, Blocked.NOT_JOINED)
    return [o for o in obstructed if o.obstacle.blocked not in starting]


def _slow(facts: Facts, obstructed: Sequence[Obstructed]) -> list[Obstructed]:
    """Returns the slots whose pods take longer to start than expected."""
    found = (o for o in obstructed if o.obstacle.blocked is Blocked.NOT_STARTED)
    return [o for o in found if facts.now >= o.since + SLOW_START]


@dataclass(frozen=True, slots=True)
class Training:
    """Whether updates are applied.

    Attributes:
        statements: the statements about Training and Running.
        interrupted: the job has trained, and applies no updates now.
        check_at: judge again at this time at the latest; None: no need.
    """

    statements: tuple[Statement, ...]
    interrupted: bool = False
    check_at: datetime | None = None


def training(facts: Facts, record: Record, slots: Sequence[Slot]) -> Training:
    """Returns the conditions Training and Running, from the step that the coordinator reports and from the pods."""
    ready = _ready(facts, record, slots)
    servers = [slot.text for slot in slots if slot.role == contract.ROLE_SERVER and slot not in ready]
    no_worker = not any(slot.role == contract.ROLE_WORKER for slot in ready)
    stopped = status.REASON_SERVERS if servers else status.REASON_WORKERS if no_worker else ""
    updates, began = facts.observed.updates, status.holds(facts.conditions, status.RUNNING) and not resumed(facts)
    if not facts.trained or _continues(facts):
        first = Statement(status.TRAINING, False, "NotStarted", _not_started(facts))
        return Training((first, *_running(facts, record, slots, stopped if began else "", began)))
    if (over := _ending(facts, record)) is not None:
        return Training((over, *_running(facts, record, slots, "", began)))
    patience = INTERRUPTED if stopped else max(NO_UPDATE, _UPDATES * timedelta(seconds=_seconds(updates)))
    known = facts.conditions.get(status.TRAINING)
    stood = known is not None and known.reason in _INTERRUPTIONS and not _has_updated(facts)
    if updates is not None and not stood and facts.now < updates.at + patience:
        trains = Statement(status.TRAINING, True, "Updating", "updates are applied")
        return Training((trains, *_running(facts, record, slots, "", began)), check_at=updates.at + patience)
    if updates is None and not stopped:
        return Training(tuple(_running(facts, record, slots, "", began)))  # no step was reported to this operator yet
    since = f"{_SINCE} {format_time(updates.at)} (step {updates.step})" if updates else "no server reports a step"
    if stood and known is not None and known.message.startswith(_SINCE):
        since = known.message.partition(": ")[0]
    reason = stopped or "NoUpdate"
    waits = "" if stopped else _waits_for(facts)
    text = f"{since}: {waits or _reason(servers, no_worker)}"
    is_new = known is None or known.status != "False" or known.reason == "NotStarted"
    # Servers, then workers, then only updates may be missing: one interruption is one event.
    halted = Statement(status.TRAINING, False, reason, text, warning("TrainingInterrupted", text) if is_new else None)
    return Training((halted, *_running(facts, record, slots, stopped, began)), interrupted=True)


def _has_updated(facts: Facts) -> bool:
    """Returns whether an update was applied that the last status does not have.

    The first report that an operator gets is none by itself. Its predecessor knew for how long there was none.
    """
    updates = facts.observed.updates
    return updates is not None and (updates.changed or updates.step > (facts.old.step or 0))


def _continues(facts: Facts) -> bool:
    """Returns whether this run continues a checkpoint, and has made no update yet: then nothing is interrupted."""
    known, progress = facts.conditions.get(status.TRAINING), facts.progress
    if known is not None and known.reason not in ("NotStarted", "Suspended"):
        return False
    if status.SUSPENDED in facts.conditions and not _reports_this_run(facts):
        return True
    start = None if progress is None else progress.report.term_start
    return start is not None and bool(start.checkpoint) and progress is not None and progress.report.step == start.step


def _reports_this_run(facts: Facts) -> bool:
    """Returns whether the newest report of a job that was resumed is of a server that was created since."""
    pod = facts.pod(SHARD_0, 0 if facts.progress is None else facts.progress.coordinator)
    return pod is not None and facts.is_of_this_run(pod)


def _not_started(facts: Facts) -> str:
    text = "no update has been applied yet"
    waits = _waits_for(facts)
    return f"{text}: {waits}" if waits else text


def _waits_for(facts: Facts) -> str:
    """Returns what the next update waits for, without seconds: they would change the status with each second (O8)."""
    return _LASTS.sub("", facts.progress.report.waits_for) if facts.progress is not None else ""


def _ending(facts: Facts, record: Record) -> Statement | None:
    """Returns the condition Training after the last update, until a pod reports the end, or None if there will be
    updates.

    The servers end before their pods are observed to end. Without an answer, the last report counts while the pod of
    shard 0's server that may have sent it lives.
    """
    known, progress = facts.conditions.get(status.TRAINING), facts.progress
    if progress is not None and progress.coordinator:
        # The text must not change the status with each second.
        text = _LASTS.sub("", progress.report.ending)
        return Statement(status.TRAINING, False, "Ending", text) if text else None
    server = facts.pod(SHARD_0, record.current(SHARD_0))
    if known is None or known.reason != "Ending" or server is None or not (server.alive and has_worked(server, None)):
        return None
    return Statement(status.TRAINING, False, "Ending", known.message)


def _seconds(updates: Updates | None) -> float:
    return (updates.seconds or 0.0) if updates is not None else 0.0


def _reason(servers: Sequence[str], no_worker: bool) -> str:
    if servers:
        return f"not ready: {', '.join(servers[:10])}"
    return "no worker is ready" if no_worker else "all servers and at least one worker are ready"


def _running(facts: Facts, record: Record, slots: Sequence[Slot], stopped: str, began: bool) -> list[Statement]:
    """Running is True once all servers and a worker are ready, or a step is reported, and False while the job is
    interrupted.

    Args:
        stopped: why training is interrupted; empty: it is not.
        began: whether the condition is True now.
    """
    kind = status.RUNNING
    ready = _ready(facts, record, slots)
    servers = all(slot in ready for slot in slots if slot.role == contract.ROLE_SERVER)
    workers = any(slot.role == contract.ROLE_WORKER for slot in ready)
    stepped = facts.progress is not None and (facts.progress.report.step or 0) > (facts.old.step or 0)
    # A report of before the suspension may arrive late. Its step is not one of the resumed job.
    if status.SUSPENDED in facts.conditions:
        stepped = stepped and _reports_this_run(facts)
    if began and not stopped:
        return []
    known = facts.conditions.get(kind)
    again = known is not None and known.reason in (status.REASON_SERVERS, status.REASON_WORKERS)
    # After an interruption, the step may be one of before it that is reported late.
    if (servers and workers) or (stepped and not again):
        text = "all servers and at least one worker are ready"
        event = normal("Running", f"{text} again" if again else text)
        return [Statement(kind, True, "Training", text, event)]
    if began or (facts.trained and stopped):
        text = "not all servers are ready" if stopped == status.REASON_SERVERS else "no worker is ready"
        return [Statement(kind, False, stopped, text)]
    if again:
        return []  # updates are reported before Kubernetes shows that the pods are ready
    # A pod that ended before a suspension stays recorded until its slot gets another one.
    pods = (facts.pod(slot, record.current(slot)) for slot in slots if not facts.outlived_suspension(slot))
    if any(pod is not None and pod.started for pod in pods):
        return [Statement(kind, False, status.REASON_STARTING, "pods are starting")]
    return [Statement(kind, False, status.REASON_PENDING, "no pod has started")]


def _ready(facts: Facts, record: Record, slots: Sequence[Slot]) -> set[Slot]:
    """Returns the slots whose current pod is ready."""

    def is_ready(pod: PodView | None) -> bool:
        return pod is not None and pod.alive and pod.ready

    return {slot for slot in slots if is_ready(facts.pod(slot, record.current(slot)))}


def _ready_pods(facts: Facts, record: Record, slot: Slot) -> int:
    """Returns how many of the slot's current pods are ready: a rank may have several."""
    view = facts.pod(slot, record.current(slot))
    return 0 if view is None else sum(pod.alive and pod.ready for pod in view.pods)


def standbys_in_sync(facts: Facts, record: Record, obstructed: Sequence[Obstructed]) -> list[Statement]:
    """Returns which shards would lose updates with their active server; nothing for a job without standbys."""
    kind, progress = status.STANDBYS_IN_SYNC, facts.progress
    if not facts.has_standbys:
        return []
    # Servers that have not answered a new operator yet are not out of sync.
    again = bool(resumed(facts))
    if again or progress is None or not progress.reached.issuperset(facts.shards):
        if kind in facts.conditions and not again:
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
    text = f"no standby in sync: shard {which}{budget}{why}"
    event = warning("BudgetSpent", f"no further standby is created: {text}") if reason == "BudgetSpent" else None
    return [Statement(kind, False, reason, text, event)]


def _given_up(facts: Facts, record: Record, shard: int) -> bool:
    """Returns whether a shard's standby is dead and gets no successor."""
    slot = Slot(contract.ROLE_SERVER, shard)
    newest = record.newest(slot)
    pod = facts.pod(slot, newest)
    dead = pod is not None and pod.ended and newest > record.active.get(slot.key, 0)
    return dead and budgets.is_spent(facts, record, slot) and record.waits_until(standby_key(slot)) is None
