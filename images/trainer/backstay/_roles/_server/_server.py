"""A parameter server's pod, which serves one shard until the job is done, and is the coordinator on shard 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from backstay_rpc.control_pb2 import Done

from ... import _instrument
from ..._process import SIGTERM_EXIT, write_termination
from ..._transport import ControlServer, DataServer, Peers, StreamHandlers
from ...errors import JobFailed, Superseded
from .._ending import ServerEnd, wait_applied
from .._observers import ServerObserver
from .._standby import Inherited
from ._context import ServerContext
from ._coordinators import CoordinatorAccess, LinkedShard
from ._served_shard import ServedShard
from ._server_host import ServerHost
from ._shard0 import Shard0

__all__ = ["Server"]

_LOG = logging.getLogger(__name__)


class Server:
    """Creates and connects the parts of a server, and runs them until the job ends.

    Attributes:
        coordinator: the coordinator, or the link to it.
        served: the shard.
        host: answers calls.
    """

    def __init__(self, context: ServerContext, observer: ServerObserver, inherited: Inherited | None = None) -> None:
        """`inherited` is the state that it held as its shard's standby."""
        environment = context.environment
        self._context, self._env, self._stop, self._observer = context, environment, context.stop, observer
        self._ending, self._times = context.ending, environment.timeouts
        self._end = ServerEnd(
            self._times, incarnation=environment.incarnation, took_over=None if inherited is None else time.monotonic()
        )
        peers = Peers() if inherited is None else inherited.peers
        self.coordinator: CoordinatorAccess
        if context.link is not None:
            self.coordinator = LinkedShard(context, context.link)
        else:
            assert observer.job is not None
            self.coordinator = Shard0(context, observer, observer.job, peers)
        self.served = ServedShard(context, observer, self.coordinator)
        self._data = self._data_server()
        self.host = ServerHost(context, observer, self.served, self.coordinator, self._data, self._end)
        if context.held is not None:
            assert inherited is not None
            self.served.inherit(context.held)
            _instrument.record("failover", inherited.promoted, time.monotonic(), context.held.engine.version)
        if inherited is None:
            self._control = ControlServer.of(environment, self.host, peers)
        else:
            self._control = inherited.control
            self._control.serve(self.host)

    def _data_server(self) -> DataServer:
        replication = self.served.replication
        return DataServer(
            self.served.runtime,
            host=self._env.bind,
            port=self._env.data_port,
            credentials=self._env.credentials,
            handlers=StreamHandlers(
                replicate=None if replication is None else replication.serve,
                link=self.coordinator.serve_link,
                ended=self.coordinator.disconnected,
            ),
            timeouts=self._times,
        )

    @property
    def ready(self) -> bool:
        """Whether the state of the term is loaded."""
        return self.served.ready

    def run(self) -> int:
        """Serve until the job is done or SIGTERM arrives; returns the exit status.

        Raises:
            CheckpointError: this shard could not be loaded from a checkpoint.
            Exception: any that `init` raises.
            Refused: the coordinator refuses this server.
            Superseded: another incarnation serves this shard.
        """
        self.served.start()
        self.coordinator.start(self.served.runtime)
        self._observe(0)
        self._stop.then(self._observer.stopping)  # it examines whether this thread still ticks
        try:
            while True:
                self._ending.wait(1.0)
                if self._ending.done is not None:  # then an error cannot change how the job ended
                    self._observer.ending()
                    return self._finish(self._ending.done)
                if self._ending.error is not None:
                    if isinstance(self._ending.error, Superseded):
                        self._observer.folder_lost()
                    raise self._ending.error
                self.coordinator.check(time.monotonic())
                self._tick()
                if self._stop.requested.is_set():
                    self._observer.ending()
                    if self.served.runtime.term:  # before its first term, the shard has no state
                        _LOG.info("SIGTERM: storing step %d", self.served.runtime.version)
                        self.coordinator.save_and_wait()
                    return self._leave()
                self._check_shard()
        finally:
            self._close()

    def _tick(self) -> None:
        now = time.monotonic()
        live, silent = self._context.peers.tick(now, self._context.live.stall_seconds, self.served.world)
        self.coordinator.tick(now, silent)
        self._observe(live)

    def _observe(self, live_workers: int) -> None:
        self._observer.ticked(live_workers, *self.served.staged())

    def _check_shard(self) -> None:
        """Raise `JobFailed` if the shard cannot continue, unless the coordinator has the report and ends the job."""
        failed = self.served.runtime.failed
        if failed is not None:
            self._ending.wait(2.0)
            if self._ending.done is None:
                raise JobFailed("ShardFailed", failed)

    def _leave(self) -> int:
        """Leave after SIGTERM: the job may have ended meanwhile."""
        if (done := self._ending.done) is not None:
            return self._finish(done)
        if message := self.coordinator.stopped():
            write_termination(self._env.termination_log, message)
        return SIGTERM_EXIT

    def _finish(self, done: Done) -> int:
        # Every server reports it, and before anything else: the operator may read only one server's end (O10).
        self._write_outcome(done)
        if not done.failed and not done.already_complete:
            wait_applied(self.served.runtime, done.version, self._times.shutdown)
        _instrument.reach("done", done.version)
        self._end.wait(self._stop.requested, self._awaited, done)
        if self.coordinator.names_returned and not done.failed:
            self._write_outcome(done, self._end.end(already_complete=done.already_complete))
        return 1 if done.failed else 0

    def _write_outcome(self, done: Done, last: Mapping[str, Any] | None = None) -> None:
        """The pod's last message; `last`: values that are known only when the server leaves."""
        message = self.coordinator.outcome(done, self.served.runtime.term)
        write_termination(self._env.termination_log, message | dict(last or {}))

    def _awaited(self, now: float) -> bool:
        """Returns whether a living peer has not received the end of the job yet."""
        return self._context.peers.any_lives(now) or self.coordinator.awaited(now)

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
        self._context.arbiter.close()
        self._observer.leaving()
        self.coordinator.close()
        self.served.close()
        self.coordinator.release()
        self._control.close()
        self._data.close(timeout=2.0)
        self._observer.close()  # last, because a slow folder may cost seconds
