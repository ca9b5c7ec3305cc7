"""Makes two updates, one evaluation and one checkpoint, with a line for each check (`backstay run --dry-run`)."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backstay_client.view.follow import JobView
from backstay_client.words import count, loss, on_one_line, plain, shown
from backstay_spec import contract

__all__ = [
    "ENVIRONMENT",
    "CheckOutcome",
    "checks_of",
    "dry_job",
    "has_one_server",
    "lines",
    "needs_one_server",
    "run_dry",
]

_UPDATES: Final = 2
_MOST_PODS: Final = 4
_SERVERS: Final = 2
_CHECKPOINTS: Final = "dry-run-checkpoints"
_REFUSED: Final = "OptimizerError"
_OK, _FAILED, _SKIPPED, _WARNING = "ok", "failed", "not checked", "warning"

ENVIRONMENT: Final = {contract.ENV_MOST_STEPS: str(_UPDATES)}
"""The variables of the pods of a dry run."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check, which is `ok`, `failed`, `warning` or `not checked`."""

    name: str
    outcome: str
    text: str = ""


def dry_job(job: dict[str, Any], folder: Path, servers: int = _SERVERS) -> dict[str, Any]:
    """Returns the job of a dry run, with at least two servers, at most four pods of a role, and checkpoints in the
    run's folder.

    The first crash of a pod ends it.

    Args:
        job: a valid TrainingJob, localised.
        folder: the folder of the run.
        servers: the fewest servers.
    """
    job = copy.deepcopy(job)
    spec = job["spec"]
    # YAML has None for a field without a value.
    shards = spec["parameterServers"] = spec.get("parameterServers") or {}
    shards["replicas"] = min(max(shards.get("replicas") or 1, servers), _MOST_PODS)
    workers = spec["workers"] = spec.get("workers") or {}
    workers["replicas"] = min(workers.get("replicas") or 1, _MOST_PODS)
    update = spec.get("update") or {}
    if isinstance(backups := update.get("backups"), int):
        update["backups"] = min(backups, workers["replicas"] - 1)
    for role in (shards, workers):
        role["maxRestarts"] = 0
    spec["checkpoint"] = {"uri": str(folder / _CHECKPOINTS)}
    if (spec.get("runPolicy") or {}).get("suspend"):
        spec["runPolicy"]["suspend"] = False
    spec.pop("queue", None)
    return job


def has_one_server(job: dict[str, Any]) -> bool:
    """Returns whether the job itself has one server."""
    return bool((job["spec"].get("parameterServers") or {}).get("replicas", 1) == 1)


def needs_one_server(view: JobView) -> bool:
    """Returns whether a job failed because its optimizer cannot be divided over several servers."""
    return view.phase == "Failed" and _REFUSED in view.message


def checks_of(view: JobView, job: dict[str, Any], read: Callable[[str], tuple[bool, str]]) -> list[CheckOutcome]:
    """Returns the checks that a dry run made.

    Args:
        view: the job at its end.
        job: the TrainingJob.
        read: reads the checkpoint of a URI; returns whether it can be read, and a text.
    """
    spec, step = job["spec"], view.report.step or 0
    servers, workers = spec["parameterServers"]["replicas"], spec["workers"]["replicas"]
    why = "" if view.phase == "Succeeded" else plain(view.message)[0] or "the job did not end"
    trained = step >= min(_UPDATES, view.report.goal_steps or _UPDATES)
    pods = f"{count(servers, 'server')}, {count(workers, 'worker')}"

    # Only the first check that fails has the reason: the ones after it did not run.
    def check(name: str, passed: bool, text: str, before: bool = True) -> CheckOutcome:
        if passed:
            return CheckOutcome(name, _OK, text)
        return CheckOutcome(name, _FAILED, why) if before else CheckOutcome(name, _SKIPPED)

    found = []
    if servers > 1:
        divided = not needs_one_server(view)
        found.append(check("several servers", divided, f"the optimizer can be divided over {count(servers, 'server')}"))
        if divided and not step:
            found[-1] = CheckOutcome("several servers", _SKIPPED)
        trains = divided
    else:
        trains = True
    newest = f", loss {text}" if (text := loss(view.report)) else ""
    found.append(check(f"{count(_UPDATES, 'update')}", trained, f"{count(step, 'update')} with {pods}{newest}", trains))
    if view.report.evaluation_error:
        found.append(CheckOutcome("evaluation", _FAILED, on_one_line(view.report.evaluation_failed)))
    elif view.report.metrics:
        found.append(CheckOutcome("evaluation", _OK, shown(view.report.metrics)))
    else:
        found.append(
            CheckOutcome("evaluation", _SKIPPED, "the script has no `evaluate`" if trained and not why else "")
        )
    if view.checkpoint is None:
        found.append(check("checkpoint", False, "", trained and not view.report.evaluation_error))
    else:
        readable, text = read(view.checkpoint)
        found.append(CheckOutcome("checkpoint", _OK if readable else _FAILED, text))
    if trained:
        found.append(check("end of the script", not why, "exit code 0"))
    return found


def lines(found: Sequence[CheckOutcome]) -> Iterator[str]:
    """Yields the checks as lines to print."""
    width = max((len(check.name) for check in found), default=0)
    for check in found:
        yield f"  {check.name:<{width}}  {check.outcome}{': ' if check.text else ''}{check.text}"


def read_back(uri: str, folder: Path) -> tuple[bool, str]:
    """Returns whether a checkpoint can be read, and the result in words."""
    command = [sys.executable, "-P", "-m", "backstay._checkpoint", uri, str(folder / "dry-run-export"), "safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return False, on_one_line(done.stderr.removeprefix("error: "))
    return True, "stored and read again: " + done.stdout.partition(": ")[2].partition(", to ")[0]


def run_dry(
    job: dict[str, Any], folder: Path, run: Callable[[dict[str, Any]], JobView | None], *, chosen: bool
) -> list[CheckOutcome]:
    """Run the job once; if its optimizer needs one server, a second time with one.

    Args:
        job: a valid TrainingJob, localised.
        folder: the folder of the run.
        run: runs a job; returns its end, or None if it has none.
        chosen: whether the user chose the number of servers. If that is 1, several servers are only a warning.
    """
    one = has_one_server(job)
    divided = dry_job(job, folder)
    view = run(divided)
    if view is None:
        return [CheckOutcome("start", _FAILED, "the job did not run")]
    found = checks_of(view, divided, lambda uri: read_back(uri, folder))
    if one and needs_one_server(view):
        refused = CheckOutcome("several servers", _WARNING if chosen else _FAILED, found[0].text)
        shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)
        single = dry_job(job, folder, servers=1)
        view = run(single)
        found = [] if view is None else checks_of(view, single, lambda uri: read_back(uri, folder))
        found.insert(0, refused)
    return found
