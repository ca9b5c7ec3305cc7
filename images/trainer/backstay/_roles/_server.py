"""A parameter server's pod: one shard, served until the job is done; on shard 0 also the coordinator."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from backstay_rpc.control_pb2 import Done, Peer
from backstay_spec import contract

from .. import _instrument
from .._control import Link, Links, Peers
from .._coordination import Coordinator, Liveness
from .._process import SIGTERM_EXIT, Environment, Stop, write_termination
from .._report import Metrics, StatusPage, Tracing
from .._wire import DataServer
from ..errors import JobFailed, Superseded
from ._arbiter import Arbiter
from ._coordinators import CoordinatorAccess, LocalCoordinator, RemoteCoordinator
from ._ending import Ending
from ._live_settings import LiveSettings
from ._ports import control_port, http_port
from ._script import Plan, Script
from ._served_shard import ServedShard
from ._server_host import ServerHost
from ._shutdown import Shutdown, wait_applied
from ._standby import Inherited
from ._storing import open_store

__all__ = ["Server"]

_LOG = logging.getLogger(__name__)


class Server:
    """Creates and connects the parts of a server, and runs them until the job ends.

    Attributes:
        served: the shard.
        host: answers calls.
    """

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
        config, times = environment.config, environment.timeouts
        self._env, self._metrics, self._stop, self._times = environment, metrics, stop, times
        self._ending, self._desired = Ending(), LiveSettings.of(config)
        stop.then(self._ending.notice)
        self._liveness, self._lock = Liveness(config.mode, times), threading.Lock()
        self._arbiter = Arbiter(environment.index, times, self._ending)
        self._shutdown = Shutdown(times, incarnation=environment.incarnation, took_over=inherited is not None)
        self._newcomers_until = 0.0 if inherited is None else time.monotonic() + times.newcomer

        peer = Peer(
            role=environment.role,
            index=environment.index,
            incarnation=environment.incarnation,
            pod=environment.pod_name,
        )
        peers = Peers() if inherited is None else inherited.peers
        store = open_store(environment, probes=inherited is None)
        self._link: Link | None = None
        if environment.index != 0:
            self._link = Link(environment.servers[0], environment.token, peer, plan.agreement, config.mode, times)
        self._tracing = Tracing(environment, peer, store, self._link)
        self._coordinator: CoordinatorAccess
        self._local: LocalCoordinator | None = None  # the same, on shard 0
        self._links: Links | None = None
        if self._link is None:
            self._coordinator = self._local = LocalCoordinator(
                environment,
                script,
                plan,
                metrics,
                stop,
                self._liveness,
                self._lock,
                ending=self._ending,
                desired=self._desired,
                store=store,
                held=held,
                tracing=self._tracing,
            )
            self._links = Links(self._local, peers, times)
        else:
            self._coordinator = RemoteCoordinator(self._link, environment, peer, held, script.steps)
        self.served = ServedShard(
            environment,
            script,
            plan,
            metrics,
            self._coordinator,
            self._link,
            ending=self._ending,
            desired=self._desired,
            arbiter=self._arbiter,
            store=store,
        )
        if inherited is None:
            self._http = http_port(metrics, self._is_ready, environment)
        else:
            self._http = inherited.http
            inherited.become_ready(self._is_ready)
        page = StatusPage(None if self._local is None else self._local.observer, self._http)
        self._tracing.serve(self._http)
        replication = self.served.replication
        self._data = DataServer(
            self.served.runtime,
            host=environment.bind,
            port=environment.data_port,
            token=environment.token,
            replicate=None if replication is None else replication.serve,
            link=None if self._links is None else self._links.serve,
            ended=None if self._local is None else self._local.disconnected,
            timeouts=times,
        )
        self.host = ServerHost(
            environment,
            plan.agreement,
            metrics,
            self.served,
            self._local,
            self._link,
            self._data,
            self._liveness,
            self._lock,
            ending=self._ending,
            desired=self._desired,
            arbiter=self._arbiter,
            shutdown=self._shutdown,
            page=page,
            tracing=self._tracing,
        )
        if held is not None:
            assert inherited is not None
            self.served.inherit(held)
            _instrument.record("failover", inherited.promoted, time.monotonic(), held.engine.version)
        if inherited is None:
            self._control = control_port(self.host, peers, environment)
        else:
            self._control = inherited.control
            self._control.serve(self.host)

    def _is_ready(self) -> bool:
        return self.served.ready

    def run(self) -> int:
        """Serve until the job is done or SIGTERM arrives; returns the exit status.

        Raises:
            CheckpointError: this shard could not be loaded from a checkpoint.
            Exception: any that `init` raises.
            Refused: the coordinator refuses this server.
            Superseded: another incarnation serves this shard.
        """
        _instrument.observe("apply", self._metrics.apply_seconds.observe)
        self.served.start()
        self._coordinator.start(self.served.runtime)
        self._tracing.tick()
        self._stop.then(self._tracing.stopping)  # it examines whether this thread still ticks
        try:
            while True:
                self._ending.wait(1.0)
                if self._ending.done is not None:  # then an error cannot change how the job ended
                    self._tracing.ending()
                    return self._end(self._ending.done)
                if self._ending.error is not None:
                    if isinstance(self._ending.error, Superseded):
                        self._tracing.records.lost()
                    raise self._ending.error
                if self._link is not None:
                    self._link.tick(time.monotonic())
                    if self._link.error is not None:
                        raise self._link.error
                if self._links is not None and self._links.error is not None:
                    raise self._links.error
                self._tick()
                if self._stop.requested.is_set():
                    self._tracing.ending()
                    _LOG.info("SIGTERM: storing step %d", self.served.runtime.version)
                    self._coordinator.save_and_wait()
                    return SIGTERM_EXIT if self._ending.done is None else self._end(self._ending.done)
                self._check_shard()
        finally:
            self._close()

    def _tick(self) -> None:
        self.served.tick()
        with self._lock:
            now = time.monotonic()
            self._liveness.tick(now)
            live = self._liveness.live(now, contract.ROLE_WORKER)
            silent = {peer.index for peer in self._liveness.lost(now) if peer.role == contract.ROLE_WORKER}
            stalled = self._liveness.stalled(now, self._desired.stall_seconds, self.served.world)
        if self._local is not None:
            self._local.driving.do(Coordinator.silent, silent | {hung.rank for hung in stalled})
        self._metrics.live_workers.set(len(live))
        self._tracing.tick()

    def _check_shard(self) -> None:
        """Raise `JobFailed` if the shard cannot continue, unless the coordinator has the report and ends the job."""
        failed = self.served.runtime.failed
        if failed is not None:
            self._ending.wait(2.0)
            if self._ending.done is None:
                raise JobFailed("ShardFailed", failed)

    def _end(self, done: Done) -> int:
        # Every server reports it, and before anything else: the operator may read only one server's end (O10).
        self._write_outcome(done)
        if not done.failed and not done.already_complete:
            wait_applied(self.served.runtime, done.version, self._times.shutdown)
        _instrument.reach("done", done.version)
        self._shutdown.wait(self._stop.requested, self._awaited, stored=bool(done.checkpoint or done.failed))
        if self._local is not None and not done.failed:
            self._write_outcome(done, self._shutdown.end(already_complete=done.already_complete))
        return 1 if done.failed else 0

    def _write_outcome(self, done: Done, last: Mapping[str, Any] | None = None) -> None:
        """The pod's last message; `last`: values that are known only when the server leaves."""
        message = self._coordinator.outcome(done, self.served.runtime.term)
        if self._local is not None:
            self._tracing.black_box.ended(message)
        write_termination(self._env.termination_log, message | dict(last or {}))

    def _awaited(self) -> bool:
        """Whether a living peer has not received the end of the job yet."""
        now = time.monotonic()
        with self._lock:
            pods = [*self._liveness.live(now, contract.ROLE_WORKER), *self._liveness.live(now, contract.ROLE_EVALUATOR)]
        linked = self._links is not None and self._links.awaited(now)
        return now < self._newcomers_until or bool(pods) or linked

    def _close(self) -> None:
        """Close the parts. After the end of the job, a failure here must not replace the server's last message."""
        try:
            self._close_parts()
        except Exception:
            if self._ending.done is None:
                raise
            _LOG.exception("closing the server failed after the end of the job")

    def _close_parts(self) -> None:
        self.served.ready = False
        self._arbiter.close()
        self._coordinator.close()
        self.served.close()
        if self._local is not None:
            self._local.release()
        self._control.close()
        self._data.close(timeout=2.0)
        self._tracing.close()  # last, because a slow folder may cost seconds
        self._http.close()
