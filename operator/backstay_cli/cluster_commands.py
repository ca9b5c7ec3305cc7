"""The commands about jobs on any cluster, and about runs on this machine: status, top, logs, list, trace and others.

They are also the commands of `kubectl backstay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import aiohttp
import typer
from rich.console import Console
from rich.live import Live

from backstay_cli.interrupts import on_signals
from backstay_cli.program import FAILED, INTERRUPTED, StrictCommand, is_of_output, refuse
from backstay_client.errors import BadInput
from backstay_client.finding.clusters import (
    FoundCluster,
    NoSuchJob,
    Where,
    default_kubeconfig,
    named_kubeconfig,
    open_cluster,
    runs_of,
)
from backstay_client.finding.known_runs import KnownRun
from backstay_client.jobfiles.bounded_yaml import as_yaml
from backstay_client.kube import ApiRequestError
from backstay_client.pod_ends import PodsRemain, until_gone
from backstay_client.view.follow import JobView, look
from backstay_client.words import current_folder

__all__ = [
    "Output",
    "add_commands",
    "choose",
    "with_cluster",
    "write_object",
]

_TOP_SECONDS = 2.0
_LIVE_SECONDS = 0.5
_NO_TERMINAL = 4096  # columns

_T = TypeVar("_T")


class Output(StrEnum):
    """The format in which a command prints its result."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


class _Role(StrEnum):
    SERVER = "server"
    WORKER = "worker"
    EVALUATOR = "evaluator"


Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="The kubeconfig. [default: KUBECONFIG, else the run in this folder, else ~/.kube/config, else the newest "
        "run on this machine]",
        show_default=False,
    ),
]
Local = Annotated[bool, typer.Option("--local", help="Only runs of `backstay run` and `backstay up` on this machine.")]
Context = Annotated[str | None, typer.Option(help="The context of the kubeconfig. [default: the current one]")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The namespace. [default: the context's]")]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="text, json or yaml.", case_sensitive=False)]
Job = Annotated[
    str | None,
    typer.Argument(
        help="The job's name, or the folder of a run on this machine. [default: the only job]", show_default=False
    ),
]


def with_cluster(where: Where, work: Callable[[FoundCluster], Awaitable[_T]], job: str | None = None) -> _T:
    """Connect and do the work; turn errors into a message and an exit status.

    Args:
        job: the job's name, or the folder of its run; None: not given.

    Raises:
        typer.Exit: the work failed: 2 for invalid input, 1 for a refusal or no answer, 130 for an interruption.
    """

    async def run() -> _T:
        try:
            async with open_cluster(where, job) as cluster:
                return await _noted(cluster, work)
        except (ApiRequestError, NoSuchJob) as error:
            missing = isinstance(error, NoSuchJob) or error.code == 404
            if job is None or not missing or not cluster.is_default:
                raise
            async with contextlib.AsyncExitStack() as stack:
                try:
                    found = await stack.enter_async_context(open_cluster(replace(where, local=True), job))
                except BadInput:  # no run has such a job
                    raise error from None
                return await _noted(found, work)

    return _reported(run)


def _reported(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Do the work; turn errors into a message and an exit status.

    Raises:
        typer.Exit: the work failed: 2 for invalid input, 1 for a refusal or no answer, 130 for an interruption.
    """

    async def run() -> _T:
        task = asyncio.current_task()
        assert task is not None
        on_signals((signal.SIGINT, signal.SIGTERM), task.cancel)
        return await work()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
    except BadInput as error:
        refuse(str(error))
    except ApiRequestError as error:
        print(f"error: {_refusal(error)}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if is_of_output(error) and not isinstance(error, aiohttp.ClientError):
            raise
        why = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectorError):  # its text has the repr of the TLS context
            why = f"{error.host} port {error.port}: {error.os_error.strerror or error.os_error}"
        print(f"error: the API server does not answer: {why}", file=sys.stderr)
        raise typer.Exit(FAILED) from None


async def _noted(cluster: FoundCluster, work: Callable[[FoundCluster], Awaitable[_T]]) -> _T:
    if cluster.note:
        print(f"note: {cluster.note}", file=sys.stderr)
    return await work(cluster)


def _refusal(error: ApiRequestError) -> str:
    if error.code == 404 and "the server could not find the requested resource" in str(error):
        return "this cluster has no TrainingJobs: install Backstay with `helm install backstay`"
    return str(error) or f"the API server answered with HTTP status {error.code}"


def write_object(found: Any, output: Output) -> None:
    """Print an object as JSON or YAML."""
    if output is Output.JSON:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print(as_yaml(found), end="")


async def choose(cluster: FoundCluster) -> str:
    """Returns the job's name, which is given or that of the only job.

    Raises:
        BadInput: no name is given, and the namespace has none or several jobs.
    """
    if cluster.job is not None:
        return cluster.job
    names = [job["metadata"]["name"] for job in await cluster.api.list_jobs(cluster.namespace)]
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise BadInput(f"there is no TrainingJob in namespace {cluster.namespace} of {cluster.name}")
    where = f"namespace {cluster.namespace} has {len(names)} jobs"
    raise BadInput(f"no job was named, and {where}: name one of {', '.join(sorted(names))}")


def _where(
    ctx: typer.Context,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None = None,
    *,
    local: bool = False,
) -> Where:
    embedded = bool(ctx.obj)
    if local and not embedded:
        refuse("--local is for `backstay`: kubectl does not know runs on this machine")
    if local and (kubeconfig is not None or context is not None):
        refuse("--local cannot be used with --kubeconfig or --context: it means runs on this machine")
    return Where(kubeconfig, context, namespace, embedded, local)


def _status(
    ctx: typer.Context,
    job: Job = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
    output: Format = Output.TEXT,
) -> None:
    """Show the state of a job: progress, what each pod does now, deaths with their causes and costs, and advice.

    Exit status: 0: the job is shown; 1: the job does not exist, or the cluster refused; 2: the input is invalid.
    """
    from backstay_cli.picture import page
    from backstay_client.view import explain

    async def show(cluster: FoundCluster) -> tuple[JobView, str]:
        return await look(cluster.api, cluster.namespace, await choose(cluster)), cluster.name

    view, name = with_cluster(_where(ctx, kubeconfig, context, namespace, local=local), show, job)
    if output is Output.TEXT:
        _console().print(page(view, time.time(), name))
    else:
        write_object(explain.as_object(view), output)


def _list_jobs(
    ctx: typer.Context,
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Also the older runs on this machine. [default: the newest 20]")
    ] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
    output: Format = Output.TEXT,
) -> None:
    """List the jobs; running jobs come first.

    Without KUBECONFIG, these are the jobs of all runs on this machine, the ended ones included. If nothing runs
    in this folder, and there is ~/.kube/config, they are the jobs of its cluster.
    """
    from backstay_cli import listing

    chosen = _where(ctx, kubeconfig, context, namespace, local=local)

    async def of_cluster(cluster: FoundCluster) -> tuple[list[JobView], str]:
        jobs = await cluster.api.list_jobs(None if everywhere else cluster.namespace)
        return listing.views(jobs), f"namespace {cluster.namespace} of {cluster.name}"

    runs = _listed_runs(chosen)
    if not runs:
        found, place = with_cluster(chosen, of_cluster)
        place = "all namespaces" if everywhere else place
    else:
        found, place = _reported(lambda: listing.views_of_runs(runs, namespace)), "the runs on this machine"
    if output is not Output.TEXT:
        write_object(listing.as_rows(found), output)
        return
    shown = found if every else listing.without_old(found)
    if found:
        several = everywhere or len({view.namespace for view in shown}) > 1
        _console().print(listing.table(shown, everywhere=several))
    else:
        print(f"there is no TrainingJob in {place}", file=sys.stderr)
    for line in listing.notes(found, shown, runs, [] if runs else runs_of(chosen)):
        print(line, file=sys.stderr)


def _top(
    ctx: typer.Context,
    job: Job = None,
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
) -> None:
    """Show all jobs, or one job with its pods, redrawn until Ctrl-C; only once if the output is not a terminal."""
    console = _console()

    async def show(cluster: FoundCluster) -> None:
        if job is not None:
            await _top_job(cluster, job, console)
        else:
            await _top_jobs(cluster, console, everywhere=everywhere)

    try:
        with_cluster(_where(ctx, kubeconfig, context, namespace, local=local), show, job)
    except typer.Exit as ended:
        if ended.exit_code != INTERRUPTED or not console.is_terminal:
            raise


def _logs(
    ctx: typer.Context,
    job: Job = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only pods with this rank or shard.")] = None,
    role: Annotated[
        _Role | None,
        typer.Option(help="Only pods with this role. [default: worker with --rank, else every role]"),
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Only the previous pods, which the current pods replaced.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the job ends, even in replacements of pods.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Number of lines from the end of each log. [default: all]")
    ] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
) -> None:
    """Print the logs of a job's pods. Unless one pod is chosen, each line begins with its pod."""
    from backstay_client.reading.logs import ROLES, WantedLogs, show_logs

    chosen = _Role.WORKER if role is None and rank is not None else role
    wanted = WantedLogs(None if chosen is None else ROLES[chosen.value], rank, previous, follow, tail)
    if previous and follow:
        refuse("--previous and --follow cannot be used together: a replaced pod writes no more")

    async def show(cluster: FoundCluster) -> None:
        await show_logs(cluster, await choose(cluster), wanted, lambda line: print(line, flush=follow))

    with_cluster(_where(ctx, kubeconfig, context, namespace, local=local), show, job)


def _trace(
    ctx: typer.Context,
    job: Job = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write; .gz compresses it. [default: JOB.trace.json]"),
    ] = None,
    stored: Annotated[
        str | None,
        typer.Option("--from", help="Read a stored timeline: a file, or a folder or URI that contains timelines."),
    ] = None,
    last: Annotated[
        float | None, typer.Option(min=0.0, help="Write only this many seconds before the end. [default: all]")
    ] = None,
    jax_profile: Annotated[
        Path | None,
        typer.Option(help="A trace of one worker by jax.profiler, or the folder with it, to join on the same clock."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The worker of --jax-profile.")] = 0,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
) -> None:
    """Write what each pod of a job did in its last minutes, on one clock, for https://ui.perfetto.dev.

    A running job sends its timeline. If the job has ended, the timeline beside its checkpoints is read.

    Exit status: 0: the file is written; 1: there is no such job, or the cluster refused; 2: the input is invalid,
    or there is no timeline.
    """
    from backstay_client.reading.trace import WantedTrace, Written, trace_of_file, trace_of_job

    wanted = WantedTrace(last, jax_profile, rank)

    async def write(cluster: FoundCluster) -> Written:
        name = await choose(cluster)
        return await trace_of_job(cluster, name, out or Path(f"{name}.trace.json"), wanted)

    if stored is not None:
        try:
            written = trace_of_file(stored, out or Path("trace.json"), wanted)
        except BadInput as error:
            refuse(str(error))
    else:
        written = with_cluster(_where(ctx, kubeconfig, context, namespace, local=local), write, job)
    print(written.summary())


def _history(
    ctx: typer.Context,
    job: Job = None,
    stored: Annotated[
        str | None,
        typer.Option("--from", help="Read the history from this checkpoint folder or URI, even of a deleted job."),
    ] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
    output: Format = Output.TEXT,
) -> None:
    """Show what happened to a job: phases, deaths with causes and costs, rollbacks, and reports about dead pods.

    Exit status: 0: the history is shown; 1: the cluster refused; 2: the input is invalid, or there is no history.
    """
    from backstay_client.reading.history import JobHistory, as_object, history_of_job, history_of_place, lines

    async def find(cluster: FoundCluster) -> JobHistory:
        return await history_of_job(cluster, await choose(cluster))

    if stored is not None:
        try:
            found = history_of_place(stored, job)
        except BadInput as error:
            refuse(str(error))
    else:
        found = with_cluster(_where(ctx, kubeconfig, context, namespace, local=local), find, job)
    if output is not Output.TEXT:
        write_object(as_object(found), output)
        return
    for line in lines(found, time.time()):
        print(line)


def _delete(
    ctx: typer.Context,
    jobs: Annotated[list[str], typer.Argument(help="The names of the jobs.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Local = False,
    wait: Annotated[bool, typer.Option(help="Wait until the pods are gone.")] = True,
) -> None:
    """Delete jobs with their pods. Checkpoints stay.

    Exit status: 0: all were deleted; 1: one does not exist, or the cluster refused.
    """

    chosen = _where(ctx, kubeconfig, context, namespace, local=local)

    async def remove_all(cluster: FoundCluster) -> bool:
        return await _delete_jobs(cluster, jobs, wait=wait)

    async def remove(cluster: FoundCluster) -> bool:
        return await _delete_jobs(cluster, [await choose(cluster)], wait=wait)

    if context is not None or _kubeconfig(chosen) is not None:
        done = with_cluster(chosen, remove_all)
    else:  # each job may be in another run
        ends = [with_cluster(chosen, remove, job) for job in jobs]
        done = all(ends)
    if not done:
        raise typer.Exit(FAILED)


_COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "status": _status,
    "list": _list_jobs,
    "top": _top,
    "logs": _logs,
    "trace": _trace,
    "history": _history,
    "delete": _delete,
}


def add_commands(app: typer.Typer, *, embedded: bool) -> None:
    """Add the commands to an app.

    Args:
        embedded: search for runs on this machine, which a kubectl plugin does not do.
    """
    for name, command in _COMMANDS.items():
        app.command(name, cls=StrictCommand, context_settings={"obj": embedded})(command)


def _listed_runs(where: Where) -> list[KnownRun]:
    """Returns the runs on this machine that `list` shows; none if it shows the jobs of a cluster."""
    if where.context is not None or _kubeconfig(where) is not None:
        return []
    runs = runs_of(where)
    here = current_folder()
    runs_here = here is not None and any(run.lives and run.is_of(here) for run in runs)
    return runs if runs_here or default_kubeconfig(where) is None else []


def _kubeconfig(where: Where) -> Path | None:
    """Returns the kubeconfig that the options or KUBECONFIG name.

    Raises:
        typer.Exit: the file does not exist.
    """
    try:
        return named_kubeconfig(where)
    except BadInput as error:
        refuse(str(error))


def _console() -> Console:
    """Returns the console. If the output is not a terminal, lines are neither wrapped nor cut."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_NO_TERMINAL)


async def _top_jobs(cluster: FoundCluster, console: Console, *, everywhere: bool) -> None:
    from backstay_cli import listing

    async def picture() -> Any:
        jobs = await cluster.api.list_jobs(None if everywhere else cluster.namespace)
        return listing.top_table(listing.views(jobs), everywhere=everywhere, width=console.width)

    if not console.is_terminal:
        console.print(await picture())
        return
    async with _screen(console) as live:
        while True:
            live.update(await picture(), refresh=True)
            await asyncio.sleep(_TOP_SECONDS)


async def _top_job(cluster: FoundCluster, job: str, console: Console) -> None:
    from backstay_cli.picture import Picture
    from backstay_client.show.curve import Losses

    losses = Losses()
    view = await look(cluster.api, cluster.namespace, job)

    def picture() -> Picture:
        losses.add(view)
        ended = view.completed if view.completed is not None else time.time()
        elapsed = 0.0 if view.started is None else max(0.0, ended - view.started)
        return Picture(view, elapsed, losses, hint="Ctrl-C ends this view; the job continues")

    if not console.is_terminal:
        console.print(picture())
        return
    async with _screen(console) as live:
        while True:
            live.update(picture(), refresh=True)
            if view.ended:
                return
            await asyncio.sleep(_LIVE_SECONDS)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                view = await look(cluster.api, cluster.namespace, job, view)


@contextlib.asynccontextmanager
async def _screen(console: Console) -> AsyncIterator[Live]:
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield live


async def _delete_jobs(cluster: FoundCluster, names: Sequence[str], *, wait: bool) -> bool:
    """Returns whether all jobs existed and are deleted."""
    deleted: dict[str, str] = {}  # by name: its uid
    for name in names:
        try:
            answer = await cluster.api.delete_job(cluster.namespace, name)
        except ApiRequestError as error:
            if error.code != 404:
                raise
            print(f"error: there is no TrainingJob {name} in namespace {cluster.namespace}", file=sys.stderr)
            continue
        # The answer is a Status, or the job if something delays its end.
        deleted[name] = (answer.get("details") or answer.get("metadata") or {}).get("uid") or ""
        print(f"deleted {name}", flush=True)
    for name, uid in deleted.items() if wait else ():
        try:
            await until_gone(cluster, cluster.namespace, name, uid)
        except PodsRemain as error:
            print(f"error: {error}", file=sys.stderr)
            return False
    return len(deleted) == len(names)
