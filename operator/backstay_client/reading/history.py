"""Shows what happened to a job, from its status and from the record beside its checkpoints (`backstay history`)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster, NoSuchJob
from backstay_client.kube import ApiRequestError
from backstay_client.reading.records import all_of, places_of, read_file
from backstay_client.view.explain import deaths, job_events, who
from backstay_client.view.facts import facts
from backstay_client.view.follow import JobView, ShownEntry, view_of
from backstay_client.words import count, duration, printable, step_of_goal
from backstay_spec import contract
from backstay_spec.records import merged

__all__ = ["JobHistory", "as_object", "history_of_job", "history_of_place", "lines"]

_RESULTS = {"Succeeded": "Succeeded", "AlreadyComplete": "Succeeded", "Failed": "Failed"}


@dataclass(frozen=True)
class JobHistory:
    """The known history of a job.

    Attributes:
        view: the job; `view.history` has all entries that are known.
        status: the newest one.
        source: a description of the place that it is from.
    """

    view: JobView
    uid: str
    status: Mapping[str, Any]
    source: str

    @property
    def entries(self) -> tuple[ShownEntry, ...]:
        """All entries that are known, oldest first."""
        return self.view.history

    def __str__(self) -> str:
        return "\n".join(lines(self, time.time()))

    __repr__ = __str__


async def history_of_job(cluster: FoundCluster, name: str) -> JobHistory:
    """Returns the history of a job of the cluster, with older entries from its record where this machine can read that.

    Raises:
        BadInput: there is no such job, nor a record of it in an embedded cluster's folder.
        ApiRequestError: the cluster refused.
    """
    try:
        job = await cluster.api.get_job(cluster.namespace, name)
    except ApiRequestError as error:
        if error.code != 404:
            raise
        raise NoSuchJob(
            f"there is no TrainingJob {name} in namespace {cluster.namespace}; name its checkpoint folder with --from"
        ) from None
    events = await cluster.api.events_of(cluster.namespace, job["metadata"]["uid"])
    uid = job["metadata"]["uid"]
    stored = await asyncio.to_thread(_stored, places_of(cluster, job), uid)  # the event loop may be a notebook's
    found = [one for one in stored if one["uid"] == uid]
    status = job.get("status") or {}
    if status.get("phase") or not found:  # the newest, even without entries, because the run may have been stopped
        found.append({**_about(job), "status": status})
    newest = _newest(found)
    view = view_of({**job, "status": newest}, [], events)
    return JobHistory(view, uid, newest, f"the job's status in {cluster.name}")


def history_of_place(place: str, name: str | None) -> JobHistory:
    """Returns the history of a job that a folder or a file has.

    Args:
        place: a record, or a folder or URI with records.
        name: the job's name; None: the newest job.

    Raises:
        BadInput: the folder or file has no such history.
    """
    if place.endswith(".json"):
        found = [_parsed(place, read_file(place))]
    else:
        found = [one for one in _stored([place.rstrip("/")]) if name in (None, one["job"])]
    if not found:
        raise BadInput(f"{place} has no history of {'a job' if name is None else f'the job {name}'}")
    newest = max(found, key=lambda one: one["unixSeconds"])
    same = [one for one in found if one["uid"] == newest["uid"]]
    status = _newest(same)
    job = {
        "metadata": {"name": newest["job"], "namespace": newest["namespace"], "uid": newest["uid"]},
        "spec": {},
        "status": status,
    }
    return JobHistory(view_of(job, [], []), newest["uid"], status, f"{place}, of {_date(newest['unixSeconds'])}")


def _about(job: dict[str, Any]) -> dict[str, Any]:
    meta = job["metadata"]
    return {"job": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"], "unixSeconds": float("inf")}


def _stored(places: list[str], uid: str = "") -> list[dict[str, Any]]:
    found = []
    for place, data in all_of(places, "history", uid):
        try:
            found.append(_parsed(place, data))
        except BadInput:  # it was torn while it was written
            continue
    return found


def _parsed(place: str, data: bytes) -> dict[str, Any]:
    """
    Raises:
        BadInput: the text is not a history.
    """
    try:
        found = json.loads(data)
        if not isinstance(found["status"].get("history", []), list):
            raise TypeError
        return {
            "job": str(found["job"]),
            "namespace": str(found["namespace"]),
            "uid": str(found["uid"]),
            "unixSeconds": float(found["unixSeconds"]),
            "status": dict(found["status"]),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadInput(f"{place} is not the history of a job") from None


def _newest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the newest status with the entries of all; a newer entry replaces an older one of the same time and
    slot."""
    status: dict[str, Any] = {}
    found = sorted(found, key=lambda one: one["unixSeconds"])
    for one in found:
        status = {**one["status"], "outcome": one["status"].get("outcome") or status.get("outcome")}
    outcome = status.pop("outcome", None) or {}
    if status.get("phase") not in _RESULTS.values() and outcome.get("result") in _RESULTS:
        # Shard 0's server has the outcome before the operator writes it.
        status |= {"phase": _RESULTS[outcome["result"]], "step": outcome.get("step", status.get("step"))}
    entries = merged(*(one["status"].get("history") or [] for one in found))
    status["history"] = [entry for entry in entries if "reason" in entry]
    return status


def as_object(history: JobHistory) -> dict[str, Any]:
    """Returns the object that ``--output json`` and ``--output yaml`` print."""
    view, status = history.view, history.status
    known = {name: status[name] for name in ("goodput", "workerSeconds", "term") if name in status}
    return {
        "name": view.name,
        "namespace": view.namespace,
        "uid": history.uid,
        "phase": view.phase,
        "startTime": status.get("startTime"),
        "completionTime": status.get("completionTime"),
        "step": view.report.step,
        "goalSteps": view.report.goal_steps,
        "checkpoint": view.checkpoint,
        **known,
        "deaths": dict(Counter(death.cause for death in deaths(view))),
        "restarts": view.restarts,
        "disruptions": view.disruptions,
        "history": list(status.get("history") or []),
        "source": history.source,
    }


def lines(history: JobHistory, now: float) -> Iterator[str]:
    """Yields the history as lines to print, oldest entry first.

    Args:
        now: Unix time, for a job that still runs.
    """
    view = history.view
    ended = view.completed if view.completed is not None else None if view.ended else now
    lasted = "" if view.started is None or ended is None else f", {duration(max(0.0, ended - view.started))}"
    step = "" if view.report.step is None else f", step {step_of_goal(view.report)}"
    yield f"{view.name} in namespace {view.namespace}: {view.phase}{lasted}{step}"
    for fact in facts(view, "costs"):
        yield f"  {fact.words}"
    if view.message and view.ended:
        yield f"  {printable(view.message.splitlines()[0])}"
    # The events below are in order of time, and so the causes of a hundred deaths are counted here.
    causes = Counter((death.slot.rpartition("-")[0], death.cause) for death in deaths(view))
    for (role, cause), times in causes.most_common():
        shown = {contract.ROLE_SERVER: "server"}.get(role, role or "pod")
        yield f"  {count(times, f'{shown} pod')} died: {cause}"
    yield ""
    for one in job_events(view):
        when = "" if one.at is None else _date(one.at)
        yield f"{when:<20}{'!' if one.bad else ' '} {one.what}: {one.text}".rstrip(": ")
    reports = [entry for entry in history.status.get("history") or [] if entry.get("report")]
    if reports:
        yield ""
    for entry in reports:
        yield f"report about {who(str(entry.get('slot') or ''))}: {printable(str(entry['report']))}"
    yield ""
    yield f"from {history.source}"


def _date(seconds: float) -> str:
    """Returns a Unix time in UTC, to the second."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
