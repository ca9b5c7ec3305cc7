"""Connects a server with the coordinator. Shard 0's server has the coordinator, the others have a link to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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

from ..._coordination import Report, ShardSink
from ..._transport import ControlClient, Link, ServerStream
from .._ending import LastSave, flush, outcome

if TYPE_CHECKING:
    from ..._process import Environment
    from ..._threaded import ThreadedCoordinator
    from ._context import ServerContext

__all__ = ["CoordinatorAccess", "LinkedShard"]


class CoordinatorAccess(ABC):
    """The coordinator, as one shard's server uses it; a `Coordination`. Thread-safe.

    Workers, evaluators and the operator call every shard's server. Shard 0's server completes the answers; the methods
    here leave them unchanged.

    Attributes:
        names_returned: whether the last message of this server states in which incarnation rank 0 has returned.
        threaded: the coordinator; None on other shards than 0.
        serve_link: serves the link of another shard; None on other shards than 0.
        disconnected: called when a worker's data stream to this server ended; None on other shards than 0.
    """

    names_returned = False
    threaded: ThreadedCoordinator | None = None
    serve_link: Callable[[Hello, ServerStream], None] | None = None
    disconnected: Callable[[Hello], None] | None = None

    # ---- Life ----

    @abstractmethod
    def start(self, sink: ShardSink) -> None:
        """Call once: `sink` gets the coordinator's messages from now on."""

    @abstractmethod
    def tick(self, now: float, silent: set[int]) -> None:
        """Call about once a second.

        Args:
            silent: the ranks of workers that are silent or stalled.
        """

    @abstractmethod
    def check(self, now: float) -> None:
        """Raise the error because of which this server must end, if there is one.

        Raises:
            Refused: the coordinator refuses this server.
            Exception: a defect that ended several links in a row.
        """

    @abstractmethod
    def save_and_wait(self) -> None:
        """Request a checkpoint of the present state after SIGTERM, and wait until it is stored or cannot be."""

    def awaited(self, now: float) -> bool:
        """Returns whether another shard's server may not have received the end of the job."""
        del now
        return False

    def stopped(self) -> dict[str, Any]:
        """Returns the termination message of this pod after SIGTERM, when the checkpoint of its state is stored."""
        return {}

    @abstractmethod
    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        """Returns the termination message of this pod."""

    @abstractmethod
    def close(self) -> None:
        """Pass no more messages in either direction."""

    @abstractmethod
    def release(self) -> None:
        """Release the checkpoint folder, after `close` and after this server's last checkpoint."""

    # ---- The shard ----

    @abstractmethod
    def report(self, report: Report) -> None:
        """See `Coordination`."""

    def describe(self, state: ReplicaState) -> bool:
        """See `ThreadedCoordinator.describe`."""
        del state  # only shard 0's standby needs the coordinator's state
        return True

    def loaded(self, term: int, version: int) -> None:
        """The shard has loaded the state at which a term begins."""
        del term, version

    # ---- Answers to calls ----

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        """A worker or evaluator joined; complete the reply to it."""
        del peer, reply

    def other_frozen(self, digests: Sequence[str], source: str, peer: str) -> str:
        """See `Host.other_frozen`."""
        del digests, source, peer  # shard 0 compares them
        return ""

    def left(self, peer: Peer) -> None:
        """A pod leaves; when a server leaves, its state is stored first."""
        del peer

    def answer(self, reply: HeartbeatReply, version: int) -> None:
        """Complete the reply to a heartbeat; `version` is that of this shard."""
        del reply, version

    def evaluated(self, request: EvaluatedRequest) -> str:
        """Receive a report about an evaluation that begins or has ended. See `Host.evaluated`."""
        del request
        return ""

    def configure(self, request: ProgressRequest) -> None:
        """The operator sent its settings."""
        del request

    def fill(self, now: float, reply: ProgressReply) -> None:
        """Add the job's part to the reply to the operator."""
        del now, reply

    def expect(self, incarnation: int) -> None:
        """A call named the incarnation of the coordinator's server."""
        del incarnation


class LinkedShard(CoordinatorAccess):
    """The server of another shard than 0. The coordinator is in shard 0's server, over a link."""

    def __init__(self, context: ServerContext, link: Link) -> None:
        """`link` leads to the coordinator, and is not started yet."""
        self._env, self._steps, self._link = context.environment, context.script.steps, link
        self._last = LastSave(link, self._env.timeouts, lambda: _request_save(self._env, context.peer))
        if (held := context.held) is not None:
            link.inherit(held.term, held.engine.version, held.last, held.contributions)

    def start(self, sink: ShardSink) -> None:
        self._link.start(sink)

    def tick(self, now: float, silent: set[int]) -> None:
        """Ranks that are silent here call shard 0's server too, which reports them."""

    def check(self, now: float) -> None:
        self._link.tick(now)
        if self._link.error is not None:
            raise self._link.error

    def save_and_wait(self) -> None:
        if self._env.checkpoint_uri is not None:
            self._last.wait()

    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        return outcome(done, term, self._steps)

    def close(self) -> None:
        flush(self._link, self._env.timeouts.gone)  # the coordinator has the last spans of this server
        self._link.close()

    def release(self) -> None:
        """The folder belongs to shard 0's server."""

    def report(self, report: Report) -> None:
        self._link.report(report)
        self._last.reported(report)

    def loaded(self, term: int, version: int) -> None:
        self._link.started(term, version)

    def expect(self, incarnation: int) -> None:
        # Without standbys, the previous server may still run, and need this shard for its last checkpoint.
        times = self._env.timeouts
        self._link.expect(incarnation, 0.0 if self._env.config.standbys else times.last_save + times.silent)


def _request_save(environment: Environment, peer: Peer) -> None:
    """Request a checkpoint from the coordinator, because this server leaves."""
    client = ControlClient(environment.servers[:1], environment.credentials, peer, environment.timeouts)
    client.leave()
    client.close()
