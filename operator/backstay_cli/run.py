"""Starts an embedded cluster, with a job or without one (`backstay run` and `backstay up`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TextIO, cast

import aiohttp
from rich.console import Console

from backstay_cli import report, stopping
from backstay_cli.interrupts import on_signals
from backstay_cli.program import BAD_INPUT, FAILED, INTERRUPTED, OK, is_of_output
from backstay_cli.script_output import ScriptOutput
from backstay_cli.view import LiveDisplay
from backstay_client.creating import OtherRefused, create_job, create_others
from backstay_client.embedded import program_store
from backstay_client.embedded.preload import preload
from backstay_client.embedded.run_folder import lasting_session, store_result
from backstay_client.embedded.session import RESTARTS, Session, SessionError, start_session
from backstay_client.errors import BadInput
from backstay_client.finding.known_runs import KnownRun, register
from backstay_client.finding.stored_run import StateFile
from backstay_client.kube import ApiCalls, ApiRequestError
from backstay_client.show.lines import Display, LineDisplay
from backstay_client.view.follow import JobView, look
from backstay_client.view.pods import has_ended, slot_of
from backstay_client.words import shortened
from backstay_spec import contract

_LAST_SECONDS = 2.0
_POLL_SECONDS = 0.25
_LOGS = "pods"
_COMPILED = ".compiled"  # the folder of JAX's cache of compilations in the cluster
_UNSEEN_SECONDS = 60.0


class LineWriter(io.TextIOBase):
    """Writes to a stream. If that fails, such as after ``| head``, the job continues without what was written.

    Attributes:
        error: why something could not be written; None: all was, or its reader has ended, or the terminal is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self.error: str | None = None

    def __call__(self, line: str) -> None:
        """Write one line."""
        print(line, file=self, flush=True)

    def write(self, text: str) -> int:
        with self._remembered():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._remembered():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        return self._stream.encoding

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_of_output(error):
                raise
            if self._terminal and error.errno == errno.EIO:  # it is closed: the rest goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            elif self.error is None and not isinstance(error, BrokenPipeError):
                self.error = f"the output cannot be written: {error.strerror}"


def run_job(
    job: dict[str, Any],
    folder: Path,
    *,
    as_json: bool,
    again: str = "",
    live: bool | None = None,
    user_environment: bool = False,
    preloaded: bool = True,
    trace: Path | None = None,
    env: Mapping[str, str] | None = None,
    others: Sequence[dict[str, Any]] = (),
    lines: Callable[[JobView, float, Path], Iterator[str]] = report.lines,
) -> int:
    """Run one job to its end and report the outcome.

    Args:
        job: a valid TrainingJob, localised.
        folder: the folder for logs, volumes and the kubeconfig, which is kept.
        as_json: whether to print one object on stdout at the end, and everything else on stderr.
        again: the command that continues the job after an interruption.
        live: redraw in place; by default when stdout is a terminal.
        user_environment: pods get the environment of this process, except the variables of Backstay and Kubernetes.
        preloaded: pods are forked from a process that has imported JAX and the script's imports.
        trace: write the job's timeline to this file.
        env: more variables of every pod.
        others: objects that are created before the job, as far as the embedded cluster has their kind.
        lines: the report about a job that has ended.

    Returns:
        The exit status: 0 Succeeded, 1 Failed, 130 interrupted or suspended.
    """
    # Programs read the object from standard output, so nothing else may be there.
    write_line = LineWriter(sys.stderr if as_json else sys.stdout)
    console = Console(file=cast(IO[str], write_line))
    known = register(folder, job)
    use_live = (console.is_terminal and not as_json) if live is None else live

    hint = f"Ctrl-C stops the job; for kubectl: export KUBECONFIG={shortened(str(folder / 'backstay.kubeconfig'))}"
    display: Display = LiveDisplay(console, hint) if use_live else LineDisplay(write_line)
    following = Following(job, display, folder / _LOGS, StateFile(folder))
    started = time.monotonic()

    def conclude(reason: str | None = None, message: str | None = None) -> None:
        """Store the object for programs, and print it.

        Args:
            reason, message: why this is the end, if the job's own end cannot be reported.
        """
        view = following.view or JobView(following.name, following.namespace)
        if reason is not None:
            view = stopping.with_stored(view, folder / _LOGS)
        seconds = time.monotonic() - started
        found = report.summary(view, seconds, folder / _LOGS, reason=reason, message=message)
        keep_result(known, found)
        if as_json:
            print(report.as_json(found), flush=True)

    def stopped(reason: str, how: str) -> int:
        """Report an end before the job's end, which `how` describes. Returns the exit status."""
        closing = list(stopping.closing_lines(following.view, job, folder / _LOGS, again, how))
        for line in closing:
            write_line(line)
        keep_trace(trace, following, folder / _LOGS, write_line)
        conclude(reason, closing[0])
        return INTERRUPTED

    try:
        view = asyncio.run(
            _interruptible(
                _run(job, folder, following, user_environment, preload(job) if preloaded else None, env, others)
            )
        )
    except asyncio.CancelledError:
        return stopped("Interrupted", "stopped")
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        keep_trace(trace, following, folder / _LOGS, write_line)
        conclude("EmbeddedClusterFailed", str(error))
        return FAILED
    except (ApiRequestError, OtherRefused) as error:
        why = str(error) if isinstance(error, OtherRefused) else f"the API server refused the job: {error}"
        print(f"error: {why}", file=sys.stderr)
        keep_result(known, {"job": following.name, "reason": "Refused", "message": str(error)})
        return BAD_INPUT
    if view.phase == "Suspended":
        return stopped("Suspended", "suspended")
    seconds = time.monotonic() - started
    for line in lines(view, seconds, folder / _LOGS):
        write_line(line)
    kept = keep_trace(trace, following, folder / _LOGS, write_line)
    conclude()
    if write_line.error is not None:
        print(f"error: {write_line.error}; see the result with `backstay history`", file=sys.stderr)
        return FAILED
    return OK if view.phase == "Succeeded" and kept else FAILED


def keep_trace(out: Path | None, following: Following, logs: Path, write_line: Callable[[str], None]) -> bool:
    """Write the timeline that the job's newest server of shard 0 has stored. Returns False if that failed."""
    if out is None:
        return True
    from backstay_client.reading.trace import stored_trace

    # Not `NAME-*`: the pods of a job `digits-2` are not those of a job `digits`.
    servers = [str(pod) for pod in (logs / following.namespace).glob(f"{following.name}-ps-0-*")]
    try:
        written = stored_trace(servers, () if following.view is None else following.view.history, out)
        if written is None:
            raise BadInput("--trace: the job has stored no timeline")
        write_line(written.summary())
    except BadInput as error:
        print(f"error: {str(error).replace('--out', '--trace', 1)}", file=sys.stderr)
        return False
    return True


async def _interruptible(work: Any) -> Any:
    """Run `work` until it ends, or is cancelled by SIGINT, SIGTERM or SIGHUP; it can always clean up."""
    task = asyncio.ensure_future(work)
    on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), task.cancel)
    return await task


class Following:
    """Shows one job while it runs.

    Attributes:
        namespace, name: the job's namespace and name.
        view: the job as it was last observed; None: it was not observed yet.
    """

    def __init__(self, job: dict[str, Any], display: Display, logs: Path, state: StateFile) -> None:
        self.namespace, self.name = job["metadata"]["namespace"], job["metadata"]["name"]
        self.view: JobView | None = None
        self.display = display
        self._state = state
        self._output = ScriptOutput(logs)

    def stage(self, text: str) -> None:
        """Show the part that is being started, before the job exists, or stopped, after it."""
        view = self.view or JobView(self.name, self.namespace)
        self.display.show(replace(view, stage=text))

    async def look(self, api: ApiCalls, trouble: str = "") -> JobView:
        """Read the job's state, and show it with the new output of worker 0's script.

        Args:
            trouble: shown instead of the reason for which the job waits.
        """
        self.view = view = await look(api, self.namespace, self.name, self.view)
        self._state.add([view.job], view.pods)
        self.display.print(self._output.new_lines(view.pods, updated=bool(view.report.step)))
        self.display.show(replace(view, stage=trouble) if trouble and not view.ended else view)
        return view

    def end(self) -> None:
        """Store the last state, and show the rest of the script's output."""
        self._state.write()
        if self.view is not None:
            self.display.print(self._output.new_lines(self.view.pods, updated=bool(self.view.report.step)))
            self.display.print(self._output.end(failed=self.view.phase == "Failed"))


async def _run(
    job: dict[str, Any],
    folder: Path,
    following: Following,
    user_environment: bool,
    modules: str | None,
    env: Mapping[str, str] | None,
    others: Sequence[dict[str, Any]],
) -> JobView:
    # Runs below one common folder share their compiled programs through that folder.
    store = program_store.store_in(folder.parents[1] if folder.parent.name == "runs" else folder)
    program_store.seed(store, folder / _COMPILED)
    with following.display:
        try:
            async with start_session(
                folder, following.stage, restarts=RESTARTS, user_environment=user_environment, preload=modules, env=env
            ) as session:
                await create_others(session.api, others, following.namespace)
                await create_job(session.api, job, embedded=True)
                try:
                    view = await _follow(session, following)
                    if view.phase == "Succeeded" and not view.restarts and not view.disruptions:
                        program_store.keep(folder / _COMPILED, store)
                    return view
                except asyncio.CancelledError:
                    if stopping.stores(job) and following.view is not None and following.view.report.step:
                        following.stage("stopping: the servers store a checkpoint; Ctrl-C again stops them now")
                        before = following.view.pods
                        await stopping.stop_job(session.api, following.namespace, following.name)
                        # The phase, the step and the checkpoint have changed since.
                        with contextlib.suppress(ApiRequestError, aiohttp.ClientError, OSError):
                            await following.look(session.api)
                        following.view = stopping.with_former(following.view, before)
                    raise
        finally:
            following.end()


async def _follow(session: Session, following: Following) -> JobView:
    deadline = time.monotonic() + _UNSEEN_SECONDS
    while True:
        try:
            view = await following.look(session.api, session.trouble)
        except ApiRequestError as error:
            if error.code == 404:  # the job was deleted, for example with kubectl
                raise SessionError(f"the job {following.name} was deleted while it ran") from None
            raise
        except (aiohttp.ClientError, TimeoutError, OSError):
            if session.died.done():
                raise session.death() from None
        else:
            if view.ended:
                return await _last_look(session, following)
            if view.phase == "Suspended":  # by kubectl: no pod runs, and the cluster ends with this command
                return view
            if not view.seen and time.monotonic() > deadline:
                log = session.folder / "operator.log"
                ended = f" ({session.operator.last_end})" if session.operator.last_end else ""
                text = f"the operator has not reconciled the job within {_UNSEEN_SECONDS:.0f} s{ended}, see {log}"
                raise SessionError(text)
        if session.died.done():
            raise session.death()
        await asyncio.sleep(_POLL_SECONDS)


async def _last_look(session: Session, following: Following) -> JobView:
    """Returns the job once its workers have ended: their last seconds are part of its goodput."""
    deadline = time.monotonic() + _LAST_SECONDS
    with contextlib.suppress(ApiRequestError, aiohttp.ClientError, TimeoutError, OSError):
        while time.monotonic() < deadline:
            pods = await session.api.pods_of(following.namespace, following.name)
            if all(has_ended(pod) for pod in pods if slot_of(pod)[0] == contract.ROLE_WORKER):
                break
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)  # the operator writes the status then
        return await following.look(session.api)
    assert following.view is not None
    return following.view


def up(folder: Path, write_line: Callable[[str], None], *, preloaded: bool = True) -> int:
    """Keep an embedded cluster running until it is interrupted, and print how to use kubectl with it."""
    known = register(folder, None)

    async def serve() -> None:
        async with lasting_session(folder, preload=preload() if preloaded else None) as session:
            write_line("The embedded cluster and the operator are running. In another terminal:\n")
            write_line(f"  export KUBECONFIG={session.kubeconfig}")
            write_line(
                "  kubectl create configmap NAME --from-file=train.py   # for a job with spec.code.configMap: NAME"
            )
            write_line("  kubectl apply -f job.yaml")
            write_line("  kubectl get trainingjobs --watch\n")
            write_line(f"Logs of every pod are in {session.folder / _LOGS}. Ctrl-C stops the cluster.")
            await session.died
            raise session.death()

    try:
        asyncio.run(_interruptible(serve()))
    except asyncio.CancelledError:
        keep_result(known, {"reason": "Interrupted", "message": "`backstay up` was stopped"})
        write_line("stopped; nothing is left running")
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        keep_result(known, {"reason": "EmbeddedClusterFailed", "message": str(error)})
        return FAILED
    return OK


def keep_result(run: KnownRun, result: Mapping[str, Any]) -> None:
    """Store the end of a run in its folder; a full disk only leaves it out."""
    if problem := store_result(run, result):
        print(f"warning: {problem}", file=sys.stderr)
