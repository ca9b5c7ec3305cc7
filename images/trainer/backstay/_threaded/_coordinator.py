"""Runs a `Sequencer` with a lock, a clock and threads.

One of the calling threads carries out the decisions, and never under the lock. So a shard may answer from inside a
call. Only `Observer.restarted` is called under the lock, before any report of the new term. Slow work (storing a
manifest, finding a checkpoint) has its own thread.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol

from backstay_rpc.control_pb2 import ReplicaState, Rollback, Staged

from .._coordination import (
    Coordinator,
    CoordinatorState,
    Decision,
    Observer,
    Report,
    Restart,
    Sequencer,
    ServerPosition,
    ShardSink,
    WriteManifest,
    carry_out,
)
from ..errors import StorageError

__all__ = ["CheckpointStorage", "ThreadedCoordinator"]

_LOG = logging.getLogger(__name__)

_TICK = 1.0
Clock = Callable[[], float]
P = ParamSpec("P")


class CheckpointStorage(Protocol):
    """The place of the checkpoints; called by one thread at a time, may take long.

    Attributes:
        stored_at: when the checkpoint that `newest` found was stored, as Unix time; 0: it found none.
    """

    stored_at: float

    def write_manifest(self, order: WriteManifest) -> str:
        """Store it, and delete checkpoints that are not kept; returns the URI. Raises `CheckpointError`."""

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """Returns the point to start from, which is a state, and the URI of its checkpoint ('' for the initial
        parameters).

        The term of the state is above `above_term` and above all that are stored. Raises `CheckpointError`.
        """


class ThreadedCoordinator:
    """The coordinator for many threads, to which shards report, links attach, and from which decisions go out.
    Thread-safe."""

    def __init__(
        self, coordinator: Coordinator, storage: CheckpointStorage, observer: Observer, *, clock: Clock = time.monotonic
    ) -> None:
        self._sequencer = Sequencer(coordinator)
        self._times = coordinator.rules.timeouts
        self._storage = storage
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._slow: queue.SimpleQueue[WriteManifest | Restart | None] = queue.SimpleQueue()
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
        return self._sequencer.coordinator.rules.shards

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
        self._do(lambda sequencer, now: sequencer.attach(now, sink, position))

    def describe(self, state: ReplicaState) -> bool:
        """Add the coordinator's state, for a successor, as of the version of `state`.

        Returns False if the coordinator has left that history. The shard will then receive a message about it.
        """
        with self._lock:
            coordinator = self._sequencer.coordinator
            own = coordinator.state_at(state.term, state.version)
            if own is None:
                return False
            state.coordinator = json.dumps(own.to_json())
            state.start.CopyFrom(coordinator.start_of_term)
            state.since_checkpoint = coordinator.schedule.since(self._clock())
            return True

    def report(self, shard: int, report: Report, sink: ShardSink | None = None) -> None:
        """A shard's report.

        Args:
            sink: the sink of the link on which the report arrived; None: the shard is in this process.
        """
        if isinstance(report, Staged) and self._is_current(shard, sink):
            self._observer.staged(self._clock(), shard, report)
        self._do(lambda sequencer, now: sequencer.report(now, shard, report, sink))

    def _is_current(self, shard: int, sink: ShardSink | None) -> bool:
        with self._lock:
            return self._sequencer.is_current(shard, sink)

    def detach(self, shard: int, sink: ShardSink) -> None:
        """The connection broke. Nothing happens when another has replaced it."""
        with self._lock:
            self._sequencer.detach(shard, sink)

    @property
    def linked(self) -> frozenset[int]:
        """The shards that have a link."""
        with self._lock:
            return self._sequencer.linked

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
        self._do(lambda sequencer, now: sequencer.add(now, event(sequencer.coordinator, now, *arguments, **more)))

    def state(self) -> CoordinatorState:
        """Returns a copy of the decided state."""
        with self._lock:
            return self._sequencer.coordinator.state.copy()

    @property
    def start_of_term(self) -> Rollback:
        """The point at which the current term began."""
        with self._lock:
            copy = Rollback()
            copy.CopyFrom(self._sequencer.coordinator.start_of_term)
            return copy

    def _newest_term(self) -> int:
        with self._lock:
            return self._sequencer.coordinator.newest_term

    def unstored(self) -> frozenset[int]:
        """Returns the versions that are being written as checkpoints."""
        with self._lock:
            return self._sequencer.coordinator.schedule.versions

    def unstored_without_server(self) -> list[int]:
        """Returns the shards that have not written one of them, and have no linked server that could write it."""
        with self._lock:
            coordinator, linked = self._sequencer.coordinator, self._sequencer.linked
            missing = [shard for shard in range(coordinator.rules.shards) if coordinator.schedule.waited_for(shard)]
            return [shard for shard in missing if shard not in linked]

    # ---- Carrying out ----

    def _do(self, event: Callable[[Sequencer, float], None]) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            event(self._sequencer, self._clock())
            if self._wakes_at != (wakes_at := self._sequencer.coordinator.wakes_at):
                self._wakes_at = wakes_at
                self._alarm.set()
            if not self._sequencer.begin():
                return
        while True:
            with self._lock:
                due = self._sequencer.take()
            if due is None:
                return
            try:
                slow = carry_out(due, self._observer)
            except Exception:  # noqa: BLE001
                # There is no caller to raise it to, and later decisions must be carried out.
                _LOG.exception("a decision of the coordinator could not be carried out")
            else:
                if slow is not None:
                    self._slow.put(slow)

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
            try:  # before the coordinator ends the job, whose last report has the checkpoint
                self._observer.checkpoint_stored(self._clock(), order, uri)
            except Exception:  # noqa: BLE001  # the checkpoint is stored all the same
                _LOG.exception("the stored checkpoint of step %d could not be reported", order.version)
        self.do(Coordinator.manifest, order, uri, error)

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

        self._restoring_since, stored_at = None, self._storage.stored_at

        def restart(coordinator: Coordinator, now: float) -> Sequence[Decision]:
            decisions = coordinator.restart(now, state, uri)
            if coordinator.state.term == state.term:  # else it did not begin again
                self._observer.restarted(now, coordinator.state, uri, stored_at)
            return decisions

        self.do(restart)

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
