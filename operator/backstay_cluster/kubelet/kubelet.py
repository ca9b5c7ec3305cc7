"""Registers the node, follows its pods and all Services, and runs a worker for each pod."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from pathlib import Path

from backstay_cluster.client import ApiClient
from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.informer import Informer
from backstay_cluster.kubelet.node import (
    GPU,
    Machine,
    NodeFacts,
    PodNode,
    Pool,
    local_gpus,
    pod_addresses,
    python_environment,
    service_links,
)
from backstay_cluster.kubelet.objects import Key, Object, is_terminal
from backstay_cluster.kubelet.pod import PodWorker
from backstay_cluster.kubelet.proxy import ServiceProxy
from backstay_cluster.kubelet.registration import Registration
from backstay_cluster.kubelet.runtime import ProcessRuntime
from backstay_cluster.kubelet.scheduler import Scheduler
from backstay_cluster.kubelet.server import KubeletServer

logger = logging.getLogger(__name__)
NAME = "backstay"


class Kubelet:
    """A node of the embedded cluster, including the scheduler and the Services' proxy.

    Args:
        client: the API server; closed by its owner.
        data_dir: the folder for logs (`pods/<namespace>/<pod>/<container>.log`), folders of running pods, and volume
            claims.
        pod_cidr: the loopback block of the pods' addresses; its first address is the node's.
        machine: runs the containers; None: as processes, with this Python environment and this machine's GPUs.
        token: the bearer token for the kubelet's own port.
        tls: serves that port over TLS and requires a client certificate instead (a real API server sends one).
    """

    def __init__(
        self,
        client: ApiClient,
        data_dir: Path,
        pod_cidr: str,
        machine: Machine | None = None,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._own_runtime = ProcessRuntime() if machine is None else None
        if self._own_runtime is not None:
            machine = Machine(self._own_runtime, python_environment(), gpus=local_gpus())
        assert machine is not None
        node_ip, *pod_ips = pod_addresses(pod_cidr, skip=1)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        allocatable = {
            "cpu": str(os.cpu_count() or 1),
            "memory": f"{memory // 1024}Ki",
            "pods": str(len(pod_ips)),
            **({GPU: str(len(machine.gpus))} if machine.gpus else {}),
        }
        facts = NodeFacts.of(NAME, node_ip, allocatable)
        self.events = EventRecorder(client, "kubelet", NAME)
        self._scheduler_events = EventRecorder(client, "default-scheduler", NAME)
        self.services: dict[Key, Object] = {}
        self.node = PodNode(
            client=client,
            events=self.events,
            facts=facts,
            machine=machine,
            data_dir=data_dir,
            addresses=Pool(pod_ips),
            service_links=lambda namespace: service_links(self.services.values(), namespace),
        )
        self.token = secrets.token_hex(16) if token is None else token
        self._server = KubeletServer(self.node.sinks, self.token, tls=tls)
        self._registration = Registration(client, facts)
        self._scheduler = Scheduler(client, self._scheduler_events, facts)
        self._proxy = ServiceProxy(self.events)
        self._pods = Informer(client, "/api/v1/pods", self._pod_changed)
        self._service_informer = Informer(client, "/api/v1/services", self._service_changed)
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def logs_dir(self) -> Path:
        """The folder of the `<namespace>/<pod>/<container>.log` files."""
        return self.node.logs_dir

    async def start(self, seconds: float = 30.0) -> None:
        """Register the node and start; returns when pods can run.

        Raises:
            TimeoutError: the API server did not answer.
        """
        if self._own_runtime is not None:
            self._own_runtime.open()
        port = await self._server.start(self.node.facts.ip)
        async with asyncio.timeout(seconds):
            await self._registration.register(port)
            self._tasks = [
                asyncio.create_task(each)
                for each in (
                    self._registration.run(),
                    self.events.run(),
                    self._scheduler_events.run(),
                    self._service_informer.run(),
                    self._pods.run(),
                    self._scheduler.run(),
                )
            ]
            for task in self._tasks:
                task.add_done_callback(_report)
            await self._service_informer.synced.wait()
            await self._pods.synced.wait()

    async def stop(self, grace: float = 5.0) -> None:
        """End every container (SIGTERM, after `grace` seconds SIGKILL) and stop; the API gets no more reports."""
        self._stopping = True
        for worker, _ in self._workers.values():
            worker.stop(grace)
        ends = [asyncio.ensure_future(worker.ended.wait()) for worker, _ in self._workers.values()]
        if ends:
            await asyncio.wait(ends, timeout=grace + 1.0)
        for end in ends:
            end.cancel()
        tasks = [*self._tasks, *(task for _, task in self._workers.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._proxy.close()
        await self._server.stop()
        if self._own_runtime is not None:
            await self._own_runtime.close()
        for sink in self.node.sinks.values():
            sink.close()

    def _service_changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        del old
        if new is None:
            self.services.pop(key, None)
        else:
            self.services[key] = new
        self._proxy.service_changed(key, new)

    def _pod_changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        self._scheduler.pod_changed(key, new)
        self._proxy.pod_changed(key, new)
        if new is None:
            if old is not None and (held := self._workers.get(old["metadata"]["uid"])) is not None:
                held[0].removed()
            for sink_key in [k for k in self.node.sinks if k[:2] == key]:
                self._forget(sink_key)
            return
        if new["spec"].get("nodeName") != self.node.facts.name or self._stopping:
            return
        uid = new["metadata"]["uid"]
        held = self._workers.get(uid)
        if held is None:
            if is_terminal(new) and not new["metadata"].get("deletionTimestamp"):
                return
            worker = PodWorker(self.node, new)
            task = asyncio.create_task(worker.run(), name=f"pod {key[0]}/{key[1]}")
            self._workers[uid] = worker, task
            task.add_done_callback(lambda _: self._workers.pop(uid, None))
            task.add_done_callback(_report)
        self._workers[uid][0].update(new)

    def _forget(self, key: tuple[str, str, str]) -> None:
        """Drop the log's handle once the container has ended; its file stays."""
        if self.node.sinks[key].closed:
            del self.node.sinks[key]


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s ended because of a defect in the kubelet", task.get_name(), exc_info=task.exception())
