"""Stops a job at Ctrl-C, when its servers store a checkpoint, and the command prints how to continue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from backstay_client.kube import ApiCalls, ApiRequestError
from backstay_client.pod_ends import until_stopped
from backstay_client.view.follow import JobView
from backstay_client.words import number, shortened
from backstay_spec import contract
from backstay_spec.job_report import CheckpointStatus

__all__ = [
    "closing_lines",
    "stop_job",
    "stored",
    "stored_step",
    "stores",
    "with_former",
    "with_stored",
]

# A log line of `backstay._report._job`; the end-to-end test of Ctrl-C checks that both agree.
_STORED = re.compile(r"^\d\d:\d\d:\d\d parameter-server-0: checkpoint of step (\d+): (.+)$", re.MULTILINE)
_TAIL_BYTES = 1 << 20


def stores(job: dict[str, Any]) -> bool:
    """Returns whether a job stores checkpoints."""
    checkpoint = job["spec"].get("checkpoint") or {}
    return "uri" in checkpoint or "volume" in checkpoint


async def stop_job(api: ApiCalls, namespace: str, name: str) -> None:
    """Suspend the job, and wait until its pods have ended. After any failure, the caller stops the cluster."""
    try:
        await api.suspend(namespace, name)
        await until_stopped(api, namespace, name, uid="")
    except (ApiRequestError, aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
        return


def stored_step(view: JobView, logs: Path) -> int | None:
    """Returns the step of the newest checkpoint that shard 0's servers stored in this run, or None if they stored none.

    The status counts too if it names a checkpoint of the job's newest step: the pod that stored it may be gone.
    """
    newest = stored(view, logs)
    if newest is not None:
        return newest[0]
    known = view.checkpoint_step == view.report.step and not _is_missing(view, view.checkpoint or "")
    return view.checkpoint_step if known else None


def with_stored(view: JobView, logs: Path) -> JobView:
    """Returns `view` with the step and the URI of the newest checkpoint, which is newer than the status of a stopped
    job."""
    newest = stored(view, logs)
    if newest is None:
        missing = _is_missing(view, view.checkpoint or "")
        return replace(view, report=view.report.model_copy(update={"checkpoint": None})) if missing else view
    step, uri = newest
    rows = {"step": max(step, view.report.step or 0), "checkpoint": CheckpointStatus(step=step, uri=uri)}
    return replace(view, report=view.report.model_copy(update=rows))


def with_former(view: JobView, pods: Sequence[dict[str, Any]]) -> JobView:
    """Returns `view` with these pods too, some of which the operator has deleted, and whose logs are still there."""
    known = {pod["metadata"]["name"] for pod in view.pods}
    return replace(view, pods=(*view.pods, *(pod for pod in pods if pod["metadata"]["name"] not in known)))


def stored(view: JobView, logs: Path) -> tuple[int, str] | None:
    """Returns the step and the URI of the newest checkpoint that shard 0's servers stored in this run, and that is
    there."""
    return max(((step, place) for step, place in _announced(view, logs) if not _is_missing(view, place)), default=None)


def _is_missing(view: JobView, place: str) -> bool:
    """Returns whether a checkpoint in a folder of this machine was deleted. A volume has another path here than in the
    pod."""
    uri = (view.job.get("spec", {}).get("checkpoint") or {}).get("uri", "")
    return "://" not in f"{uri}{place}" and uri.startswith("/") and place.startswith("/") and not Path(place).exists()


def _announced(view: JobView, logs: Path) -> list[tuple[int, str]]:
    """Returns the step and the URI of the last checkpoint of each log of shard 0's servers."""
    found: list[tuple[int, str]] = []
    for pod in view.pods:
        labels = pod["metadata"].get("labels", {})
        if (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) != (contract.ROLE_SERVER, "0"):
            continue
        log = logs / pod["metadata"]["namespace"] / pod["metadata"]["name"] / f"{contract.CONTAINER}.log"
        try:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
                lines = _STORED.findall(file.read().decode(errors="replace"))
                found += [(int(step), place) for step, place in lines[-1:]]
        except OSError:
            continue
    return found


def closing_lines(view: JobView | None, job: dict[str, Any], logs: Path, again: str, how: str) -> Iterator[str]:
    """Yields the lines that are printed after Ctrl-C, or after another command has suspended the job.

    Args:
        view: the job as it was last observed; None: it had not begun.
        job: the job.
        logs: the folder with the logs of all pods.
        again: the command that continues the job.
        how: ``stopped`` or ``suspended``.
    """
    if view is None or not view.report.step:
        yield f"{how} before the first update; nothing is left running"
    elif not stores(job):
        yield f"{how} at step {number(view.report.step)}; nothing is left running"
        yield "  nothing is stored: the job has no checkpoint (--checkpoint FOLDER for a script, or spec.checkpoint)"
    elif (step := stored_step(view, logs)) is None:
        yield f"{how} at step {number(view.report.step)}; nothing is left running"
        lost = max(_announced(view, logs), default=None)
        if lost is None:
            yield "  this run stored no checkpoint; the log of parameter server 0 has the reason"
        else:
            yield f"  the checkpoint of step {number(lost[0])} was stored, and is missing now: {lost[1]}"
    elif step < view.report.step:
        yield f"{how} at step {number(view.report.step)}; nothing is left running"
        yield f"  only the checkpoint of step {number(step)} is stored; the log of parameter server 0 has the reason"
        yield f"  to continue from it: {again}"
    else:
        yield f"{how}; the checkpoint of step {number(step)} is stored; nothing is left running"
        yield f"  to continue: {again}"
    yield f"  logs of every pod in {shortened(str(logs))}"
