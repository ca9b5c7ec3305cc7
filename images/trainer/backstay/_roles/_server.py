"""A parameter server's pod: one shard, served until the job is done; on shard 0 also the coordinator."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Done,
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Hello,
    JoinReply,
    Norm,
    Peer,
    ProgressReply,
    ProgressRequest,
    ReplicaState,
    Rollback,
    Written,
)
from backstay_spec import contract

from .. import _instrument
from .._control import Agreement, Driving, Link, Links, Peers
from .._coordination import Intervals, Liveness
from .._coordination.seam import Message, Report
from .._process._environment import Environment
from .._process._exit import SIGTERM_EXIT, Stop, write_termination
from .._shard import ShardRuntime
from .._shard._follower import Held
from .._shard._replication import Replication
from .._wire.server import DataServer
from ..errors import BackstayError, JobFailed, Superseded
from ._arbiter import Arbiter
from ._farewell import Farewell, wait_applied
from ._history import begin_history, rules_of
from ._last_save import request_save, wait_until
from ._leader import Leader
from ._learning_rate import LearningRate
from ._loading import Loader, build
from ._manifests import ManifestStorage, NoStorage
from ._metrics import Metrics
from ._ports import control_port, http_port
from ._script import Plan, Script
from ._standby import Inherited
from ._status_page import StatusPage
from ._storing import CheckpointWriter, open_store
from ._timeline import Tracing

__all__ = ["Server"]

_LOG = logging.getLogger(__name__)


class Server:
    """A control service's `Host`, the coordinator's `ShardSink`, and its own shard's `Coordination`."""

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: Plan,
        metrics: Metrics,
        stop: Stop,
        inherited: Inherited | None = None,
    ) -> None:
        """`inherited`: the state that it held as its shard's standby."""
        held = None if inherited is None else inherited.held
        config, self.shard, self.incarnation = environment.config, environment.index, environment.incarnation
        self._env, self._script, self._plan, self._metrics, self._stop = environment, script, plan, metrics, stop
        self._times = environment.timeouts
        self._peer = Peer(
            role=environment.role, index=self.shard, incarnation=self.incarnation, pod=environment.pod_name
        )
        self._lock = threading.Lock()
        self._liveness = Liveness(config.mode, environment.timeouts)
        self._peers = Peers() if inherited is None else inherited.peers
        self._arbiter = Arbiter(self.shard, environment.timeouts)
        self._closing = False
        self._wake = threading.Event()
        stop.then(self._wake.set)
        self._ready = False
        self._term = 0
        self._world = config.workers
        self._desired_world = config.workers
        self._stall_seconds = config.stall_seconds
        self._keep = config.checkpoint.keep if config.checkpoint else 1
        self._done: Done | None = None
        self._crash: BaseException | None = None
        self._saved = threading.Event()
        self._commit_arrived: dict[int, float] = {}
        self._already_complete = False
        self._farewell = Farewell(self._times, incarnation=self.incarnation, took_over=inherited is not None)
        self._newcomers_until = 0.0 if inherited is None else time.monotonic() + self._times.newcomer

        store = open_store(environment, probes=inherited is None)
        self._history = ""
        self._storage: ManifestStorage | NoStorage | None = None
        self._leader: Leader | None = None
        self._driving: Driving | None = None
        self._link: Link | None = None
        self._links = Links(self, self._peers) if self.shard == 0 else None
        if self.shard == 0:
            names = [leaf.path for leaf in plan.partition.tree.parameters.leaves]
            self._leader = Leader(
                self._liveness,
                self._lock,
                metrics,
                script.steps,
                script.log_every,
                names,
                batches=script.batches_of_update,
            )
            self._storage, self._driving, self._already_complete = begin_history(
                environment,
                script,
                plan,
                self._leader,
                store,
                held,
                stop,
                self._folder_lost,
                keep=lambda: self._keep,
                world=lambda: self._desired_world,
            )
        else:
            self._link = Link(
                environment.servers[0],
                environment.token,
                self._peer,
                plan.agreement,
                self,
                config.mode,
                environment.timeouts,
            )
        self._learning_rate = LearningRate(metrics)
        self._tracing = Tracing(environment, self._peer, store, self._link)
        stop.then(self._tracing.stopping)
        self._writer: CheckpointWriter | None = None
        if store is not None:
            self._writer = CheckpointWriter(
                store,
                self,
                shard=self.shard,
                shards=config.shards,
                incarnation=self.incarnation,
                metrics=metrics,
                history=lambda: self._history,
            )
        self._replication: Replication | None = None
        if config.standbys:
            self._replication = Replication(
                plan.agreement.digest,
                incarnation=self.incarnation,
                admitted=lambda: self._runtime.admit_replica(),  # noqa: PLW0108  # it is made below
                standby_lost=self._standby_lost,
                coordinator=self._describe,
                timeouts=environment.timeouts,
            )
        self._runtime = ShardRuntime(
            plan.partition.shards[self.shard],
            plan.agreement.digest,
            self,
            incarnation=self.incarnation,
            mode=config.mode,
            on_checkpoint=self._writer,
            standbys=self._replication,
            timeouts=environment.timeouts,
            wire=plan.wires[self.shard],
            rules=rules_of(environment, script),
        )
        self._staged_bytes = sum(block.nbytes for block in plan.wires[self.shard].gradients)
        if inherited is None:
            self._http = http_port(metrics, lambda: self._ready, environment)
        else:
            self._http = inherited.http
            inherited.become_ready(lambda: self._ready)
        self._page = StatusPage(self._leader, self._http)
        self._tracing.serve(self._http)
        self._data = DataServer(
            self._runtime,
            host=environment.bind,
            port=environment.data_port,
            token=environment.token,
            replicate=None if self._replication is None else self._replication.serve,
            link=None if self._links is None else self._links.serve,
            ended=self._stream_ended,
            timeouts=environment.timeouts,
        )
        self.data_address = f"{environment.pod_ip}:{self._data.port}"
        self._held = held
        if held is not None:
            self._inherit(held)
            assert inherited is not None
            _instrument.record("failover", inherited.promoted, time.monotonic(), held.engine.version)
        if inherited is None:
            self._control = control_port(self, self._peers, environment)
        else:
            self._control = inherited.control
            self._control.serve(self)
        self._loader = Loader(self._load, self._load_failed)

    def _describe(self, state: ReplicaState) -> bool:
        state.history = self._history
        return self._driving is None or self._driving.describe(state)

    def _folder_lost(self, error: BackstayError) -> None:
        """Another process has the checkpoint folder. Called by any thread."""
        self._tracing.records.lost()
        if isinstance(error, Superseded):
            self._arbiter.supersede(error)
        elif self._driving is not None:
            self._driving.fail(type(error).__name__, str(error))
        else:
            self._crash = error
        self._wake.set()

    def _inherit(self, held: Held) -> None:
        """Continue at the state of the previous active server, in the same term."""
        self._term, self._world, self._history = held.term, held.world, held.history
        self._metrics.term.set(held.term)
        self._learning_rate.watch(held.engine)
        self._runtime.reset(held.term, held.engine, held.world, held.offset)
        self._runtime.inherit(held.prepared, held.last)
        if self._link is not None:
            prepared = () if held.prepared is None else held.prepared.contributions
            self._link.inherit(held.term, held.engine.version, held.last, prepared)
        self._ready = True

    def _stream_ended(self, hello: Hello) -> None:
        if self._driving is not None and not self._closing:
            self._driving.disconnected(hello.peer.index, hello.peer.incarnation)

    def _standby_lost(self, when: float, closed: bool) -> None:
        replication = self._replication
        assert replication is not None
        self._arbiter.standby_lost(when, closed, lambda: replication.dialled)

    # ---- The life of the process ----

    def run(self) -> int:
        """Serve until the job is done or SIGTERM arrives; returns the exit status.

        Raises:
            CheckpointError: this shard could not be loaded from a checkpoint.
            Exception: any that `init` raises.
            Refused: the coordinator refuses this server.
        """
        _instrument.observe("apply", self._metrics.apply_seconds.observe)
        self._loader.start()
        if self._driving is not None:
            self._driving.start()
            self._attach_self()
        elif self._link is not None:
            self._link.start()
        try:
            while True:
                self._wake.wait(1.0)
                self._wake.clear()
                if self._crash is not None:
                    raise self._crash
                if self._arbiter.superseded is not None:
                    self._tracing.records.lost()
                    raise self._arbiter.superseded
                if self._link is not None and self._link.refused is not None:
                    raise self._link.refused
                self._metrics.step.set(self._runtime.version)
                self._metrics.staged_bytes.set(self._runtime.memory.most() * self._staged_bytes)
                self._metrics.staged_bytes_limit.set(self._runtime.memory.bound * self._staged_bytes)
                with self._lock:
                    now = time.monotonic()
                    self._liveness.tick(now)
                    live = self._liveness.live(now, contract.ROLE_WORKER)
                    silent = {peer.index for peer in self._liveness.lost(now) if peer.role == contract.ROLE_WORKER}
                    stalled = self._liveness.stalled(now, self._stall_seconds, self._world)
                if self._driving is not None:
                    self._driving.silent(silent | {hung.rank for hung in stalled})
                self._metrics.live_workers.set(len(live))
                self._tracing.tick()
                self._learning_rate.tick()
                if self._done is not None:
                    self._tracing.ending()
                    return self._end(self._done)
                if self._stop.requested.is_set():
                    self._tracing.ending()
                    return self._save_and_stop()
                failed = self._runtime.failed
                if failed is not None and self._done is None:
                    # The coordinator has the report. If it could not be reached, this pod's final message has it.
                    self._wake.wait(2.0)
                    if self._done is None:
                        raise JobFailed("ShardFailed", failed)
        finally:
            self._close()

    def _attach_self(self) -> None:
        assert self._driving is not None
        held = self._held
        if held is None:
            self._driving.attach(0, self, 0, 0, incarnation=self.incarnation)
            return
        self._driving.attach(
            0,
            self,
            held.term,
            held.engine.version,
            incarnation=self.incarnation,
            last=held.last,
            prepared=() if held.prepared is None else held.prepared.contributions,
        )
        self._held = None

    def _end(self, done: Done) -> int:
        if not done.failed and not self._already_complete:
            wait_applied(self._runtime, done.version, self._times.farewell)
        _instrument.reach("done", done.version)
        # Any server reports a failure: the operator may read another server's end before shard 0's.
        if self._driving is not None or done.failed:
            self._write_outcome(done)
        self._farewell.wait(self._stop.requested, self._awaited, stored=bool(done.checkpoint or done.failed))
        if self._driving is not None and not done.failed:
            self._write_outcome(done, self._farewell.end(already_complete=self._already_complete))
        return 1 if done.failed else 0

    def _awaited(self) -> bool:
        """Whether a living peer has not received the end of the job yet."""
        now = time.monotonic()
        with self._lock:
            pods = [*self._liveness.live(now, contract.ROLE_WORKER), *self._liveness.live(now, contract.ROLE_EVALUATOR)]
        return now < self._newcomers_until or bool(pods) or bool(self._links)

    def _write_outcome(self, done: Done, last: Mapping[str, Any] | None = None) -> None:
        """The pod's last message; `last`: values that are known only when the server leaves."""
        said = {"result": "Failed", "reason": done.reason, "message": done.failed, "step": done.version}
        if self._leader is not None and not done.failed:
            said = self._leader.outcome(done, self._term, complete=self._already_complete)
        if self._leader is not None:
            self._tracing.black_box.ended(said)
        write_termination(self._env.termination_log, said | dict(last or {}))

    def _save_and_stop(self) -> int:
        """SIGTERM: store a checkpoint of the present state, so that the successor loses nothing."""
        _LOG.info("SIGTERM: storing step %d", self._runtime.version)
        self._saved.clear()
        if self._storage is not None:
            self._storage.closing()
        if self._driving is not None:
            self._driving.save()
            driving = self._driving
            wait_until(
                lambda: not driving.unstored() or self._done is not None,
                lambda: not driving.unstored_by_the_gone(),
                self._times.last_save,
                gone=self._times.gone,
            )
            if self._done is None and driving.unstored() and (gone := driving.unstored_by_the_gone()):
                _LOG.warning(
                    "step %d is not stored: the server of shard %d left earlier", self._runtime.version, gone[0]
                )
        elif self._writer is not None:
            request_save(self._env, self._peer)
            link = self._link  # short where all is stored already, or no peer needs it
            wait_until(self._saved.is_set, lambda: link is not None and link.up, 10.0, gone=self._times.gone)
            time.sleep(0.5)  # the link sends the end to the coordinator
        return SIGTERM_EXIT

    def _close(self) -> None:
        self._ready = False
        self._closing = True
        self._arbiter.close()
        if self._link is not None:
            self._link.close()
        if self._driving is not None:
            self._driving.close()
        self._runtime.close()
        if self._writer is not None:
            self._writer.close()
        if self._storage is not None:
            self._storage.close()
        self._control.close()
        self._data.close(timeout=2.0)
        self._tracing.close()  # last, because a slow folder may cost seconds
        self._http.close()

    # ---- Building the shard ----

    def _load_failed(self, error: BaseException) -> None:
        self._crash = error
        self._wake.set()

    def _load(self, rollback: Rollback) -> None:
        if rollback.term < self._term:
            return
        if rollback.term == self._term:
            # The coordinator sent it again, because the link broke before the shard's report had arrived.
            if self._link is not None:
                self._link.started(rollback.term, self._runtime.version)
            self._ready = True
            return
        engine = build(rollback, self._env, self._script, self._plan, self._desired_world)
        self._term, self._world, self._history = rollback.term, rollback.world, rollback.history
        self._metrics.term.set(rollback.term)
        self._learning_rate.watch(engine)
        self._runtime.reset(rollback.term, engine, rollback.world, rollback.offset)
        if self._link is not None:
            self._link.started(rollback.term, rollback.version)
        self._ready = True

    # ---- Between the shard and the coordinator ----

    def deliver(self, message: Message) -> None:
        """A message of the coordinator; see `ShardSink`."""
        match message:
            case Commit():
                self._commit_arrived[message.version] = time.monotonic()
                self._world = message.world
                _instrument.reach("commit", message.version)
            case Rollback():
                self._ready = False
                self._commit_arrived.clear()
                self._loader.put(message)
            case Done():
                self._done = message
        self._runtime.deliver(message)
        if isinstance(message, Done):
            self._wake.set()

    def report(self, report: Report) -> None:
        """A report of this server's shard or its writer; see `Coordination`."""
        match report:
            case Norm():
                _instrument.reach("norm", report.version)
            case Applied():
                self._applied(report.version)
        if self._driving is not None:
            self._driving.report(self.shard, report)
        elif self._link is not None:
            self._link.report(report)
        if isinstance(report, Written):
            self._saved.set()

    def _applied(self, version: int) -> None:
        """An update was applied; it was computed from version - 1."""
        _instrument.reach("applied", version)
        self._metrics.step.set(version)
        began = self._commit_arrived.pop(version - 1, None)
        if began is not None:
            _instrument.record("apply", began, time.monotonic(), version - 1)

    # ---- Host ----

    @property
    def agreement(self) -> Agreement:
        return self._plan.agreement

    @property
    def driving(self) -> Driving | None:
        return self._driving

    def not_ready(self) -> str:
        if self._ready or self._done is not None:
            return ""
        return f"shard {self.shard} is still loading"

    def joined(self, peer: Peer) -> JoinReply:
        if peer.role != contract.ROLE_SERVER:
            with self._lock:
                new = self._liveness.joined(time.monotonic(), peer)
            if new:  # a pod that only connects again has joined before
                self._metrics.joins.inc()
        reply = JoinReply(
            incarnation=self.incarnation,
            term=self._runtime.term,
            version=self._runtime.version,
            data_address=self.data_address,
            done=self._done is not None and not self._done.failed,
            failed=self._failed(),
        )
        if self._driving is not None and peer.role == contract.ROLE_EVALUATOR:
            self._driving.evaluates()
        if self._driving is not None and peer.role == contract.ROLE_WORKER:
            self._driving.joined(peer.index, peer.incarnation)
            reply.key_step = self._driving.state().key_steps.get(peer.index, 0)
            reply.began = self._driving.start_of_term.version
        return reply

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        with self._lock:
            self._liveness.beat(time.monotonic(), request.peer, request.activity, request.step_seconds)
        self._page.beat(request)
        self._tracing.add_spans(request.peer, request.spans)
        for spans in request.kept:
            self._tracing.add_spans(Peer(role=self._env.role, index=self.shard), spans)
        if request.HasField("hang_report"):
            self._tracing.black_box.hangs(request.peer, request.hang_report)
        reply = HeartbeatReply(
            world=self._world,
            done=self._done is not None and not self._done.failed,
            failed=self._failed(),
            clock=time.monotonic(),
        )
        if self._leader is not None:
            checkpoint = self._leader.checkpoint
            reply.checkpoint, reply.checkpoint_step = checkpoint.uri, checkpoint.step
            if reply.done:
                reply.evaluation.update(self._leader.evaluation_of(self._runtime.version))
        if request.peer.role == contract.ROLE_WORKER:
            reply.spans.extend(self._tracing.copies(request.peer.index))
        return reply

    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        if peer.role == contract.ROLE_SERVER:
            if self._driving is not None:
                self._driving.save()
            return True
        ended = self._done is not None and not self._done.failed
        if trained and ended and peer.index == 0 and not self._farewell.report(peer.incarnation):
            return False
        with self._lock:
            self._liveness.left(peer)
        self._page.left(peer)
        if self._driving is not None and peer.role == contract.ROLE_WORKER:
            self._driving.left(peer.index, peer.incarnation)
        return True

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        self._tracing.add_spans(peer, spans)

    def evaluated(self, request: EvaluatedRequest) -> None:
        if self._leader is not None and self._driving is not None:
            self._leader.evaluated(request)
            self._driving.evaluated(request.step)

    def progress(self, request: ProgressRequest) -> ProgressReply:
        now = time.monotonic()
        serving = request.incarnations.get(self._env.name, 0)
        if serving == self.incarnation:
            self._arbiter.confirm()
        elif serving > self.incarnation and self._env.config.standbys:
            self.superseded(serving)
        reply = ProgressReply(
            incarnation=self.incarnation,
            term=self._runtime.term,
            step=self._runtime.version,
            world=self._world,
            done=self._done is not None and not self._done.failed,
            failed=self._failed(),
        )
        self._tracing.replaced(request.incarnations)
        self._tracing.black_box.record(request.record, request.record_id)
        self._tracing.black_box.spent(request.job_seconds, self._runtime.version)
        self._tracing.black_box.fill(reply)
        self._stall_seconds = request.stall_seconds or self._stall_seconds
        if request.HasField("checkpoint"):
            self._keep = request.checkpoint.keep or self._keep
        if self._driving is not None and self._leader is not None:
            intervals = None
            if request.HasField("checkpoint"):
                desired = request.checkpoint
                intervals = Intervals(desired.every_steps or None, desired.every_seconds or None)
            self._desired_world = request.world or self._desired_world
            self._driving.configure(request.world, intervals)
            if request.HasField("grace"):
                self._driving.set_grace(None if request.grace.auto else request.grace.seconds)
            self._leader.fill(now, reply, self._driving.state(), self._stall_seconds, self._driving.start_of_term)
        if self._replication is not None:
            reply.standby = self._replication.standby
        with self._lock:
            reply.lost.extend(self._liveness.lost(now))
            reply.beating.update(self._liveness.live(now, contract.ROLE_WORKER))
        reply.live_workers = len(reply.beating)
        return reply

    def awaits_operator(self) -> bool:
        return self._arbiter.asking

    def superseded(self, by: int) -> None:
        """Another incarnation serves this shard: this process ends."""
        error = Superseded("PERMISSION_DENIED", f"incarnation {by} serves shard {self.shard} now")
        self._arbiter.supersede(error)
        self._wake.set()

    def fence(self, incarnations: Mapping[str, int]) -> None:
        if self._env.config.standbys:
            leader = incarnations.get(f"{self._env.role}-0", 0)
            if self.shard != 0 and leader and self._link is not None:
                self._link.expect(leader)
        data = getattr(self, "_data", None)  # a call may come while the ports are being opened
        if data is not None:
            data.fence(incarnations)

    def _failed(self) -> str:
        return "" if self._done is None or not self._done.failed else f"{self._done.reason}: {self._done.failed}"
