"""A server's answers to the calls of workers, evaluators, other servers and the operator."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
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

from .._control import Agreement, Driving, Link
from .._coordination import Liveness

if TYPE_CHECKING:
    from .._process import Environment
    from .._report import Metrics, StatusPage, Tracing
    from .._wire import DataServer
    from ._arbiter import Arbiter
    from ._coordinators import LocalCoordinator
    from ._ending import Ending
    from ._live_settings import LiveSettings
    from ._served_shard import ServedShard
    from ._shutdown import Shutdown

__all__ = ["ServerHost"]


class ServerHost:
    """A control service's `Host` while this server is the active one of its shard."""

    def __init__(
        self,
        environment: Environment,
        agreement: Agreement,
        metrics: Metrics,
        served: ServedShard,
        coordinator: LocalCoordinator | None,
        link: Link | None,
        data: DataServer,
        liveness: Liveness,
        lock: threading.Lock,
        *,
        ending: Ending,
        desired: LiveSettings,
        arbiter: Arbiter,
        shutdown: Shutdown,
        page: StatusPage,
        tracing: Tracing,
    ) -> None:
        """
        Args:
            coordinator: completes the answers of shard 0's server; None on other shards.
            link: the link to the coordinator; None on shard 0.
            liveness: the liveness of this server's peers, guarded by `lock`.
        """
        self.shard, self.incarnation, self.agreement = environment.index, environment.incarnation, agreement
        self._env, self._metrics, self._data = environment, metrics, data
        self._served, self._coordinator, self._link = served, coordinator, link
        self._liveness, self._lock = liveness, lock
        self._ending, self._desired, self._arbiter, self._shutdown = ending, desired, arbiter, shutdown
        self._page, self._tracing = page, tracing

    @property
    def driving(self) -> Driving | None:
        """See `Host`."""
        return None if self._coordinator is None else self._coordinator.driving

    def not_ready(self) -> str:
        """See `Host`."""
        if self._served.ready or self._ending.done is not None:
            return ""
        return f"shard {self.shard} is still loading"

    # ---- Workers and evaluators ----

    def joined(self, peer: Peer) -> JoinReply:
        """Answer a pod that joins."""
        if peer.role != contract.ROLE_SERVER:
            with self._lock:
                new = self._liveness.joined(time.monotonic(), peer)
            if new:  # a pod that only connects again has joined before
                self._metrics.joins.inc()
        reply = JoinReply(
            incarnation=self.incarnation,
            term=self._served.runtime.term,
            version=self._served.runtime.version,
            data_address=self.data_address,
            done=self._ending.complete,
            failed=self._ending.failed,
        )
        if self._coordinator is not None:
            self._coordinator.joined(peer, reply)
        return reply

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """A heartbeat."""
        with self._lock:
            self._liveness.beat(time.monotonic(), request.peer, request.activity, request.step_seconds)
        self._page.beat(request)
        self._tracing.add_spans(request.peer, request.spans)
        for spans in request.kept:
            self._tracing.add_spans(Peer(role=self._env.role, index=self.shard), spans)
        if request.HasField("hang_report"):
            self._tracing.black_box.hangs(request.peer, request.hang_report)
        reply = HeartbeatReply(
            world=self._served.world,
            done=self._ending.complete,
            failed=self._ending.failed,
            clock=time.monotonic(),
        )
        if reply.done and self._ending.done is not None:
            reply.already_complete = self._ending.done.already_complete
        if self._coordinator is not None:
            self._coordinator.answer(reply, self._served.runtime.version)
        if request.peer.role == contract.ROLE_WORKER:
            reply.spans.extend(self._tracing.copies(request.peer.index))
        return reply

    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        """See `Host`."""
        if peer.role != contract.ROLE_SERVER:
            # On another shard than 0, the report may arrive before the end, which comes on the link.
            ended = self._ending.complete or self.shard != 0
            if trained and ended and peer.index == 0 and not self._shutdown.report(peer.incarnation):
                return False
            with self._lock:
                self._liveness.left(peer)
            self._page.left(peer)
        if self._coordinator is not None:
            self._coordinator.left(peer)
        return True

    def evaluated(self, request: EvaluatedRequest) -> None:
        """The result of an evaluation."""
        if self._coordinator is not None:
            self._coordinator.evaluated(request)

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
        runtime, black_box = self._served.runtime, self._tracing.black_box
        reply = ProgressReply(
            incarnation=self.incarnation,
            term=runtime.term,
            step=runtime.version,
            world=self._served.world,
            done=self._ending.complete,
            failed=self._ending.failed,
        )
        self._tracing.replaced(request.incarnations)
        black_box.record(request.record, request.record_id)
        black_box.spent(request.job_seconds, runtime.version)
        black_box.fill(reply)
        self._desired.update(request)
        if self._coordinator is not None:
            self._coordinator.configure(request)
            self._coordinator.fill(now, reply)
        if self._served.replication is not None:
            reply.standby = self._served.replication.standby
        with self._lock:
            reply.lost.extend(self._liveness.lost(now))
            reply.beating.update(self._liveness.live(now, contract.ROLE_WORKER))
        reply.live_workers = len(reply.beating)
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
        if self._link is not None and coordinator:
            # Without standbys, the previous server may still run, and need this shard for its last checkpoint.
            times = self._env.timeouts
            self._link.expect(coordinator, 0.0 if self._env.config.standbys else times.last_save + times.silent)
        self._data.fence(incarnations)
