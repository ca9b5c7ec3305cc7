"""Reads what a pod that has not started yet wrote last, which says most about a long start."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import aiohttp

from backstay_client.kube import ApiRequestError, JobApi
from backstay_client.words import log_line, printable
from backstay_spec import contract
from backstay_spec.causes import condition_of

__all__ = ["is_ready", "newest_line"]

LONG_START = 10.0
"""Seconds since the start of a container after which its log is read."""

_SECONDS = 2.0
_LONGEST = 240
_STYLES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Colours and movements of the cursor (ECMA-48, 5.4)."""
_TAIL = 1 << 16
"""Bytes of a line that are kept: a progress bar writes all of its states into one line."""


async def newest_line(api: JobApi, namespace: str, pods: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Returns the last line with text in the log of the first pod that has long been in its start.

    Servers are before other pods, because these wait for them.

    Returns:
        The name of the pod and its line; empty: no pod is in a long start, or its log is empty or cannot be read.
    """
    slow = sorted((pod for pod in pods if _starts_long(pod)), key=_order)
    if not slow:
        return "", ""
    name, text = slow[0]["metadata"]["name"], b""
    try:
        async with asyncio.timeout(_SECONDS):
            async for chunk in api.log(namespace, name, tailLines="10"):
                text = (text + chunk)[-_TAIL:]
    except (ApiRequestError, aiohttp.ClientError, OSError):  # of which a timeout is one
        return "", ""
    lines = [_message(log_line(_STYLES.sub(b"", line).rstrip())) for line in text.split(b"\n")]
    return name, next((line for line in reversed(lines) if line), "")


def is_ready(pod: dict[str, Any]) -> bool:
    """Returns whether a pod has started: its condition `Ready` is true."""
    return condition_of(pod, "Ready").get("status") == "True"


def _order(pod: dict[str, Any]) -> tuple[bool, str]:
    return pod["metadata"].get("labels", {}).get(contract.LABEL_ROLE) != contract.ROLE_SERVER, pod["metadata"]["name"]


def _starts_long(pod: dict[str, Any]) -> bool:
    if is_ready(pod):
        return False
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container.get("name") == contract.CONTAINER:
            began = container.get("state", {}).get("running", {}).get("startedAt")
            return bool(began) and time.time() - datetime.fromisoformat(began).timestamp() >= LONG_START
    return False


def _message(line: str) -> str:
    """Returns the text of a line, which may be a JSON object (`spec.logFormat`)."""
    try:
        found = json.loads(line)
        line = found["message"] if isinstance(found["message"], str) else line
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    shown = printable(line)  # a text in JSON may have other controls
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
