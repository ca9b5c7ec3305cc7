"""The Node object, its status, and the Lease that shows that the node is alive."""

from __future__ import annotations

import asyncio
import logging
import platform
import time

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.node import NodeFacts
from backstay_cluster.kubelet.objects import Object, micro_timestamp, timestamp

logger = logging.getLogger(__name__)
LEASE_SECONDS = 40
RENEW_SECONDS = 10.0
STATUS_EVERY = 30  # renewals: the status is written every 5 minutes, as in Kubernetes
RETRY_SECONDS = 0.1
LEASE_NAMESPACE = "kube-node-lease"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"


def node_object(node: NodeFacts, port: int, now: str) -> Object:
    """Returns the Node with its status.

    Args:
        node: the node.
        port: the port of the kubelet's server.
        now: metav1.Time of this heartbeat.
    """
    kinds = (
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
    )
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": dict(node.labels)},
        "spec": {},
        "status": {
            "capacity": dict(node.allocatable),
            "allocatable": dict(node.allocatable),
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
                for kind, status, reason, message in kinds
            ],
            "addresses": [{"type": "InternalIP", "address": node.ip}, {"type": "Hostname", "address": node.name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": {
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
                "kernelVersion": platform.release(),
                "osImage": platform.platform(terse=True),
                "containerRuntimeVersion": f"process://{platform.python_version()}",
                "kubeletVersion": "v1.36.0-backstay",
                "kubeProxyVersion": "",
                "operatingSystem": platform.system().lower(),
                "architecture": node.labels["kubernetes.io/arch"],
            },
        },
    }


class Registration:
    """Registers the node, and renews its Lease.

    Args:
        client: the API server.
        node: the node.
    """

    def __init__(self, client: ApiClient, node: NodeFacts) -> None:
        self._client = client
        self._node = node
        self._port = 0

    async def register(self, port: int) -> None:
        """Create the Node, or take over an existing one of this name; tries until the API server accepts it."""
        self._port = port
        while True:
            try:
                await self._write()
                await self._renew()
            except ApiRequestError as error:
                logger.debug("node %s not registered: %s", self._node.name, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _write(self) -> None:
        obj = node_object(self._node, self._port, timestamp(time.time()))
        path = f"/api/v1/nodes/{self._node.name}"
        try:
            await self._client.create("/api/v1/nodes", obj)
        except ApiRequestError as error:
            if error.code != 409:
                raise
        # A new Node gets a taint, which a controller removes once the node is ready. This cluster has no such
        # controller.
        await self._client.patch(path, {"spec": {"taints": None}})
        await self._client.patch(f"{path}/status", {"status": obj["status"]})

    async def _renew(self) -> None:
        name = self._node.name
        lease: Object = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": LEASE_NAMESPACE},
            "spec": {
                "holderIdentity": name,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": micro_timestamp(time.time()),
            },
        }
        try:
            await self._client.patch(f"{LEASES}/{name}", {"spec": lease["spec"]})
        except ApiRequestError as error:
            if error.code != 404:
                raise
            try:
                await self._client.create(LEASES, lease)
            except ApiRequestError as missing:
                if missing.code != 404:
                    raise
                namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASE_NAMESPACE}}
                await self._client.create("/api/v1/namespaces", namespace)
                await self._client.create(LEASES, lease)

    async def run(self) -> None:
        """Renew until cancelled; a failed renewal is tried again at the next turn."""
        turn = 0
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            turn += 1
            try:
                await self._renew()
                if turn % STATUS_EVERY == 0:
                    await self._write()
            except ApiRequestError as error:
                logger.debug("node %s: %s", self._node.name, error)
