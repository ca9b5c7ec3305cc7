"""A kubelet without processes, whose pods are Running and ready as soon as they are bound, and die when a caller kills
them.

For measurements of the API server and an operator at thousands of pods, and for tests that need a certain cause of
death.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.informer import Informer
from backstay_cluster.kubelet.node import Machine, NodeFacts, PodNode, Pool, pod_addresses
from backstay_cluster.kubelet.objects import Key, Object, is_terminal, timestamp
from backstay_cluster.kubelet.registration import Registration
from backstay_cluster.kubelet.runtime import ProcessRuntime
from backstay_cluster.kubelet.scheduler import Scheduler
from backstay_cluster.kubelet.status import ContainerRecord, conditions_of, terminated

logger = logging.getLogger(__name__)
NAME = "fake"
POD_CIDR = "127.244.0.0/18"  # on loopback, so that no call leaves this machine
RESOURCES = {"cpu": "10000", "memory": "100Ti", "pods": "10000", "nvidia.com/gpu": "100000"}
PARALLEL = 16  # requests at the same time


class FakeKubelet:
    """A node whose pods run as soon as they are bound.

    Args:
        client: the API server; closed by its owner.
        pod_ip: one address for all pods, on which a program of the caller answers; None: each pod has its own, on
            which nothing listens.
    """

    def __init__(self, client: ApiClient, *, pod_ip: str | None = None) -> None:
        self._client = client
        events = EventRecorder(client, "fake-kubelet", NAME)
        self._node = PodNode(
            client=client,
            events=events,
            facts=NodeFacts.of(NAME, "127.244.0.1", RESOURCES),
            machine=Machine(ProcessRuntime(), {}),  # never opened
            data_dir=Path(),
            addresses=Pool(pod_addresses(POD_CIDR)),
        )
        self._registration = Registration(client, self._node.facts)
        self._scheduler = Scheduler(client, events, self._node.facts)
        self._informer = Informer(client, "/api/v1/pods", self._changed)
        self._limit = asyncio.Semaphore(PARALLEL)
        self._busy: dict[str, asyncio.Task[None]] = {}  # by uid
        self._killed: dict[str, tuple[int, str, Object | None]] = {}
        self._pod_ip = pod_ip
        self._addresses: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pods(self) -> dict[Key, Object]:
        """All pods in their newest state, by namespace and name."""
        return self._informer.objects

    async def start(self) -> None:
        """Register the node, and start."""
        await self._registration.register(10250)
        runs = (self._registration.run(), self._node.events.run(), self._informer.run(), self._scheduler.run())
        self._tasks = [asyncio.create_task(each) for each in runs]
        await self._informer.synced.wait()

    async def stop(self) -> None:
        """Stop; the pods stay unchanged."""
        tasks = [*self._tasks, *self._busy.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(
        self, namespace: str, name: str, *, exit_code: int = 137, reason: str = "Error", condition: Object | None = None
    ) -> None:
        """Make a pod die: its containers end with `exit_code`, and it is Succeeded (0) or Failed.

        Args:
            namespace: the pod's namespace.
            name: the pod's name.
            exit_code: the exit code of all its containers.
            reason: the reason of the terminated state, such as `OOMKilled`.
            condition: an additional condition, such as a `DisruptionTarget`.

        Raises:
            KeyError: the pod does not exist.
        """
        pod = self.pods[namespace, name]
        self._killed[pod["metadata"]["uid"]] = exit_code, reason, condition
        self._begin(pod)

    def _changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        self._scheduler.pod_changed(key, new)
        if new is None:
            uid = (old or {}).get("metadata", {}).get("uid", "")
            self._killed.pop(uid, None)
            if (address := self._addresses.pop(uid, None)) is not None:
                self._node.addresses.release([address])
        elif new["spec"].get("nodeName") == self._node.facts.name:
            self._begin(new)

    def _begin(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._busy and self._wants(pod):
            self._busy[uid] = asyncio.create_task(self._serve(uid, pod))
            self._busy[uid].add_done_callback(lambda _: self._done(uid, pod))

    def _done(self, uid: str, pod: Object) -> None:
        self._busy.pop(uid, None)
        meta = pod["metadata"]
        newest = self.pods.get((meta["namespace"], meta["name"]))
        if newest is not None and newest["metadata"]["uid"] == uid and self._tasks and not self._tasks[0].cancelled():
            self._begin(newest)

    def _wants(self, pod: Object) -> str | None:
        meta = pod["metadata"]
        if meta.get("deletionTimestamp"):
            return "delete"
        if is_terminal(pod):
            return None
        if meta["uid"] in self._killed:
            return "kill"
        return None if (pod.get("status") or {}).get("phase") == "Running" else "run"

    async def _serve(self, uid: str, pod: Object) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        while wanted := self._wants(pod):
            try:
                async with self._limit:
                    if wanted == "delete":
                        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                        await self._client.delete(path, {"apiVersion": "v1", "kind": "DeleteOptions", **body})
                        return
                    status = self._status(pod, killed=self._killed.get(uid))
                    versions = {"uid": uid, "resourceVersion": meta["resourceVersion"]}
                    pod = await self._client.patch(f"{path}/status", {"metadata": versions, "status": status})
            except ApiRequestError as error:
                if error.code == 404:
                    return
                await asyncio.sleep(0.05 if error.code == 409 else 0.5)
                try:
                    pod = await self._client.get(path)
                except ApiRequestError:
                    continue
                if pod["metadata"]["uid"] != uid:
                    return
            meta = pod["metadata"]

    def _status(self, pod: Object, killed: tuple[int, str, Object | None] | None) -> Object:
        now = timestamp(time.time())
        uid = pod["metadata"]["uid"]
        if self._pod_ip is None and uid not in self._addresses:
            self._addresses[uid] = self._node.addresses.take()[0]
        records = []
        for container in pod["spec"]["containers"]:
            record = ContainerRecord(container["name"], container.get("image", ""), id=uuid.uuid4().hex)
            if killed is None:
                record.state, record.ready, record.started = {"running": {"startedAt": now}}, True, True
            else:
                record.state = terminated(killed[0], killed[1], "", started=now, finished=now, container=record.id)
            records.append(record)
        phase = "Running" if killed is None else "Succeeded" if killed[0] == 0 else "Failed"
        before = (pod.get("status") or {}).get("conditions") or []
        extra = [] if killed is None or killed[2] is None else [killed[2]]
        ip = self._pod_ip or self._addresses[uid]
        return {
            "phase": phase,
            "conditions": conditions_of(before, phase, [], records, has_address=True, now=now) + extra,
            "containerStatuses": [record.as_status() for record in records],
            "hostIP": self._node.facts.ip,
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": (pod.get("status") or {}).get("startTime") or now,
        }
