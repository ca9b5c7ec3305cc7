"""Starts and ends the pods of a simulated job, as a kubelet does, and makes some of them servers. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from backstay_spec import contract
from backstay_spec.actions import Action, CreatePod, DeletePod, PatchService
from backstay_spec.types import TrainingJob
from backstay_spec.types_status import slot_key

from ..._coordination import Coordinator, Finished, Report
from ..._process import SIGTERM_EXIT
from ._host import CoordinatorHost, TimedStore
from ._operator import SimulatedOperator
from ._pod import PodOnNode
from ._shard import TimedShard
from ._standby import FollowedState
from ._worker import TimedWorker
from ._world import SimulatedWorld

__all__ = ["SimulatedPods"]

_KILLED: Final = 137
_LINK_PAUSE: Final = 0.1
_BEAT: Final = 2.0
_EVICTED_AFTER: Final = 300.0
"""The default toleration of pods for a node that is not reachable."""
_GROUP_LOST_AFTER: Final = 0.2
"""How long the other pods of a rank need to notice that one was lost, and to end."""


class SimulatedPods:
    """The pods of one job. It is the `ServerTable` of the workers, and the `JobPods` of the operator.

    Args:
        world: the simulation.
        job: the TrainingJob, valid.

    Attributes:
        shards, host: see `ServerTable`.
        pods, gone, store, finished: see `JobPods`.
        operator, objects: the operator, and the objects of the job.
        on_start: called with each pod whose process begins.
        failed_nodes: the numbers of nodes that were lost or preempted, which get no further pods.
    """

    def __init__(self, world: SimulatedWorld, job: TrainingJob) -> None:
        self._world, self._heap, self._assumed = world, world.heap, world.assumed
        self.store = TimedStore(world)
        self.shards: list[TimedShard | None] = [None] * world.config.shards
        self.host: CoordinatorHost | None = None
        self.pods: dict[str, PodOnNode] = {}
        self.gone: dict[str, PodOnNode] = {}
        self._workers = job.spec.workers.replicas
        self._pods_per_rank = job.spec.workers.pods_per_rank
        self._nodes = 0
        self._on_node: dict[int, int] = {}
        self.failed_nodes: set[int] = set()
        self.finished: Finished | None = None
        self.on_start: list[Callable[[PodOnNode], None]] = []
        self._silent_told: frozenset[int] = frozenset()
        self.operator = SimulatedOperator(world, job, self, self._acted)
        self.objects = self.operator.objects
        self._heap.after(_BEAT, self._beats)

    # ---- `ServerTable` ----

    @property
    def is_done(self) -> bool:
        """See `ServerTable`."""
        return self.finished is not None

    # ---- Heartbeats ----

    def beat(self) -> None:
        """Send the heartbeats of all workers."""
        unix, saved = self.operator.unix(), max(0, self.store.version)
        for pod in self.pods.values():
            if pod.worker is not None and pod.worker.alive and pod.silent_since is None:
                pod.worker.beat(unix, saved)

    def _beats(self) -> None:
        if self.operator.has_ended:
            return
        host, now, limit = self.host, self._heap.now, self._world.times.silent
        silent = frozenset(
            pod.key[1] for pod in self.pods.values() if pod.worker is not None and pod.is_silent(now, limit)
        )
        if host is not None and host.alive and silent != self._silent_told:
            self._silent_told = silent
            host.do(Coordinator.silent, silent)
        self._heap.after(_BEAT, self._beats)

    def _beat_of(self, pod: PodOnNode) -> None:
        """A worker sends a heartbeat. Each worker has its own phase, so that a kill loses half of the interval."""
        if pod.alive and pod.silent_since is None and pod.worker is not None and pod.worker.alive:
            pod.worker.beat(self.operator.unix(), max(0, self.store.version))
            self._heap.after(_BEAT, self._beat_of, pod)

    # ---- The kubelet ----

    def _acted(self, action: Action) -> None:
        match action:
            case CreatePod():
                self._create(action)
            case DeletePod():
                self._delete(action.name)
            case PatchService():
                self._heap.after(2 * self._world.latency, self._promote)
            case _:
                pass

    def _create(self, action: CreatePod) -> None:
        name = action.manifest["metadata"]["name"]
        if name not in self.objects.pods or name in self.pods:
            return
        key = (action.role, action.index, action.incarnation, name)
        member = int(action.manifest["metadata"]["labels"].get(contract.LABEL_MEMBER, "0"))
        pod = self.pods[name] = PodOnNode(key, self._world.machine(), member)
        starts = self._assumed.starts
        draws = self._world.draws("start", *pod.purpose)
        self._heap.after(draws.around(starts.scheduling_seconds, starts.sigma), self._placed, pod)

    def _placed(self, pod: PodOnNode) -> None:
        if not pod.alive:
            return
        pod.placed = self._heap.now
        pod.node = self._free_node()
        starts = self._assumed.starts
        start = starts.worker if pod.role == contract.ROLE_WORKER else starts.server
        draws = self._world.draws("container", *pod.purpose)
        work = draws.around(start.processor_seconds, starts.sigma)
        self._heap.after(draws.around(start.seconds, starts.sigma), self._runs, pod, work)

    def _free_node(self) -> int:
        limit = self._assumed.nodes.pods
        if self._on_node.get(self._nodes, 0) >= limit or self._nodes in self.failed_nodes:
            self._nodes += 1
        self._on_node[self._nodes] = self._on_node.get(self._nodes, 0) + 1
        return self._nodes

    def _runs(self, pod: PodOnNode, work: float) -> None:
        if not pod.alive or pod.silent_since is not None:
            return
        pod.started = self._heap.now
        self.objects.run(pod.name, ready=False)
        if pod.role == contract.ROLE_WORKER and not pod.member:
            pod.worker = TimedWorker(
                self._world,
                self,
                pod.key,
                pod.machine,
                lambda: self._rank_ready(pod),
                lambda code: self._worker_ended(pod, code),
            )
            phase = self._world.draws("heartbeat", *pod.key[:3]).uniform()
            self._heap.after(_BEAT * phase, self._beat_of, pod)
        pod.machine.processor.add(work, lambda: self._begins(pod))
        self.operator.changed()
        for act in self.on_start:
            act(pod)

    def _begins(self, pod: PodOnNode) -> None:
        if not pod.alive:
            return
        pod.is_loaded = True
        if pod.role == contract.ROLE_WORKER:
            rank = self._rank(pod)
            first = rank[0]
            if len(rank) < self._pods_per_rank or not all(each.is_loaded for each in rank) or first.worker is None:
                return  # the last pod of the rank begins for all of them
            if self.finished is None:
                first.worker.start()
            else:  # a worker that is created after training gets the result from the last checkpoint
                self._heap.after(self._assumed.checkpoints.read_seconds, self._worker_ended, first, 0)
        elif pod.role == contract.ROLE_SERVER:
            if self._active(pod.key[1]) == pod.key[2]:
                self._serve(pod, FollowedState())
            else:
                self._follow(pod)
        else:
            self._ready(pod)

    def _rank(self, pod: PodOnNode) -> list[PodOnNode]:
        """Returns the living pods of a worker's rank, this one too, in the order of the members."""
        if self._pods_per_rank == 1:
            return [pod]
        return sorted(
            (each for each in self.pods.values() if each.key[:3] == pod.key[:3] and each.alive),
            key=lambda each: each.member,
        )

    def _rank_ready(self, first: PodOnNode) -> None:
        for pod in self._rank(first):
            self._ready(pod)

    def _ready(self, pod: PodOnNode) -> None:
        conditions = self.objects.pods.get(pod.name, {}).get("status", {}).get("conditions") or [{}]
        if pod.alive and pod.name in self.objects.pods and conditions[0].get("status") != "True":
            self.objects.run(pod.name)
            self.operator.changed()

    def _worker_ended(self, pod: PodOnNode, code: int) -> None:
        if not pod.alive or pod.worker is None:
            return
        measured = pod.worker.seconds.rounded
        host = self.host
        message: dict[str, Any] = {"workerSeconds": measured}
        if self.finished is not None and not self.finished.reason:
            done = {"result": "Trained", "step": self.finished.version, "checkpoint": self.store.checkpoint}
            message = {**done, **message}
        if host is not None:
            host.do(Coordinator.left, pod.key[1], pod.key[2])
        for each in self._rank(pod):
            self._end(each, code, json.dumps(message), tuple(measured))

    # ---- Servers ----

    def _active(self, shard: int) -> int:
        status, key = self.objects.status, slot_key(contract.ROLE_SERVER, shard)
        found: int = status.get("active", {}).get(key) or status.get("incarnations", {}).get(key, 0)
        return found

    def _pod_of(self, shard: int, incarnation: int) -> PodOnNode | None:
        for pod in self.pods.values():
            if pod.role == contract.ROLE_SERVER and pod.key[1:3] == (shard, incarnation):
                return pod
        return None

    def _serve(self, pod: PodOnNode, held: FollowedState) -> None:
        """A pod becomes the active server of its shard."""
        index = pod.key[1]
        before = self.shards[index]
        if before is not None:
            self._stop_serving(before)
        pod.followed = None
        server = pod.server = TimedShard(self._world, index, pod.key, pod.machine, self._report)
        self.shards[index] = server
        server.refill = lambda: self._fill_again(server)
        if held.in_sync:
            server.take_over(held)
        if index == 0:
            self._coordinate(server, held)
        self._link(server)
        for standby in self._standbys_of(server):
            self._follow(standby)
        self._ready(pod)

    def _coordinate(self, server: TimedShard, held: FollowedState) -> None:
        now, world = self._heap.now, self._world
        if held.in_sync and held.coordinator is not None and held.start is not None:
            coordinator = Coordinator.resume(
                world.rules,
                held.coordinator,
                held.start,
                last=held.last,
                prepared=held.prepared,
                incarnation=server.incarnation,
                infos=held.infos,
                checkpoint=self.store.checkpoint,
                checkpoint_at=(self.store.term, self.store.version),
                since_checkpoint=now - held.checkpoint_began,
                desired_world=self._workers,
                intervals=world.intervals,
                now=now,
            )
        else:
            state, checkpoint = self.store.newest(0)
            coordinator = Coordinator(
                world.rules,
                state,
                checkpoint=checkpoint,
                desired_world=self._workers,
                intervals=world.intervals,
                now=now,
            )
        self.host = CoordinatorHost(world, coordinator, self.store, self._job_finished)
        for other in self.shards:
            if other is not None and other is not server:
                self._link(other)

    def _link(self, server: TimedShard) -> None:
        """Connect a shard with the coordinator, now or later."""

        def connect() -> None:
            host = self.host
            if not server.alive or self.shards[server.shard] is not server:
                return
            if host is None or not host.alive:
                return  # the next coordinator links all shards
            if not host.linked(server):
                host.attach(server)

        self._heap.after(0.0 if server.shard == 0 else _LINK_PAUSE, connect)

    def _report(self, server: TimedShard, report: Report) -> None:
        host = self.host
        if host is None:
            return
        if server.shard == 0:
            host.report(server, report)
        else:
            self._heap.after(self._world.latency, host.report, server, report)

    def _stop_serving(self, server: TimedShard) -> None:
        index = server.shard
        if self.shards[index] is server:
            self.shards[index] = None
        if self.host is not None:
            if index == 0:
                self.host.close()
                self.host = None
            else:
                self.host.detach(server)
        server.close()
        for pod in self.pods.values():
            if pod.worker is not None:
                pod.worker.server_ended()

    def _fill_again(self, server: TimedShard) -> None:
        """A term begins: a standby gets the whole state again."""
        for pod in self._standbys_of(server):
            pod.followed = None
            self._follow(pod)

    def _standbys_of(self, server: TimedShard) -> list[PodOnNode]:
        newer = [pod for pod in self.pods.values() if pod.key[:2] == server.pod[:2] and pod.key[2] > server.incarnation]
        return [pod for pod in newer if pod.is_loaded and pod.server is None]

    def _follow(self, pod: PodOnNode) -> None:
        """A standby receives the state of its server."""
        server = self.shards[pod.key[1]]
        if not pod.alive or pod.server is not None or pod.followed is not None:
            return
        if server is None or not server.alive or server.term == 0 or server.incarnation >= pod.key[2]:
            self._heap.after(0.25, self._follow, pod)
            return
        held = pod.followed = FollowedState()

        def filled() -> None:
            # The server may have died while the state was on its way. The standby then begins again with its successor.
            if not (pod.alive and server.alive and pod.followed is held and self.shards[server.shard] is server):
                if pod.alive and pod.followed is held and pod.server is None:
                    pod.followed = None
                    self._follow(pod)
                return
            held.term, held.version, held.world, held.last = server.term, server.version, server.world, server.last
            held.prepared = server.prepared
            host = self.host
            if server.shard == 0 and host is not None:
                held.coordinator = host.coordinator.state_at(server.term, server.version)
                held.start = host.start_of_term
                held.checkpoint_began = self._heap.now - host.coordinator.schedule.since(self._heap.now)
                if held.coordinator is None:
                    self._heap.after(0.01, filled)
                    return
            held.in_sync = True
            server.standby.followed = held
            self._ready(pod)
            self.operator.changed()

        self._world.tally.replicated += self._world.state_bytes
        server.machine.to_standby.add(self._world.state_bytes, filled)

    def _promote(self) -> None:
        """Servers are informed which of them are active."""
        for index, server in enumerate(self.shards):
            active = self._active(index)
            if server is not None and server.incarnation >= active:
                continue
            pod = self._pod_of(index, active)
            if pod is None or not pod.alive or not pod.is_loaded or pod.silent_since is not None:
                continue
            held = pod.followed or FollowedState()
            if server is not None:
                old = self._pod_of(index, server.incarnation)
                self._stop_serving(server)
                if old is not None and old.alive:
                    self._end(old, SIGTERM_EXIT)
            self._serve(pod, held)

    def _job_finished(self, finished: Finished) -> None:
        self.finished = finished
        self._heap.after(self._world.latency, self._all_end)

    def _all_end(self) -> None:
        finished = self.finished
        assert finished is not None
        for pod in list(self.pods.values()):
            if pod.worker is not None:
                pod.worker.job_done()
        failed = bool(finished.reason)
        if failed:
            said: dict[str, Any] = {"result": "Failed", "reason": finished.reason, "message": finished.why}
        else:
            said = {"result": "Succeeded", "checkpoint": self.store.checkpoint, "returned": self._incarnation(0)}
        message = json.dumps({**said, "step": finished.version})

        def end() -> None:
            for pod in list(self.pods.values()):
                if pod.role == contract.ROLE_SERVER and pod.alive:
                    self._end(pod, int(failed), message)

        self._heap.after(self._assumed.starts.end_seconds, end)

    def _incarnation(self, rank: int) -> int:
        found: int = self.objects.status.get("incarnations", {}).get(slot_key(contract.ROLE_WORKER, rank), 1)
        return found

    # ---- Ends of pods ----

    def kill(self, pod: PodOnNode) -> None:
        """The process of a pod is killed."""
        if pod.alive and pod.started is not None:
            self._close(pod, kill=True)
            self._end(pod, _KILLED)

    def preempt(self, pod: PodOnNode, notice: float) -> None:
        """The pod is deleted with notice."""
        if not pod.alive or pod.is_leaving:
            return
        if pod.name in self.objects.pods:
            self.objects.disrupt(pod.name, "EvictionByEvictionAPI")
        self._leave(pod, notice)
        self.operator.changed()

    def lose_node(self, pod: PodOnNode) -> None:
        """The node of the pod is lost: the pod is silent, until the API server reports it."""
        if not pod.alive or pod.silent_since is not None:
            return
        pod.silent_since = self._heap.now
        silent = self._world.times.silent
        for each in self._rank(pod):
            if each.worker is not None:  # the other pods of the rank wait for this one
                each.worker.alive = False
        if pod.server is not None:
            pod.server.alive = False
        self._heap.after(silent, self._close_silent, pod)
        self._heap.after(self._assumed.nodes.lost_after_seconds, self._report_lost, pod)

    def _close_silent(self, pod: PodOnNode) -> None:
        """Peers notice that a pod is silent."""
        if pod.server is not None:
            pod.server.alive = True
        self._close(pod, kill=True)
        self.operator.changed()

    def _report_lost(self, pod: PodOnNode) -> None:
        if pod.name in self.objects.pods and pod.name in self.pods:
            if pod.started is not None:  # a pod that never ran is not Ready before either
                # The node controller sets Ready to False without a reason. ContainersReady is set by the kubelet only.
                status, when = self.objects.pods[pod.name]["status"], self.operator.now().isoformat()
                status["conditions"] = [
                    {"type": "Ready", "status": "False", "lastTransitionTime": when},
                    {"type": "ContainersReady", "status": "True", "lastTransitionTime": when},
                ]
                self.operator.changed()
            self._heap.after(_EVICTED_AFTER, self._evict, pod)

    def _evict(self, pod: PodOnNode) -> None:
        if pod.name in self.objects.pods and pod.name in self.pods:
            self.objects.disrupt(pod.name, "DeletionByTaintManager")
            self.operator.changed()
            self._heap.after(1.0, self._vanish, pod)

    def _group_lost(self, pod: PodOnNode) -> None:
        """The process of a pod ends because another pod of its rank was lost. One that has not started is deleted."""
        if pod.started is not None and pod.silent_since is None:
            self._end(pod, contract.GROUP_LOST_EXIT)

    def _close(self, pod: PodOnNode, *, kill: bool) -> None:
        if pod.role == contract.ROLE_WORKER:
            for each in self._rank(pod):
                if each.worker is not None:
                    (each.worker.kill if kill else each.worker.leave)()
                if each is not pod:
                    self._heap.after(_GROUP_LOST_AFTER, self._group_lost, each)
        server = pod.server
        if server is not None:
            self._stop_serving(server)
        if pod.followed is not None:
            active = self.shards[pod.key[1]]
            if active is not None and active.standby.followed is pod.followed:
                active.standby.lose(self._assumed.operator.plan_seconds + 2 * self._world.latency)
            pod.followed = None

    def _delete(self, name: str) -> None:
        pod = self.pods.get(name)
        if pod is None:
            self.objects.pods.pop(name, None)
            return
        if pod.silent_since is not None:
            self._heap.after(1.0, self._vanish, pod)
        elif not pod.is_leaving:
            self._leave(pod, self.objects.pods[name]["metadata"].get("deletionGracePeriodSeconds", 30))

    def _leave(self, pod: PodOnNode, notice: float) -> None:
        """SIGTERM."""
        pod.is_leaving = True
        server, host = pod.server, self.host
        if self._world.rules.stores and server is not None and host is not None and self.finished is None:
            host.do(Coordinator.save)
            deadline = self._heap.now + min(notice, self._world.times.last_save)
            self._heap.after(0.1, self._leave_when_stored, pod, host, deadline)
        else:
            self._heap.after(min(0.2, notice), self._left, pod)

    def _leave_when_stored(self, pod: PodOnNode, host: CoordinatorHost, deadline: float) -> None:
        if not pod.alive:
            return
        stored = not host.alive or not host.coordinator.schedule.versions
        if stored or self._heap.now >= deadline or pod.server is None or not pod.server.alive:
            self._left(pod)
        else:
            self._heap.after(0.1, self._leave_when_stored, pod, host, deadline)

    def _left(self, pod: PodOnNode) -> None:
        if pod.alive:
            if pod.worker is not None:
                pod.measured = tuple(pod.worker.seconds.rounded)
            self._close(pod, kill=False)
            self._end(pod, SIGTERM_EXIT, measured=pod.measured)

    def _end(self, pod: PodOnNode, code: int, message: str = "", measured: tuple[float, ...] = ()) -> None:
        if not pod.alive:
            return
        if pod.server is not None and pod.server.alive:
            self._stop_serving(pod.server)
        pod.alive = False
        pod.measured, pod.code = measured, code
        self._count(pod)
        if pod.name in self.objects.pods:
            self.objects.end(pod.name, code, message)
            if self.objects.pods[pod.name]["metadata"].get("deletionTimestamp"):
                self.objects.vanish(pod.name)
        self.operator.changed()

    def _vanish(self, pod: PodOnNode) -> None:
        pod.alive = False
        if pod.name in self.pods:
            self._count(pod)
        self.objects.pods.pop(pod.name, None)
        self.operator.changed()

    def _count(self, pod: PodOnNode) -> None:
        """The pod no longer occupies a node."""
        pod.ended = self._heap.now
        if pod.placed is not None:
            seconds = self._world.tally.pod_seconds
            role = "worker" if pod.role == contract.ROLE_WORKER else "server"
            seconds[role] = seconds.get(role, 0.0) + pod.ended - pod.placed
        if pod.node >= 0:
            self._on_node[pod.node] -= 1
        self.pods.pop(pod.name, None)
        self.gone[pod.name] = pod

    def close(self) -> None:
        """The simulation ends: count the pods that are still there."""
        for pod in list(self.pods.values()):
            pod.alive = False
            self._count(pod)
