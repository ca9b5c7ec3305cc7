"""A server's way to the coordinator: in the same process on shard 0, over a link on the other shards."""

from __future__ import annotations

import logging
import threading
import time
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
from .._coordination import Coordinator, Intervals, Liveness, Report, ServerPosition, ShardSink
from .._process import ALREADY_COMPLETE, STOPPED_EARLY
from .._report import JobObserver
from ..errors import BackstayError, Superseded
from ._history import begin_history
from ._last_save import request_save, wait_until

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._process import Environment, Stop
    from .._report import Metrics, Tracing
    from .._shard import Held
    from ._ending import Ending
    from ._live_settings import LiveSettings
    from ._script import Plan, Script

__all__ = ["CoordinatorAccess", "LocalCoordinator", "RemoteCoordinator"]

_LOG = logging.getLogger(__name__)


class CoordinatorAccess(Protocol):
    """The coordinator, as one shard's server uses it; a `Coordination`. Thread-safe."""

    def start(self, sink: ShardSink) -> None:
        """Call once: `sink` gets the coordinator's messages from now on."""

    def close(self) -> None:
        """Pass no more messages in either direction."""

    def report(self, report: Report) -> None:
        """See `Coordination`."""

    def describe(self, state: ReplicaState) -> bool:
        """See `Driving.describe`."""

    def save_and_wait(self) -> None:
        """SIGTERM: request a checkpoint of the present state, and wait until it is stored or cannot be."""

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        """The termination message of this pod."""


class LocalCoordinator:
    """The coordinator in this process. See `CoordinatorAccess`. It is the `LinkHost` of the other shards' links.

    Workers, evaluators and the operator call every shard's server. The coordinator's part of the answers is here.

    Attributes:
        driving: the coordinator.
        observer: its observer.
    """

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
        desired: LiveSettings,
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
        self._steps = script.steps
        leaves = [leaf.path for leaf in plan.partition.tree.parameters.leaves]
        batches = script.batches_of_update
        self.observer = JobObserver(liveness, lock, metrics, script.steps, script.log_every, leaves, batches=batches)
        # A server that takes over serves workers before it gives its position to the coordinator, which then drops what
        # the shard has reported (T8).
        self._reporting = threading.Lock()
        self._unsent: list[Report] | None = []
        self._running: Driving | None = None  # for a folder that is lost while it is read
        self._storage, self.driving = begin_history(
            environment,
            script,
            plan,
            self.observer,
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
            self._running.do(Coordinator.fail, type(error).__name__, str(error))

    def start(self, sink: ShardSink) -> None:
        self.driving.start()
        held, self._held = self._held, None
        if held is None:
            position = ServerPosition(0, 0, 0, incarnation=self.incarnation)
        else:
            position = ServerPosition(
                0,
                held.term,
                held.engine.version,
                incarnation=self.incarnation,
                last=held.last,
                prepared=tuple(held.contributions),
            )
        self.driving.attach(sink, position)
        while unsent := self._take_unsent():
            for report in unsent:
                self.driving.report(0, report)

    def close(self) -> None:
        self.driving.close()

    def release(self) -> None:
        """After `close`, and after this server's last checkpoint: release the checkpoint folder."""
        self._storage.close()

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """See `LinkHost`."""
        self._tracing.add_spans(peer, spans)

    # ---- The shard ----

    def _take_unsent(self) -> list[Report]:
        """None left: from now on, reports go to the coordinator directly."""
        with self._reporting:
            unsent = self._unsent or []
            self._unsent = [] if unsent else None
            return unsent

    def report(self, report: Report) -> None:
        with self._reporting:
            if self._unsent is not None:
                self._unsent.append(report)
                return
        self.driving.report(0, report)

    def describe(self, state: ReplicaState) -> bool:
        return self.driving.describe(state)

    def save_and_wait(self) -> None:
        self._storage.closing()
        self.driving.do(Coordinator.save)
        requested = self.driving.unstored()

        def unstored() -> frozenset[int]:
            # Updates continue meanwhile, and may begin further checkpoints.
            return requested & self.driving.unstored()

        wait_until(
            lambda: not unstored() or self._ending.done is not None,
            lambda: not self.driving.unstored_without_server(),
            self._times.last_save,
            gone=self._times.gone,
        )
        if self._ending.done is None and (steps := unstored()) and (gone := self.driving.unstored_without_server()):
            _LOG.warning("step %d is not stored: the server of shard %d left earlier", max(steps), gone[0])

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        return outcome(done, term, self._steps) | ({} if done.failed else self.observer.measured())

    # ---- Workers, evaluators and the operator ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        """A worker or evaluator joined; complete the reply to it."""
        if peer.role == contract.ROLE_EVALUATOR:
            self.driving.do(Coordinator.evaluates)
        elif peer.role == contract.ROLE_WORKER:
            self.driving.do(Coordinator.joined, peer.index, peer.incarnation)
            reply.key_step = self.driving.state().key_steps.get(peer.index, 0)
            reply.began = self.driving.start_of_term.version

    def left(self, peer: Peer) -> None:
        """A pod leaves; when a server leaves, its state is stored first."""
        if peer.role == contract.ROLE_SERVER:
            self.driving.do(Coordinator.save)
        elif peer.role == contract.ROLE_WORKER:
            self.driving.do(Coordinator.left, peer.index, peer.incarnation)

    def disconnected(self, hello: Hello) -> None:
        """A worker's data stream to this server ended."""
        self.driving.do(Coordinator.disconnected, hello.peer.index, hello.peer.incarnation)

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        """Complete the reply to a heartbeat; `version` is that of this shard."""
        checkpoint = self.observer.checkpoint
        reply.checkpoint, reply.checkpoint_step = checkpoint.uri, checkpoint.step
        if reply.done:
            reply.evaluation.update(self.observer.evaluation_of(version))

    def evaluated(self, request: EvaluatedRequest) -> None:
        """An evaluator, or worker 0, reports an evaluation."""
        if request.begins:
            self._storage.pin(request.checkpoint)
            return
        newest = self.observer.checkpoint
        evaluated = request.checkpoint or (newest.uri.rpartition("/")[2] if newest.step == request.step else "")
        if not request.error:
            self._storage.evaluated(evaluated, request.metrics)
        self.observer.evaluated(request)
        self.driving.do(Coordinator.evaluated, request.step)

    def configure(self, request: ProgressRequest) -> None:
        """The operator sent its settings."""
        intervals = None
        if request.HasField("checkpoint"):
            sent = request.checkpoint
            intervals = Intervals(sent.every_steps or None, sent.every_seconds or None)
        self.driving.do(Coordinator.configure, request.world, intervals)
        if request.HasField("grace"):
            self.driving.do(Coordinator.set_grace, None if request.grace.auto else request.grace.seconds)

    def fill(self, now: float, reply: ProgressReply) -> None:
        """Add the job's part to the reply to the operator."""
        stall_seconds = self._desired.stall_seconds
        self.observer.fill(now, reply, self.driving.state(), stall_seconds, self.driving.start_of_term)


class RemoteCoordinator:
    """The coordinator in shard 0's server, over a link. See `CoordinatorAccess`."""

    def __init__(self, link: Link, environment: Environment, peer: Peer, held: Held | None, steps: int) -> None:
        """
        Args:
            link: the link to the coordinator, not started yet.
            peer: this server.
            held: what this server held as its shard's standby.
            steps: the number of updates that training makes.
        """
        self._link, self._env, self._peer, self._steps = link, environment, peer, steps
        self._saved = threading.Event()
        if held is not None:
            link.inherit(held.term, held.engine.version, held.last, held.contributions)

    def start(self, sink: ShardSink) -> None:
        self._link.start(sink)

    def close(self) -> None:
        self._link.close()

    def report(self, report: Report) -> None:
        self._link.report(report)
        if isinstance(report, Written):
            self._saved.set()

    def describe(self, state: ReplicaState) -> bool:
        del state  # only shard 0's standby needs the coordinator's state
        return True

    def save_and_wait(self) -> None:
        if self._env.checkpoint_uri is None:
            return
        self._saved.clear()
        request_save(self._env, self._peer)
        times, began = self._env.timeouts, time.monotonic()

        def linked() -> bool:
            return self._link.up

        # Short where all is stored already, or no peer needs it.
        wait_until(lambda: self._saved.is_set() or self._link.storing, linked, 10.0, gone=times.gone)
        left = times.last_save - (time.monotonic() - began)
        wait_until(lambda: not self._link.storing, linked, left, gone=times.gone)
        self._flush(times.gone)

    def _flush(self, seconds: float) -> None:
        """Wait until the coordinator has processed the reports, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._link.error is None and time.monotonic() < deadline:
            answered = self._link.flush()
            wait_until(answered, lambda: self._link.up, deadline - time.monotonic(), gone=0.1)
            if answered():
                return

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        return outcome(done, term, self._steps)


def outcome(done: Done, term: int, steps: int) -> dict[str, Any]:
    """How the job ended, for the termination message of every server: one message is enough for the operator (O10).

    Args:
        term: the term of the last update; 0: this server received none.
        steps: the number of updates that training was to make.
    """
    if done.failed:
        return {"result": "Failed", "reason": done.reason, "message": done.failed, "step": done.version}
    fields: dict[str, Any] = {
        "result": ALREADY_COMPLETE if done.already_complete else "Succeeded",
        "step": done.version,
        "checkpoint": done.checkpoint,
    }
    if term:
        fields["term"] = term
    if done.version < steps and not done.already_complete:
        fields["reason"] = STOPPED_EARLY
    return fields
