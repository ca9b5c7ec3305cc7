"""Supervises tested jobs by the planner, with the processes of this machine as its cluster.

The pods, Services and the status of the job are those of a `SimulatedJob`. `ProcessJob` is the adapter of `JobObjects`
beside it. Each pod that a plan creates becomes a process. The end of each process becomes the status of its pod.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from backstay_cluster.load import slack
from backstay_rpc.answers import carried, urgent
from backstay_spec import contract
from backstay_spec import status as statuses
from backstay_spec.actions import CreatePod, CreateService, DeletePod, PatchService, Plan
from backstay_spec.causes import Cause
from backstay_spec.observed import PlanSettings
from backstay_spec.simulated import SimulatedJob
from backstay_spec.supervision import Done, SeenJob, run_without_waiting, settle
from backstay_spec.types_status import slot_key

from ..errors import JobFailed
from ._calls import Callee, PodCaller
from ._pods import SECONDS, Job, Pod
from ._service import Service

__all__ = ["ProcessJob", "Supervisor"]

_POLL: Final = 0.01
_END_OF_LOG: Final = 2000
"""Characters of a log that stand for the termination message of a pod that left none, as in Kubernetes."""
_FOLLOWS_PLAN: Final = (contract.ENV_ACTIVE, contract.ENV_TRAINED)
"""Variables of a pod that depend on the plan that created it; `Job` has the others."""


def _now() -> datetime:
    return datetime.now(UTC)


class ProcessJob:
    """The adapter of `JobObjects` for a job of processes.

    Workers and the evaluator start once every standby holds the state of its server. Their pods are pending until then.

    Args:
        job: starts the pods.
        max_restarts: how often the pods of each slot are replaced on average, before the job fails.

    Attributes:
        objects: the objects of the job.
        running: the processes that run, by name of their pod's object.
        lost: the processes that ended before their work was done, in order, each with its exit code.
        changed: whether something happened since the last plan that may need another one.
        has_started: whether workers and the evaluator may start.
    """

    def __init__(self, job: Job, max_restarts: int) -> None:
        self.job = job
        self.objects = SimulatedJob(_manifest(job, max_restarts), _now, stamp=datetime.isoformat)
        self.running: dict[str, Pod] = {}
        self.lost: list[tuple[Pod, int]] = []
        self.changed = True
        self._services = [Service() for _ in range(job.shards)]
        job.environment[contract.ENV_SERVERS] = ",".join(service.address for service in self._services)
        self._held: dict[str, CreatePod] = {}  # pods that start once the standbys are in sync
        self._kills: dict[str, float] = {}  # pods that are being deleted -> when SIGKILL follows
        self._reasons: dict[str, str] = {}
        self._ready: frozenset[str] = frozenset()
        self._caller = PodCaller(job.token, job.workers)
        self.has_started = not job.config.get("standbys")

    # The port.

    async def observed(self) -> SeenJob | None:
        """See `JobObjects`."""
        self.changed = False
        return await self.objects.observed()

    async def write_status(self, planned: Plan) -> bool:
        """See `JobObjects`."""
        return await self.objects.write_status(planned)

    async def carry_out(self, planned: Plan) -> Done:
        """See `JobObjects`."""
        done = await self.objects.carry_out(planned)
        for action in planned.actions:
            match action:
                case CreatePod():
                    self._create(action)
                case DeletePod():
                    self._delete(action)
                case CreateService() | PatchService():
                    self._select()
                case _:
                    pass
        if planned.actions:
            self._call(now=True)
        return done

    def _create(self, action: CreatePod) -> None:
        name = action.manifest["metadata"]["name"]
        if name not in self.objects.pods or name in self.running:
            return
        if action.role != contract.ROLE_SERVER and not self.has_started:
            self._held[name] = action
            return
        (container,) = (c for c in action.manifest["spec"]["containers"] if c["name"] == contract.CONTAINER)
        variables = {v["name"]: v["value"] for v in container["env"] if v["name"] in _FOLLOWS_PLAN}
        self.running[name] = self.job.start(
            action.role, action.index, action.incarnation, ports=self.job.new_ports(), environment=variables
        )
        self.objects.run(name, ready=False)
        self._select()

    def _delete(self, action: DeletePod) -> None:
        self._reasons[action.name] = action.reason
        pod = self.running.get(action.name)
        if pod is None:
            self._held.pop(action.name, None)
            self.objects.vanish(action.name)
            return
        pod.process.send_signal(signal.SIGTERM)
        seconds = self.objects.pods[action.name]["metadata"]["deletionGracePeriodSeconds"]
        self._kills[action.name] = time.monotonic() + seconds

    def _select(self) -> None:
        """Connect each Service with the server that it selects."""
        for service in self.objects.services.values():
            selector = service["spec"]["selector"]
            for name, pod in self.running.items():
                labels = self.objects.pods[name]["metadata"]["labels"]
                if selector.items() <= labels.items():
                    self._services[pod.index].target = (self.job.address, pod.ports.control)

    def _call(self, *, now: bool = False) -> None:
        status = self.objects.status
        active = status.get("active", {})
        serving = {**status.get("incarnations", {}), **active}
        callees = []
        for name, pod in self.running.items():
            uid = self.objects.pods[name]["metadata"]["uid"]
            serves = serving.get(slot_key(pod.role, pod.index)) == pod.incarnation
            callees.append(Callee(uid, pod, serves, uid in self._ready))
        self._caller.call(callees, serving, now=now)

    # The processes.

    def look(self) -> None:
        """Take note of the processes that ended, and of the answers of the others."""
        for name, pod in list(self.running.items()):
            code = pod.process.poll()
            if code is not None:
                self._ended(name, pod, code)
            elif time.monotonic() >= self._kills.get(name, float("inf")):
                pod.process.kill()
        self._take_answers()
        if not self.has_started and self._in_sync():
            self.has_started = True
            held, self._held = self._held, {}
            for action in held.values():
                self._create(action)

    def _ended(self, name: str, pod: Pod, code: int) -> None:
        del self.running[name]
        deleted = self._reasons.get(name)
        if code != 0 and deleted in (None, Cause.STALLED):
            self.lost.append((pod, code))
        self.objects.end(name, code, _final_message(pod, code))
        if self._kills.pop(name, None) is not None:
            self.objects.vanish(name)
        self.changed = True
        self._call()

    def lose_node(self, name: str) -> None:
        """The node of a pod is lost: its process is killed, and the pod no longer exists."""
        pod = self.running.pop(name)
        pod.process.kill()
        self.objects.vanish(name)
        self.changed = True

    def _take_answers(self) -> None:
        answers = self._caller.answers()
        if answers is None:
            return
        memory = self.objects.memory
        before, memory.contact = memory.contact, answers.contact
        if before is None or (before.silent, before.hung_workers) != (
            answers.contact.silent,
            answers.contact.hung_workers,
        ):
            self.changed = True
        for name in self.running:
            uid = self.objects.pods[name]["metadata"]["uid"]
            if uid in answers.ready and uid not in self._ready:
                self.objects.run(name)
                self.changed = True
        self._ready |= answers.ready
        if answers.progress is not None:
            progress = carried(memory.progress, answers.progress)
            self.changed = self.changed or urgent(memory.progress, progress)
            memory.progress = progress
            if progress.report.step is not None:
                memory.reported(progress.report.step, progress.taken, progress.coordinator)
        self._call()

    def _in_sync(self) -> bool:
        progress = self.objects.memory.progress
        return progress is not None and all(self.standby(shard) for shard in range(self.job.shards))

    def standby(self, shard: int) -> int:
        """Returns the incarnation of the shard's standby that holds the state of its server, or 0 if there is none."""
        progress, active = self.objects.memory.progress, self.active(shard)
        found = 0 if progress is None else progress.in_sync.get(shard, 0)
        return found if found > active else 0

    def active(self, shard: int) -> int:
        """Returns the incarnation of the shard's active server, or 0 if none was created."""
        status, key = self.objects.status, slot_key(contract.ROLE_SERVER, shard)
        found: int = status.get("active", {}).get(key) or status.get("incarnations", {}).get(key, 0)
        return found

    def pod(self, role: str, index: int, incarnation: int | None = None) -> Pod:
        """Returns the running process of a slot, by default of its newest pod."""
        return self.running[self.objects.named(role, index, incarnation)]

    def close(self) -> None:
        """End the calls, and close the Services."""
        self._caller.close()
        for service in self._services:
            service.close()


class Supervisor:
    """Supervises a job of processes, as the operator supervises one in a cluster.

    Each method that waits also supervises. Nothing happens to the job's pods between two calls.

    Attributes:
        processes: the job, its objects and its processes.
    """

    def __init__(self, job: Job, max_restarts: int = 100) -> None:
        """
        Args:
            job: starts the pods. Its number of workers and servers, its standbys and its evaluator count.
            max_restarts: how often the pods of each slot are replaced on average, before the job fails.
        """
        self.processes = ProcessJob(job, max_restarts)
        # A pod that crashes before it worked is replaced immediately, so that a test does not wait.
        self._settings = PlanSettings("default", first_wait=timedelta(0))
        self._due = 0.0

    @property
    def failure(self) -> tuple[str, str] | None:
        """The reason and the message of the job's failure, or None if it has not failed."""
        failed = self.processes.objects.condition(statuses.FAILED)
        return (failed["reason"], failed["message"]) if failed.get("status") == "True" else None

    @property
    def ended(self) -> bool:
        """Whether the job has succeeded or failed."""
        succeeded = self.processes.objects.condition(statuses.SUCCEEDED)
        return self.failure is not None or succeeded.get("status") == "True"

    def step(self) -> None:
        """Look at the processes, and plan if something has changed or is due."""
        self.processes.look()
        if not self.processes.changed and time.monotonic() < self._due:
            return
        wait = run_without_waiting(settle(self.processes, self._settings, _now))
        self._due = float("inf") if wait is None else time.monotonic() + wait

    def until(self, done: Callable[[], object], seconds: float = SECONDS) -> None:
        """Supervise until `done` returns a true value.

        Args:
            done: the awaited condition.
            seconds: the limit on a machine without other work. A busy machine has more.

        Raises:
            JobFailed: the job has failed, and the condition is false.
            TimeoutError: the condition was false for the limit. The messages of both have the end of each log.
        """
        began = time.monotonic()
        while not done():
            if self.failure is not None:
                reason, message = self.failure
                raise JobFailed(reason, f"{message}\n{self.processes.job.last()}")
            if (passed := time.monotonic() - began) > seconds * slack():
                last = self.processes.job.last()
                raise TimeoutError(f"the job did not end within {passed:.0f} s:\n{last}")
            self.step()
            time.sleep(_POLL)

    def close(self) -> None:
        """End the calls, and close the Services. The pods continue."""
        self.processes.close()


def _final_message(pod: Pod, code: int) -> str:
    """Returns the text that a process wrote as its termination message, or the end of its log after a crash."""
    try:
        written = pod.termination.read_text()
    except OSError:
        written = ""
    return written or ("" if code == 0 else pod.output()[-_END_OF_LOG:])


def _manifest(job: Job, max_restarts: int) -> dict[str, Any]:
    """Returns the TrainingJob of a job of processes, with the fields that the planner reads."""
    config, stored = job.config, job.config.get("checkpoint")
    spec: dict[str, Any] = {
        "image": "none",
        "command": ["none"],
        "parameterServers": {
            "replicas": job.shards,
            "standbys": config.get("standbys", 0),
            "maxRestarts": max_restarts * job.shards,
        },
        "workers": {"replicas": job.workers, "maxRestarts": max_restarts * job.workers},
        "update": {"mode": config.get("mode", "Sync"), "backups": config.get("backups", 0)},
    }
    if config.get("evaluator"):
        spec["evaluator"] = {"maxRestarts": max_restarts}
    if stored:
        spec["checkpoint"] = {"uri": stored["uri"]}
    metadata = {"name": "tested", "namespace": "default", "uid": str(uuid.uuid4()), "generation": 1}
    return {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": metadata, "spec": spec}
