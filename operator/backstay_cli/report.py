"""The report when a job has ended: for people, or as one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay_client.view import explain
from backstay_client.view.facts import facts
from backstay_client.view.follow import JobView
from backstay_client.words import count, number, plain, printable, shortened

_TAIL_LINES = 15
_MISSING_PACKAGE = "ModuleNotFoundError: No module named"
_TRACEBACK = "Traceback (most recent call last):"
_TRACEBACK_LINES = 40
_TAIL_BYTES = 64_000
_LINE_LENGTH = 400  # a program may print megabytes without a line break


def summary(
    view: JobView, seconds: float, logs: Path, *, reason: str | None = None, message: str | None = None
) -> dict[str, Any]:
    """Returns the object that ``--output json`` prints.

    Args:
        view: the job as it was seen last.
        seconds: seconds since the command was started.
        logs: the folder with the logs of all pods.
        reason, message: why this is the end; by default those of the job's last condition.
    """
    failed = [{"pod": end.pod, "end": end.how, "log": str(end.log)} for end in ends(view, logs)]
    return {
        "job": view.name,
        **explain.measured(view),
        **({} if reason is None else {"reason": reason or None, "message": message or None}),
        "seconds": round(seconds, 3),
        "checkpoint": view.checkpoint,
        "logs": str(logs),
        "failedPods": failed if view.phase == "Failed" else [],
    }


def as_json(found: Mapping[str, Any]) -> str:
    """`summary` on one line."""
    return json.dumps(found, allow_nan=False)


def lines(view: JobView, seconds: float, logs: Path) -> Iterator[str]:
    """Yields the report as lines to print."""
    desired = {role: values.desired for role, values in view.roles.items()}
    standbys = min(view.standbys, desired.get("ParameterServer", 0))
    shape = count(desired.get("ParameterServer", 0) - standbys, "server")
    shape += f", {count(standbys, 'standby')}" if standbys else ""
    shape += f", {count(desired.get('Worker', 0), 'worker')}"
    # The step and the loss are then those of the earlier run, and the seconds those of this command.
    if "AlreadyComplete" in view.message:
        when = f"without a new update, in {seconds:.1f} s"
    elif view.report.step or view.phase == "Succeeded":
        when = f"after {number(view.report.step)} updates in {seconds:.1f} s"
    else:
        when = f"before its first update, after {seconds:.1f} s"
    yield f"{view.name} {view.phase.lower()} {when} ({shape})"
    if view.message and (view.phase != "Succeeded" or "AlreadyComplete" in view.message):
        first, *more = plain(view.message)
        for line in (first, *(line for line in more if line not in first)):
            yield f"  {line}"
        if view.phase == "Failed" and _MISSING_PACKAGE in view.message:
            yield f"  the pods run the Python of this command, {sys.executable}: install the package there"
    numbers = [fact.words for fact in facts(view, "numbers")]
    if rate := view.report.examples_per_second:  # the newest one; nothing else shows a rate after the end
        numbers.append(f"{number(rate, 3)} examples/s")
    if numbers:
        yield f"  {', '.join(numbers)}"
    for fact in facts(view, "metrics", "results", "costs", "deaths"):
        yield f"  {fact.words}"
    if view.checkpoint:
        place = shortened(view.checkpoint)
        yield f"  checkpoint {place}"
        folder = place.rpartition("/")[0] or "."
        yield f"    backstay.load({folder!r})  # the newest"
        kept = (view.job.get("spec", {}).get("checkpoint") or {}).get("keepBest")
        if kept and kept["metric"] in view.report.metrics:
            yield f"    backstay.load({folder!r}, best=True)  # the best, by {kept['metric']}"
    yield f"  logs of every pod in {shortened(str(logs))}"
    if view.phase == "Failed":
        yield from _failures(view, logs)


@dataclass(frozen=True)
class ContainerEnd:
    """How the container of one pod ended with an error."""

    pod: str
    how: str
    log: Path


def ends(view: JobView, logs: Path) -> Iterator[ContainerEnd]:
    """Yields the pods that ended with an error, as far as they still exist."""
    for pod in view.pods:
        meta, status = pod["metadata"], pod.get("status", {})
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            ended = container.get("state", {}).get("terminated")
            if ended is None or ended.get("exitCode") == 0:
                continue
            log = logs / meta["namespace"] / meta["name"] / f"{container['name']}.log"
            yield ContainerEnd(meta["name"], f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})", log)


def _failures(view: JobView, logs: Path) -> Iterator[str]:
    """Yields how each pod ended. Pods with the same end are reported together, with one traceback or the end of one
    log."""
    groups: dict[tuple[str, tuple[str, ...]], list[ContainerEnd]] = {}
    for end in ends(view, logs):
        groups.setdefault((end.how, tuple(tail(end.log))), []).append(end)
    for (how, output), group in groups.items():
        yield f"  {group[0].pod} ended with {how}: {shortened(str(group[0].log))}"
        yield from output or ("    | (it printed nothing)",)
        if len(group) > 1:
            yield f"    the same in {', '.join(end.pod for end in group[1:])}"


def tail(log: Path) -> Iterator[str]:
    """Yields the last traceback in a pod's log, if the log ends with one; otherwise the log's last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return
    lines = content.decode(errors="backslashreplace").splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    chosen = lines[begins[-1] :][-_TRACEBACK_LINES:] if begins else lines[-_TAIL_LINES:]
    for line in chosen:
        text = printable(line)
        yield "    | " + (text if len(text) <= _LINE_LENGTH else "... " + text[-_LINE_LENGTH:])
