"""Waits until the pods of a deleted job are gone, or those of a suspended one have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp

from backstay_client.finding.clusters import FoundCluster
from backstay_client.kube import JobApi

__all__ = ["STORING_SECONDS", "PodsRemain", "until_gone", "until_stopped"]

_GONE_SECONDS = 90.0
_POLL_SECONDS = 0.1

STORING_SECONDS = 60.0
"""How long the servers may take to store a checkpoint; the same time as in a cluster."""


class PodsRemain(TimeoutError):  # noqa: N818
    """The pods of a deleted or suspended job still exist."""


async def until_gone(
    cluster: FoundCluster, namespace: str, name: str, uid: str, clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait until a deleted job has no pods. Another job may have its name already.

    Raises:
        PodsRemain: the job still has pods after 90 s.
    """
    deadline = clock() + _GONE_SECONDS
    while await _has_pods(cluster, namespace, name, uid):
        if clock() > deadline:
            raise PodsRemain(f"pods of {name} still exist after {_GONE_SECONDS:.0f} s")
        await asyncio.sleep(0.2)


async def until_stopped(
    api: JobApi, namespace: str, name: str, uid: str, is_reported: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Wait until the pods of a suspended job have ended, whose servers store a checkpoint.

    Args:
        is_reported: whether the operator has reported the end, which it does after the pods have ended; None: the
            report is not awaited.

    Raises:
        PodsRemain: some still run after 60 s, or the operator has not reported the end.
    """
    try:
        async with asyncio.timeout(STORING_SECONDS) as limit:
            while True:
                pods = await api.pods_of(namespace, name, uid)
                running = any(pod.get("status", {}).get("phase") in {"Pending", "Running"} for pod in pods)
                if not running and (is_reported is None or await is_reported()):
                    return
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        if not limit.expired():  # one call took too long
            raise
        raise PodsRemain(
            f"pods of {name} still run after {STORING_SECONDS:.0f} s, or the operator has not reported their end"
        ) from None


async def _has_pods(cluster: FoundCluster, namespace: str, name: str, uid: str) -> bool:
    """Returns whether a deleted job still has pods; the embedded cluster of `backstay run` ends with its job."""
    try:
        return bool(await cluster.api.pods_of(namespace, name, uid))
    except (aiohttp.ClientError, OSError):
        if cluster.folder is None:
            raise
        return False
