"""Writes events in the background: a pod never waits for its events, and does not depend on them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.objects import Object, reference, timestamp

logger = logging.getLogger(__name__)
MAX_WAITING = 1000


class EventRecorder:
    """Writes events in the order in which they were recorded; drops the newest if the API server is too slow.

    Args:
        client: the API server.
        component: the reporting component, such as `kubelet`.
        host: the node's name.
    """

    def __init__(self, client: ApiClient, component: str, host: str) -> None:
        self._client = client
        self._component = component
        self._host = host
        self._queue: asyncio.Queue[Object] = asyncio.Queue(MAX_WAITING)

    def record(
        self, obj: Mapping[str, Any], kind: str, reason: str, message: str, *, warning: bool = False, path: str = ""
    ) -> None:
        """Record an event about an object; `path` names a part of it, such as `spec.containers{trainer}`."""
        now = time.time()
        involved = reference(obj, kind)
        if path:
            involved["fieldPath"] = path
        namespace = obj["metadata"].get("namespace") or "default"
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{obj['metadata']['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "eventTime": None,
            "count": 1,
        }
        logger.debug("%s %s/%s: %s: %s", kind, namespace, obj["metadata"]["name"], reason, message)
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            logger.debug("event dropped, %d are waiting: %s %s", MAX_WAITING, reason, message)

    async def run(self) -> None:
        """Write recorded events until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._client.create(f"/api/v1/namespaces/{event['metadata']['namespace']}/events", event)
            except ApiRequestError as error:
                logger.debug("event %s not written: %s", event["reason"], error)
