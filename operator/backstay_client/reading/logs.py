"""Prints the logs of a job's pods one after another or as they are written, each line with its pod (`backstay
logs`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.kube import ApiRequestError
from backstay_client.view.follow import TERMINAL
from backstay_client.view.pods import active_pods, member_of, slot_of
from backstay_client.words import log_line
from backstay_spec import contract

__all__ = ["ROLES", "WantedLogs", "log_lines", "show_logs"]

ROLES = {"server": contract.ROLE_SERVER, "worker": contract.ROLE_WORKER, "evaluator": contract.ROLE_EVALUATOR}
_SHORT = {role: name for name, role in ROLES.items()}
LOOK_SECONDS = 1.0
_LONGEST_LINE = 1 << 20
_MOST_LINES = 1000
QUIET_SECONDS = 0.5
_QUIET_STEPS, _LAST_STEPS = 10, 60
"""Lines that wait for their reader; then the pods' logs wait."""


@dataclass(frozen=True)
class WantedLogs:
    """The selected logs.

    Attributes:
        role: a value of the role label; None: every role.
        rank: the index of the slot; None: every slot.
        previous: whether to read the log of the pod that filled the slot before the current one.
        follow: continue until the job ends, even in replacements.
        tail: the number of lines at the end of each log; None: all.
    """

    role: str | None = None
    rank: int | None = None
    previous: bool = False
    follow: bool = False
    tail: int | None = None

    def covers(self, pod: dict[str, Any]) -> bool:
        """Returns whether a pod's slot is selected."""
        role, index, _ = slot_of(pod)
        return self.role in (None, role) and self.rank in (None, index)


async def show_logs(cluster: FoundCluster, job: str, wanted: WantedLogs, write: Callable[[str], None]) -> None:
    """Write the logs, line by line; see `log_lines`."""
    async with contextlib.aclosing(log_lines(cluster, job, wanted)) as lines:
        async for line in lines:
            write(line)


async def log_lines(cluster: FoundCluster, job: str, wanted: WantedLogs) -> AsyncGenerator[str]:
    """Yields the lines of the logs.

    Raises:
        BadInput: the job has no such pod.
        ApiRequestError: the job does not exist, or its logs may not be read.
    """
    uid = (await cluster.api.get_job(cluster.namespace, job))["metadata"]["uid"]
    pods = [pod for pod in await cluster.api.pods_of(cluster.namespace, job, uid) if wanted.covers(pod)]
    chosen = _previous(pods) if wanted.previous else active_pods(pods)
    if not chosen and not wanted.follow:
        raise BadInput(_nothing(job, wanted, pods))
    # With one pod, lines have no prefix, so that other programs can process the output.
    many = wanted.role is None or wanted.rank is None or any(member_of(pod) is not None for pod in pods)
    if wanted.follow:
        async with contextlib.aclosing(_follow(cluster, job, uid, wanted, many=many)) as lines:
            async for line in lines:
                yield line
        return
    for pod in chosen:
        async for line in _lines(cluster, pod, wanted):
            yield _prefixed(pod, line, many=many)


def _nothing(job: str, wanted: WantedLogs, pods: Sequence[dict[str, Any]]) -> str:
    if wanted.previous and pods:
        return f"no pod of {job} that was chosen has been replaced, or the replaced pod is deleted already"
    slot = " ".join(
        part
        for part in (
            "" if wanted.role is None else f"with role {_SHORT[wanted.role]}",
            "" if wanted.rank is None else f"with rank {wanted.rank}",
        )
        if part
    )
    return f"the job {job} has no pod {slot}".rstrip() + f"; `backstay status {job}` lists its pods"


async def _until_silent(
    tasks: Iterable[asyncio.Task[None]], found: asyncio.Queue[Any], count: Callable[[], int]
) -> None:
    """Wait until the tasks have ended, or have read nothing for five seconds although the reader of `found` was not
    late. A pod that prints after the end of the job is read for half a minute.

    Args:
        count: returns the number of lines that were read.
    """
    waiting, before, quiet, steps = set(tasks), count(), 0, 0
    # In short steps: a reader that stops the event loop for a minute ends one of them.
    while waiting and quiet < _QUIET_STEPS and steps < _LAST_STEPS:
        _, waiting = await asyncio.wait(waiting, timeout=QUIET_SECONDS)
        quiet = quiet + 1 if found.empty() and count() == before else 0
        steps += found.empty()
        before = count()


def _previous(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the newest pod of each slot before the current one."""
    current = {id(pod) for pod in active_pods(pods)}
    return active_pods([pod for pod in pods if id(pod) not in current])


def _prefixed(pod: dict[str, Any], line: str, *, many: bool) -> str:
    role, index, incarnation = slot_of(pod)
    own = "" if (member := member_of(pod)) is None else f".{member}"
    name = f"{_SHORT.get(role, role)} {index}{own}" + (f" #{incarnation}" if incarnation > 1 else "")
    return f"{name:<12}| {line}" if many else line


async def _lines(
    cluster: FoundCluster, pod: dict[str, Any], wanted: WantedLogs, *, follow: bool = False
) -> AsyncIterator[str]:
    """Yields the lines of one pod; none while it has no log yet."""
    options = {"follow": "true"} if follow else {}
    if wanted.tail is not None:
        options["tailLines"] = str(wanted.tail)
    meta = pod["metadata"]
    rest = b""
    try:
        async for chunk in cluster.api.log(meta["namespace"], meta["name"], **options):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield log_line(line)
            if len(rest) > _LONGEST_LINE:
                yield log_line(rest)
                rest = b""
    except ApiRequestError as error:
        if error.code not in (400, 404):
            raise
        for kept in _kept(cluster.folder, pod, wanted):
            yield kept
    if rest:
        yield log_line(rest)


def _kept(folder: Path | None, pod: dict[str, Any], wanted: WantedLogs) -> list[str]:
    """Returns the lines of a pod's log that an embedded cluster has kept, if its API no longer serves the log."""
    if folder is None:
        return []
    meta = pod["metadata"]
    log = folder / "pods" / meta["namespace"] / meta["name"] / f"{contract.CONTAINER}.log"
    with contextlib.suppress(OSError):
        lines = log.read_bytes().splitlines()
        first = 0 if wanted.tail is None else max(0, len(lines) - wanted.tail)
        return [log_line(line) for line in lines[first:]]
    return []


async def _follow(cluster: FoundCluster, job: str, uid: str, wanted: WantedLogs, *, many: bool) -> AsyncGenerator[str]:
    """Yields the lines of the logs of all selected pods, including new ones, until the job has ended."""
    found: asyncio.Queue[str | Exception | None] = asyncio.Queue(_MOST_LINES)

    async def find() -> None:
        try:
            await _find(cluster, job, uid, wanted, found, many=many)
        except Exception as error:  # noqa: BLE001  # it is raised below, after the lines before it
            await found.put(error)
        else:
            await found.put(None)

    finding = asyncio.create_task(find())
    try:
        while (line := await found.get()) is not None:
            if isinstance(line, Exception):
                raise line
            yield line
    finally:
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)


async def _find(
    cluster: FoundCluster, job: str, uid: str, wanted: WantedLogs, found: asyncio.Queue[Any], *, many: bool
) -> None:
    """Follow each selected pod in a task that puts its lines into `found`."""
    followed: dict[str, asyncio.Task[None]] = {}
    sent: dict[str, tuple[str, int]] = {}  # by uid of a pod: its first line, and how many lines
    read = 0

    async def one(pod: dict[str, Any]) -> None:
        nonlocal read
        pod_uid, number = pod["metadata"]["uid"], 0
        first, skip = sent.get(pod_uid, ("", 0))
        async for line in _lines(cluster, pod, wanted, follow=True):
            number, read = number + 1, read + 1
            if number == 1 and (line != first or wanted.tail is not None):
                first, skip = line, 0  # not again from the beginning: the log was rotated, or its end was requested
            if number > skip:
                sent[pod_uid] = first, number
                await found.put(_prefixed(pod, line, many=many))

    try:
        while True:
            ended = False
            # A pod whose connection was lost is followed again. After a refusal it would be refused again.
            for pod_uid, task in list(followed.items()):
                failure = task.exception() if task.done() and not task.cancelled() else None
                if isinstance(failure, aiohttp.ClientError | TimeoutError | OSError):
                    del followed[pod_uid]
                elif failure is not None:
                    raise failure
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                try:
                    current = await cluster.api.get_job(cluster.namespace, job)
                    ended = (current.get("status") or {}).get("phase") in TERMINAL
                    pods = await cluster.api.pods_of(cluster.namespace, job, uid)
                    if current["metadata"]["uid"] != uid:  # another job has the name now
                        ended, pods = True, []
                except ApiRequestError as error:
                    if error.code != 404:
                        raise
                    ended, pods = True, []
                for pod in active_pods([pod for pod in pods if wanted.covers(pod)]):
                    started = pod.get("status", {}).get("phase") not in (None, "Pending")
                    if started and pod["metadata"]["uid"] not in followed:
                        followed[pod["metadata"]["uid"]] = asyncio.create_task(one(pod))
            if ended:
                await _until_silent(followed.values(), found, lambda: read)
                return
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for task in followed.values():
            task.cancel()
        await asyncio.gather(*followed.values(), return_exceptions=True)
