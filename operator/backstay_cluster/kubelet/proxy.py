"""Serves the addresses of Services by a TCP listener on each clusterIP and port, which forwards connections to a
matching pod.

It handles connections, as kube-proxy handles packets. If a Service has no pod, nothing listens on its port, so the
kernel refuses a caller immediately. The proxy cuts a connection when the connected pod no longer matches or has ended.
So a caller never continues with a pod that the Service selected before. Pods exchange bulk data directly, not through
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.objects import Key, Object, is_ready, is_terminal, selects

logger = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Endpoint:
    """A pod behind a Service's port."""

    pod: Key
    uid: str
    ip: str
    port: int


def target_port(port: Mapping[str, Any], pod: Mapping[str, Any]) -> int | None:
    """Returns the port of a pod for a Service's port, or None if it is a name that the pod does not have."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int) or str(target).isdigit():
        return int(target)
    for container in pod["spec"].get("containers") or []:
        for entry in container.get("ports") or []:
            if entry.get("name") == target:
                return int(entry["containerPort"])
    return None


def matching(service: Mapping[str, Any], pods: Mapping[Key, Object]) -> dict[Key, Object]:
    """Returns the pods that a Service's selector matches, that have an address, and that have not ended."""
    selector = (service.get("spec") or {}).get("selector")
    namespace = service["metadata"]["namespace"]
    if not selector:
        return {}
    return {
        key: pod
        for key, pod in pods.items()
        if key[0] == namespace
        and (pod.get("status") or {}).get("podIP")
        and not is_terminal(pod)
        and selects(selector, pod["metadata"].get("labels") or {})
    }


def endpoints(service: Mapping[str, Any], port: Mapping[str, Any], pods: Mapping[Key, Object]) -> list[Endpoint]:
    """Returns the targets of new connections, which are ready pods that are not being deleted, or all with
    `publishNotReadyAddresses`."""
    unready = bool(service["spec"].get("publishNotReadyAddresses"))
    found = []
    for key, pod in matching(service, pods).items():
        meta, number = pod["metadata"], target_port(port, pod)
        if number is not None and (unready or (is_ready(pod) and not meta.get("deletionTimestamp"))):
            found.append(Endpoint(key, meta["uid"], pod["status"]["podIP"], number))
    return found


class _Half(asyncio.Protocol):
    """One end of a forwarded connection. Its peer writes what it reads, no faster than the other side accepts."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: _Half | None = None
        self._closed = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        if self.peer is not None and self.peer.transport is not None and self.peer.transport.can_write_eof():
            self.peer.transport.write_eof()
        return True  # the other direction stays open

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        peer, self.peer = self.peer, None
        if peer is not None and peer.transport is not None:
            if exc is None:
                peer.transport.close()
            else:
                peer.transport.abort()
        self._closed()


class ProxiedConnection:
    """One connection to a Service, and its connection to a pod."""

    def __init__(self, pick: Callable[[], Endpoint | None], closed: Callable[[ProxiedConnection], None]) -> None:
        self.endpoint: Endpoint | None = None
        self._pick = pick
        self._closed = closed
        self.front = _Front(self)
        self.back = _Half(self._ended)
        self._connecting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The caller has connected: choose a pod."""
        self.endpoint = self._pick()
        if self.endpoint is None:
            self.cut()
            return
        self._connecting = asyncio.ensure_future(self._connect(self.endpoint))

    async def _connect(self, endpoint: Endpoint) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.get_running_loop().create_connection(lambda: self.back, endpoint.ip, endpoint.port)
        except OSError:  # includes TimeoutError
            self.cut()
            return
        if self.front.transport is None:
            self.cut()
            return
        self.front.peer, self.back.peer = self.back, self.front
        self.front.transport.resume_reading()

    def cut(self) -> None:
        """Reset both connections."""
        if self._connecting is not None:
            self._connecting.cancel()
        for half in (self.front, self.back):
            if half.transport is not None:
                half.transport.abort()

    def _ended(self) -> None:
        if self.front.transport is None and self.back.transport is None:
            self._closed(self)


class _Front(_Half):
    def __init__(self, link: ProxiedConnection) -> None:
        super().__init__(self._gone)
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast("asyncio.Transport", transport).pause_reading()  # until the connection to a pod exists
        self._link.begin()

    def _gone(self) -> None:
        self._link._ended()


@dataclass(eq=False)
class _ProxiedService:
    obj: Object
    dirty: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: dict[tuple[str, int], asyncio.Server] = field(default_factory=dict)
    links: set[ProxiedConnection] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    reported: set[tuple[str, int]] = field(default_factory=set)


class ServiceProxy:
    """Listens on the ports of all Services of the cluster that have a clusterIP.

    Args:
        events: records a port on which the proxy cannot listen.
    """

    def __init__(self, events: EventRecorder | None = None) -> None:
        self._events = events
        self._services: dict[Key, _ProxiedService] = {}
        self._pods: dict[Key, Object] = {}
        self._turn = itertools.count()

    def service_changed(self, key: Key, service: Object | None) -> None:
        """A Service is new, changed, or deleted."""
        held = self._services.get(key)
        if service is None:
            if held is not None:
                held.obj = {**held.obj, "spec": {}}
                self._services.pop(key)
                held.dirty.set()
            return
        if held is None:
            held = self._services[key] = _ProxiedService(service)
            held.task = asyncio.ensure_future(self._serve(key, held))
        held.obj = service
        held.dirty.set()
        self._cut(held)

    def pod_changed(self, key: Key, pod: Object | None) -> None:
        """A pod is new, changed, or deleted."""
        old = self._pods.pop(key, None)
        if pod is not None:
            self._pods[key] = pod
        for (namespace, _), held in self._services.items():
            selector = (held.obj.get("spec") or {}).get("selector")
            if namespace == key[0] and selector:
                for one in (old, pod):
                    if one is not None and selects(selector, one["metadata"].get("labels") or {}):
                        held.dirty.set()
                        self._cut(held)
                        break

    def _cut(self, held: _ProxiedService) -> None:
        still = matching(held.obj, self._pods)
        for link in list(held.links):
            end = link.endpoint
            if end is not None and (end.pod not in still or still[end.pod]["metadata"]["uid"] != end.uid):
                link.cut()

    async def _serve(self, key: Key, held: _ProxiedService) -> None:
        """Keep the listeners of one Service up to date; ends with the Service."""
        try:
            while True:
                await held.dirty.wait()
                held.dirty.clear()
                again = await self._listen(held)
                if self._services.get(key) is not held:
                    return
                if again:
                    await asyncio.sleep(RETRY_SECONDS)
                    held.dirty.set()
        finally:
            for server in held.listeners.values():
                server.close()
            for link in list(held.links):
                link.cut()

    async def _listen(self, held: _ProxiedService) -> bool:
        """Open and close listeners. Returns True if one of them must be tried again."""
        spec = held.obj.get("spec") or {}
        ip = spec.get("clusterIP")
        wanted = {
            (str(ip), int(port["port"])): port
            for port in spec.get("ports") or []
            if ip not in (None, "", "None")
            and port.get("protocol", "TCP") == "TCP"
            and endpoints(held.obj, port, self._pods)
        }
        for address in [address for address in held.listeners if address not in wanted]:
            held.listeners.pop(address).close()
        again = False
        for address in wanted:
            if address in held.listeners:
                continue
            try:
                held.listeners[address] = await asyncio.get_running_loop().create_server(
                    functools.partial(self._link, held, address), *address, backlog=512
                )
                held.reported.discard(address)
            except OSError as error:
                again = True
                if address not in held.reported:
                    held.reported.add(address)
                    message = f"cannot listen on {address[0]}:{address[1]}: {error}; trying again"
                    logger.warning("service %s: %s", held.obj["metadata"]["name"], message)
                    if self._events is not None:
                        self._events.record(held.obj, "Service", "PortNotAvailable", message, warning=True)
        return again

    def _link(self, held: _ProxiedService, address: tuple[str, int]) -> asyncio.Protocol:
        def pick() -> Endpoint | None:
            for port in (held.obj.get("spec") or {}).get("ports") or []:
                if int(port["port"]) == address[1]:
                    found = endpoints(held.obj, port, self._pods)
                    return found[next(self._turn) % len(found)] if found else None
            return None

        link = ProxiedConnection(pick, held.links.discard)
        held.links.add(link)
        return link.front

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        tasks = [held.task for held in self._services.values() if held.task is not None]
        self._services.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
