"""A TrainingJob on a cluster, for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from backstay_client.errors import BadInput, ClusterUnreachable, JobDeleted, NoResult, TrainingFailed
from backstay_client.finding.clusters import FoundCluster
from backstay_client.kube import ApiCalls, ApiRequestError, is_transient
from backstay_client.pod_ends import until_gone, until_stopped
from backstay_client.reading.curve import TrainingCurve, curve_of_job
from backstay_client.reading.history import JobHistory, history_of_job
from backstay_client.reading.logs import ROLES, WantedLogs, log_lines
from backstay_client.reading.trace import WantedTrace, Written, trace_of_job
from backstay_client.show.frames import curve_frame
from backstay_client.show.html import job_card
from backstay_client.show.progress import display_for
from backstay_client.view.follow import JobView, look
from backstay_client.view.status import JobStatus, status_of
from backstay_client.words import duration, on_one_line
from backstay_spec import contract

__all__ = [
    "PATIENCE",
    "AsyncJobHandle",
    "Connected",
    "checked",
    "checkpoint_of",
    "load_checkpoint",
]

PATIENCE = 60.0
"""Seconds without an answer of the API server after which a wait ends in an error."""

_POLL_SECONDS = 0.5


def _wanted(rank: int | None, role: str | None, *, follow: bool, previous: bool, tail: int | None) -> WantedLogs:
    """Returns the logs that the arguments of `logs` select.

    Raises:
        BadInput: the role does not exist, or the arguments cannot be used together.
    """
    if role is not None and role not in ROLES:
        raise BadInput(f"role={role!r}: must be one of {', '.join(ROLES)}")
    if previous and follow:
        raise BadInput("previous= and follow= cannot be used together: a replaced pod writes no more")
    chosen = "worker" if role is None and rank is not None else role
    return WantedLogs(None if chosen is None else ROLES[chosen], rank, previous, follow, tail)


class Connected(Protocol):
    """The part of a client that a handle uses."""

    async def cluster_of(self, namespace: str | None) -> FoundCluster:
        """Returns the connection, for a namespace, or for that of the client if it is None."""

    async def api(self) -> ApiCalls:
        """Returns the API server, for changes."""

    def raise_if_ended(self) -> None:
        """Raise `SessionError` if the client's own cluster has died."""


class AsyncJobHandle:
    """A TrainingJob on a cluster. The job continues without this handle.

    `AsyncClient.submit`, `AsyncClient.job` and `AsyncClient.list` make handles.

    Attributes:
        name: the job's name.
        namespace: its namespace.
        uid: its uid. Another job that gets the name later is not this one.
    """

    def __init__(self, client: Connected, job: dict[str, Any]) -> None:
        meta = job["metadata"]
        self.name: str = meta["name"]
        self.namespace: str = meta["namespace"]
        self.uid: str = meta["uid"]
        self._client = client
        self._curve = TrainingCurve()
        self._known: JobView | None = None

    def __repr__(self) -> str:
        known = "" if self._known is None else f" {self._known.phase}"
        return f"<TrainingJob {self.name} in {self.namespace}{known}>"

    def _repr_html_(self) -> str:
        """Returns a table of the state that was read last; `await job.status()` reads it again."""
        status = JobStatus(self.name, self.namespace, "Pending") if self._known is None else status_of(self._known)
        return job_card(status, self._curve.values("loss"))

    # ---- Reading ----

    async def status(self) -> JobStatus:
        """Returns the state now.

        Raises:
            JobDeleted: the job does not exist any more.
            ApiRequestError, aiohttp.ClientError, OSError: the cluster refused, or does not answer.
        """
        return status_of(await self._look())

    async def watch(
        self, patience: float = PATIENCE, timeout: float | None = None
    ) -> AsyncGenerator[tuple[JobView, str]]:
        """Yields the states of the job, twice a second, until it has ended.

        Args:
            patience: seconds without an answer of the API server after which the wait ends.
            timeout: seconds until the wait ends in any case; None: no limit.

        Yields:
            The newest known state, and why no newer one is known; empty: it is the newest.

        Raises:
            JobDeleted: the job was deleted.
            ClusterUnreachable: the API server does not answer.
            ApiRequestError: the cluster refuses.
            TimeoutError: the job has not ended within `timeout`.
        """
        answered = time.monotonic()
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    view = await self._look()
            except (ApiRequestError, aiohttp.ClientError, OSError) as error:
                if limit.expired():
                    raise TimeoutError(_timeout_message(self.name, self._known, timeout)) from None
                if not is_transient(error):
                    raise
                self._client.raise_if_ended()
                silent = time.monotonic() - answered
                why = _reason_of(error)
                if silent >= patience:
                    raise ClusterUnreachable(
                        f"the API server of {(await self._cluster()).name} has not answered for "
                        f"{duration(silent)}: {why}. The job {self.name} may still run"
                    ) from error
                if self._known is not None:
                    yield self._known, f"the API server does not answer: {why}"
            else:
                answered = time.monotonic()
                yield view, ""
                if view.ended:
                    return
            await asyncio.sleep(_POLL_SECONDS)

    async def wait(
        self, timeout: float | None = None, *, progress: bool = True, check: bool = True, patience: float = PATIENCE
    ) -> JobStatus:
        """Wait until the job has ended. An interruption or an error of this call does not stop the job.

        Args:
            timeout: seconds to wait; None: as long as it takes.
            progress: whether to show a bar on a terminal, a card in a notebook, and lines elsewhere.
            check: whether a job that has failed raises.
            patience: see `watch`.

        Raises:
            TrainingFailed: the job has failed.
            TimeoutError: the job has not ended within `timeout`.
            JobDeleted, ClusterUnreachable, ApiRequestError: see `watch`.
        """
        display = display_for(progress=progress)
        view: JobView | None = None
        try:
            async with contextlib.aclosing(self.watch(patience, timeout)) as states:
                async for view, trouble in states:
                    display.show(view, trouble)
        finally:
            display.close()
        assert view is not None
        return checked(status_of(view), check=check)

    def logs(
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        role: str | None = None,
        previous: bool = False,
        tail: int | None = None,
    ) -> AsyncGenerator[str]:
        """Returns the lines of the pods' logs. Unless one pod is chosen, each line begins with its pod.

        Args:
            follow: continue until the job ends, also in replacements of pods.
            rank: only pods with this rank or shard.
            role: ``server``, ``worker`` or ``evaluator``; None: worker with a `rank`, else every role.
            previous: only the pods that the current ones replaced.
            tail: the number of lines at the end of each log; None: all.

        Raises:
            BadInput: the job has no such pod.
            JobDeleted: the job does not exist any more.
        """
        wanted = _wanted(rank, role, follow=follow, previous=previous, tail=tail)

        async def lines() -> AsyncGenerator[str]:
            cluster = await self._cluster()
            await self._job()  # another job may have the name
            async with contextlib.aclosing(log_lines(cluster, self.name, wanted)) as found:
                async for line in found:
                    yield line

        return lines()

    async def curve(self) -> TrainingCurve:
        """Loss and metrics over the steps; without points if nothing is known."""
        cluster = await self._cluster()
        job = await self._job()
        pods = await cluster.api.pods_of(self.namespace, self.name, job["metadata"]["uid"])
        found = await curve_of_job(cluster, job, pods)
        if found.steps or found.evaluations:  # the server of a job that has ended is gone
            self._curve = found
        return self._curve

    async def metrics(self) -> Any:
        """Loss and metrics over the steps as a `pandas.DataFrame`, whose index are the steps.

        Its columns are `loss`, the metrics that `loss` returned, and ``evaluation/NAME`` for those of `evaluate`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        return curve_frame(await self.curve())

    async def history(self) -> JobHistory:
        """Returns the past of the job, with its phases, and the deaths of its pods with causes and costs.

        Raises:
            JobDeleted: the job does not exist any more.
        """
        await self._job()
        return await history_of_job(await self._cluster(), self.name)

    async def trace(self, path: str | Path, *, last: float | None = None) -> Written:
        """Write what each pod did in the last minutes, on one clock, for https://ui.perfetto.dev.

        Args:
            path: the file; a name that ends in ``.gz`` is compressed.
            last: only this many seconds before the end; None: all.

        Raises:
            BadInput: there is no timeline, or the file cannot be written.
            JobDeleted: the job does not exist any more.
        """
        await self._job()
        return await trace_of_job(await self._cluster(), self.name, Path(path), WantedTrace(last))

    async def result(self, like: Any = None) -> Any:
        """Returns the newest checkpoint, as `backstay.load` returns it: `.params`, `.state`, `.step`, `.metrics`.

        Args:
            like: see `backstay.load`.

        Raises:
            NoResult: the job has stored no checkpoint, or this machine cannot read it.
        """
        uri = checkpoint_of(await self.status())
        return await asyncio.to_thread(load_checkpoint, uri, like)

    # ---- Changing ----

    async def scale(self, workers: int) -> None:
        """Change the number of workers of a running job, backups included.

        Raises:
            ApiRequestError: the number is not valid.
        """
        await self._patch({"spec": {"workers": {"replicas": workers}}})

    async def suspend(self, *, wait: bool = True) -> None:
        """Delete all pods; the servers store a checkpoint first. `resume` starts them again.

        Args:
            wait: whether to wait until the pods have ended and the status has their checkpoint, for at most 60 s.

        Raises:
            PodsRemain: some pods still run.
        """
        await self._patch({"spec": {"runPolicy": {"suspend": True}}})
        if wait:
            await until_stopped((await self._cluster()).api, self.namespace, self.name, self.uid, self._is_stopped)

    async def resume(self) -> None:
        """Start a suspended job again, from its newest checkpoint."""
        await self._patch({"spec": {"runPolicy": {"suspend": False}}})

    async def delete(self, *, wait: bool = True) -> None:
        """Delete the job with its pods. Checkpoints stay. A job that was deleted already is not an error.

        Args:
            wait: whether to wait until the pods are gone, for at most 90 s.

        Raises:
            PodsRemain: the pods still exist.
        """
        cluster = await self._cluster()
        try:
            with self._deleted():
                await cluster.api.delete_job(self.namespace, self.name, self.uid)
        except JobDeleted:
            return
        if wait:
            await until_gone(cluster, self.namespace, self.name, self.uid)

    # ---- The rest ----

    async def _cluster(self) -> FoundCluster:
        return await self._client.cluster_of(self.namespace)

    async def _job(self) -> dict[str, Any]:
        """Returns the TrainingJob.

        Raises:
            JobDeleted: the job does not exist any more.
        """
        cluster = await self._cluster()
        with self._deleted():
            job = await cluster.api.get_job(self.namespace, self.name)
        self._same(job)
        return job

    @contextlib.contextmanager
    def _deleted(self) -> Iterator[None]:
        """The answers that there is no such job, or that another one has its name, become `JobDeleted`."""
        try:
            yield
        except ApiRequestError as error:
            if error.code not in (404, 409):
                raise
            raise JobDeleted(f"the TrainingJob {self.name} in namespace {self.namespace} was deleted") from None

    def _same(self, job: Any) -> None:
        if job["metadata"]["uid"] != self.uid:
            raise JobDeleted(
                f"the TrainingJob {self.name} in namespace {self.namespace} was deleted, and another one of this name "
                f"was created: client.job({self.name!r}) follows that one"
            )

    async def _is_stopped(self) -> bool:
        """Returns whether the job is suspended or has ended, in its status."""
        status = await self.status()
        return status.phase == "Suspended" or status.ended

    async def _look(self) -> JobView:
        cluster = await self._cluster()
        with self._deleted():
            view = await look(cluster.api, self.namespace, self.name, self._known)
        self._same(view.job)
        self._known = view
        return view

    async def _patch(self, patch: dict[str, Any]) -> None:
        await self._job()
        api = await self._client.api()
        with self._deleted():
            await api.patch_job(self.namespace, self.name, {**patch, "metadata": {"uid": self.uid}})


def checked(status: JobStatus, *, check: bool) -> JobStatus:
    """Returns the final state of a job.

    Raises:
        TrainingFailed: the job has failed, and `check` is true.
    """
    if check and not status.succeeded:
        message = status.message or f"the job is {status.phase}"
        raise TrainingFailed(status.reason or status.phase, f"the job {status.name} has failed: {message}")
    return status


def _timeout_message(name: str, view: JobView | None, timeout: float | None) -> str:
    """Returns the text of the error that a wait took too long."""
    step = "" if view is None or not view.report.step else f" at step {view.report.step}"
    phase = "not known" if view is None else view.phase
    return f"the job {name} has not ended within {duration(timeout or 0.0)}: it is {phase}{step}, and continues"


def checkpoint_of(status: JobStatus) -> str:
    """Returns the URI of the newest checkpoint.

    Raises:
        NoResult: there is none, or it is in a volume of the cluster.
    """
    job = {} if status.view is None else status.view.job
    stored = (job.get("spec") or {}).get("checkpoint") or {}
    if status.phase == "Suspended" and status.step and stored.get("uri"):
        return str(stored["uri"])  # the servers stored a checkpoint after their last report
    if not status.checkpoint:
        if not stored.get("uri") and not stored.get("volume"):
            raise NoResult(f"the job {status.name} stores no checkpoints: submit it with checkpoint=")
        if status.ended:
            why = f": {status.reason}: {on_one_line(status.message)}" if not status.succeeded else ""
            raise NoResult(f"the job {status.name} is {status.phase}, and has reported no checkpoint{why}")
        raise NoResult(
            f"the job {status.name} is {status.phase}, and has stored no checkpoint yet: its last update stores one, "
            "so call job.wait() first"
        )
    return status.checkpoint


def load_checkpoint(uri: str, like: Any) -> Any:
    """Returns the same as `backstay.load`.

    Raises:
        NoResult: this machine cannot read it.
    """
    backstay = importlib.import_module("backstay")  # it is above this package
    try:
        return backstay.load(uri, like)
    except backstay.errors.CheckpointError as error:
        where = contract.CHECKPOINT_MOUNT
        hint = (
            f": {where} is a volume of the pods. Store checkpoints at a URI that this machine reads too, or export the "
            "result in worker 0"
            if uri.removeprefix("file://").startswith(where)
            else ""
        )
        raise NoResult(f"the checkpoint {uri} cannot be read here: {error}{hint}") from error


def _reason_of(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its text has the repr of the TLS context
        return f"{error.host} port {error.port}: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__
