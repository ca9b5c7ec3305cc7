"""The life of one pod on the node, and its status in the API.

Each pod has two loops, which share only the records of its containers. One loop runs the pod, and never waits for the
API server. The other one writes the status whenever the records differ from the API's status, until it succeeds. It
compares levels, not edges: after an outage of the API server, one patch contains all changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from backstay_cluster.client import ApiRequestError
from backstay_cluster.kubelet.container import QUICK_RETRY_SECONDS, RETRY_SECONDS, ContainerProcess, Reserved
from backstay_cluster.kubelet.files import NotReadyError, Volumes, field_of
from backstay_cluster.kubelet.node import GPU, RUNNING, PodNode, PoolEmptyError, is_set_within
from backstay_cluster.kubelet.objects import (
    DEFAULT_GRACE,
    Object,
    container_requests,
    is_sidecar,
    is_terminal,
    own_grace,
    pod_requests,
    timestamp,
)
from backstay_cluster.kubelet.status import ContainerRecord, conditions_of, covers, phase_of, terminated, waiting

logger = logging.getLogger(__name__)
MAX_RETRY_SECONDS = 5.0


class PodWorker:
    """Runs one pod bound to this node.

    Args:
        node: the node.
        pod: the pod as first read.
    """

    def __init__(self, node: PodNode, pod: Object) -> None:
        self._node = node
        self._pod = pod  # the newest known version
        self._uid = pod["metadata"]["uid"]
        spec = pod["spec"]
        self._init = [_record(c, init=True) for c in spec.get("initContainers") or []]
        self._records = [_record(c, init=False) for c in spec.get("containers") or []]
        for record in [*self._init[1:], *(self._records if self._init else ())]:
            record.state = waiting("PodInitializing")
        self._containers: dict[str, ContainerProcess] = {}
        self._ending: set[str] = set()  # the names of the sidecars that were stopped
        self._address: str | None = None
        self._started_at: str | None = None
        self._failure: tuple[str, str] | None = None  # reason and message of a failure that containers cannot change
        self._dirty = asyncio.Event()
        self._clean = asyncio.Event()
        self._stopping = asyncio.Event()
        self._leaving = asyncio.Event()  # deletionTimestamp is set, or the pod was deleted
        self.ended = asyncio.Event()  # no process runs, and none will start
        self._gone = False
        self._over = False  # the containers have ended, or will never be started
        self._lent = False
        self._grace = DEFAULT_GRACE
        self._kill_at: float | None = None  # by the clock of the loop, once its containers are being ended
        self._volumes: Volumes | None = None

    @property
    def api_path(self) -> str:
        """The pod's path in the API."""
        meta = self._pod["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"

    def update(self, pod: Object) -> None:
        """The watch showed a newer version of the pod."""
        self._pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            grace = pod["metadata"].get("deletionGracePeriodSeconds")
            self._leave(DEFAULT_GRACE if grace is None else float(grace))
        elif not self._status_is_ours(pod):
            self._dirty.set()

    def removed(self) -> None:
        """The pod was deleted from the API: end its remaining processes now."""
        self._gone = True
        self._leave(0)

    def _leave(self, grace: float) -> None:
        if not self._leaving.is_set() or grace < self._grace:
            self._leaving.set()
            self.stop(grace)

    def stop(self, grace: float) -> None:
        """End all containers, and start no more. Sidecars end after the others."""
        self._grace = grace
        self._kill_at = asyncio.get_running_loop().time() + grace
        self._stopping.set()
        for name, container in self._containers.items():
            if container.record.sidecar and name not in self._ending:
                container.start_no_more()
            else:
                container.stop(grace)

    async def run(self) -> None:
        """Run until the pod is deleted from the API, or until this task is cancelled, which ends its processes."""
        writer = asyncio.create_task(self._write_status())
        borrowed: list[str] = []
        try:
            if is_terminal(self._pod):
                self._stopping.set()
            else:
                await self._run_safely(borrowed)
            self.ended.set()
            await self._leaving.wait()
            while not self._gone:
                await self._clean.wait()
                await self._delete()
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            self._release(borrowed)
            if self._volumes is not None:
                self._volumes.remove()
            for container in self._containers.values():
                container.remove()

    def _release(self, gpus: list[str]) -> None:
        self._node.gpus.release(gpus)
        gpus.clear()
        if self._lent and self._address is not None:
            self._lent = False
            self._node.addresses.release([self._address])

    async def _run_safely(self, gpus: list[str]) -> None:
        try:
            await self._run_pod(gpus)
        except Exception as error:
            # A defect of the kubelet fails only this pod, with a message; the node continues.
            logger.exception("pod %s", self.api_path)
            self._fail("KubeletError", f"{type(error).__name__}: {error}")
        finally:
            # The object may exist for long after its end; its resources are free now.
            self._release(gpus)

    async def _run_pod(self, gpus: list[str]) -> None:
        """Run the pod from its start until all containers have ended."""
        spec, meta = self._pod["spec"], self._pod["metadata"]
        self._started_at = timestamp(time.time())
        before = (self._pod.get("status") or {}).get("containerStatuses") or []
        if any(status.get("containerID") for status in before):
            self._ended_with_kubelet(before)
            return
        wanted = {c["name"]: int(container_requests(c).get(GPU, 0)) for c in _all_containers(spec)}
        try:
            self._address = self._node.addresses.take()[0]
            self._lent = True
            gpus += self._node.gpus.take(int(pod_requests(self._pod).get(GPU, 0)))
        except PoolEmptyError as error:
            self._fail("UnexpectedAdmissionError", f"the node has too few free addresses or {GPU}: {error}")
            return
        root = self._node.data_dir / RUNNING / self._uid
        claims = self._node.data_dir / "claims"
        self._volumes = Volumes(
            self._pod,
            root / "volumes",
            claims,
            lambda kind, name: self._node.lookup(meta["namespace"], kind, name),
            lambda path: field_of(self._pod, path, pod_ip=self._address or "", host_ip=self._node.facts.ip),
        )
        position = 0
        for record, container in zip([*self._init, *self._records], _all_containers(spec), strict=True):
            count = wanted[record.name]
            own = gpus[position : position + count]
            # The containers after an init container get its devices, because it has ended. A sidecar keeps them.
            position += 0 if record.init and not record.sidecar else count
            self._containers[record.name] = ContainerProcess(
                self._node,
                self._pod,
                container,
                record,
                self._dirty.set,
                Reserved(root / record.name, self._address, own),
            )
        deadline = spec.get("activeDeadlineSeconds")
        guard = asyncio.create_task(self._deadline(float(deadline))) if deadline else None
        try:
            folders = await self._mount(self._volumes)
            if folders is not None:
                await self._run_containers(folders, spec.get("restartPolicy") or "Always")
        finally:
            if guard is not None:
                guard.cancel()
        for record in [*self._init, *self._records]:
            if record.exit_code is None:
                self._never_started(record)
        self._over = True
        self._dirty.set()

    async def _run_containers(self, folders: Mapping[str, Any], policy: str) -> None:
        """Run the init containers in order, then the others together, with the sidecars beside them."""
        sidecars: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as beside:
            for record in self._init:
                container = self._containers[record.name]
                if record.sidecar:
                    sidecars[record.name] = beside.create_task(container.run(folders, "Always"))
                    complete = await container.started()
                else:
                    await container.run(folders, "OnFailure" if policy == "Always" else policy)
                    complete = record.exit_code == 0
                if not complete:
                    break
            else:
                async with asyncio.TaskGroup() as group:
                    for record in self._records:
                        group.create_task(self._containers[record.name].run(folders, policy))
            await self._end_sidecars(sidecars)

    async def _end_sidecars(self, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        """End the sidecars one by one, the last one first. Together they have one grace period.

        Args:
            tasks: the tasks that run them, by name, in the order of their start.
        """
        clock = asyncio.get_running_loop().time
        if self._kill_at is None:
            self._kill_at = clock() + own_grace(self._pod)
        for name in tasks:
            self._containers[name].start_no_more()
        for name in reversed(list(tasks)):
            self._ending.add(name)
            self._containers[name].stop(max(0.0, self._kill_at - clock()))
            await tasks[name]

    async def _mount(self, volumes: Volumes) -> Mapping[str, Any] | None:
        delay, reported = QUICK_RETRY_SECONDS, ""
        while not self._stopping.is_set():
            try:
                return await volumes.mount()
            except NotReadyError as error:
                self._dirty.set()
                if str(error) != reported:
                    reported = str(error)
                    self._node.events.record(self._pod, "Pod", error.reason, reported, warning=True)
            except ApiRequestError as error:
                logger.debug("volumes of %s: %s", self.api_path, error)
            await is_set_within(self._stopping, delay)
            delay = min(RETRY_SECONDS, delay * 2)
        return None

    async def _deadline(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._failure = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
        self.stop(own_grace(self._pod))

    def _ended_with_kubelet(self, statuses: list[Object]) -> None:
        """A previous kubelet started the containers, and they ended with it."""
        now = timestamp(time.time())
        started = {status["name"]: status for status in statuses}
        for record in [*self._init, *self._records]:
            old = started.get(record.name, {})
            record.restarts = int(old.get("restartCount") or 0)
            if "terminated" in (old.get("state") or {}):
                record.state = old["state"]
            else:
                message = (
                    "The container could not be located when the kubelet started: it ended with the previous kubelet"
                )
                record.state = terminated(137, "ContainerStatusUnknown", message, finished=now)
        self._dirty.set()

    def _never_started(self, record: ContainerRecord) -> None:
        if record.last_state:
            record.state = record.last_state
        elif not record.init and all(init.sidecar or init.complete for init in self._init):
            message = "The container was never started: its pod ended before"
            record.state = terminated(137, "ContainerStatusUnknown", message, finished=timestamp(time.time()))
        # Otherwise it waits for an init container, which did not succeed. A kubelet reports that permanently.

    def _fail(self, reason: str, message: str) -> None:
        self._failure = (reason, message)
        self._node.events.record(self._pod, "Pod", reason, message, warning=True)
        self._dirty.set()

    # --- the status

    def _status(self) -> Object:
        """Returns the status that the API must show."""
        now = timestamp(time.time())
        policy = self._pod["spec"].get("restartPolicy") or "Always"
        phase = phase_of(policy, self._init, self._records)
        alive = any(record.running for record in [*self._init, *self._records])
        if self._stopping.is_set() and not alive and phase in ("Pending", "Running"):
            # It will not run again: the exit codes of its containers decide, independent of its restart policy.
            codes = [record.exit_code for record in [*self._init, *self._records] if not record.sidecar]
            if self._over or None not in codes:
                phase = "Succeeded" if all(code == 0 for code in codes) else "Failed"
        status: Object = {"reason": None, "message": None}
        if self._failure is not None and not alive:
            phase = "Failed"
            status = {"reason": self._failure[0], "message": self._failure[1]}
        previous = (self._pod.get("status") or {}).get("conditions") or []
        status |= {
            "phase": phase,
            "conditions": conditions_of(
                previous, phase, self._init, self._records, has_address=self._address is not None, now=now
            ),
            "hostIP": self._node.facts.ip,
            "hostIPs": [{"ip": self._node.facts.ip}],
            "startTime": self._started_at,
            "containerStatuses": [record.as_status() for record in self._records],
        }
        if self._init:
            status["initContainerStatuses"] = [record.as_status() for record in self._init]
        if self._address is not None:
            status["podIP"] = self._address
            status["podIPs"] = [{"ip": self._address}]
        return status

    def _status_is_ours(self, pod: Mapping[str, Any]) -> bool:
        if self._started_at is None:  # this kubelet has no state of it: a new pod, or one that had ended before
            return True
        return covers(pod.get("status") or {}, self._status())

    async def _write_status(self) -> None:
        delay = QUICK_RETRY_SECONDS
        if self._started_at is None and not is_terminal(self._pod):
            await self._dirty.wait()
        while True:
            self._dirty.clear()
            if self._gone or self._status_is_ours(self._pod):
                self._clean.set()
                await self._dirty.wait()
                self._clean.clear()
                continue
            self._clean.clear()
            meta = self._pod["metadata"]
            body = {
                # Both are preconditions: the same pod, and no status that this kubelet has not read.
                "metadata": {"uid": self._uid, "resourceVersion": meta["resourceVersion"]},
                "status": self._status(),
            }
            try:
                answer = await self._node.client.patch(f"{self.api_path}/status", body)
                self._newer(answer)
                if self._dirty.is_set() or self._status_is_ours(self._pod):
                    delay = QUICK_RETRY_SECONDS
                    continue
                # The server stores another value than the one that was sent: wait, and do not retry immediately.
            except ApiRequestError as error:
                if error.code == 409 and await self._refresh():
                    continue
                if error.code == 404:
                    self._gone = True
                    self._leave(0)
                    continue
                logger.log(
                    logging.WARNING if error.code in (400, 403, 422) else logging.DEBUG,
                    "status of %s not written, again in %.2f s: %s",
                    self.api_path,
                    delay,
                    error,
                )
            await asyncio.sleep(delay)
            delay = min(MAX_RETRY_SECONDS, delay * 2)

    async def _refresh(self) -> bool:
        try:
            pod = await self._node.client.get(self.api_path)
        except ApiRequestError as error:
            if error.code == 404:
                self._gone = True
                self._leave(0)
                return True
            return False
        if pod["metadata"]["uid"] != self._uid:
            self._gone = True
            self._leave(0)
        else:
            self._newer(pod)
        return True

    def _newer(self, pod: Object) -> None:
        self._pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self.update(pod)

    async def _delete(self) -> None:
        """All containers have ended: delete the pod from the API."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self._uid},
        }
        try:
            await self._node.client.delete(self.api_path, body)
            self._gone = True
        except ApiRequestError as error:
            if error.code in (404, 409):
                self._gone = True
                return
            logger.debug("%s not deleted: %s", self.api_path, error)
            await asyncio.sleep(RETRY_SECONDS)


def _all_containers(spec: Mapping[str, Any]) -> list[Object]:
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _record(container: Mapping[str, Any], *, init: bool) -> ContainerRecord:
    reason = "ContainerCreating" if not init else "PodInitializing"
    return ContainerRecord(
        name=container["name"],
        image=str(container.get("image") or ""),
        init=init,
        sidecar=init and is_sidecar(container),
        state={"waiting": {"reason": reason}},
    )
