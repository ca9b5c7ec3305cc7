"""A server's way to the coordinator: in the same process on shard 0, over a link on the other shards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from backstay_rpc.control_pb2 import (
    Done,
    EvaluatedRequest,
    HeartbeatReply,
    Hello,
    JoinReply,
    Peer,
    ProgressReply,
    ProgressRequest,
    ReplicaState,
    Written,
)
from backstay_spec import contract

from .._control import Driving, Link
from .._coordination import Intervals, Liveness, Report, ShardSink
from ..errors import BackstayError, Superseded
from ._history import begin_history
from ._last_save import request_save, wait_until
from ._leader import Leader

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._process import Environment, Stop
    from .._shard import Held
    from ._desired import Desired
    from ._ending import Ending
    from ._metrics import Metrics
    from ._script import Plan, Script
    from ._timeline import Tracing

__all__ = ["CoordinatorAccess", "LocalCoordinator", "RemoteCoordinator"]

_LOG = logging.getLogger(__name__)


class CoordinatorAccess(Protocol):
    """The coordinator, as one server uses it; a `Coordination`. Thread-safe."""

    @property
    def driving(self) -> Driving | None:
        """The coordinator; None: another server has the coordinator."""

    @property
    def leader(self) -> Leader | None:
        """The coordinator's observer; None: another server has the coordinator."""

    @property
    def already_complete(self) -> bool:
        """Whether the training was complete when this server started."""

    def start(self, sink: ShardSink) -> None:
        """Call once: `sink` gets the coordinator's messages from now on."""

    def check(self) -> None:
        """Call it about once a second.

        Raises:
            Refused: the coordinator refuses this server permanently.
            Exception: this server cannot reach the coordinator any more because of a defect.
        """

    def close(self) -> None:
        """Pass no more messages in either direction."""

    def release(self) -> None:
        """Release the checkpoint folder. Call after `close`, and after this server's last checkpoint."""

    # ---- The shard ----

    def report(self, report: Report) -> None:
        """See `Coordination`."""

    def started(self, term: int, version: int) -> None:
        """The shard is at the beginning of a term."""

    def describe(self, state: ReplicaState) -> bool:
        """See `Driving.describe`."""

    def expect(self, incarnation: int) -> None:
        """The incarnation of shard 0's active server."""

    def save_and_wait(self) -> None:
        """SIGTERM: request a checkpoint of the present state, and wait until it is stored or cannot be."""

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        """The termination message of this pod."""

    # ---- Workers, evaluators and the operator ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        """A worker or evaluator joined; complete the reply to it."""

    def left(self, peer: Peer) -> None:
        """A pod leaves; when a server leaves, its state is stored first."""

    def disconnected(self, hello: Hello) -> None:
        """A worker's data stream to this server ended."""

    def silent(self, ranks: Iterable[int]) -> None:
        """See `Coordinator.silent`."""

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        """Complete the reply to a heartbeat; `version` is that of this shard."""

    def evaluated(self, request: EvaluatedRequest) -> None:
        """An evaluator, or worker 0, reports an evaluation."""

    def configure(self, request: ProgressRequest) -> None:
        """The operator sent its settings."""

    def fill(self, now: float, reply: ProgressReply) -> None:
        """Add the job's part to the reply to the operator."""


class LocalCoordinator:
    """The coordinator in this process. See `CoordinatorAccess`. It is the `LinkHost` of the other shards' links."""

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: Plan,
        metrics: Metrics,
        stop: Stop,
        liveness: Liveness,
        lock: threading.Lock,
        *,
        ending: Ending,
        desired: Desired,
        store: CheckpointStore | None,
        held: Held | None,
        tracing: Tracing,
    ) -> None:
        """Begins the history, which may wait for the checkpoint folder. Raises as `begin_history`.

        Args:
            liveness: the liveness of this server's peers, guarded by `lock`.
            held: what this server held as its shard's standby.
        """
        self.shard, self.incarnation, self._times = environment.index, environment.incarnation, environment.timeouts
        self._ending, self._desired, self._held, self._tracing = ending, desired, held, tracing
        leaves = [leaf.path for leaf in plan.partition.tree.parameters.leaves]
        batches = script.batches_of_update
        self.leader = Leader(liveness, lock, metrics, script.steps, script.log_every, leaves, batches=batches)
        self._running: Driving | None = None  # for a folder that is lost while it is read
        self._storage, self.driving, self.already_complete = begin_history(
            environment,
            script,
            plan,
            self.leader,
            store,
            held,
            stop,
            self._folder_lost,
            desired,
        )
        self._running = self.driving

    def _folder_lost(self, error: BackstayError) -> None:
        self._tracing.records.lost()
        if self._running is None or isinstance(error, Superseded):
            self._ending.fail(error)
        else:
            self._running.fail(type(error).__name__, str(error))

    def start(self, sink: ShardSink) -> None:
        self.driving.start()
        held, self._held = self._held, None
        if held is None:
            self.driving.attach(0, sink, 0, 0, incarnation=self.incarnation)
        else:
            self.driving.attach(
                0,
                sink,
                held.term,
                held.engine.version,
                incarnation=self.incarnation,
                last=held.last,
                prepared=() if held.prepared is None else held.prepared.contributions,
            )

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.driving.close()

    def release(self) -> None:
        self._storage.close()

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """See `LinkHost`."""
        self._tracing.add_spans(peer, spans)

    # ---- The shard ----

    def report(self, report: Report) -> None:
        self.driving.report(0, report)

    def started(self, term: int, version: int) -> None:
        pass  # the coordinator began the term

    def describe(self, state: ReplicaState) -> bool:
        return self.driving.describe(state)

    def expect(self, incarnation: int) -> None:
        pass

    def save_and_wait(self) -> None:
        self._storage.closing()
        self.driving.save()
        wait_until(
            lambda: not self.driving.unstored() or self._ending.done is not None,
            lambda: not self.driving.unstored_by_the_gone(),
            self._times.last_save,
            gone=self._times.gone,
        )
        if self._ending.done is None and self.driving.unstored() and (gone := self.driving.unstored_by_the_gone()):
            step = self.driving.state().version
            _LOG.warning("step %d is not stored: the server of shard %d left earlier", step, gone[0])

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        return _failure(done) if done.failed else self.leader.outcome(done, term, complete=self.already_complete)

    # ---- Workers, evaluators and the operator ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        if peer.role == contract.ROLE_EVALUATOR:
            self.driving.evaluates()
        elif peer.role == contract.ROLE_WORKER:
            self.driving.joined(peer.index, peer.incarnation)
            reply.key_step = self.driving.state().key_steps.get(peer.index, 0)
            reply.began = self.driving.start_of_term.version

    def left(self, peer: Peer) -> None:
        if peer.role == contract.ROLE_SERVER:
            self.driving.save()
        elif peer.role == contract.ROLE_WORKER:
            self.driving.left(peer.index, peer.incarnation)

    def disconnected(self, hello: Hello) -> None:
        self.driving.disconnected(hello.peer.index, hello.peer.incarnation)

    def silent(self, ranks: Iterable[int]) -> None:
        self.driving.silent(ranks)

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        checkpoint = self.leader.checkpoint
        reply.checkpoint, reply.checkpoint_step = checkpoint.uri, checkpoint.step
        if reply.done:
            reply.evaluation.update(self.leader.evaluation_of(version))

    def evaluated(self, request: EvaluatedRequest) -> None:
        self.leader.evaluated(request)
        self.driving.evaluated(request.step)

    def configure(self, request: ProgressRequest) -> None:
        intervals = None
        if request.HasField("checkpoint"):
            sent = request.checkpoint
            intervals = Intervals(sent.every_steps or None, sent.every_seconds or None)
        self.driving.configure(request.world, intervals)
        if request.HasField("grace"):
            self.driving.set_grace(None if request.grace.auto else request.grace.seconds)

    def fill(self, now: float, reply: ProgressReply) -> None:
        stall_seconds = self._desired.stall_seconds
        self.leader.fill(now, reply, self.driving.state(), stall_seconds, self.driving.start_of_term)


class RemoteCoordinator:
    """The coordinator in shard 0's server, over a link. See `CoordinatorAccess`."""

    driving: None = None
    leader: None = None
    already_complete = False

    def __init__(self, link: Link, environment: Environment, peer: Peer, held: Held | None) -> None:
        """
        Args:
            link: the link to the coordinator, not started yet.
            peer: this server.
            held: what this server held as its shard's standby.
        """
        self._link, self._env, self._peer = link, environment, peer
        self._saved = threading.Event()
        if held is not None:
            prepared = () if held.prepared is None else held.prepared.contributions
            link.inherit(held.term, held.engine.version, held.last, prepared)

    def start(self, sink: ShardSink) -> None:
        self._link.start(sink)

    def check(self) -> None:
        self._link.tick(time.monotonic())
        if self._link.error is not None:
            raise self._link.error

    def close(self) -> None:
        self._link.close()

    def release(self) -> None:
        pass

    # ---- The shard ----

    def report(self, report: Report) -> None:
        self._link.report(report)
        if isinstance(report, Written):
            self._saved.set()

    def started(self, term: int, version: int) -> None:
        self._link.started(term, version)

    def describe(self, state: ReplicaState) -> bool:
        del state  # only shard 0's standby needs the coordinator's state
        return True

    def expect(self, incarnation: int) -> None:
        # Without standbys, the previous server may still run, and need this shard for its last checkpoint.
        times = self._env.timeouts
        self._link.expect(incarnation, 0.0 if self._env.config.standbys else times.last_save + times.silent)

    def save_and_wait(self) -> None:
        if self._env.checkpoint_uri is None:
            return
        self._saved.clear()
        request_save(self._env, self._peer)
        # Short where all is stored already, or no peer needs it.
        wait_until(self._saved.is_set, lambda: self._link.up, 10.0, gone=self._env.timeouts.gone)
        time.sleep(0.5)  # the link sends the end to the coordinator

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        del term
        return _failure(done)

    # ---- Workers, evaluators and the operator: they call the coordinator's server too ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        pass

    def left(self, peer: Peer) -> None:
        pass

    def disconnected(self, hello: Hello) -> None:
        pass

    def silent(self, ranks: Iterable[int]) -> None:
        pass

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        pass

    def evaluated(self, request: EvaluatedRequest) -> None:
        pass

    def configure(self, request: ProgressRequest) -> None:
        pass

    def fill(self, now: float, reply: ProgressReply) -> None:
        pass


def _failure(done: Done) -> dict[str, Any]:
    return {"result": "Failed", "reason": done.reason, "message": done.failed, "step": done.version}
