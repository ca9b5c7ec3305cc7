"""Runs the coordinator in shard 0's server, with its observer, its storage and the links of other shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
)
from backstay_spec import contract

from ..._coordination import Coordinator, Intervals, Report, ServerPosition, ShardSink
from ..._threaded import ThreadedCoordinator
from ..._transport import Links, Peers
from ...errors import BackstayError, Superseded
from .._ending import outcome, wait_stored
from ._coordinators import CoordinatorAccess
from ._history import begin_history

if TYPE_CHECKING:
    from .._observers import JobHistoryObserver, ServerObserver
    from ._context import ServerContext

__all__ = ["Shard0"]


class Shard0(CoordinatorAccess):
    """The server of shard 0. It is the `LinkHost` of the other shards' links."""

    names_returned = True
    threaded: ThreadedCoordinator

    def __init__(self, context: ServerContext, observer: ServerObserver, job: JobHistoryObserver, peers: Peers) -> None:
        """Begins the history, which may wait for the checkpoint folder. Raises as `begin_history`.

        Args:
            job: observes the decisions of the coordinator.
            peers: the incarnations that are known here.
        """
        environment = context.environment
        self.shard, self.incarnation, self._times = environment.index, environment.incarnation, environment.timeouts
        self._ending, self._live, self._observer, self._job = context.ending, context.live, observer, job
        self._held, self._steps = context.held, context.script.steps
        checkpoint = environment.config.checkpoint
        self._keeps_best = checkpoint is not None and checkpoint.keep_best is not None
        self._running: ThreadedCoordinator | None = None  # None until the folder was read, which may fail
        self._storage, self.threaded = begin_history(context, job, self._folder_lost)
        self._running = self.threaded
        self._beginning = context.script.beginning
        start = self.threaded.state().start_from
        self._frozen_from = self._beginning.reference(start, self._storage.frozen.record)
        self._links = Links(self, peers, self._times)
        self.serve_link, self.disconnected = self._links.serve, self._disconnected

    def _folder_lost(self, error: BackstayError) -> None:
        self._observer.folder_lost()
        if self._running is None or isinstance(error, Superseded):
            self._ending.fail(error)
        else:
            self._running.do(Coordinator.fail, type(error).__name__, str(error))

    def start(self, sink: ShardSink) -> None:
        self.threaded.start()
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
        self.threaded.attach(sink, position)

    def tick(self, now: float, silent: set[int]) -> None:
        self.threaded.do(Coordinator.silent, silent)

    def check(self, now: float) -> None:
        if self._links.error is not None:
            raise self._links.error

    def awaited(self, now: float) -> bool:
        return self._links.awaited(now)

    def close(self) -> None:
        self.threaded.close()

    def release(self) -> None:
        self._job.close()
        self._storage.close()

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """See `LinkHost`."""
        self._observer.add_spans(peer, spans)

    # ---- The shard ----

    def report(self, report: Report) -> None:
        self.threaded.report(0, report)

    def describe(self, state: ReplicaState) -> bool:
        return self.threaded.describe(state)

    def save_and_wait(self) -> None:
        self._storage.closing()
        self.threaded.do(Coordinator.save)
        wait_stored(self.threaded, lambda: self._ending.done is not None, self._times)

    def stopped(self) -> dict[str, Any]:
        """Returns the last report, with the checkpoint as a row. Nothing reports it later."""
        checkpoint = self._job.newest_checkpoint()
        stored = {"checkpoint": checkpoint.model_dump(mode="json", exclude_none=True)} if checkpoint.uri else {}
        return self._job.last_report(self.threaded.state(), self.threaded.start_of_term) | stored

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        report = self._job.last_report(self.threaded.state(), self.threaded.start_of_term)
        message = report | outcome(done, term, self._steps)
        self._observer.ended(message)
        return message

    # ---- Workers, evaluators and the operator ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        reply.frozen_from = self._frozen_from
        if peer.role == contract.ROLE_EVALUATOR:
            self.threaded.do(Coordinator.evaluates)
        elif peer.role == contract.ROLE_WORKER:
            self.threaded.do(Coordinator.joined, peer.index, peer.incarnation)
            reply.key_step = self.threaded.state().key_steps.get(peer.index, 0)
            reply.began = self.threaded.start_of_term.version

    def other_frozen(self, digests: Sequence[str], source: str, peer: str) -> str:
        if len(digests) != (own := len(self._beginning.tree.frozen_leaves)):
            return f"{peer} has {len(digests)} frozen arrays, and this server has {own}"
        return self._storage.frozen.join(self._beginning.record(digests, source), peer)

    def left(self, peer: Peer) -> None:
        if peer.role == contract.ROLE_SERVER:
            self.threaded.do(Coordinator.save)
        elif peer.role == contract.ROLE_WORKER:
            self.threaded.do(Coordinator.left, peer.index, peer.incarnation)

    def _disconnected(self, hello: Hello) -> None:
        self.threaded.do(Coordinator.disconnected, hello.peer.index, hello.peer.incarnation)

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        checkpoint = self._job.newest_checkpoint()
        reply.checkpoint, reply.checkpoint_step = checkpoint.uri, checkpoint.step
        if reply.done:
            reply.evaluation.update(self._job.evaluation_of(version))

    def evaluated(self, request: EvaluatedRequest) -> str:
        if request.begins:
            if self._keeps_best:
                self._storage.pin(request.checkpoint)
            return self._job.evaluation_begins(request)
        if not request.error:
            self._storage.evaluated(request.step, request.metrics, request.checkpoint)
        self._job.evaluated(request)
        self.threaded.do(Coordinator.evaluated, request.step)
        return ""

    def configure(self, request: ProgressRequest) -> None:
        intervals = None
        if request.HasField("checkpoint"):
            sent = request.checkpoint
            intervals = Intervals(sent.every_steps or None, sent.every_seconds or None)
        self.threaded.do(Coordinator.configure, request.world, intervals)
        if request.HasField("grace"):
            self.threaded.do(Coordinator.set_grace, None if request.grace.auto else request.grace.seconds)

    def fill(self, now: float, reply: ProgressReply) -> None:
        stall_seconds = self._live.stall_seconds
        self._job.fill(now, reply, self.threaded.state(), stall_seconds, self.threaded.start_of_term)
