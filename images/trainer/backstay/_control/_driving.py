"""Runs the pure coordinator with a lock, a clock and links to the shards.

Decisions are carried out in the order in which they were made, by one of the calling threads, and never under the lock.
So a shard may answer from inside a call. Slow work (storing a manifest, finding a checkpoint) has its own thread.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol

from backstay_rpc.control_pb2 import ReplicaState, Rollback, Staged

from .._coordination import (
    CheckpointFailed,
    Coordinator,
    CoordinatorState,
    Counted,
    Decision,
    Finished,
    Redone,
    Report,
    Restart,
    Send,
    ServerPosition,
    ShardSink,
    Updated,
    WriteManifest,
)
from ..errors import StorageError

__all__ = ["Driving", "Observer", "Storage"]

_LOG = logging.getLogger(__name__)

_TICK = 1.0
Clock = Callable[[], float]
P = ParamSpec("P")


class Observer(Protocol):
    """Receives the events for metrics, logs and progress. Decisions in order; `staged` from any thread."""

    def staged(self, now: float, shard: int, staged: Staged) -> None: ...
    def counted(self, now: float, counted: Counted) -> None: ...
    def updated(self, now: float, updated: Updated) -> None: ...
    def restarted(self, now: float, state: CoordinatorState) -> None: ...
    def redo(self, now: float, updates: int) -> None: ...
    def checkpoint_stored(self, now: float, uri: str, version: int) -> None: ...
    def checkpoint_failed(self, now: float, version: int, error: str) -> None: ...
    def finished(self, now: float, finished: Finished) -> None: ...


class Storage(Protocol):
    """The place of the checkpoints; called by one thread at a time, may take long."""

    def write_manifest(self, order: WriteManifest) -> str:
        """Store it, and delete checkpoints that are not kept; returns the URI. Raises `CheckpointError`."""

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """The point to start from: a state, and the URI of its checkpoint ('' for the initial parameters).

        The term of the state is above `above_term` and above all that are stored. Raises `CheckpointError`.
        """


class Driving:
    """The coordinator for many threads: shards report to it, links attach to it, decisions go out. Thread-safe."""

    def __init__(
        self, coordinator: Coordinator, storage: Storage, observer: Observer, *, clock: Clock = time.monotonic
    ) -> None:
        self._coordinator = coordinator
        self._times = coordinator.rules.timeouts
        self._storage = storage
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._outbox: deque[tuple[float, Decision, list[tuple[int, ShardSink]]]] = deque()
        self._draining = False
        self._sinks: dict[int, ShardSink] = {}
        self._slow: queue.SimpleQueue[Decision | None] = queue.SimpleQueue()
        self._restoring_since: float | None = None
        self._closed = threading.Event()
        self._alarm = threading.Event()
        self._wakes_at: float | None = None
        self._threads = [
            threading.Thread(target=self._do_slow, name="backstay-storing", daemon=True),
            threading.Thread(target=self._tick, name="backstay-deadlines", daemon=True),
        ]

    @property
    def shards(self) -> int:
        """The number of shards of the job."""
        return self._coordinator.rules.shards

    # ---- Life ----

    def start(self) -> None:
        """Call once, when the first shard's sink exists or is about to."""
        self.do(Coordinator.start)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Make no further decision; a checkpoint that is being stored is finished."""
        self._closed.set()
        self._alarm.set()
        self._slow.put(None)

    # ---- Links ----

    def attach(self, sink: ShardSink, position: ServerPosition) -> None:
        """A shard's server is connected: `sink` gets all later messages, and first those that it has missed."""

        def hello(now: float) -> list[Decision]:
            self._sinks[position.shard] = sink
            return self._coordinator.hello(now, position)

        self._do(hello)

    def describe(self, state: ReplicaState) -> bool:
        """Add the coordinator's state, for a successor, as of the version of `state`.

        False: the coordinator has left that history, and the shard will receive a message about it.
        """
        with self._lock:
            own = self._coordinator.state_at(state.term, state.version)
            if own is None:
                return False
            state.coordinator = json.dumps(own.to_json())
            state.start.CopyFrom(self._coordinator.start_of_term)
            state.since_checkpoint = self._coordinator.schedule.since(self._clock())
            return True

    def report(self, shard: int, report: Report, sink: ShardSink | None = None) -> None:
        """A shard's report.

        Args:
            sink: the sink of the link on which the report arrived; None: the shard is in this process. A report from a
                replaced link is ignored: a server that was only paused may still report after its replacement (T6).
        """

        def current() -> bool:
            return sink is None or self._sinks.get(shard) is sink

        if isinstance(report, Staged) and current():
            self._observer.staged(self._clock(), shard, report)
        self._do(lambda now: self._coordinator.report(now, shard, report) if current() else ())

    def detach(self, shard: int, sink: ShardSink) -> None:
        """The connection broke. Nothing happens when another has replaced it."""
        with self._lock:
            if self._sinks.get(shard) is sink:
                del self._sinks[shard]

    # ---- Everything else ----

    def do(
        self,
        event: Callable[Concatenate[Coordinator, float, P], Sequence[Decision]],
        *arguments: P.args,
        **more: P.kwargs,
    ) -> None:
        """Report any other event, such as ``do(Coordinator.left, rank, incarnation)``.

        Args:
            event: a method of `Coordinator` whose first argument is the time.
            arguments, more: the other arguments of the method.
        """
        self._do(lambda now: event(self._coordinator, now, *arguments, **more))

    def state(self) -> CoordinatorState:
        """A copy of the decided state."""
        with self._lock:
            return self._coordinator.state.copy()

    @property
    def start_of_term(self) -> Rollback:
        """The point at which the current term began."""
        with self._lock:
            copy = Rollback()
            copy.CopyFrom(self._coordinator.start_of_term)
            return copy

    def _newest_term(self) -> int:
        with self._lock:
            return self._coordinator.newest_term

    def unstored(self) -> frozenset[int]:
        """The versions that are being written as checkpoints."""
        with self._lock:
            return self._coordinator.schedule.versions

    def unstored_without_server(self) -> list[int]:
        """The shards that have not written one of them, and have no linked server that could write it."""
        with self._lock:
            coordinator = self._coordinator
            missing = [shard for shard in range(coordinator.rules.shards) if coordinator.schedule.waited_for(shard)]
            return [shard for shard in missing if shard not in self._sinks]

    # ---- Carrying out ----

    def _do(self, event: Callable[[float], Sequence[Decision]]) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            now = self._clock()
            decisions = event(now)
            if self._wakes_at != (wakes_at := self._coordinator.wakes_at):
                self._wakes_at = wakes_at
                self._alarm.set()
            # For the shards that are linked now. A shard that links later gets the missed messages after its hello.
            sinks = list(self._sinks.items())
            self._outbox.extend((now, decision, sinks) for decision in decisions)
            if self._draining:
                return  # the draining thread carries these out too, after the earlier ones
            self._draining = True
        while True:
            with self._lock:
                if not self._outbox:
                    self._draining = False
                    return
                now, decision, sinks = self._outbox.popleft()
            try:
                self._carry_out(now, decision, sinks)
            except Exception:  # noqa: BLE001
                # There is no caller to raise it to, and later decisions must be carried out.
                _LOG.exception("a decision of the coordinator could not be carried out")

    def _carry_out(self, now: float, decision: Decision, sinks: list[tuple[int, ShardSink]]) -> None:
        match decision:
            case Send(shard, message):
                for index, sink in sinks:
                    if shard is None or shard == index:
                        sink.deliver(message)
            case Counted():
                self._observer.counted(now, decision)
            case Updated():
                self._observer.updated(now, decision)
            case CheckpointFailed(version, error):
                self._observer.checkpoint_failed(now, version, error)
            case Redone(updates):
                self._observer.redo(now, updates)
            case Finished():
                self._observer.finished(now, decision)
            case WriteManifest() | Restart():
                self._slow.put(decision)

    def _do_slow(self) -> None:
        while (decision := self._slow.get()) is not None:
            try:
                match decision:
                    case WriteManifest():
                        self._write(decision)
                    case Restart():
                        self._restart(decision)
            except Exception as error:  # noqa: BLE001  # training waits for the decision, so the job must end (T8)
                _LOG.exception("a decision of the coordinator could not be carried out")
                reason = "RestoreFailed" if isinstance(decision, Restart) else "CheckpointFailed"
                self.do(Coordinator.fail, reason, f"the coordinator could not carry out a decision: {error}")

    def _write(self, order: WriteManifest) -> None:
        uri, error = "", ""
        try:
            uri = self._storage.write_manifest(order)
        except Exception as failure:  # noqa: BLE001  # training continues after any error, and reports it
            error = str(failure)
        else:
            self._observer.checkpoint_stored(self._clock(), uri, order.version)
        self.do(Coordinator.manifest, order.version, uri, error)

    def _restart(self, order: Restart) -> None:
        now = self._clock()
        self._restoring_since = now if self._restoring_since is None else self._restoring_since
        try:
            state, uri = self._storage.newest(self._newest_term())
        except Exception as failure:  # noqa: BLE001
            if isinstance(failure, StorageError) and now - self._restoring_since < self._times.restoring:
                _LOG.warning("training waits for the checkpoints: %s", failure)
                self._closed.wait(self._times.restore_again)
                self._slow.put(order)
                return
            why = f"shard {order.shard} was lost and no checkpoint could be read: {failure}"
            self.do(Coordinator.fail, "RestoreFailed", why)
            return

        self._restoring_since = None

        def restart(now: float) -> list[Decision]:
            decisions = self._coordinator.restart(now, state, uri)
            self._observer.restarted(now, self._coordinator.state)
            return decisions

        self._do(restart)

    def _tick(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                wakes_at = self._wakes_at
            seconds = _TICK if wakes_at is None else wakes_at - self._clock()
            self._alarm.wait(min(max(seconds, 0.0), _TICK))
            self._alarm.clear()
            try:
                self.do(Coordinator.tick)
            except Exception:  # noqa: BLE001  # without this thread, no later wait would end (T8)
                _LOG.exception("the deadlines of the coordinator could not be examined")
