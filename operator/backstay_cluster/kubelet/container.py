"""Runs one container: prepares its process, starts it, watches it, reports its end, and restarts it if required."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay_cluster import quantity
from backstay_cluster.client import ApiRequestError
from backstay_cluster.kubelet.expand import PathMap, clean_path, expand, valid_image
from backstay_cluster.kubelet.files import NotReadyError, environment, mount_paths
from backstay_cluster.kubelet.logs import LogSink
from backstay_cluster.kubelet.memory import resident_bytes
from backstay_cluster.kubelet.node import PodNode, is_set_within
from backstay_cluster.kubelet.objects import own_grace, timestamp
from backstay_cluster.kubelet.probes import ProbeSpec, attempt, exec_in, watch_probe
from backstay_cluster.kubelet.runtime import Process, StartError
from backstay_cluster.kubelet.status import ContainerRecord, terminated, waiting

logger = logging.getLogger(__name__)
MESSAGE_BYTES = 4096
FALLBACK_BYTES, FALLBACK_LINES = 2048, 80
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 10.0, 300.0
QUICK_RETRY_SECONDS, RETRY_SECONDS = 0.05, 1.0
RSS_SECONDS = 0.5


@dataclass(frozen=True)
class Reserved:
    """The folder, address and devices that the node reserved for one container.

    Attributes:
        folder: the container's own folder.
        pod_ip: the pod's address.
        gpus: the container's devices.
    """

    folder: Path
    pod_ip: str
    gpus: Sequence[str]


class ContainerProcess:
    """Runs one container of a pod.

    Args:
        node: the node.
        pod: the pod as first read; the parts that this class uses never change.
        spec: the container.
        record: the state of the container, for the status.
        changed: called whenever `record` changed.
        reserved: the container's folder, address and devices.
    """

    def __init__(
        self,
        node: PodNode,
        pod: Mapping[str, Any],
        spec: Mapping[str, Any],
        record: ContainerRecord,
        changed: Callable[[], None],
        reserved: Reserved,
    ) -> None:
        self.record = record
        self._node = node
        self._pod = pod
        self._spec = spec
        self._changed = changed
        self._reserved = reserved
        self._process: Process | None = None
        self._sink: LogSink | None = None
        self._started_at = 0.0
        self._oom = False
        self._stop = asyncio.Event()  # once set, no process is started
        self._kill_at: float | None = None  # by the clock of the loop, once `stop` was called
        self._settled = asyncio.Event()  # it has started for the first time, or it never will
        self._killers: set[asyncio.Task[None]] = set()
        self._message_file = reserved.folder / "termination-log"
        self._logs = node.logs_dir / pod["metadata"]["namespace"] / pod["metadata"]["name"]

    def _record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        path = f"spec.{'initContainers' if self.record.init else 'containers'}{{{self.record.name}}}"
        self._node.events.record(self._pod, "Pod", reason, message, warning=warning, path=path)

    async def run(self, volumes: Mapping[str, Path], policy: str) -> None:
        """Run until the container has ended and is not restarted: by its restart policy, or because it was stopped."""
        backoff = BACKOFF_SECONDS
        while not self._stop.is_set():
            began = time.time()
            if not await self._run_once(volumes):
                return
            code = self.record.exit_code
            if policy == "Never" or (policy == "OnFailure" and code == 0) or self._stop.is_set():
                return
            if time.time() - began > 2 * MAX_BACKOFF_SECONDS:
                backoff = BACKOFF_SECONDS
            self.record.last_state = self.record.state
            self.record.state = waiting(
                "CrashLoopBackOff", f"back-off {backoff:.0f}s restarting failed container={self.record.name}"
            )
            self._changed()
            if self.record.restarts:
                self._record_event("BackOff", f"Back-off restarting failed container {self.record.name}", warning=True)
            if await self._pause(backoff if self.record.restarts else 0.0):
                self.record.state = self.record.last_state
                self._changed()
                return
            if self.record.restarts:
                backoff = min(MAX_BACKOFF_SECONDS, backoff * 2)
            self.record.restarts += 1

    async def started(self) -> bool:
        """Wait until it has started for the first time. Returns False if it was stopped before."""
        await self._settled.wait()
        return not self._stop.is_set()

    def start_no_more(self) -> None:
        """Start no more processes; the running one continues."""
        self._stop.set()
        self._settled.set()

    def stop(self, grace: float, why: str = "Stopping container") -> None:
        """Start no more processes, and end the running one: SIGTERM, after `grace` seconds SIGKILL to its group.

        May be called again with a shorter grace period.
        """
        self.start_no_more()
        self._kill_at = asyncio.get_running_loop().time() + grace
        self.kill(grace, f"{why} {self.record.name}")

    def kill(self, grace: float, message: str) -> None:
        """End the running process, if one exists."""
        process = self._process
        if process is None or process.exited.done():
            return
        if message and not self._killers:
            self._record_event("Killing", message)
        task = asyncio.ensure_future(self._kill(process, grace))
        self._killers.add(task)
        task.add_done_callback(self._killers.discard)

    async def _kill(self, process: Process, grace: float) -> None:
        if grace > 0:
            self._node.machine.runtime.kill(process, signal.SIGTERM)
            await asyncio.sleep(grace)  # cancelled when the process has ended
        self._node.machine.runtime.kill(process, signal.SIGKILL, group=True)

    async def _pause(self, seconds: float) -> bool:
        """Wait. Returns True if the container was stopped during the wait."""
        return await is_set_within(self._stop, seconds)

    async def _prepare(self, volumes: Mapping[str, Path]) -> tuple[list[str], dict[str, str], str] | None:
        """Returns the command line, environment and folder; waits for missing objects. None if the container was
        stopped."""
        delay = QUICK_RETRY_SECONDS
        while not self._stop.is_set():
            try:
                return await self._command(volumes)
            except NotReadyError as error:
                state = waiting(error.reason, str(error))
                if self.record.state != state:
                    self._record_event("Failed", f"Error: {error}", warning=True)
                    self.record.state = state
                    self._changed()
            except ApiRequestError as error:
                logger.debug("container %s: %s", self.record.name, error)
            if await self._pause(delay):
                break
            delay = min(RETRY_SECONDS, delay * 2)
        return None

    async def _command(self, volumes: Mapping[str, Path]) -> tuple[list[str], dict[str, str], str]:
        spec, namespace = self._spec, self._pod["metadata"]["namespace"]
        image = str(spec.get("image") or "")
        if not valid_image(image):
            raise NotReadyError(
                "InvalidImageName",
                f'Failed to apply default image tag "{image}": '
                f'couldn\'t parse image name "{image}": invalid reference format',
            )
        if not spec.get("command") and not spec.get("args"):
            raise NotReadyError(
                "CreateContainerError",
                "no command specified: this node pulls no images, so it has no entrypoint; `command` must be given",
            )
        base = {**self._node.machine.image, "HOSTNAME": self._pod["metadata"]["name"]}
        # As with the device plugin: without a limit, no device. Otherwise every process would take the whole GPU's
        # memory.
        base["CUDA_VISIBLE_DEVICES"] = ",".join(self._reserved.gpus)
        if not self._reserved.gpus:
            base |= self._node.machine.without_gpu
        links = self._node.service_links(namespace) if self._pod["spec"].get("enableServiceLinks", True) else {}
        env = await environment(
            self._pod,
            spec,
            lambda kind, name: self._node.lookup(namespace, kind, name),
            base,
            {**links, **{name: self._substituted(value) for name, value in self._node.machine.extra_env.items()}},
            pod_ip=self._reserved.pod_ip,
            host_ip=self._node.facts.ip,
            allocatable=self._node.facts.allocatable,
        )
        paths = mount_paths(spec, volumes)
        message_path = clean_path(spec.get("terminationMessagePath") or "/dev/termination-log")
        paths[message_path] = str(self._message_file)
        moved = PathMap(paths)
        argv = [expand(word, env) for word in [*(spec.get("command") or []), *(spec.get("args") or [])]]
        cwd = str(self._reserved.folder)
        if spec.get("workingDir"):
            cwd = moved(clean_path(spec["workingDir"]))
            if cwd != clean_path(spec["workingDir"]):
                os.makedirs(cwd, exist_ok=True)  # noqa: PTH103
        return [moved(word) for word in argv], {name: moved(value) for name, value in env.items()}, cwd

    def _substituted(self, value: str) -> str:
        return value.replace("$(POD_IP)", self._reserved.pod_ip).replace("$(POD_LOGS)", str(self._logs))

    async def _run_once(self, volumes: Mapping[str, Path]) -> bool:
        """Start a process and wait for its end. Returns False if the container was stopped before it started."""
        self._reserved.folder.mkdir(parents=True, exist_ok=True)
        made = await self._prepare(volumes)
        if made is None:
            return False
        argv, env, cwd = made
        meta = self._pod["metadata"]
        self._message_file.write_bytes(b"")
        container_id = uuid.uuid4().hex
        path = self._logs / f"{self.record.name}.log"
        sink = LogSink(path)
        self._sink = self._node.sinks[meta["namespace"], meta["name"], self.record.name] = sink
        self._oom = False
        self.record.id = container_id
        try:
            process = await self._node.machine.runtime.start(container_id, argv, env, cwd, sink.write_fd)
        except StartError as error:
            sink.close()
            self._ended_unstarted(error, argv, cwd)
            return True
        except BaseException:
            sink.close()
            raise
        sink.close_write()
        self._process = process
        self._started_at = time.time()
        self.record.state = {"running": {"startedAt": timestamp(self._started_at)}}
        if not self._spec.get("startupProbe"):
            self._has_started()
        self._changed()
        self._record_event("Created", f"Container created: {self.record.name}")
        self._record_event("Started", f"Container started: {self.record.name}")
        watchers = [asyncio.ensure_future(each) for each in self._watchers(process, env, cwd)]
        if self._kill_at is not None:  # stopped while the process was being started
            self.kill(self._kill_at - asyncio.get_running_loop().time(), "")
        try:
            code = await asyncio.shield(process.exited)
        except asyncio.CancelledError:
            self._node.machine.runtime.kill(process, signal.SIGKILL, group=True)
            raise
        finally:
            for task in [*watchers, *self._killers]:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*watchers, return_exceptions=True)
            sink.close()
        self._ended(code)
        return True

    def _has_started(self) -> None:
        self.record.started = True
        self.record.ready = not self._spec.get("readinessProbe")
        self._settled.set()

    def _ended(self, code: int) -> None:
        self.record.ready = self.record.started = False
        reason = "OOMKilled" if self._oom else "Completed" if code == 0 else "Error"
        self.record.state = terminated(
            code,
            reason,
            self._termination_message(code),
            started=timestamp(self._started_at),
            finished=timestamp(time.time()),
            container=self.record.id,
        )
        self._changed()

    def _ended_unstarted(self, error: StartError, argv: Sequence[str], cwd: str) -> None:
        if error.what == "exec":
            why = os.strerror(error.number)
            if error.number == errno.ENOENT and "/" not in argv[0]:
                why = "executable file not found in $PATH"
            message = f'exec: "{argv[0]}": {why}'
        elif error.what == "chdir":
            message = f"workingDir {cwd!r}: {os.strerror(error.number)}"
        else:
            message = str(error)
        self._record_event("Failed", f"Error: failed to start container {self.record.name!r}: {message}", warning=True)
        now = timestamp(time.time())
        self.record.state = terminated(128, "StartError", message, finished=now, container=self.record.id)
        self._changed()

    def _termination_message(self, code: int) -> str:
        data = b""
        with contextlib.suppress(OSError), self._message_file.open("rb") as file:
            data = file.read(MESSAGE_BYTES)
        if (
            not data
            and code != 0
            and self._spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
            and self._sink
        ):
            with contextlib.suppress(OSError):
                data = self._sink.tail(FALLBACK_BYTES, FALLBACK_LINES)
        return data.decode(errors="replace")

    def _watchers(self, process: Process, env: Mapping[str, str], cwd: str) -> list[Any]:
        limit = ((self._spec.get("resources") or {}).get("limits") or {}).get("memory")
        found: list[Any] = []
        if limit is not None:
            found.append(self._watch_memory(process, int(quantity.value(limit))))
        if any(self._spec.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")):
            found.append(self._probe(process, env, cwd))
        return found

    async def _watch_memory(self, process: Process, limit: int) -> None:
        while True:
            await asyncio.sleep(RSS_SECONDS)
            used = await asyncio.to_thread(resident_bytes, process.pid)
            if used > limit and not process.exited.done():
                self._oom = True
                self._record_event("OOMKilling", f"Memory limit {limit} bytes, {used} bytes are used", warning=True)
                self._node.machine.runtime.kill(process, signal.SIGKILL, group=True)
                return

    async def _probe(self, process: Process, env: Mapping[str, str], cwd: str) -> None:
        """Runs all probes of one run, first startup, then readiness and liveness at the same time."""

        async def run(command: Sequence[str]) -> int:
            start = self._node.machine.runtime.start
            try:
                return await exec_in(
                    lambda out: start(uuid.uuid4().hex, list(command), env, cwd, out),
                    lambda started: self._node.machine.runtime.kill(started, signal.SIGKILL, group=True),
                )
            except StartError:
                return 127

        async def attempt_probe(spec: ProbeSpec) -> None:
            await attempt(spec, self._spec, self._reserved.pod_ip, run)

        grace = own_grace(self._pod)

        def lethal(kind: str, spec: ProbeSpec) -> Callable[[bool, str, int], None]:
            def verdict(holds: bool, message: str, failures: int) -> None:
                if not holds:
                    self._unhealthy(kind, message, failures)
                    if failures == spec.failure:
                        self.kill(grace, f"Container {self.record.name} failed {kind.lower()} probe")

            return verdict

        def ready(holds: bool, message: str, failures: int) -> None:
            if not holds:
                self._unhealthy("Readiness", message, failures)
            if holds != self.record.ready and (holds or failures >= readiness.failure):
                self.record.ready = holds
                self._changed()

        if self._spec.get("startupProbe"):
            spec = ProbeSpec.of(self._spec["startupProbe"])
            await watch_probe(spec, attempt_probe, lethal("Startup", spec), eager=False, until_success=True)
            self._has_started()
            self._changed()
        async with asyncio.TaskGroup() as group:
            if self._spec.get("readinessProbe"):
                readiness = ProbeSpec.of(self._spec["readinessProbe"])
                group.create_task(watch_probe(readiness, attempt_probe, ready, eager=True))
            if self._spec.get("livenessProbe"):
                spec = ProbeSpec.of(self._spec["livenessProbe"])
                group.create_task(watch_probe(spec, attempt_probe, lethal("Liveness", spec), eager=False))

    def _unhealthy(self, kind: str, message: str, failures: int) -> None:
        if failures == 1:  # once for each row of failures: an event for every period would hide the other events
            self._record_event("Unhealthy", f"{kind} probe failed: {message}", warning=True)

    def remove(self) -> None:
        """Remove the container's folder."""
        shutil.rmtree(self._reserved.folder, ignore_errors=True)
