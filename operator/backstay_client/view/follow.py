"""The state of a job, from the API and from the page `/status` of shard 0's server.

Progress alone changes the job's status at most every 10 s (O8); the page is as new as the last update.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from backstay_client.kube import JobApi
from backstay_client.view.starting import newest_line
from backstay_spec import contract
from backstay_spec.causes import parsed
from backstay_spec.job_report import NO_RATES, JobReport, UpdateWait

STOPPED = "Stopped"
"""The phase of a job, and of a pod, whose run on this machine ended first. Only these commands have it."""
TERMINAL = {"Succeeded", "Failed", STOPPED}
LONG_WAIT = 20.0
"""Seconds without an update after which the command shows the reason."""
ROLES = {
    "ParameterServer": contract.ROLE_SERVER,
    "Worker": contract.ROLE_WORKER,
    "Evaluator": contract.ROLE_EVALUATOR,
}


@dataclass(frozen=True)
class RoleView:
    """The pods of one role."""

    desired: int = 0
    ready: int = 0
    restarts: int = 0
    disruptions: int = 0


@dataclass(frozen=True)
class PodActivity:
    """The current activity of a pod, from its newest heartbeat.

    Attributes:
        point: the part of the step, such as ``compute``; empty: none.
        step: the step that it belongs to; None: none.
        seconds: seconds since the activity began.
        activity: a value of `Activity` in control.proto.
        heartbeat: seconds since the heartbeat.
        member: the pod of the rank that does this; the others wait for it.
    """

    point: str
    step: int | None
    seconds: float
    activity: str = ""
    heartbeat: float = 0.0
    member: int = 0


@dataclass(frozen=True)
class ShownEntry:
    """One entry of the job's history.

    Attributes:
        at: Unix time; None: not known.
        slot: the slot whose pod died, such as ``worker-3``; empty for anything else.
        recovered: Unix time at which the slot took part in training again; None: it has not, or it is not known.
        incarnation: the incarnation of the pod that died; None: not known.
    """

    at: float | None
    type: str
    reason: str
    message: str
    slot: str = ""
    recovered: float | None = None
    incarnation: int | None = None


@dataclass(frozen=True)
class JobView:
    """A job at one moment."""

    name: str
    namespace: str
    phase: str = "Pending"
    message: str = ""
    report: JobReport = field(default_factory=JobReport)  # the newest numbers of training
    roles: dict[str, RoleView] = field(default_factory=dict)
    standbys: int = 0  # of all shards; `roles` counts them as parameter servers
    events: tuple[tuple[str, str, str], ...] = ()  # (type, reason, message), oldest first
    pods: tuple[dict[str, Any], ...] = ()
    stage: str = ""  # the part that is being started, before the job exists
    seen: bool = False  # the operator has written a status
    concluded: bool = False  # it has the termination message of shard 0's server
    trouble: str = ""  # a problem that does not stop training
    goodput: float | None = None
    worker_seconds: Mapping[str, float] = field(default_factory=dict)  # by part, see backstay_spec.goodput
    started: float | None = None  # Unix time
    completed: float | None = None
    history: tuple[ShownEntry, ...] = ()  # oldest first
    doings: Mapping[str, PodActivity] = field(default_factory=dict)  # by the name of the pod
    waits: UpdateWait = field(default_factory=UpdateWait)
    newest_line: tuple[str, str] = ("", "")  # of the log of a pod that starts, after its name, if it takes long
    live: bool = False  # shard 0's server answered: the numbers are current
    folder: str = ""  # of its run on this machine; empty: it is a job of another cluster
    job: Mapping[str, Any] = field(default_factory=dict)  # the TrainingJob

    @property
    def ended(self) -> bool:
        """Whether the job's phase is final."""
        return self.phase in TERMINAL

    @property
    def checkpoint(self) -> str | None:
        """The URI of the newest checkpoint."""
        return None if self.report.checkpoint is None else self.report.checkpoint.uri or None

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return None if self.report.checkpoint is None else self.report.checkpoint.step

    @property
    def checkpoint_time(self) -> float | None:
        """The Unix time at which the newest checkpoint was stored."""
        stored = self.report.checkpoint
        return None if stored is None or stored.time is None else stored.time.timestamp()

    @property
    def restarts(self) -> int:
        """Pods replaced after crashes, all roles."""
        return sum(role.restarts for role in self.roles.values())

    @property
    def disruptions(self) -> int:
        """Pods replaced after disruptions, all roles."""
        return sum(role.disruptions for role in self.roles.values())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last update, at the rate of the newest ones, or None if they are not known."""
        step, goal, rate = self.report.step, self.report.goal_steps, self.report.updates_per_second
        if self.ended or not rate or goal is None or step is None:
            return None
        return max(0, goal - step) / rate


async def look(api: JobApi, namespace: str, name: str, before: JobView | None = None) -> JobView:
    """Returns the current state of the job; parts that can no longer be read are copied from `before`."""
    job = await api.get_job(namespace, name)
    pods = await api.pods_of(namespace, name, job["metadata"]["uid"])
    events = await api.events_of(namespace, job["metadata"]["uid"])
    view = view_of(job, pods, events, before)
    if view.ended:
        return view
    view = await _with_live_numbers(api, view)
    return view if view.report.step else replace(view, newest_line=await newest_line(api, namespace, view.pods))


def view_of(
    job: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], before: JobView | None = None
) -> JobView:
    """Returns the state of the job, only from the given objects. `before` counts if it is of the same job, and not of
    an earlier one with its name."""
    if before is not None and before.job.get("metadata", {}).get("uid") != job["metadata"].get("uid"):
        before = None
    status = job.get("status") or {}
    roles = {
        role: RoleView(*(int(values.get(key, 0)) for key in ("desired", "ready", "restarts", "disruptions")))
        for role, values in (status.get("roles") or {}).items()
    }
    ending = _termination_of_shard_0(pods)
    servers = (job.get("spec") or {}).get("parameterServers") or {}
    view = JobView(
        name=job["metadata"]["name"],
        namespace=job["metadata"]["namespace"],
        phase=status.get("phase") or "Pending",
        message=_message_of(status),
        report=_report(status, ending),
        roles=roles,
        standbys=int(servers.get("replicas", 1)) * int(servers.get("standbys", 0)),
        seen=bool(status),
        concluded=bool(ending),
        trouble=_trouble_of(status),
        events=tuple((event.get("type", ""), event.get("reason", ""), event.get("message", "")) for event in events),
        pods=tuple(pods),
        goodput=status.get("goodput"),
        worker_seconds=status.get("workerSeconds") or {},
        started=unix_time(status.get("startTime")),
        completed=unix_time(status.get("completionTime")),
        history=_history(status, events),
        job=job,
    )
    if before is None:
        return view
    # Pods of a job that ended may be gone; their logs still have to be named.
    return replace(view, report=_merged(view, before.report), pods=view.pods or before.pods)


def _report(status: dict[str, Any], ending: dict[str, Any]) -> JobReport:
    """Returns the rows in the job's status, and those in the termination message of shard 0's server, which are
    newer."""
    return JobReport.in_message(ending).over(JobReport.valid(status))


def _merged(view: JobView, before: JobReport) -> JobReport:
    """Returns the newest rows, where `view` is from the API, and `before` may be from the page, which is newer.

    The termination message is the newest source. Of the same step, the page has more digits. An evaluation and a
    checkpoint have their own steps, which may be newer in a status of the same step.
    """
    seen = view.report
    if view.concluded:
        return seen.over(before)
    term = seen.term or before.term or 0

    def newest(step_of: Callable[[JobReport], int | None]) -> JobReport:
        def place(one: JobReport) -> tuple[int, int]:
            step = step_of(one)
            return one.term or term, -1 if step is None else step

        return max(before, seen, key=place)

    last, evaluated = newest(lambda one: one.step), newest(lambda one: one.evaluated_step)
    stored = newest(lambda one: None if one.checkpoint is None else one.checkpoint.step)
    newer = seen.over(before) if last is seen else before.over(seen)
    return newer.model_copy(
        update={
            "term": last.term or term or None,
            "step": last.step,
            "metrics": evaluated.metrics,
            "evaluated_step": evaluated.evaluated_step,
            "checkpoint": stored.checkpoint,
        }
    )


def unix_time(text: Any) -> float | None:
    """Returns a time of the API as Unix time, or None if there is none."""
    if not isinstance(text, str):
        return None
    with contextlib.suppress(ValueError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def _history(status: dict[str, Any], events: list[dict[str, Any]]) -> tuple[ShownEntry, ...]:
    """Returns the entries of the status, which stay when the API server has deleted its events. An older operator has
    none."""
    if entries := status.get("history"):
        return tuple(
            ShownEntry(
                unix_time(e.get("time")),
                e.get("type", ""),
                e["reason"],
                e.get("message", ""),
                e.get("slot") or "",
                unix_time(e.get("recovered")),
                e.get("incarnation"),
            )
            for e in entries
        )
    return tuple(
        ShownEntry(
            unix_time(event.get("firstTimestamp")),
            event.get("type", ""),
            event.get("reason", ""),
            event.get("message", ""),
        )
        for event in events
        if event.get("reason") != "Evaluated"
    )


def _message_of(status: dict[str, Any]) -> str:
    """Returns the reason and message of the condition behind the phase."""
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    condition = conditions.get(status.get("phase", ""))
    if condition is None or condition["status"] != "True":
        return ""
    return f"{condition['reason']}: {condition.get('message', '')}".rstrip(": ")


def _trouble_of(status: dict[str, Any]) -> str:
    """Returns the reason why checkpoints cannot be stored, if any: a job may wait for its last one for ten minutes."""
    for condition in status.get("conditions") or []:
        if (condition["type"], condition.get("reason")) == ("Checkpointing", "WriteFailed"):
            return f"checkpoints cannot be stored: {condition.get('message', '')}"
    return ""


def _termination_of_shard_0(pods: list[dict[str, Any]]) -> dict[str, Any]:
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        if (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) != (contract.ROLE_SERVER, "0"):
            continue
        for container in pod.get("status", {}).get("containerStatuses", []):
            message = container.get("state", {}).get("terminated", {}).get("message", "")
            found = parsed(message)
            if found is not None and "result" in found:
                return found
    return {}


async def _with_live_numbers(api: JobApi, view: JobView) -> JobView:
    """`view` with the current numbers from the page `/status` of shard 0's server, if the server answers."""
    for pod in view.pods:
        if is_slot(pod, contract.ROLE_SERVER, "0") and pod.get("status", {}).get("phase") == "Running":
            page = await api.pod_page(pod, "/status", timeout=0.5 if view.seen else 2.0)
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                found = json.loads(page or "{}")
                if found:
                    return with_page(view, found)
    return view


def is_slot(pod: dict[str, Any], role: str, index: str) -> bool:
    """Returns whether a pod fills that slot, or did."""
    labels = pod["metadata"].get("labels", {})
    return (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) == (role, index)


def with_page(view: JobView, page: dict[str, Any]) -> JobView:
    """`view` with the numbers of the page `/status`; a standby and a server that is loading have none."""
    if "goalSteps" not in page:
        return view
    doings = {
        str(pod["pod"]): PodActivity(
            str(pod.get("doing") or ""),
            pod.get("step"),
            float(pod.get("seconds") or 0.0),
            str(pod.get("activity") or ""),
            float(pod.get("heartbeatSeconds") or 0.0),
            int(pod.get("member") or 0),
        )
        for pod in page.get("pods") or []
    }
    view = replace(view, doings=doings, live=True, waits=UpdateWait.model_validate(page.get("waits") or {}))
    report, known = JobReport.model_validate(page), view.report
    if not report.step:
        return replace(view, report=JobReport(goal_steps=report.goal_steps).over(known))
    # The rates are means of 30 s. Without updates, they and the remaining time are no longer correct.
    stands = view.waits.seconds >= LONG_WAIT
    merged = report.over(known).model_copy(update=NO_RATES if stands else {})
    return replace(view, report=merged)
