"""A server's answers to the calls of workers, evaluators, other servers and the operator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import (
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    Peer,
    ProgressReply,
    ProgressRequest,
)
from backstay_spec import contract

if TYPE_CHECKING:
    from ..._threaded import ThreadedCoordinator
    from ..._transport import DataServer
    from .._ending import ServerEnd
    from .._observers import ServerObserver
    from ._context import ServerContext
    from ._coordinators import CoordinatorAccess
    from ._served_shard import ServedShard

__all__ = ["ServerHost"]


class ServerHost:
    """A control service's `Host` while this server is the active one of its shard."""

    def __init__(
        self,
        context: ServerContext,
        observer: ServerObserver,
        served: ServedShard,
        coordinator: CoordinatorAccess,
        data: DataServer,
        end: ServerEnd,
    ) -> None:
        """`coordinator` completes the answers of shard 0's server."""
        environment = context.environment
        self.shard, self.incarnation = environment.index, environment.incarnation
        self.agreement = context.plan.agreement
        self._env, self._observer, self._data = environment, observer, data
        self._served, self._coordinator, self._peers = served, coordinator, context.peers
        self._ending, self._live, self._arbiter, self._end = context.ending, context.live, context.arbiter, end

    @property
    def threaded(self) -> ThreadedCoordinator | None:
        """See `Host`."""
        return self._coordinator.threaded

    def not_ready(self) -> str:
        """See `Host`."""
        if self._served.ready or self._ending.done is not None:
            return ""
        return f"shard {self.shard} is still loading"

    # ---- Workers and evaluators ----

    def joined(self, peer: Peer) -> JoinReply:
        """Answer a pod that joins."""
        if peer.role != contract.ROLE_SERVER and self._peers.joined(time.monotonic(), peer):
            self._observer.joined()  # a pod that only connects again has joined before
        reply = JoinReply(
            incarnation=self.incarnation,
            term=self._served.runtime.term,
            version=self._served.runtime.version,
            data_address=self.data_address,
            done=self._ending.complete,
            failed=self._ending.failed,
        )
        self._coordinator.joined(peer, reply)
        return reply

    def other_frozen(self, digests: Sequence[str], source: str, peer: str) -> str:
        """See `Host`."""
        return self._coordinator.other_frozen(digests, source, peer)

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A heartbeat."""
        self._peers.beat(time.monotonic(), request.peer, request.activity, request.step_seconds)
        self._observer.beat(request)
        reply = HeartbeatReply(
            world=self._served.world,
            done=self._ending.complete,
            failed=self._ending.failed,
            clock=time.monotonic(),
        )
        if reply.done and self._ending.done is not None:
            reply.already_complete = self._ending.done.already_complete
        self._coordinator.answer(reply, self._served.runtime.version)
        if request.peer.role == contract.ROLE_WORKER:
            reply.spans.extend(self._observer.copies(request.peer.index))
        return reply

    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        """See `Host`."""
        if peer.role != contract.ROLE_SERVER:
            # On another shard than 0, the report may arrive before the end, which comes on the link.
            ended = self._ending.complete or self.shard != 0
            if trained and ended and peer.index == 0 and not self._end.report(peer.incarnation):
                return False
            self._peers.left(peer)
            self._observer.left(peer)
        self._coordinator.left(peer)
        return True

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """See `Host`."""
        self._observer.add_spans(peer, spans)

    def evaluated(self, request: EvaluatedRequest) -> str:
        """See `Host`."""
        return self._coordinator.evaluated(request)

    # ---- Servers and the operator ----

    @property
    def data_address(self) -> str:
        """See `Host`."""
        return f"{self._env.pod_ip}:{self._data.port}"

    def progress(self, request: ProgressRequest) -> ProgressReply:
        """The operator sends its settings, and gets the progress of the job."""
        now = time.monotonic()
        serving = request.incarnations.get(self._env.name, 0)
        if serving == self.incarnation:
            self._arbiter.confirm()
        elif serving > self.incarnation and self._env.config.standbys:
            self.superseded(serving)
        runtime = self._served.runtime
        reply = ProgressReply(
            incarnation=self.incarnation,
            term=runtime.term,
            step=runtime.version,
            world=self._served.world,
            done=self._ending.complete,
        )
        self._observer.progress(request, reply, runtime.version)
        self._live.update(request)
        self._coordinator.configure(request)
        self._coordinator.fill(now, reply)
        if self._served.replication is not None:
            reply.standby = self._served.replication.standby
        reply.beating.update(self._peers.beating(now))
        return reply

    def awaits_operator(self) -> bool:
        """See `Host`."""
        return self._arbiter.asking

    def superseded(self, by: int) -> None:
        """See `Host`."""
        self._arbiter.supersede(by)

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """See `Host`."""
        coordinator = incarnations.get(f"{self._env.role}-0", 0)
        if coordinator:
            self._coordinator.expect(coordinator)
        self._data.fence(incarnations)
