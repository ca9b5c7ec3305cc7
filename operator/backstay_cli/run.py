"""`backstay run` and `backstay up`: a job, or nothing yet, on an embedded cluster of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console

from backstay_cli import report
from backstay_cli.follow import JobView, look
from backstay_cli.jobfile import claims_of
from backstay_cli.kube import JOBS, ApiError
from backstay_cli.preload import preload
from backstay_cli.session import RESTARTS, Session, SessionError, start_session
from backstay_cli.view import Display, LineDisplay, LiveDisplay
from backstay_spec import contract

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_POLL_SECONDS = 0.25
_LOGS = "pods"
_UNSEEN_SECONDS = 60.0


def new_folder(name: str, base: Path | None = None) -> Path:
    """A folder of its own for one run: ``.backstay/runs/<job>-<time>-<pid>`` in the current folder.

    It is kept after the run, for the logs of all pods and the volumes with the checkpoints.
    """
    root = base if base is not None else Path.cwd() / ".backstay"
    folder = root / "runs" / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(parents=True)
    ignore = root / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return folder


def as_yaml(job: dict[str, Any]) -> str:
    """The job as a person would write it."""
    return yaml.safe_dump(job, sort_keys=False)


def run_job(
    job: dict[str, Any],
    folder: Path,
    *,
    as_json: bool,
    live: bool | None = None,
    user_environment: bool = False,
    preloaded: bool = True,
) -> int:
    """Run one job to its end and say what was seen.

    Args:
        job: a checked TrainingJob, localised.
        folder: for logs, volumes and the kubeconfig; kept.
        as_json: one object on stdout at the end, everything else on stderr.
        live: redraw in place; by default when stdout is a terminal.
        user_environment: pods get the environment of this process, without what is Backstay's or Kubernetes' own.
        preloaded: pods are forked from a process that has imported JAX and what the script imports.

    Returns:
        The exit status: 0 Succeeded, 1 Failed, 130 interrupted.
    """
    console = Console(stderr=as_json)
    use_live = (console.is_terminal and not as_json) if live is None else live

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    hint = f"Ctrl-C stops; for kubectl: export KUBECONFIG={report.shortened(str(folder / 'backstay.kubeconfig'))}"
    display: Display = LiveDisplay(console, hint) if use_live else LineDisplay(say)
    started = time.monotonic()
    try:
        view = asyncio.run(
            _interruptible(_run(job, folder, display, user_environment, preload(job) if preloaded else None))
        )
    except asyncio.CancelledError:
        say(f"stopped; nothing is left running. Logs of every pod in {report.shortened(str(folder / _LOGS))}")
        return INTERRUPTED
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except ApiError as error:
        print(f"error: the API server refused the job: {error}", file=sys.stderr)
        return BAD_INPUT
    seconds = time.monotonic() - started
    for line in report.lines(view, seconds, folder / _LOGS):
        say(line)
    if as_json:
        print(report.as_json(view, seconds), flush=True)
    return OK if view.phase == "Succeeded" else FAILED


async def _interruptible(work: Any) -> Any:
    """Run `work` until it ends, or is cancelled by SIGINT, SIGTERM or SIGHUP; it always gets to clean up."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await task


async def _run(
    job: dict[str, Any], folder: Path, display: Display, user_environment: bool, modules: str | None
) -> JobView:
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    with display:

        def say(stage: str) -> None:
            display.show(JobView(name=name, namespace=namespace, stage=stage))

        async with start_session(
            folder, say, restarts=RESTARTS, user_environment=user_environment, preload=modules
        ) as session:
            await _create(session, job)
            return await _follow(session, namespace, name, display)


async def _create(session: Session, job: dict[str, Any]) -> None:
    namespace = job["metadata"]["namespace"]
    with contextlib.suppress(ApiError):
        await session.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for claim in claims_of(job):
        with contextlib.suppress(ApiError):
            await session.api.request(
                "POST",
                f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
                {
                    "metadata": {"name": claim},
                    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
                },
            )
    await session.api.request("POST", f"{JOBS}/namespaces/{namespace}/{contract.PLURAL}", job, fieldValidation="Strict")


async def _follow(session: Session, namespace: str, name: str, display: Display) -> JobView:
    view: JobView | None = None
    deadline = time.monotonic() + _UNSEEN_SECONDS
    while True:
        try:
            view = await look(session.api, namespace, name, view)
        except ApiError as error:
            if error.status == 404:  # somebody deleted the job, with kubectl say
                raise SessionError(f"the job {name} was deleted while it ran") from None
            raise
        except (aiohttp.ClientError, TimeoutError, OSError):
            if session.died.done():
                raise SessionError(
                    f"the {session.died.result()} died, see {session.folder / session.died.result()}.log"
                ) from None
        else:
            display.show(view)
            if view.ended:
                return view
            if not view.seen and time.monotonic() > deadline:
                log = session.folder / "operator.log"
                raise SessionError(f"the operator has not looked at the job for {_UNSEEN_SECONDS:.0f} s, see {log}")
        if session.died.done():
            raise SessionError(f"the {session.died.result()} died, see {session.folder / session.died.result()}.log")
        await asyncio.sleep(_POLL_SECONDS)


def up(folder: Path, say: Callable[[str], None], *, preloaded: bool = True) -> int:
    """Keep an embedded cluster running until it is interrupted, and say how to point kubectl at it."""

    async def serve() -> None:
        async with start_session(folder, restarts=RESTARTS, preload=preload() if preloaded else None) as session:
            say("The embedded cluster is up, the operator is running. Point kubectl at it:\n")
            say(f"  export KUBECONFIG={session.kubeconfig}\n")
            say("then for example: kubectl apply -f job.yaml; kubectl get trainingjobs -w")
            say(f"Logs of every pod in {session.folder / _LOGS}. Ctrl-C stops it.")
            name = await session.died
            raise SessionError(f"the {name} died, see {session.folder / name}.log")

    try:
        asyncio.run(_interruptible(serve()))
    except asyncio.CancelledError:
        say("stopped; nothing is left running")
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return OK
