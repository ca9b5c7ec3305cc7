"""A simulated server of one shard, its standby, and the parts of contributions that it receives. Pure.

The server carries out the coordinator's messages with the shard's own `Orders` and `Credits`, and answers by the update
mode's own rules. It adds the time of each action. It asserts T1, that no update has a part of a contribution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    Done,
    Gather,
    GradientId,
    GradientInfo,
    Lost,
    Norm,
    NormRequest,
    Reject,
    RejectReason,
    Rollback,
    Save,
    Staged,
    Written,
)

from ..._coordination import Message, Report, ServerPosition, identity
from ..._shard import Credits, Orders, Turn, has_ended
from ._standby import FollowedState, HeldAnswers, StandbyLink
from ._streams import PartOnWay
from ._world import SimulatedMachine, SimulatedWorld

__all__ = ["TimedShard"]

_LATE: Final = RejectReason.LATE
_FIRST_BLOCK: Final = 4 << 20
"""Bytes of a block. The first block is sent while the others are computed."""


class _Woken(threading.Condition):
    """Calls a function where a real push would wake its thread."""

    def __init__(self, lock: threading.Lock, act: Callable[[], None]) -> None:
        super().__init__(lock)
        self._act = act

    def notify(self, n: int = 1) -> None:
        del n
        self._act()


class TimedShard:
    """The active server of one shard, in time. It is the coordinator's `ShardSink`.

    Args:
        world: the simulation.
        shard: its number.
        pod: the role, index, incarnation and name of its pod.
        machine: the machine of its pod.
        report: sends a report to the coordinator.

    Attributes:
        term, version: what it has reached; a term of 0: it has no state.
        alive: whether it works.
        standby: its link to its standby.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        shard: int,
        pod: tuple[str, int, int, str],
        machine: SimulatedMachine,
        report: Callable[[TimedShard, Report], None],
    ) -> None:
        self._world, self.shard, self.pod, self.machine, self._send = world, shard, pod, machine, report
        self._heap, self._mode, self._costs = world.heap, world.mode, world.assumed.costs
        self._lock = threading.Lock()
        self.credits = Credits(world.mode, world.rules, self._lock)
        self._orders = Orders(cast(Any, self))
        self.term = self.version = self.world = self.begun = self.saves = 0
        self.last: Commit | None = None
        self.prepared: tuple[Contribution, ...] = ()
        self._infos: tuple[GradientInfo, ...] = ()
        self._sums: set[tuple[int, ...]] = set()
        self._round = -1
        self._held: dict[tuple[int, ...], PartOnWay] = {}
        self._undecided: dict[int, int] = {}  # complete contributions by rank
        self._parts: dict[int, PartOnWay] = {}
        self._waiting: dict[int, PartOnWay] = {}
        self._published: int | None = None
        self._busy = False
        self.done: Done | None = None
        self.alive = True
        self.standby = StandbyLink(world, machine)
        self.written: list[Written] = []
        self.refill: Callable[[], None] = lambda: None  # begins to send the whole state to the standby again

    @property
    def incarnation(self) -> int:
        """The incarnation of its pod."""
        return self.pod[2]

    def position(self) -> ServerPosition:
        """Returns where it is when it connects to a coordinator."""
        replicates = self._world.rules.replicates
        return ServerPosition(
            self.shard,
            self.term,
            self.version,
            incarnation=self.incarnation,
            last=self.last if replicates else None,
            prepared=self.prepared if replicates else (),
            begun=self.begun,
            saves=self.saves,
        )

    def take_over(self, held: FollowedState) -> None:
        """Begin with the state of a standby."""
        self.term = self.begun = held.term
        self.version, self.world, self.last = held.version, held.world, held.last
        self.prepared, self._infos = held.prepared, held.infos
        self._begin_credits()
        self._published = self.version

    def report_all(self) -> None:
        """Report what it holds, after a coordinator has its position."""
        for part in list(self._held.values()):
            if part.complete and part.gradient is not None:
                self._send(self, Staged(id=part.gradient, info=part.info))
        self._send(self, Applied(version=self.version))
        for written in self.written:
            self._send(self, written)

    def close(self) -> None:
        """The process ended, so all of its streams break."""
        if not self.alive:
            return
        self.alive = False
        self.standby.reset()
        self._break_streams()
        self._held.clear()

    def _break_streams(self) -> None:
        for part in list(self._parts.values()):
            part.stop()
            if part.is_open:
                part.is_open = False
                part.worker.lost_server(part)
        self._parts.clear()
        self._waiting.clear()

    # ---- Streams of workers ----

    def enter(self, rank: int, act: Callable[[], None]) -> Turn | None:
        """Wait for memory, and call `act` with it. Returns what `leave` ends, or None if `act` was called."""
        with self._lock:
            turn = self.credits.enter(rank, again=self._undecided.get(rank, 0) > 0)
            if turn.granted:
                self.credits.leave(turn)
        if turn.granted:
            act()
            return None

        def woken() -> None:
            if turn.granted:
                self._heap.after(0.0, begin)

        def begin() -> None:
            with self._lock:
                self.credits.leave(turn)
            act()

        turn.woken = _Woken(self._lock, woken)
        return turn

    def leave(self, turn: Turn) -> None:
        """End a wait for memory."""
        with self._lock:
            self.credits.leave(turn)

    def receive(self, part: PartOnWay) -> None:
        """A worker opens a stream."""
        gradient = part.gradient
        if not part.is_open:
            return
        if not self.alive or self.term == 0 or (gradient is not None and gradient.term != self.term):
            part.is_open = False
            part.worker.lost_server(part)
            return
        self._parts[id(part)] = part
        if gradient is None:
            self._wait(part)
            return
        part.key = identity(gradient)
        if self._mode.used_up(gradient.version, self.version) or self.done is not None:
            part.finished = True
            part.pushed = self._heap.now
            self._send(self, Lost(id=gradient))
            self._wait(part)
            return
        with self._lock:
            self.credits.take()
        part.has_memory = True
        self._held[part.key] = part
        self._world.tally.sent += self._world.gradient_bytes
        ingress = self.machine.ingress
        part.flow = ingress, ingress.add(self._world.gradient_bytes, lambda: self._received(part))

    def _received(self, part: PartOnWay) -> None:
        part.flow = None
        if self.alive and part.is_open:
            costs = self._costs
            seconds = costs.contribution_seconds + self._world.gradient_bytes / costs.receive_bytes_per_second
            processor = self.machine.processor
            part.flow = processor, processor.add(seconds, lambda: self._complete(part))

    def _complete(self, part: PartOnWay) -> None:
        part.flow = None
        gradient = part.gradient
        if not (self.alive and part.is_open) or gradient is None:
            return
        part.pushed = self._heap.now
        part.finished = True
        if self._moved_on(part, gradient):
            self._forget(part)
            self._send(self, Lost(id=gradient))
        else:
            part.complete = True
            self._undecided[gradient.rank] = self._undecided.get(gradient.rank, 0) + 1
            self._send(self, Staged(id=gradient, info=part.info))
        self._wait(part)

    def _moved_on(self, part: PartOnWay, gradient: GradientId) -> bool:
        used_up = self._mode.used_up(gradient.version, self.version)
        return bool(part.outcome) or used_up or gradient.term != self.term or self.done is not None

    def drop(self, part: PartOnWay) -> None:
        """The worker's end of a stream is gone."""
        if not part.is_open:
            return
        part.is_open = False
        part.stop()
        self._parts.pop(id(part), None)
        self._waiting.pop(id(part), None)
        if self.alive and part.gradient is not None and part.key and not part.finished:
            part.finished = True
            self._forget(part)
            self._send(self, Lost(id=part.gradient))

    def _forget(self, part: PartOnWay) -> None:
        if self._remove(part.key) is not None:
            self._free([part])

    def _remove(self, key: tuple[int, ...]) -> PartOnWay | None:
        part = self._held.pop(key, None)
        if part is not None and part.complete and part.gradient is not None:
            self._undecided[part.gradient.rank] -= 1
        return part

    def _free(self, parts: Sequence[PartOnWay]) -> None:
        with self._lock:
            for part in parts:
                if part.has_memory:
                    part.has_memory = False
                    self.credits.give()

    def _begin_credits(self) -> None:
        with self._lock:
            self.credits.begin(self.world)

    # ---- Answers ----

    def _wait(self, part: PartOnWay) -> None:
        if self._published is not None and self._answers(part):
            self._answer([part], None)
        else:
            part.is_waiting = True
            self._waiting[id(part)] = part

    def _answers(self, part: PartOnWay) -> bool:
        published = self._published
        assert published is not None
        if self.done is not None:
            return published >= self.done.version
        if part.gradient is None:
            return published >= part.min_version
        if part.applied is not None:
            return published >= part.applied
        return self._mode.answered_by(part.outcome, part.gradient.version, published)

    def _answer_all(self, hold: HeldAnswers | None) -> None:
        found = [part for part in self._waiting.values() if self._answers(part)]
        for part in found:
            del self._waiting[id(part)]
        for wants_all in (True, False):
            same = [part for part in found if (part.gradient is None) == wants_all]
            if same:
                self._answer(same, hold)

    def _answer(self, parts: list[PartOnWay], hold: HeldAnswers | None) -> None:
        """Send the published version to streams that get the same number of bytes."""
        assert self._published is not None
        last, limit = self.last, 0
        if self.shard == 0:
            with self._lock:
                limit = self.credits.limit(self.world)
        version = self._published
        done = has_ended(self.done, last, version)
        for part in parts:
            part.is_waiting = False
            part.term, part.version, part.world, part.done, part.ask = self.term, version, self.world, done, limit > 0
            part.name_outcome(last if last is not None and version == last.version + 1 else None)
        amount = self._world.whole_bytes if parts[0].gradient is None else self._world.parameter_bytes
        seconds = self._costs.answer_seconds + amount / self._costs.send_bytes_per_second
        processor, egress = self.machine.processor, self.machine.egress

        def send() -> None:
            begins = self._heap.now + self._world.latency
            living = [part for part in parts if part.is_open]
            if not living:
                return
            flow = egress, egress.add(amount, arrived, len(living))
            for part in living:
                part.answered, part.flow = begins, flow

        def arrived() -> None:
            self._world.tally.received += amount * len(parts)
            if hold is None or hold.has_ended:
                end()
            else:
                hold.waiting.append(end)

        def end() -> None:
            for part in parts:
                part.flow = None
            self._heap.after(self._world.latency, self._end_all, parts)

        flow = processor, processor.add(seconds, send, len(parts))
        for part in parts:
            part.flow = flow

    def _end_all(self, parts: list[PartOnWay]) -> None:
        for part in parts:
            self._end(part)

    def _end(self, part: PartOnWay) -> None:
        if part.is_open:
            part.is_open = False
            self._parts.pop(id(part), None)
            part.worker.answered(part)

    # ---- The coordinator's messages ----

    def deliver(self, message: Message) -> None:
        """See `ShardSink`."""
        if not self.alive:
            return
        match message:
            case Commit():
                self._order(message, self._orders.commit)
            case Gather():
                self._order(message, self._orders.gather)
            case NormRequest():
                self._order(message, self._orders.prepare)
            case Save():
                self.saves = max(self.saves, message.version)
                self._order(message, self._orders.save)
            case Reject():
                self._reject(message)
            case Rollback():
                self._rollback(message)
            case Done():
                self.done = message
                with self._lock:
                    self.credits.wake()
                if self._published is not None:
                    self._answer_all(None)
                self._world.heap.after(0.0, self._work)

    def _order(self, order: Any, keep: Callable[[Any], None]) -> None:
        assert order.term <= self.term, "a message of a later term follows its Rollback"
        if order.term == self.term and order.version >= self.version:
            keep(order)
            self._work()

    def _reject(self, reject: Reject) -> None:
        part = self._held.get(identity(reject.id))
        if part is None:
            return
        self._orders.withdraw(reject.id)
        if part.key in self._sums:
            self._sums.clear()
            self._begin_credits()
        part.outcome, part.next_key_step = reject.reason, reject.next_key_step
        if part.complete:
            self._forget(part)
        else:
            self._stop_receiving(part)
        if part.is_waiting and self._published is not None and self._answers(part):
            self._waiting.pop(id(part), None)
            self._answer([part], None)

    def _stop_receiving(self, part: PartOnWay) -> None:
        """A contribution is of no use before all of it has arrived."""
        part.stop()
        part.finished = True
        part.pushed = self._heap.now
        self._forget(part)
        if part.gradient is not None and self.alive:
            self._send(self, Lost(id=part.gradient))
        if part.is_open and not part.is_waiting:
            self._wait(part)

    def _rollback(self, message: Rollback) -> None:
        self.term = self.begun = message.term
        self.version, self.world, self.last = message.version, message.world, None
        self.prepared, self._infos, self.saves = (), (), 0
        self._published, self.done = None, None
        self.standby.reset()
        self._sums.clear()
        self._orders.clear()
        self.written.clear()
        held, self._held = list(self._held.values()), {}
        self._undecided.clear()
        self._break_streams()
        self._free(held)
        self._begin_credits()
        self._busy = True
        stored = self._world.assumed.checkpoints
        seconds = stored.read_seconds + self._world.state_bytes / stored.read_bytes_per_second
        self._heap.after(seconds if message.checkpoint else 0.0, self._loaded, message.term)

    def _loaded(self, term: int) -> None:
        if self.alive and self.term == term:
            self._published = self.version
            self._answer_all(None)
            self.refill()
            self._next()

    # ---- The apply thread, as `Orders` calls it ----

    def _work(self) -> None:
        if self._busy or not self.alive or self.term == 0:
            return
        work = self._orders.take(cast(Any, self))
        if work is not None:
            self._busy = True
            work()

    def _next(self) -> None:
        self._busy = False
        self._work()

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        term = self.term

        def ended() -> None:
            if self.alive and self.term == term:
                then()

        self.machine.processor.add(seconds, ended)

    def save(self, _: Any) -> None:
        """Copy the state, and write it while updates continue."""
        term, version = self.term, self.version
        stored, began = self._world.assumed.checkpoints, self._heap.now

        def copied() -> None:
            seconds = stored.write_seconds + self._world.state_bytes / stored.write_bytes_per_second
            self._heap.after(seconds, wrote)
            self._next()

        def wrote() -> None:
            if self.alive and self.term == term:
                self._world.spans.record(self.pod, "checkpoint", began, self._heap.now, version)
                written = Written(term=term, version=version)
                self.written = [*self.written[-2:], written]
                self._send(self, written)

        self._compute(self._world.state_bytes / stored.snapshot_bytes_per_second, copied)

    def gather(self, _: Any, gather: Gather) -> None:
        """Add up contributions, and free their memory."""
        if gather.round != self._round:
            self._sums.clear()
            self._round = gather.round
        keys = [identity(contribution.id) for contribution in gather.contributions]
        held = [part for key in keys if (part := self._held.get(key)) is not None and part.complete]
        if all(key in self._sums for key in keys) or len(held) != len(keys):
            self._next()
            return
        self._sums.update(keys)

        def added() -> None:
            self._free(held)
            with self._lock:
                self.credits.summed({part.gradient.rank for part in held if part.gradient is not None})
            self._next()

        self._compute(len(keys) * self._world.shard_bytes / self._costs.add_bytes_per_second, added)

    def prepare(self, _: Any, request: NormRequest) -> None:
        """Compute the mean, and answer once the standby holds it."""
        seconds = self._mean_seconds(request.contributions)
        if seconds is None:
            self._next()  # the decision was withdrawn
            return
        norm = Norm(term=request.term, version=request.version, sum_of_squares=1.0, round=request.round)

        def computed() -> None:
            self.prepared = tuple(request.contributions)
            self._infos = tuple(
                part.info
                for contribution in self.prepared
                if (part := self._held.get(identity(contribution.id))) is not None and part.info is not None
            )
            self.standby.send(self._world.shard_bytes, hold_mean, held)

        def hold_mean(followed: FollowedState) -> None:
            followed.prepared, followed.infos = self.prepared, self._infos

        def held() -> None:
            self._send(self, norm)
            self._next()

        self._compute(seconds, computed)

    def _mean_seconds(self, contributions: Sequence[Contribution]) -> float | None:
        """Returns the time to compute the mean, or None if a contribution is missing."""
        if self.prepared and tuple(contributions) == self.prepared:
            return 0.0
        keys = [identity(contribution.id) for contribution in contributions]
        rest = [key for key in keys if key not in self._sums]
        if not all((part := self._held.get(key)) is not None and part.complete for key in rest):
            return None
        sums = 1 if len(rest) < len(keys) else 0
        return (len(rest) + sums) * self._world.shard_bytes / self._costs.add_bytes_per_second

    def apply(self, _: Any, commit: Commit, __: float) -> None:
        """Apply an update, and publish its version block by block."""
        began, costs, size = self._heap.now, self._costs, self._world.shard_bytes
        mean = self._mean_seconds(commit.contributions)
        assert mean is not None, "T1: every shard holds all contributions that a commit names"
        freed = self._use(commit)
        hold = HeldAnswers()
        self.standby.send(0.0, lambda followed: followed.commit(commit), hold.end)
        self.last, self.prepared, self._infos = commit, (), ()
        all_blocks = 0.0 if commit.skip else size / costs.apply_bytes_per_second
        first = all_blocks * min(1.0, _FIRST_BLOCK / size) if size else 0.0

        def publish() -> None:
            self._published = self.version
            self._answer_all(hold)
            self._compute(all_blocks - first, applied)

        def applied() -> None:
            self._free(freed)
            self._world.spans.record(self.pod, "apply", began, self._heap.now, commit.version)
            self._send(self, Applied(version=commit.version + 1))
            if commit.checkpoint:
                self.save(None)
            else:
                self._next()

        self._compute(costs.update_seconds + mean + first, publish)

    def _use(self, commit: Commit) -> list[PartOnWay]:
        version = commit.version + 1
        freed: list[PartOnWay] = []
        for contribution in commit.contributions:
            key = identity(contribution.id)
            part = self._remove(key)
            if part is None:
                continue
            freed.append(part)
            part.applied = version
            if commit.skip:
                part.outcome = RejectReason.SKIPPED
        self.version, self.world = version, commit.world
        self._published = None
        self._sums.clear()
        for part in list(self._held.values()):
            if part.gradient is None or not self._mode.used_up(part.gradient.version, version):
                continue
            if part.complete:
                part.outcome = _LATE
                self._forget(part)
            else:
                self._stop_receiving(part)
        self._begin_credits()
        return freed
