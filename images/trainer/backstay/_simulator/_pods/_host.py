"""Runs the real coordinator and sequencer in simulated time, with simulated links and storage. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from backstay_rpc.control_pb2 import JoinReply, Staged

from ..._coordination import (
    CheckpointFailed,
    Coordinator,
    CoordinatorState,
    Counted,
    Decision,
    Finished,
    Message,
    Outcome,
    Report,
    Restart,
    Sequencer,
    Updated,
    WriteManifest,
    carry_out,
)
from .._clock import PlannedEvent
from ._shard import TimedShard
from ._world import SimulatedWorld

if TYPE_CHECKING:
    from backstay_rpc.control_pb2 import Rollback

__all__ = ["CoordinatorHost", "TimedStore"]

P = ParamSpec("P")

_TICK = 1.0


class TimedStore:
    """The checkpoints of a simulated job.

    Attributes:
        checkpoint: the newest complete one; empty: there is none.
        version, term: its version and its term.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._state: dict[str, Any] | None = None
        self._newest_term = 0
        self.checkpoint, self.version, self.term = "", -1, 0

    def store(self, order: WriteManifest) -> str:
        """Store a manifest; returns its URI."""
        if (order.term, order.version) >= (self.term, self.version):
            self._state, self.version, self.term = dict(order.state), order.version, order.term
            self.checkpoint = f"simulated://checkpoint/{order.term}/{order.version}"
        self._world.tally.checkpoints += 1
        return self.checkpoint

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """Returns the state to start from, in a term above all earlier ones, and its checkpoint."""
        self._newest_term = term = max(self._newest_term, above_term) + 1
        if self._state is None:
            return CoordinatorState(term=term, version=0, world=self._world.config.workers), ""
        state = CoordinatorState.from_json(self._state)
        state.term = term
        return state, self.checkpoint


class _LinkOfShard:
    """A shard's link, which delivers the coordinator's messages after the latency of the network."""

    def __init__(self, world: SimulatedWorld, shard: TimedShard, is_local: bool) -> None:
        self._world, self.shard, self._is_local = world, shard, is_local

    def deliver(self, message: Message) -> None:
        """See `ShardSink`."""
        if self._is_local:
            self.shard.deliver(message)
        else:
            self._world.heap.after(self._world.latency, self.shard.deliver, message)


class CoordinatorHost:
    """One coordinator, from the start of shard 0's server until its end. It is the `Observer` of its decisions.

    Args:
        world: the simulation.
        coordinator: a new coordinator, or one that resumes.
        store: the checkpoints.
        finished: called when the job has ended.

    Attributes:
        alive: whether its server works.
        contributed: rank -> the incarnation that has contributed.
        began: the time at which the newest checkpoint began.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        coordinator: Coordinator,
        store: TimedStore,
        finished: Callable[[Finished], None],
    ) -> None:
        self._world, self._store, self._finished = world, store, finished
        self._heap = world.heap
        self._sequencer = Sequencer(coordinator)
        self._sinks: dict[int, _LinkOfShard] = {}
        self._alarm: PlannedEvent | None = None
        self._wakes_at: float | None = None
        self.alive = True
        self.contributed: dict[int, int] = {}
        self.do(Coordinator.start)
        self._heap.after(_TICK, self._tick)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, to read."""
        return self._sequencer.coordinator

    @property
    def state(self) -> CoordinatorState:
        """The decided state."""
        return self._sequencer.coordinator.state

    @property
    def start_of_term(self) -> Rollback:
        """Where the term began."""
        return self._sequencer.coordinator.start_of_term

    def close(self) -> None:
        """The process ended."""
        self.alive = False
        self._heap.cancel(self._alarm)

    # ---- Links ----

    def attach(self, shard: TimedShard) -> None:
        """A shard connects, and reports what it holds."""
        if not (self.alive and shard.alive):
            return
        sink = self._sinks[shard.shard] = _LinkOfShard(self._world, shard, shard.shard == 0)
        self._sequencer.attach(self._heap.now, sink, shard.position())
        self._drain()
        shard.report_all()

    def detach(self, shard: TimedShard) -> None:
        """The link of a shard broke."""
        sink = self._sinks.get(shard.shard)
        if sink is not None and sink.shard is shard:
            self._sequencer.detach(shard.shard, sink)

    def linked(self, shard: TimedShard) -> bool:
        """Returns whether this server of the shard has a link."""
        sink = self._sinks.get(shard.shard)
        return sink is not None and sink.shard is shard

    def report(self, shard: TimedShard, report: Report) -> None:
        """A shard's report arrived."""
        sink = self._sinks.get(shard.shard)
        if not self.alive or sink is None or sink.shard is not shard:
            return
        if isinstance(report, Staged) and report.id.incarnation > self.contributed.get(report.id.rank, 0):
            self.contributed[report.id.rank] = report.id.incarnation
        self._sequencer.report(self._heap.now, shard.shard, report, sink)
        self._drain()

    # ---- Workers and the clock ----

    def do(
        self,
        event: Callable[Concatenate[Coordinator, float, P], Sequence[Decision]],
        *arguments: P.args,
        **more: P.kwargs,
    ) -> None:
        """Report any other event, as in `ThreadedCoordinator.do`."""
        if self.alive:
            now = self._heap.now
            self._sequencer.add(now, event(self._sequencer.coordinator, now, *arguments, **more))
            self._drain()

    def join(self, rank: int, incarnation: int, term: int, version: int) -> JoinReply:
        """A worker joins with parameters of (term, version)."""
        if term:
            self.do(Coordinator.worker_at, term, version)
        self.do(Coordinator.joined, rank, incarnation)
        state = self.state
        return JoinReply(
            term=state.term,
            version=state.version,
            key_step=state.key_steps.get(rank, 0),
            began=self.start_of_term.version,
        )

    def _tick(self) -> None:
        if self.alive:
            self.do(Coordinator.tick)
            self._heap.after(_TICK, self._tick)

    def _drain(self) -> None:
        wakes_at = self._sequencer.coordinator.wakes_at
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            self._heap.cancel(self._alarm)
            self._alarm = None if wakes_at is None else self._heap.at(wakes_at, self._wake)
        if not self._sequencer.begin():
            return
        while (due := self._sequencer.take()) is not None:
            slow = carry_out(due, self)
            match slow:
                case WriteManifest():
                    self._heap.after(self._world.assumed.checkpoints.manifest_seconds, self._store_manifest, slow)
                case Restart():
                    self._heap.after(self._world.assumed.checkpoints.read_seconds, self._restart)

    def _wake(self) -> None:
        self._wakes_at = None
        self.do(Coordinator.tick)

    def _store_manifest(self, order: WriteManifest) -> None:
        if self.alive:
            uri = self._store.store(order)
            self.do(Coordinator.manifest, order, uri)

    def _restart(self) -> None:
        if self.alive and self.coordinator.finished is None:
            state, checkpoint = self._store.newest(self.coordinator.newest_term)
            before = self.state.redone
            self.do(Coordinator.restart, state, checkpoint)
            self._world.tally.redone += max(0, self.state.redone - before)

    # ---- `Observer` ----

    def staged(self, now: float, shard: int, staged: Staged) -> None:
        """See `Observer`."""

    def counted(self, now: float, counted: Counted) -> None:
        """See `Observer`."""
        tally, outcome = self._world.tally, counted.outcome.value
        tally.outcomes[outcome] = tally.outcomes.get(outcome, 0) + 1
        if counted.outcome is Outcome.APPLIED:
            tally.examples += counted.info.examples
            tally.staleness[counted.staleness] = tally.staleness.get(counted.staleness, 0) + 1

    def updated(self, now: float, updated: Updated) -> None:
        """See `Observer`."""
        if not updated.adopted:
            self._world.tally.updates.append((now, updated.commit.version + 1))

    def restarted(self, now: float, state: CoordinatorState, checkpoint: str, stored_at: float) -> None:
        """See `Observer`."""

    def redo(self, now: float, updates: int) -> None:
        """See `Observer`."""
        self._world.tally.redone += updates

    def checkpoint_stored(self, now: float, order: WriteManifest, uri: str) -> None:
        """See `Observer`."""

    def checkpoint_failed(self, now: float, failed: CheckpointFailed) -> None:
        """See `Observer`."""

    def finished(self, now: float, finished: Finished) -> None:
        """See `Observer`."""
        self._finished(finished)
