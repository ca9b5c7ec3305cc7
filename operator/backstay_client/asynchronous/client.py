"""The client of a cluster, for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from backstay_client.asynchronous.job import AsyncJobHandle
from backstay_client.asynchronous.options import SubmitOptions, submission_of
from backstay_client.asynchronous.sweep_options import SweepOptions, prepared_sweep
from backstay_client.creating import create_job_once
from backstay_client.embedded.preload import preload
from backstay_client.embedded.run_folder import lasting_session, new_folder, store_result
from backstay_client.embedded.session import Session, SessionError
from backstay_client.errors import BadInput, JobExists
from backstay_client.finding.clusters import FoundCluster, NoSuchJob, Where, open_cluster
from backstay_client.finding.known_runs import register
from backstay_client.kube import ApiCalls, ApiRequestError
from backstay_client.pod_ends import until_gone
from backstay_client.show.job_list import Jobs
from backstay_client.show.progress import text_display_for
from backstay_client.sweeps.results import SweepResult
from backstay_client.sweeps.runner import TrialJobs
from backstay_client.view.follow import TERMINAL, view_of
from backstay_client.view.status import status_of
from backstay_spec import contract
from backstay_spec.types import TrainingJob

__all__ = ["AsyncClient"]


class AsyncClient:
    """Submits and follows TrainingJobs. Its methods are coroutines, with the names of `Client`.

    It connects at its first call. Close it with `close`, or use it as an asynchronous context manager.

    Args:
        kubeconfig: the kubeconfig. None: `KUBECONFIG`, else a run in this folder (`backstay run` or `backstay up`),
            else ``~/.kube/config``, else the account of this pod, else the newest run on this machine.
        context: the context of the kubeconfig; None: the current one.
        namespace: the namespace; None: that of the context.
        image: the image of the pods of submitted functions and scripts. An embedded cluster needs none.

    Raises:
        BadInput: this process is a pod of a job.
    """

    def __init__(
        self,
        kubeconfig: str | Path | None = None,
        *,
        context: str | None = None,
        namespace: str | None = None,
        image: str | None = None,
    ) -> None:
        if job := os.environ.get(contract.ENV_JOB):
            raise BadInput(
                f"this process is a pod of the TrainingJob {job}, which runs the code that submitted it: put the calls "
                "that submit under `if __name__ == '__main__':`"
            )
        self._where = Where(None if kubeconfig is None else Path(kubeconfig), context, namespace)
        self._image = image
        self._folder: Path | None = None
        self._session: Session | None = None
        self._stack = contextlib.AsyncExitStack()
        self._opening = asyncio.Lock()
        self._cluster: FoundCluster | None = None
        self._closed = False

    @classmethod
    def local(cls, folder: str | Path | None = None, *, namespace: str | None = None) -> Self:
        """Returns a client with its own embedded cluster, which ends with the client.

        Its pods are processes of this Python environment, and have the environment of this process.

        Args:
            folder: the folder for logs, volumes and checkpoints; None: a new one in ``.backstay/runs``. It is kept.
            namespace: the namespace; None: ``default``.
        """
        client = cls(namespace=namespace)
        client._folder = new_folder("client", option="folder=") if folder is None else Path(folder).resolve()
        return client

    async def __aenter__(self) -> Self:
        await self.cluster()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. The jobs of `local` end with its cluster; others continue."""
        self._closed = True
        async with self._opening:
            self._cluster = None
            await self._stack.aclose()

    def __repr__(self) -> str:
        known = "not connected" if self._cluster is None else f"{self._cluster.namespace} of {self._cluster.name}"
        return f"<{type(self).__name__}: {known}>"

    # ---- Jobs ----

    async def submit(
        self,
        what: Callable[..., Any] | str | Path | TrainingJob | Mapping[str, Any],
        *,
        replace: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> AsyncJobHandle:
        """Create a TrainingJob, and return its handle.

        The source of a function's or a script's module travels in a ConfigMap, with what it imports from the user's
        folders. Nothing is pickled. All pods run it: it calls `backstay.train`.

        Args:
            what: a function at the top level of a module, the path of a script (``.py``) or of a TrainingJob
                (``.yaml``), or a TrainingJob.
            replace: whether to delete a job of the same name first, if it has ended.
            options: see `SubmitOptions`.

        Raises:
            BadInput: the input is invalid.
            JobExists: the namespace has a job of this name.
            ApiRequestError, aiohttp.ClientError, OSError: the cluster refused, or does not answer.
        """
        cluster = await self.cluster()
        made = submission_of(what, options, cluster, self._image)
        meta = made.job["metadata"]
        if replace:
            await self._delete_ended(meta["namespace"], meta["name"])
        embedded = cluster.folder is not None
        job = await create_job_once(await self.api(), made.job, made.config_map, embedded=embedded)
        return AsyncJobHandle(self, job)

    async def job(self, name: str, *, namespace: str | None = None) -> AsyncJobHandle:
        """Returns the handle of an existing job.

        Raises:
            NoSuchJob: there is no such job.
        """
        cluster = await self.cluster_of(namespace)
        try:
            return AsyncJobHandle(self, await cluster.api.get_job(cluster.namespace, name))
        except ApiRequestError as error:
            if error.code != 404:
                raise
        raise NoSuchJob(f"there is no TrainingJob {name} in namespace {cluster.namespace} of {cluster.name}")

    async def list(self, *, everywhere: bool = False, labels: Mapping[str, str] | None = None) -> Jobs[AsyncJobHandle]:
        """Returns the handles of all jobs, in order of their creation.

        Args:
            everywhere: the jobs of all namespaces.
            labels: only jobs with these labels.
        """
        cluster = await self.cluster()
        found = await cluster.api.list_jobs(None if everywhere else cluster.namespace)
        wanted = set((labels or {}).items())
        jobs = [job for job in found if wanted <= set((job["metadata"].get("labels") or {}).items())]
        jobs.sort(key=lambda job: (job["metadata"].get("creationTimestamp") or "", job["metadata"]["name"]))
        return Jobs([AsyncJobHandle(self, job) for job in jobs], [status_of(view_of(job, [], [])) for job in jobs])

    async def sweep(
        self,
        what: Callable[..., Any] | str | Path,
        space: Mapping[str, Any],
        *,
        progress: bool = True,
        **options: Unpack[SweepOptions],
    ) -> SweepResult:
        """Search for the best arguments by trials, each of which is a TrainingJob.

        The sweep is in a file. The same call continues it after an interruption: it follows the trials that still run,
        and starts those again whose jobs are gone.

        Args:
            what: a function at the top level of a module, or the path of a script.
            space: a list of choices, ``(low, high)``, ``(low, high, "log")``, or a distribution of Optuna, for each
                argument by its name. Two whole numbers are a range of whole numbers.
            progress: whether to show the sweep while it runs.
            options: see `SweepOptions`.

        Raises:
            SweepFailed: the first trials failed, or the objective does not exist.
            SweepInUse: another process runs the sweep.
            BadInput, JobExists, ApiRequestError: see `submit`.
            ClusterUnreachable: the API server does not answer.
            MissingPackage: Optuna is not installed.
        """
        display = text_display_for(progress=progress)
        result: SweepResult | None = None
        try:
            async with contextlib.aclosing(self.sweep_states(what, space, **options)) as states:
                async for result in states:
                    if display is not None:
                        display.show(repr(result), result._repr_html_)
        finally:
            if display is not None:
                display.close()
        assert result is not None
        return result

    async def sweep_states(
        self, what: Callable[..., Any] | str | Path, space: Mapping[str, Any], **options: Unpack[SweepOptions]
    ) -> AsyncGenerator[SweepResult]:
        """Yields the states of a sweep, about once a second, until it has ended. See `sweep`."""
        cluster = await self.cluster()
        made = prepared_sweep(what, space, options, cluster, self._image)

        async def start(name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> AsyncJobHandle:
            return await self.submit(what, **made.options_of(name, params, labels))

        async def existing(labels: Mapping[str, str]) -> dict[str, AsyncJobHandle]:
            return {job.name: job for job in await self.list(labels=labels)}

        with made.store() as store:
            runner = made.runner(store, TrialJobs(start, existing))
            async with contextlib.aclosing(runner.run()) as states:
                async for trials in states:
                    self.raise_if_ended()
                    yield SweepResult.of(store.plan, trials, store.study)

    async def _delete_ended(self, namespace: str, name: str) -> None:
        cluster = await self.cluster()
        try:
            found = await cluster.api.get_job(namespace, name)
        except ApiRequestError as error:
            if error.code == 404:
                return
            raise
        phase = (found.get("status") or {}).get("phase") or "Pending"
        if phase not in TERMINAL:
            raise JobExists(f"the TrainingJob {name} is {phase}: replace= deletes only a job that has ended")
        try:
            await cluster.api.delete_job(namespace, name, found["metadata"]["uid"])
        except ApiRequestError as error:
            if error.code != 409:
                raise
            raise JobExists(f"another TrainingJob {name} was created meanwhile, and is not deleted") from None
        await until_gone(cluster, namespace, name, found["metadata"]["uid"])

    # ---- The connection ----

    async def cluster(self) -> FoundCluster:
        """Returns the connection, which is opened at the first call."""
        if self._cluster is None:
            async with self._opening:
                if self._closed:
                    raise BadInput("this client is closed")
                if self._cluster is None:
                    self._cluster = await self._open()
        return self._cluster

    async def cluster_of(self, namespace: str | None) -> FoundCluster:
        """Returns the same connection, for another namespace, or for that of the client if it is None."""
        cluster = await self.cluster()
        return cluster if namespace is None else replace(cluster, namespace=namespace)

    async def api(self) -> ApiCalls:
        """Returns the API server, for changes.

        Raises:
            BadInput: the cluster is a run that has ended.
        """
        cluster = await self.cluster()
        if not isinstance(cluster.api, ApiCalls):
            raise BadInput(f"{cluster.name} can only be read: start a cluster with Client.local() or `backstay up`")
        return cluster.api

    def raise_if_ended(self) -> None:
        """Raise `SessionError` if the embedded cluster of `local` has died."""
        if self._session is not None and self._session.died.done():
            raise self._session.death()

    async def _open(self) -> FoundCluster:
        if self._folder is None:
            return await self._stack.enter_async_context(open_cluster(self._where))
        folder, namespace = self._folder, self._where.namespace or "default"
        run = register(folder, None, ("python", "backstay.Client.local()"))
        self._stack.callback(store_result, run, {"reason": "Closed", "message": "the client was closed"})
        modules = preload()
        try:
            session = await self._stack.enter_async_context(
                lasting_session(folder, preload=modules, user_environment=True)
            )
        except BaseException as error:
            self._stack.pop_all()  # what closing would store is not how the run ended
            why = str(error) if isinstance(error, SessionError) else "its start was interrupted"
            store_result(run, {"reason": "EmbeddedClusterFailed", "message": why})
            raise
        self._session = session
        return FoundCluster(session.api, namespace, f"the embedded cluster in {folder}", folder)
