"""A TrainingJob on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backstay_client.asynchronous.job import (
    PATIENCE,
    AsyncJobHandle,
    checked,
    checkpoint_of,
    load_checkpoint,
)
from backstay_client.blocking.thread import LoopThread
from backstay_client.reading.curve import TrainingCurve
from backstay_client.reading.history import JobHistory
from backstay_client.reading.trace import Written
from backstay_client.show.frames import curve_frame
from backstay_client.show.html import job_card
from backstay_client.show.progress import display_for
from backstay_client.view.follow import JobView
from backstay_client.view.status import JobStatus, status_of

__all__ = ["JobHandle", "LogLines"]


class LogLines(Iterator[str]):
    """The lines of logs, one after the other. In a notebook and as a text, it is all lines."""

    def __init__(self, lines: Iterator[str], *, follow: bool, owner: object = None) -> None:
        """`owner` stays open as long as these lines: a client that nothing refers to is closed."""
        self._lines, self._follow, self._owner = lines, follow, owner

    def __next__(self) -> str:
        return next(self._lines)

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def __repr__(self) -> str:
        return "<the lines of running logs: use `for line in ...`>" if self._follow else str(self)


class JobHandle:
    """A TrainingJob on a cluster. The job continues without this handle.

    `Client.submit`, `Client.job` and `Client.list` make handles. In a notebook, a handle is shown as a small table with
    a curve of the loss.

    Attributes:
        name: the job's name.
        namespace: its namespace.
        uid: its uid. Another job that gets the name later is not this one.
    """

    def __init__(self, owner: object, thread: LoopThread, job: AsyncJobHandle) -> None:
        self.name, self.namespace, self.uid = job.name, job.namespace, job.uid
        self._owner = owner  # a client that nothing refers to closes its thread
        self._thread, self._job = thread, job

    def __repr__(self) -> str:
        return repr(self._job)

    def _repr_html_(self) -> str:
        status = self.status
        return job_card(status, self.curve().values("loss"))

    @property
    def status(self) -> JobStatus:
        """The state now, which is read at each use.

        Raises:
            JobDeleted: the job does not exist any more.
            ApiRequestError, aiohttp.ClientError, OSError: the cluster refused, or does not answer.
        """
        return self._thread.run(self._job.status())

    def wait(
        self, timeout: float | None = None, *, progress: bool = True, check: bool = True, patience: float = PATIENCE
    ) -> JobStatus:
        """Wait until the job has ended. Ctrl-C ends the wait, and not the job.

        Args:
            timeout: seconds to wait; None: as long as it takes.
            progress: whether to show a bar on a terminal, a card in a notebook, and lines elsewhere.
            check: whether a job that has failed raises.
            patience: seconds without an answer of the API server after which the wait ends.

        Raises:
            TrainingFailed: the job has failed.
            TimeoutError: the job has not ended within `timeout`.
            JobDeleted: the job was deleted.
            ClusterUnreachable: the API server does not answer.
            ApiRequestError: the cluster refuses.
        """
        display = display_for(progress=progress)
        view: JobView | None = None
        try:
            # The caller's thread shows the progress: a notebook knows by it which cell the output belongs to.
            for view, trouble in self._thread.iterate(self._job.watch(patience, timeout)):
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
    ) -> LogLines:
        """Returns the lines of the pods' logs. Unless one pod is chosen, each line begins with its pod.

        Args:
            follow: continue until the job ends, also in replacements of pods.
            rank: only pods with this rank or shard.
            role: ``server``, ``worker`` or ``evaluator``; None: worker with a `rank`, else every role.
            previous: only the pods that the current ones replaced.
            tail: the number of lines at the end of each log; None: all.

        Raises:
            BadInput: the job has no such pod.
        """
        lines = self._job.logs(follow=follow, rank=rank, role=role, previous=previous, tail=tail)
        return LogLines(self._thread.iterate(lines), follow=follow, owner=self)

    def curve(self) -> TrainingCurve:
        """Loss and metrics over the steps; without points if nothing is known."""
        return self._thread.run(self._job.curve())

    def metrics(self) -> Any:
        """Loss and metrics over the steps as a `pandas.DataFrame`, whose index are the steps.

        Its columns are `loss`, the metrics that `loss` returned, and ``evaluation/NAME`` for those of `evaluate`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        return curve_frame(self.curve())

    def history(self) -> JobHistory:
        """Returns the past of the job, with its phases, and the deaths of its pods with causes and costs."""
        return self._thread.run(self._job.history())

    def trace(self, path: str | Path, *, last: float | None = None) -> Written:
        """Write what each pod did in the last minutes, on one clock, for https://ui.perfetto.dev.

        Args:
            path: the file; a name that ends in ``.gz`` is compressed.
            last: only this many seconds before the end; None: all.

        Raises:
            BadInput: there is no timeline, or the file cannot be written.
        """
        return self._thread.run(self._job.trace(path, last=last))

    def result(self, like: Any = None) -> Any:
        """Returns the newest checkpoint, as `backstay.load` returns it: `.params`, `.state`, `.step`, `.metrics`.

        Args:
            like: see `backstay.load`.

        Raises:
            NoResult: the job has stored no checkpoint, or this machine cannot read it.
        """
        return load_checkpoint(checkpoint_of(self.status), like)

    def scale(self, workers: int) -> None:
        """Change the number of workers of a running job, backups included.

        Raises:
            ApiRequestError: the number is not valid.
        """
        self._thread.run(self._job.scale(workers))

    def suspend(self, *, wait: bool = True) -> None:
        """Delete all pods; the servers store a checkpoint first. `resume` starts them again.

        Args:
            wait: whether to wait until the pods have ended and the status has their checkpoint, for at most 60 s.

        Raises:
            PodsRemain: some pods still run.
        """
        self._thread.run(self._job.suspend(wait=wait))

    def resume(self) -> None:
        """Start a suspended job again, from its newest checkpoint."""
        self._thread.run(self._job.resume())

    def delete(self, *, wait: bool = True) -> None:
        """Delete the job with its pods. Checkpoints stay. A job that was deleted already is not an error.

        Args:
            wait: whether to wait until the pods are gone, for at most 90 s.

        Raises:
            PodsRemain: the pods still exist.
        """
        self._thread.run(self._job.delete(wait=wait))
