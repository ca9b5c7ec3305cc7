"""Plans for a simulated job with the real planner and account, and calls simulated servers. Pure.

The planner is the operator's own `settle`, on a `SimulatedJob` whose clock is the heap's. So budgets, back-offs,
promotions and replacements are those of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from backstay_rpc.answers import carried, urgent
from backstay_spec import contract
from backstay_spec import status as statuses
from backstay_spec.actions import Action
from backstay_spec.goodput import PARTS, Account, WorkerPod
from backstay_spec.job_report import CheckpointStatus, JobReport, TermStart
from backstay_spec.observed import Contact, PlanSettings, Progress, Silence
from backstay_spec.simulated import SimulatedJob
from backstay_spec.supervision import run_without_waiting, settle
from backstay_spec.types import TrainingJob

from ..._coordination import Finished
from .._clock import PlannedEvent
from ._host import TimedStore
from ._pod import PodOnNode
from ._worker import ServerTable
from ._world import SimulatedWorld

__all__ = ["BEGAN", "JobPods", "SimulatedOperator"]

BEGAN: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of day at which a simulation begins."""

_UID: Final = "5f1c2f0e-0000-4000-8000-000000000000"


class JobPods(ServerTable, Protocol):
    """The pods of the job, as the operator observes them.

    Attributes:
        pods: the living pods by name.
        gone: the pods that ended, while their objects exist.
        store: the checkpoints.
        finished: how training ended; None: it has not.
    """

    pods: dict[str, PodOnNode]
    gone: dict[str, PodOnNode]
    store: TimedStore
    finished: Finished | None

    def beat(self) -> None:
        """Send the heartbeats of all workers."""


class _ActedObjects(SimulatedJob):
    """The objects of the job. It calls back for each action on a pod or a Service."""

    def __init__(self, manifest: dict[str, Any], now: Callable[[], datetime], act: Callable[[Action], None]) -> None:
        super().__init__(manifest, now, stamp=datetime.isoformat)
        self._act = act

    def act(self, action: Action) -> None:
        super().act(action)
        self._act(action)


class SimulatedOperator:
    """The operator of one job.

    Args:
        world: the simulation.
        job: the TrainingJob, valid.
        pods: its pods.
        act: called with each action that a plan carries out.

    Attributes:
        objects: the objects of the job.
        account: the seconds of the workers.
        has_ended: whether the job has succeeded or failed.
    """

    def __init__(self, world: SimulatedWorld, job: TrainingJob, pods: JobPods, act: Callable[[Action], None]) -> None:
        self._world, self._heap, self._assumed, self._pods = world, world.heap, world.assumed, pods
        manifest = job.to_dict()
        manifest.pop("status", None)
        manifest["metadata"] = (
            {"generation": 1} | manifest["metadata"] | {"uid": manifest["metadata"].get("uid") or _UID}
        )
        self.objects = _ActedObjects(manifest, self.now, act)
        self._workers = job.spec.workers.replicas
        self._settings = PlanSettings("backstay-system")
        self.account = Account()
        self._planned: PlannedEvent | None = None
        self._due: PlannedEvent | None = None
        self.has_ended = False
        self._heap.after(0.0, self._plan)
        self._heap.after(self._assumed.operator.call_seconds, self._call)

    def now(self) -> datetime:
        """Returns the time of day."""
        return BEGAN + timedelta(seconds=self._heap.now)

    def changed(self) -> None:
        """Plan a little later, because the operator observes a change."""
        if self._planned is None and not self.has_ended:
            operator = self._assumed.operator
            self._planned = self._heap.after(
                operator.plan_seconds + operator.pod_seconds * len(self._pods.pods), self._plan
            )

    def _plan(self) -> None:
        self._heap.cancel(self._planned)
        self._heap.cancel(self._due)
        self._planned = self._due = None
        if self.has_ended:
            return
        self._read_contact()
        self._observe(self._read_progress())
        wait = run_without_waiting(settle(self.objects, self._settings, self.now))
        if wait is not None:
            self._due = self._heap.after(wait, self._plan)
        conditions = (self.objects.condition(kind) for kind in (statuses.SUCCEEDED, statuses.FAILED))
        self.has_ended = any(condition.get("status") == "True" for condition in conditions)

    def _call(self) -> None:
        """The operator's calls to the servers."""
        if self.has_ended:
            return
        before = self.objects.memory.progress
        self._read_contact()
        after = self._progress()
        is_urgent = after is not None and urgent(before, carried(before, after))
        if is_urgent or any(pod.silent_since is not None for pod in self._pods.pods.values()):
            self.changed()
        self._observe(after)
        self._heap.after(self._assumed.operator.call_seconds, self._call)

    def _read_contact(self) -> None:
        servers = [
            pod for pod in self._pods.pods.values() if pod.role == contract.ROLE_SERVER and pod.started is not None
        ]
        answered, silent = {}, {}
        for pod in servers:
            uid = self.objects.pods[pod.name]["metadata"]["uid"]
            answered[uid] = self.now()
            if pod.silent_since is not None:
                since = BEGAN + timedelta(seconds=pod.silent_since)
                seconds = self._heap.now - pod.silent_since
                answered[uid] = since
                silent[uid] = Silence(since, int(seconds / self._assumed.operator.call_seconds), int(seconds >= 10))
        hung = {
            self.objects.pods[pod.name]["metadata"]["uid"]
            for pod in self._pods.pods.values()
            if pod.role == contract.ROLE_WORKER and pod.is_silent(self._heap.now, self._world.times.silent)
        }
        self.objects.memory.contact = Contact(
            self.now(),
            answered,
            silent,
            frozenset(shard.shard for shard in self._pods.shards if shard is not None and shard.alive),
            frozenset(),
            frozenset(hung),
        )

    def _progress(self) -> Progress | None:
        reached = frozenset(shard.shard for shard in self._pods.shards if shard is not None and shard.alive)
        if not reached:
            return None
        fields: dict[str, Any] = {}
        host = self._pods.host
        if host is not None and host.alive:
            state, stored = host.state, self._pods.store
            checkpoint = None
            if stored.checkpoint:
                checkpoint = CheckpointStatus(step=stored.version, uri=stored.checkpoint)
            fields = {
                "coordinator": (self._pods.shards[0].incarnation if self._pods.shards[0] is not None else 0),
                "report": JobReport(
                    step=state.version,
                    term=state.term,
                    world=state.world,
                    checkpoint=checkpoint,
                    steps_redone=state.redone,
                    term_start=TermStart(state.term, host.start_of_term.version, host.start_of_term.checkpoint),
                ),
                "contributed": dict(host.contributed),
                "done": self._pods.finished is not None and not self._pods.finished.reason,
            }
        beating = {
            pod.key[1]: pod.key[2]
            for pod in self._pods.pods.values()
            if pod.worker is not None and pod.silent_since is None and pod.worker.last_beat is not None
        }
        in_sync = {
            pod.key[1]: pod.key[2]
            for pod in self._pods.pods.values()
            if pod.followed is not None and pod.followed.in_sync and pod.silent_since is None
        }
        return Progress(taken=self.now(), reached=reached, in_sync=in_sync, beating=beating, **fields)

    def _read_progress(self) -> Progress | None:
        progress = self._progress()
        if progress is not None:
            memory = self.objects.memory
            memory.progress = carried(memory.progress, progress)
            if progress.report.step is not None:
                memory.reported(progress.report.step, progress.taken, progress.coordinator)
        return progress

    def unix(self) -> float:
        """Returns the Unix time."""
        return BEGAN.timestamp() + self._heap.now

    def _observe(self, progress: Progress | None) -> None:
        """The operator's account."""
        found, reports = [], {}
        base = BEGAN.timestamp()
        # A pod that the planner has deleted does not exist any more.
        self._pods.gone = {name: pod for name, pod in self._pods.gone.items() if name in self.objects.pods}
        for pod in (*self._pods.pods.values(), *self._pods.gone.values()):
            if pod.role != contract.ROLE_WORKER or pod.member or pod.placed is None:
                continue
            key = pod.key[1], pod.key[2]
            ended = None if pod.ended is None else base + pod.ended
            found.append(WorkerPod(key, base + pod.placed, ended, pod.code == 0, pod.measured))
            if pod.worker is not None and (beat := pod.worker.last_beat) is not None:
                reports[key] = beat
        self.account.observe(self.unix(), found, self._workers, over=self.has_ended)
        self.account.report(reports)
        if progress is not None and progress.report.term is not None and progress.report.term_start is not None:
            self.account.progressed(
                progress.report.term,
                progress.report.term_start.step,
                progress.report.steps_redone or 0,
                max(0, self._pods.store.version),
            )

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the workers by part until now."""
        unix = self.unix()
        self._pods.beat()
        self._observe(self._progress())
        return {part: value for part, value in self.account.seconds(unix).items() if part in PARTS}
