"""Holds the jobs of a run as its cluster last served them, written while the run lives, and read after its end."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from backstay_client.errors import BadInput
from backstay_client.finding.known_runs import KnownRun, read_json, write_json
from backstay_client.kube import ApiRequestError
from backstay_client.view.follow import STOPPED, TERMINAL
from backstay_client.words import shortened
from backstay_spec import contract
from backstay_spec.names import LABEL_JOB_UID

__all__ = ["StateFile", "StoredApi", "jobs_in"]

_STATE: Final = "state.json"
_WRITE_SECONDS: Final = 10.0


class StateFile:
    """The file with the jobs and pods that a run's cluster has had.

    It is written every 10 s, so that a command that is killed leaves it too.

    Args:
        folder: the run's folder.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = folder / _STATE, clock
        self._jobs: dict[tuple[str, str], Any] = {}
        self._pods: dict[tuple[str, str], Any] = {}
        self._written = -_WRITE_SECONDS
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)  # of an earlier run in this folder

    def add(self, jobs: Iterable[Any], pods: Iterable[Any]) -> None:
        """Add what the API server returned; deleted jobs and pods stay."""
        self._jobs.update({_key(job): job for job in jobs if job})
        self._pods.update({_key(pod): pod for pod in pods})
        if self._jobs and self._clock() - self._written >= _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file. If the disk is full, the run continues, and an older file stays."""
        self._written = self._clock()
        with contextlib.suppress(OSError, ValueError):
            state = {"unixSeconds": time.time(), "jobs": [*self._jobs.values()], "pods": [*self._pods.values()]}
            write_json(self._path, state)


def _key(found: Any) -> tuple[str, str]:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def jobs_in(run: KnownRun) -> list[str]:
    """Returns the names of the jobs that a run has stored."""
    names = [job["metadata"]["name"] for job in read_json(run.folder / _STATE).get("jobs") or []]
    return list(dict.fromkeys([*([run.job] if run.job else []), *names]))


class StoredApi:
    """Answers like the API server of a run that has ended.

    A job that had not ended is `Stopped`, and so are its pods.

    Args:
        run: the run.
    """

    def __init__(self, run: KnownRun) -> None:
        self._run = run
        state, result = read_json(run.folder / _STATE), run.result()
        ended = result.get("endTime") or state.get("unixSeconds") or run.started
        jobs = state.get("jobs") or []
        if run.job and not jobs:  # the cluster never served it
            meta = {"name": run.job, "namespace": run.namespace, "uid": "", "creationTimestamp": _stamp(run.started)}
            jobs = [{"metadata": meta, "spec": {}, "status": {}}]
        self._jobs = [_as_ended(job, run, result, float(ended)) for job in jobs]
        self._pods = [_pod_as_ended(pod) for pod in state.get("pods") or []]

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Returns the TrainingJob.

        Raises:
            ApiRequestError: the run had no such job.
        """
        for job in self._jobs:
            if _key(job) == (namespace, name):
                return job
        place = shortened(str(self._run.folder))
        raise ApiRequestError(404, "NotFound", f"the run in {place} had no TrainingJob {name} in namespace {namespace}")

    async def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """Returns the TrainingJobs of a namespace, or of all if it is None."""
        return [job for job in self._jobs if namespace in (None, job["metadata"].get("namespace"))]

    async def pods_of(self, namespace: str, name: str, uid: str = "") -> list[dict[str, Any]]:
        """Returns the pods that the job has had; `uid` is as in `JobApi`."""
        wanted = {contract.LABEL_JOB: name} | ({LABEL_JOB_UID: uid} if uid else {})
        return [
            pod
            for pod in self._pods
            if pod["metadata"].get("namespace") == namespace
            and wanted.items() <= (pod["metadata"].get("labels") or {}).items()
        ]

    async def events_of(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Returns nothing: the status of a job has its history."""
        return []

    async def delete_job(self, namespace: str, name: str, uid: str = "") -> dict[str, Any]:
        """Refuse.

        Raises:
            BadInput: always.
        """
        place = shortened(str(self._run.folder))
        raise BadInput(f"the run of {name} has ended: to forget it, delete its folder {place}")

    async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        """Yields the log of a pod; of the options, only `tailLines` has an effect.

        Raises:
            ApiRequestError: there is no log of such a pod.
        """
        try:
            data = (self._run.folder / "pods" / namespace / pod / f"{contract.CONTAINER}.log").read_bytes()
        except OSError:
            raise ApiRequestError(404, "NotFound", f"there is no log of the pod {pod}") from None
        if "tailLines" in options:
            lines = data.splitlines(keepends=True)
            data = b"".join(lines[max(0, len(lines) - int(options["tailLines"])) :])
        yield data

    async def pod_page(self, pod: dict[str, Any], path: str, timeout: float = 2.0, **headers: str) -> bytes | None:
        """Returns None, because the pods have ended."""
        return None


def _as_ended(job: dict[str, Any], run: KnownRun, result: dict[str, Any], ended: float) -> dict[str, Any]:
    job = copy.deepcopy(job)
    status = job["status"] = job.get("status") or {}
    if status.get("phase") not in TERMINAL:
        reason = result.get("reason") or "CommandEnded"
        message = result.get("message") or (
            "`backstay up` was stopped" if not run.job and result else f"process {run.owner.pid} was killed"
        )
        status["conditions"] = [
            *(one for one in status.get("conditions") or [] if one.get("type") != STOPPED),
            {"type": STOPPED, "status": "True", "reason": reason, "message": message},
        ]
        status["phase"] = STOPPED
        status["step"] = result.get("step") or status.get("step")
    status.setdefault("startTime", _stamp(run.started))
    status.setdefault("completionTime", _stamp(ended))
    return job


def _pod_as_ended(pod: dict[str, Any]) -> dict[str, Any]:
    if (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}:
        return pod
    pod = copy.deepcopy(pod)
    pod["status"] = {**(pod.get("status") or {}), "phase": STOPPED}
    return pod


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
