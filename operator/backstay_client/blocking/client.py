"""The client of a cluster."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from backstay_client.asynchronous.client import AsyncClient
from backstay_client.asynchronous.options import SubmitOptions
from backstay_client.asynchronous.sweep_options import SweepOptions
from backstay_client.blocking.job import JobHandle
from backstay_client.blocking.thread import LoopThread
from backstay_client.show.job_list import Jobs
from backstay_client.show.progress import text_display_for
from backstay_client.sweeps.results import SweepResult
from backstay_spec.types import TrainingJob

__all__ = ["Client"]


class Client:
    """Submits and follows TrainingJobs.

        client = backstay.Client()
        job = client.submit("train.py", workers=4)
        job.wait()

    It connects at its first call. Its calls also work where an event loop runs already, such as in a notebook. Close it
    with `close`, or use it as a context manager. `AsyncClient` has the same methods as coroutines.

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
        self._begin(AsyncClient(kubeconfig, context=context, namespace=namespace, image=image))

    @classmethod
    def local(cls, folder: str | Path | None = None, *, namespace: str | None = None) -> Self:
        """Returns a client with its own embedded cluster, which starts now and ends with the client or the process.

        Its pods are processes of this Python environment, and have the environment of this process.

        Args:
            folder: the folder for logs, volumes and checkpoints; None: a new one in ``.backstay/runs``. It is kept.
            namespace: the namespace; None: ``default``.

        Raises:
            SessionError: the cluster did not start.
        """
        client = cls.__new__(cls)
        client._begin(AsyncClient.local(folder, namespace=namespace))
        try:
            client._thread.run(client._client.cluster())
        except BaseException:
            client.close()
            raise
        return client

    def _begin(self, client: AsyncClient) -> None:
        self._client, self._thread = client, LoopThread()
        self._ending = weakref.finalize(self, _close, client, self._thread)

    def __enter__(self) -> Self:
        self._thread.run(self._client.cluster())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The jobs of `local` end with its cluster; others continue."""
        self._ending()

    def __repr__(self) -> str:
        return repr(self._client).replace("<AsyncClient", "<Client", 1)

    def submit(
        self,
        what: Callable[..., Any] | str | Path | TrainingJob | Mapping[str, Any],
        *,
        replace: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle:
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
        return JobHandle(self, self._thread, self._thread.run(self._client.submit(what, replace=replace, **options)))

    def job(self, name: str, *, namespace: str | None = None) -> JobHandle:
        """Returns the handle of an existing job.

        Raises:
            NoSuchJob: there is no such job.
        """
        return JobHandle(self, self._thread, self._thread.run(self._client.job(name, namespace=namespace)))

    def list(self, *, everywhere: bool = False, labels: Mapping[str, str] | None = None) -> Jobs[JobHandle]:
        """Returns the handles of all jobs, in order of their creation.

        Args:
            everywhere: the jobs of all namespaces.
            labels: only jobs with these labels.
        """
        found = self._thread.run(self._client.list(everywhere=everywhere, labels=labels))
        return Jobs([JobHandle(self, self._thread, job) for job in found], found.statuses)

    def sweep(
        self,
        what: Callable[..., Any] | str | Path,
        space: Mapping[str, Any],
        *,
        progress: bool = True,
        **options: Unpack[SweepOptions],
    ) -> SweepResult:
        """Search for the best arguments by trials, each of which is a TrainingJob.

            client.sweep(train, space={"rate": (1e-4, 1e-1, "log"), "width": [64, 128]}, trials=20)

        The sweep is in a file. The same call continues it after an interruption: it follows the trials that still run,
        and starts those again whose jobs are gone. Ctrl-C ends the call, and not the trials that run.

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
            for result in self._thread.iterate(self._client.sweep_states(what, space, **options)):
                if display is not None:
                    display.show(repr(result), result._repr_html_)
        finally:
            if display is not None:
                display.close()
        assert result is not None
        return result


def _close(client: AsyncClient, thread: LoopThread) -> None:
    thread.close(client.close())
