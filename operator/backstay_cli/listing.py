"""Prints one row for each job (`backstay list` and `backstay top`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import aiohttp
from rich.table import Table
from rich.text import Text

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import ANSWER_SECONDS, open_run
from backstay_client.finding.known_runs import KnownRun
from backstay_client.kube import ApiRequestError
from backstay_client.show.curve import bar
from backstay_client.view import explain
from backstay_client.view.facts import cells, ready_of
from backstay_client.view.follow import JobView, view_of
from backstay_client.words import count, duration, shortened

__all__ = ["as_rows", "notes", "table", "top_table", "views", "views_of_runs", "without_old"]

_MOST_ENDED: Final = 20

_NAME_WIDTH: Final = 8
"""The least width of the first column, in characters. In a narrow terminal the others give way."""

_PHASES = {"Succeeded": "green", "Failed": "red", "Running": "cyan", "Suspended": "yellow"}


def views(jobs: Iterable[dict[str, Any]]) -> list[JobView]:
    """Returns the jobs as their status has them, those that run first, then the newest first."""
    return _sorted([view_of(job, [], []) for job in jobs])


def _sorted(found: list[JobView]) -> list[JobView]:
    return sorted(found, key=lambda view: (view.ended, -_created(view), view.namespace, view.name))


async def views_of_runs(runs: Sequence[KnownRun], namespace: str | None) -> list[JobView]:
    """Returns the jobs of the runs on this machine, in the order of `views`."""
    found = await asyncio.gather(*(_views_of_run(run, namespace) for run in runs))
    return _sorted([view for some in found for view in some])


async def _views_of_run(run: KnownRun, namespace: str | None) -> list[JobView]:
    try:
        async with asyncio.timeout(ANSWER_SECONDS), open_run(run, wait=False) as cluster:
            jobs = await cluster.api.list_jobs(namespace)
        found = [view_of(job, [], []) for job in jobs]
    except (BadInput, ApiRequestError, aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
        # The cluster is being started, or its process is stopped.
        found = [JobView(run.job, run.namespace, phase="NoAnswer", started=run.started)] if run.job else []
    return [replace(view, folder=str(run.folder)) for view in found]


def without_old(found: Sequence[JobView]) -> list[JobView]:
    """Returns the jobs without the older runs on this machine that have ended."""
    old = [view for view in found if view.folder and view.ended][_MOST_ENDED:]
    return [view for view in found if view not in old]


def notes(
    found: Sequence[JobView], shown: Sequence[JobView], runs: Sequence[KnownRun], others: Sequence[KnownRun]
) -> Iterator[str]:
    """Yields the lines below the table.

    Args:
        found, shown: all jobs, and those in the table.
        runs: the runs whose jobs were found.
        others: runs whose jobs were not listed, because the jobs of a cluster were.
    """
    if len(shown) < len(found):
        yield f"{count(len(found) - len(shown), 'older run')}: backstay list --all"
    with_jobs = {view.folder for view in found}
    for run in runs:
        if not run.job and run.lives and str(run.folder) not in with_jobs:
            yield f"`backstay up` runs in {shortened(str(run.folder))}, and has no job"
    if others:
        yield f"{count(len(others), 'run')} on this machine: backstay list --local"


def _created(view: JobView) -> float:
    from backstay_client.view.follow import unix_time

    return unix_time((view.job.get("metadata") or {}).get("creationTimestamp")) or view.started or 0.0


def as_rows(found: Sequence[JobView], now: float | None = None) -> list[dict[str, Any]]:
    """Returns the objects that ``--output json`` and ``--output yaml`` print."""
    now = time.time() if now is None else now
    return [
        {
            "name": view.name,
            "namespace": view.namespace,
            **explain.measured(view),
            "workersReady": view.roles["Worker"].ready if "Worker" in view.roles else 0,
            "workersDesired": view.roles["Worker"].desired if "Worker" in view.roles else 0,
            "checkpointStep": view.checkpoint_step,
            "checkpointAgeSeconds": None
            if view.checkpoint_time is None
            else round(max(0.0, now - view.checkpoint_time), 1),
            "ageSeconds": round(max(0.0, now - _created(view)), 1),
            "folder": view.folder or None,
        }
        for view in found
    ]


def _columns(names: Sequence[str], *, left: frozenset[str], shrinks: str = "") -> Table:
    """Returns the columns of a table; the one that `shrinks` makes room for the others."""
    made = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        least = _NAME_WIDTH if name == names[0] else None
        justify: Any = "left" if name in left else "right"
        made.add_column(name, justify=justify, no_wrap=name != shrinks, overflow="ellipsis", min_width=least)
    return made


def table(found: Sequence[JobView], *, everywhere: bool, now: float | None = None) -> Table:
    """Returns the table of `backstay list`.

    Args:
        everywhere: whether the jobs are of several namespaces.
    """
    now = time.time() if now is None else now
    names = [*(["namespace"] if everywhere else []), "name", "phase", "progress", "left", "workers", "deaths", "age"]
    local = any(view.folder for view in found)
    names += ["folder of the run"] if local else []
    left_side = frozenset({"namespace", "name", "phase", "folder of the run"})
    made = _columns(names, left=left_side, shrinks="folder of the run" if local else "")
    for view in found:
        fraction = explain.progress_of(view)
        workers = view.roles.get("Worker")
        made.add_row(
            *([view.namespace] if everywhere else []),
            view.name,
            Text(view.phase, _PHASES.get(view.phase, "")),
            "–" if fraction is None else f"{100 * fraction:.0f} %",
            cells(view).get("time left", "–"),
            "–" if workers is None else ready_of(view, workers),
            str(view.restarts + view.disruptions),
            duration(max(0.0, now - _created(view))),
            *([Text(shortened(view.folder), no_wrap=True, overflow="ellipsis")] if local else []),
        )
    return made


def top_table(found: Sequence[JobView], *, everywhere: bool, width: int, now: float | None = None) -> Table:
    """Returns the table of `backstay top`; a wide terminal gets more columns."""
    now = time.time() if now is None else now
    # Most terminals have 80 columns, which hold what a glance needs.
    wide, widest = width >= 110, width >= 140
    names = [*(["namespace"] if everywhere else []), "name", "phase", "progress", "left", "examples/s"]
    names += ["loss", *(["goodput"] if wide else []), *(["checkpoint"] if widest else [])]
    names += [*(["last death"] if wide else []), "workers", "deaths"]
    left_side = frozenset({"namespace", "name", "phase", "progress", "last death"})
    made = _columns(names, left=left_side, shrinks="last death" if wide else "name")
    for view in found:
        fraction, workers, known = explain.progress_of(view), view.roles.get("Worker"), cells(view)
        size = 16 if widest else 8
        progress = "–" if fraction is None else f"{bar(fraction, size)} {100 * fraction:3.0f} %"
        row: list[str | Text] = [
            *([view.namespace] if everywhere else []),
            Text(view.name, no_wrap=True, overflow="ellipsis"),
            Text(view.phase, _PHASES.get(view.phase, "")),
        ]
        row += [progress, *(known.get(label, "–") for label in ("time left", "examples/s", "loss"))]
        if wide:
            row.append("–" if view.goodput is None else f"{100 * view.goodput:.0f} %")
        if widest:
            age = view.checkpoint_time
            row.append("–" if age is None or view.ended else duration(max(0.0, now - age)))
        if wide:
            row.append(Text(_last_death(view, now), no_wrap=True, overflow="ellipsis"))
        row.append("–" if workers is None else f"{workers.ready}/{workers.desired}")
        row.append(Text(str(view.restarts + view.disruptions), "yellow" if view.restarts else ""))
        made.add_row(*row)
    return made


def _last_death(view: JobView, now: float) -> str:
    died = explain.deaths(view)
    if not died:
        return ""
    return f"{explain.who(died[-1].slot)}, {died[-1].cause}, {explain.ago(died[-1], now)}"
