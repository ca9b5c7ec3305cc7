"""Keeps an embedded cluster for several jobs, for `backstay up` and `Client.local()`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from backstay_client.embedded.session import RESTARTS, Session, start_session
from backstay_client.errors import BadInput
from backstay_client.finding.known_runs import RESULT, KnownRun, write_json
from backstay_client.finding.stored_run import StateFile
from backstay_client.kube import ApiCalls, ApiRequestError
from backstay_spec import contract

__all__ = ["lasting_session", "new_folder", "store_result"]

_KEEP_SECONDS = 2.0


def new_folder(name: str, base: Path | None = None, *, option: str = "") -> Path:
    """Returns a new folder for one run, ``.backstay/runs/<job>-<time>-<pid>`` in the current folder.

    It is kept after the run, for the logs of all pods and the volumes with the checkpoints.

    Args:
        option: names another folder, as the caller writes it; empty: there is no such option.

    Raises:
        BadInput: the current folder cannot be written.
    """
    try:
        return _made(name, base if base is not None else Path.cwd() / ".backstay")
    except OSError as error:
        raise BadInput(
            f"the folder for logs and volumes cannot be created in {error.filename or 'the current folder'}: "
            f"{error.strerror or error}. {f'Name another one with {option}, or change' if option else 'Change'} to a "
            "folder of yours"
        ) from None


def _made(name: str, root: Path) -> Path:
    place = root / "runs" / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
    place.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):  # one process may start several in a second
        folder = place if number == 1 else place.with_name(f"{place.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    ignore = root / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return folder


def store_result(run: KnownRun, result: Mapping[str, Any]) -> str:
    """Store the end of a run in its folder; returns why it was not stored, or an empty text."""
    known = {"command": list(run.command), "cwd": run.cwd, "startTime": run.started, "endTime": time.time()}
    try:
        write_json(run.folder / RESULT, {**result, **known})
    except (OSError, ValueError) as error:
        return f"{RESULT} was not written: {error}"
    return ""


@contextlib.asynccontextmanager
async def lasting_session(
    folder: Path, *, preload: str | None, user_environment: bool = False
) -> AsyncIterator[Session]:
    """Start the cluster and the operator, and store its jobs in the folder, so that they are known after its end.

    Args:
        folder: the folder of the run, which is registered.
        preload: see `start_session`.
        user_environment: see `start_session`.

    Raises:
        SessionError: a process did not start within a minute.
    """
    state = StateFile(folder)
    async with start_session(folder, restarts=RESTARTS, preload=preload, user_environment=user_environment) as session:
        keeping = asyncio.create_task(_keep_jobs(session.api, state))
        try:
            yield session
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await _keep_now(session.api, state)


async def _keep_jobs(api: ApiCalls, state: StateFile) -> None:
    """Store the jobs of the cluster, until cancelled."""
    while True:
        await asyncio.sleep(_KEEP_SECONDS)
        await _keep_now(api, state, everything=False)


async def _keep_now(api: ApiCalls, state: StateFile, *, everything: bool = True) -> None:
    with contextlib.suppress(ApiRequestError, aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
        pods = await api.request("GET", "/api/v1/pods", labelSelector=contract.LABEL_JOB)
        state.add(await api.list_jobs(None), pods["items"])
    if everything:
        state.write()
