"""Collects the state of a job and its reasons in one object, from which the page of `backstay status` is made."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backstay_client.view.follow import STOPPED, JobView, ShownEntry
from backstay_client.view.pods import active_pods, rows, slot_of, slot_words
from backstay_client.view.waiting import waiting_for
from backstay_client.words import count, duration, on_one_line
from backstay_spec import contract
from backstay_spec.causes import Cause
from backstay_spec.job_report import STATUS_ROWS

__all__ = ["DeadPod", "JobEvent", "as_object", "deaths", "job_events", "next_steps"]

_CAUSES = {str(cause) for cause in Cause}
_BUDGET = 0.8
_NEW_START = {"RolledBack", "Suspended", "Resumed"}
_SHOWN_OTHERWISE = {"checkpoint"}
_CHECKPOINTS_LATE = 3  # intervals


@dataclass(frozen=True)
class DeadPod:
    """A pod that died.

    Attributes:
        at: the Unix time.
        slot: the slot, such as ``worker-3``; empty: not known.
        cause: a value of `Cause`.
        message: the event, and the operator's action.
        recovered_after: seconds until the slot took part in training again; None: it has not yet.
        redone: the updates that were made again because of it, as text.
    """

    at: float | None
    slot: str
    cause: str
    message: str
    recovered_after: float | None = None
    redone: str = ""

    @property
    def why(self) -> str:
        """How the pod ended, such as ``exit code 137 (SIGKILL)``."""
        return self.message.partition(" died: ")[2].partition(";")[0] or self.message

    @property
    def cost(self) -> str:
        """The known cost of the death, or an empty text if it is not known."""
        parts = [] if self.recovered_after is None else [f"trains again after {duration(self.recovered_after)}"]
        return "; ".join(parts + ([self.redone] if self.redone else []))


@dataclass(frozen=True)
class JobEvent:
    """An event of the job, for one line.

    Attributes:
        at: Unix time; None: not known.
        what: a title in a few words.
        text: more details.
        bad: whether a person may have to act.
    """

    at: float | None
    what: str
    text: str
    bad: bool


def deaths(view: JobView) -> list[DeadPod]:
    """Returns the deaths in the job's history, oldest first, each with its cost."""
    costs = {id(cause): entry.message for cause, entry in _rollbacks(view)}
    found: list[DeadPod] = []
    for entry in view.history:
        if _is_death(entry):
            after = None
            if entry.at is not None and entry.recovered is not None:
                after = max(0.0, round(entry.recovered - entry.at, 3))
            redone = costs.get(id(entry), "")
            found.append(DeadPod(entry.at, entry.slot, entry.reason, entry.message, after, redone))
    return found


def _rollbacks(view: JobView) -> Iterator[tuple[ShownEntry, ShownEntry]]:
    """Yields each death of a server after which updates were made again, with the entry about them.

    A job that is resumed from an older checkpoint goes back without a death. The death of a worker is never the cause.
    """
    dead: ShownEntry | None = None
    for entry in view.history:
        if _is_death(entry) and entry.slot.startswith(contract.ROLE_SERVER):
            dead = entry
        elif entry.reason == "RolledBack" and dead is not None:
            yield dead, entry
        if entry.reason in _NEW_START:
            dead = None


def _is_death(entry: ShownEntry) -> bool:
    return bool(entry.slot) or entry.reason in _CAUSES


def job_events(view: JobView) -> list[JobEvent]:
    """Returns the job's history, oldest first. A death with its cost is one line, and so is an interruption with its
    length."""
    died = iter(deaths(view))
    shown = {id(entry) for _, entry in _rollbacks(view)}
    found: list[JobEvent] = []
    interrupted: int | None = None
    for entry in view.history:
        bad = entry.type == "Warning"
        if _is_death(entry):
            death = next(died)
            text = "; ".join(part for part in (death.why, death.cost) if part)
            found.append(JobEvent(entry.at, f"{who(death.slot)} died", on_one_line(text), bad))
        elif entry.reason == "TrainingInterrupted":
            interrupted = len(found)
            why = entry.message.partition("): ")[2] or entry.message  # the line begins with the time
            found.append(JobEvent(entry.at, "no updates", on_one_line(why), bad))
        elif entry.reason == "Running" and interrupted is not None:
            before = found[interrupted]
            if before.at is not None and entry.at is not None:
                lasted = f"no updates for {duration(entry.at - before.at)} or longer"
                found[interrupted] = replace(before, what=lasted)
            interrupted = None
        elif entry.reason == "ReportStored" or id(entry) in shown:
            continue  # it belongs to a death
        else:
            found.append(JobEvent(entry.at, entry.reason, on_one_line(entry.message), bad))
    return found


def as_object(view: JobView, now: float | None = None) -> dict[str, Any]:
    """Returns the object that ``--output json`` and ``--output yaml`` print; a key without a value is null.

    Args:
        now: Unix time; None: now.
    """
    now = time.time() if now is None else now
    ended = view.completed if view.completed is not None else now
    return {
        "name": view.name,
        "namespace": view.namespace,
        **measured(view),
        "waitsFor": waiting_for(view) or None,
        "seconds": None if view.started is None else round(ended - view.started, 1),
        "roles": {role: vars(values) for role, values in view.roles.items()},
        "checkpoint": {
            "uri": view.checkpoint,
            "step": view.checkpoint_step,
            "ageSeconds": None if view.checkpoint_time is None else round(max(0.0, now - view.checkpoint_time), 1),
        }
        if view.checkpoint
        else None,
        "deaths": [
            {
                "secondsAgo": None if death.at is None else round(max(0.0, now - death.at), 1),
                "slot": death.slot,
                "cause": death.cause,
                "message": death.message,
                "recoveredAfterSeconds": death.recovered_after,
                "redone": death.redone or None,
            }
            for death in deaths(view)
        ],
        "pods": [
            {
                "pod": row.pod,
                "slot": row.slot,
                "state": row.state,
                "does": row.does or None,
                "node": row.node or None,
                "incarnation": row.incarnation,
            }
            for row in rows(view)
        ],
        "nextSteps": list(next_steps(view, now)),
        "live": view.live,
    }


def measured(view: JobView) -> dict[str, Any]:
    """Returns the phase with its reason, and the numbers, as all objects for programs have them. Each key is always
    there."""
    reason, _, message = view.message.partition(": ")
    rows = view.report.model_dump(mode="json", by_alias=True, include=set(STATUS_ROWS) - _SHOWN_OTHERWISE)
    return {
        "phase": view.phase,
        "reason": reason or None,
        "message": message or None,
        **{name: _finite(value) for name, value in rows.items()},
        "progress": progress_of(view),
        "secondsLeft": None if (left := view.seconds_left) is None else round(left, 1),
        "goodput": _finite(view.goodput),
        "workerSeconds": dict(view.worker_seconds),
        "restarts": view.restarts,
        "disruptions": view.disruptions,
    }


def progress_of(view: JobView) -> float | None:
    """Returns the fraction of the updates that are applied, or None if it is not known."""
    if view.phase == "Succeeded":
        return 1.0
    if not view.report.goal_steps or view.report.step is None:
        return None
    return min(1.0, view.report.step / view.report.goal_steps)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def next_steps(view: JobView, now: float) -> Iterator[str]:
    """Advice for the user about problems; nothing for a healthy job."""
    job, where = view.name, "" if view.namespace == "default" else f" -n {view.namespace}"
    conditions = {c["type"]: c for c in (view.job.get("status") or {}).get("conditions") or []}
    if view.phase == "Failed":
        yield from _after_failure(view, where)
        return
    # A job that has ended needs one step at most. Those below are for problems of a job that runs.
    if view.phase == STOPPED:
        return
    if view.phase == "Suspended":
        patch = '{"spec":{"runPolicy":{"suspend":false}}}'
        yield f"resume it: kubectl patch tj {job}{where} --type merge -p '{patch}'"
        return
    if view.phase == "Succeeded":
        if view.checkpoint:
            yield f"load the result: backstay.load({view.checkpoint.rpartition('/')[0] or '.'!r})"
        return
    for pod, row in zip(active_pods(view.pods), rows(view), strict=True):
        if row.state == "Pending" and row.does:
            yield f"{row.slot} cannot start: kubectl describe pod {pod['metadata']['name']}{where}"
            break
    yield from _about_checkpoints(view, conditions, now)
    yield from _about_budgets(view, where)
    if view.report.evaluation_error:
        yield f"the evaluation fails: backstay logs {job}{where} --role evaluator"
    synced = conditions.get("StandbysInSync")
    if synced is not None and synced["status"] == "False" and synced["reason"] not in {"Starting", "Filling"}:
        yield f"a standby is missing: {on_one_line(synced.get('message', ''))}"


def _after_failure(view: JobView, where: str) -> Iterator[str]:
    for pod in view.pods:
        if pod.get("status", {}).get("phase") == "Failed":
            role, index, _ = slot_of(pod)
            yield f"read what it printed: backstay logs {view.name}{where} --role {short_role(role)} --rank {index}"
            break
    if view.checkpoint:
        yield "correct the cause, delete the job and create it again: training continues from the checkpoint"


def short_role(role: str) -> str:
    """Returns the role in the form of `backstay logs --role`."""
    return "server" if role == contract.ROLE_SERVER else role


def _about_checkpoints(view: JobView, conditions: dict[str, Any], now: float) -> Iterator[str]:
    condition = conditions.get("Checkpointing") or {}
    if condition.get("reason") == "NotConfigured":
        servers = (view.job.get("spec") or {}).get("parameterServers") or {}
        if not servers.get("standbys"):
            yield "set spec.checkpoint: without checkpoints the loss of a server loses all progress"
        return
    if condition.get("reason") == "WriteFailed":
        yield f"repair the checkpoint storage: {on_one_line(condition.get('message', ''))}"
        return
    every = ((view.job.get("spec") or {}).get("checkpoint") or {}).get("everySeconds")
    age = None if view.checkpoint_time is None else now - view.checkpoint_time
    if every and age is not None and age > _CHECKPOINTS_LATE * every:
        yield f"the newest checkpoint is {duration(age)} old, and one is due every {duration(every)}"


def _about_budgets(view: JobView, where: str) -> Iterator[str]:
    spec = view.job.get("spec") or {}
    for role, short, field, default in (
        ("ParameterServer", "server", "parameterServers", 10),
        ("Worker", "worker", "workers", 100),
    ):
        limit = (spec.get(field) or {}).get("maxRestarts", default)
        used = view.roles[role].restarts if role in view.roles else 0
        if limit and used >= _BUDGET * limit:
            logs = f"backstay logs {view.name}{where} --role {short} --previous"
            yield (
                f"{used} of {count(limit, 'restart')} of spec.{field} are used: find the cause with `{logs}`, or raise "
                f"spec.{field}.maxRestarts"
            )


def ago(death: DeadPod, now: float) -> str:
    """Returns how long ago, such as ``3 min 20 s ago``."""
    return "" if death.at is None else f"{duration(max(0.0, now - death.at))} ago"


def who(slot: str) -> str:
    """Returns a slot in words; an older operator does not report it."""
    return slot_words(slot) if slot else "a pod"
