"""Sends events about a job, for `kubectl describe`. A repeated event increments the count of its object."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from backstay_operator import errors
from backstay_operator.kube import Kube
from backstay_operator.memory import OperatorMemory, SentEvent
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.rights import EVENTS
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_spec import contract
from backstay_spec.events import Event

log = logging.getLogger(__name__)
COMPONENT = "backstay-operator"


class EventSender:
    """Sends the events of all jobs.

    Args:
        kube: the API server.
        instance: the name of this operator in events.
        metrics: counts the failures.
        now: the time of day.
        draw: returns a random number in [0, 1), for the names of events.
    """

    def __init__(
        self,
        kube: Kube,
        instance: str,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime],
        draw: Callable[[], float],
    ) -> None:
        self._kube, self._instance, self._metrics, self._now, self._draw = kube, instance, metrics, now, draw

    async def send(self, key: JobKey, job: Json, event: Event, memory: OperatorMemory) -> None:
        """Send one event. A failure is counted and logged, and has no other effect: an event never delays a job."""
        level = logging.WARNING if event.type == "Warning" else logging.INFO
        log.log(level, "job %s/%s: %s: %s", *key, event.reason, event.message)
        now = self._now()
        stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = (event.type, event.reason, event.message)
        sent = memory.sent_events.get(content)
        try:
            if sent is not None:
                try:
                    patch = {"count": sent.count + 1, "lastTimestamp": stamp}
                    await self._kube.merge_patch(EVENTS, key[0], sent.name, patch)
                    sent.count += 1
                    return
                except errors.NotFound:
                    del memory.sent_events[content]  # events are kept for an hour
            name = f"{key[1]}.{int(now.timestamp() * 1e6):x}{int(self._draw() * 16**6):06x}"
            await self._kube.create(EVENTS, key[0], _body(name, key, job, event, self._instance, stamp))
            memory.sent_events[content] = SentEvent(name, 1)
        except errors.KubeError as error:
            self._metrics.errors.labels("event").inc()
            log.warning("job %s/%s: an event could not be sent, and is in the status only: %s", *key, error)


def _body(name: str, key: JobKey, job: Json, event: Event, instance: str, stamp: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": key[0]},
        "involvedObject": {
            "apiVersion": contract.API_VERSION,
            "kind": contract.KIND,
            "namespace": key[0],
            "name": key[1],
            "uid": job["metadata"]["uid"],
            "resourceVersion": job["metadata"]["resourceVersion"],
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance[:128],
    }
