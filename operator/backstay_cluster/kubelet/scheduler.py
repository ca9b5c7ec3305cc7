"""Schedules on a cluster of one node by binding pods that fit, and reports the reason for the others.

A pod is unschedulable only because of the kind of the node: its labels, and devices such as GPUs. CPU and memory
requests do not count. So a job that requests 8 cores in a cluster also runs on a laptop, more slowly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from backstay_cluster import quantity
from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.node import NodeFacts
from backstay_cluster.kubelet.objects import Key, Object, is_terminal, pod_requests, timestamp

logger = logging.getLogger(__name__)
NAME = "default-scheduler"
SHARED = ("cpu", "memory", "ephemeral-storage")
RETRY_SECONDS = 0.5
PARALLEL = 8


def unschedulable_reason(
    pod: Mapping[str, Any], labels: Mapping[str, str], allocatable: Mapping[str, str], used: Mapping[str, Decimal]
) -> str | None:
    """Returns the reason why the node cannot run the pod, or None if it can.

    Args:
        pod: the pod.
        labels: the node's labels.
        allocatable: the node's resources, as quantities.
        used: the resources that its pods use.
    """
    spec = pod["spec"]
    reasons = []
    for name, wanted in sorted(pod_requests(pod).items()):
        if name not in SHARED and wanted > quantity.value(allocatable.get(name, "0")) - used.get(name, Decimal(0)):
            reasons.append(f"1 Insufficient {name}")
    if used.get("pods", Decimal(0)) >= quantity.value(allocatable.get("pods", "110")):
        reasons.append("1 Too many pods")
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = required.get("nodeSelectorTerms")
    chosen = all(labels.get(name) == value for name, value in (spec.get("nodeSelector") or {}).items())
    if not chosen or (terms is not None and not any(_term(term, labels) for term in terms)):
        reasons.append("1 node(s) didn't match Pod's node affinity/selector")
    return f"0/1 nodes are available: {', '.join(reasons)}." if reasons else None


def _term(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    expressions = term.get("matchExpressions") or []
    return bool(expressions) and all(_matches(expression, labels) for expression in expressions)


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                return int(value or "") > int(values[0]) if operator == "Gt" else int(value or "") < int(values[0])
            except ValueError:
                return False
        case _:
            return False


class Scheduler:
    """Binds pods to the node.

    Args:
        client: the API server.
        events: reports what the scheduler does.
        node: the node.
    """

    def __init__(self, client: ApiClient, events: EventRecorder, node: NodeFacts) -> None:
        self._client = client
        self._events = events
        self._node = node
        self._pods: dict[Key, Object] = {}  # all pods that are not bound yet
        self._taken: dict[Key, dict[str, Decimal]] = {}  # by pods that are bound and have not ended
        self._used: dict[str, Decimal] = {}
        self._wake = asyncio.Event()
        self._limit = asyncio.Semaphore(PARALLEL)

    def pod_changed(self, key: Key, pod: Object | None) -> None:
        """A pod is new, changed, or deleted."""
        spec = (pod or {}).get("spec") or {}
        if pod is None or is_terminal(pod):
            self._pods.pop(key, None)
            if self._release(key) and self._pods:
                self._wake.set()
        elif spec.get("nodeName"):
            self._pods.pop(key, None)
            self._take(key, pod)
        elif not pod["metadata"].get("deletionTimestamp") and spec.get("schedulerName", NAME) == NAME:
            self._pods[key] = pod
            self._wake.set()

    def _take(self, key: Key, pod: Object) -> None:
        if key not in self._taken:
            wants = {**pod_requests(pod), "pods": Decimal(1)}
            self._taken[key] = wants
            for name, value in wants.items():
                self._used[name] = self._used.get(name, Decimal(0)) + value

    def _release(self, key: Key) -> bool:
        wants = self._taken.pop(key, {})
        for name, value in wants.items():
            self._used[name] -= value
        return bool(wants)

    async def run(self) -> None:
        """Bind until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting = [item for item in self._pods.items() if not (item[1]["spec"].get("schedulingGates") or [])]
            failed = not all(await asyncio.gather(*(self._bind(key, pod) for key, pod in waiting)))
            if failed:
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    def _waits(self, key: Key, pod: Object) -> bool:
        """Returns whether this pod still waits to be bound, and is not another one of its name."""
        return key in self._pods and self._pods[key]["metadata"]["uid"] == pod["metadata"]["uid"]

    async def _bind(self, key: Key, pod: Object) -> bool:
        """Bind the pod, or report the reason. Returns False if the request must be repeated."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        async with self._limit:
            if not self._waits(key, pod):
                return True
            reason = unschedulable_reason(pod, self._node.labels, self._node.allocatable, self._used)
            if reason is None:
                self._take(key, pod)  # before the first await: other pods are bound in the meantime
            try:
                if reason is not None:
                    await self._refuse(path, pod, reason)
                    return True
                binding = {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
                    "target": {"apiVersion": "v1", "kind": "Node", "name": self._node.name},
                }
                await self._client.create(f"{path}/binding", binding)
            except ApiRequestError as error:
                if error.code == 409 and reason is not None:
                    return True  # changed in the meantime: the watch will show that, and the pod is checked again
                if error.code not in (404, 409):
                    logger.debug("pod %s not bound: %s", path, error)
                    self._release(key)
                    return False
                # Deleted, bound, or replaced by another pod of this name: the watch shows which.
                if key in self._pods:
                    self._release(key)
                if self._waits(key, pod):
                    del self._pods[key]
                return True
        if self._waits(key, pod):
            del self._pods[key]
        self._events.record(
            pod, "Pod", "Scheduled", f"Successfully assigned {meta['namespace']}/{meta['name']} to {self._node.name}"
        )
        return True

    async def _refuse(self, path: str, pod: Object, message: str) -> None:
        conditions = (pod.get("status") or {}).get("conditions") or []
        old = next((c for c in conditions if c["type"] == "PodScheduled"), None)
        if old is not None and old["status"] == "False" and old.get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": timestamp(time.time()),
        }
        others = [c for c in conditions if c["type"] != "PodScheduled"]
        body = {
            "metadata": {"uid": pod["metadata"]["uid"], "resourceVersion": pod["metadata"]["resourceVersion"]},
            "status": {"conditions": [*others, condition]},
        }
        await self._client.patch(f"{path}/status", body)
        self._events.record(pod, "Pod", "FailedScheduling", message, warning=True)
