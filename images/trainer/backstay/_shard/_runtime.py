"""Connects data streams, the coordinator's messages and the engine of one shard.

- `Admission` refuses streams for another server, or whose sender was replaced.
- `Gradients` is the staging memory: which memory belongs to which gradient.
- `Orders` keeps the coordinator's messages until their version comes.
- `Applier` prepares and applies updates.
- `Publisher` sends versions to the streams that wait for them.
- `Standbys` keeps another server ready to replace this one.

Streams and the coordinator call `ShardRuntime` from any thread. One apply thread carries the orders out, strictly in
order of version.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from backstay_rpc.control_pb2 import (
    Commit,
    Done,
    Examine,
    Gather,
    GradientId,
    GradientInfo,
    Hello,
    Lost,
    NormRequest,
    Occupied,
    Part,
    Peer,
    Reject,
    RejectReason,
    Rollback,
    Save,
    ShardFailed,
    Staged,
)
from backstay_rpc.refusals import RefusalCode

from .. import _instrument
from .._coordination import MODES, Answering, Coordination, Message, Rules, used_in
from .._process import describe as describe_failure
from .._transport import QUIET_CHECKS, Answer, CheckpointHook, Engine, Incoming, Refusal
from .._update import ShardWire
from ..errors import PeerLost, Superseded
from ._admission import Admission
from ._applier import Applier, Term, TermOver
from ._credits import Credits
from ._operand import Operand
from ._orders import Orders
from ._publisher import Publisher, has_ended
from ._staging import GradientKey, Gradients, StagedGradient, StagedPart, check_address, describe, key_of
from ._standbys import NoStandbys, Standbys

__all__ = ["ShardEvents", "ShardRuntime"]

_LOG = logging.getLogger(__name__)

_Order = TypeVar("_Order", Commit, Gather, NormRequest, Save)

_LATE = RejectReason.LATE
_NONE = RejectReason.REJECT_UNSPECIFIED


@dataclass(frozen=True)
class ShardEvents:
    """The functions that a shard calls.

    Attributes:
        checkpoint: see `CheckpointHook`; None: the job stores nothing.
        rollback: loads the state at which a term begins, and then calls `ShardRuntime.reset`; returns immediately.
        done: called when the job has ended, after the streams have it.
    """

    checkpoint: CheckpointHook | None = None
    rollback: Callable[[Rollback], None] = lambda rollback: None
    done: Callable[[Done], None] = lambda done: None


class ShardRuntime:
    """One shard as a `ShardPort` for data streams and a `ShardSink` for the coordinator. Thread-safe."""

    def __init__(
        self,
        wire: ShardWire,
        admission: Admission,
        coordination: Coordination,
        rules: Rules,
        *,
        events: ShardEvents | None = None,
        standbys: Standbys | None = None,
    ) -> None:
        """Starts the apply thread. Streams are refused as `NOT_READY` until `reset` gives an engine.

        Args:
            wire: how the shard's blocks are encoded on the wire.
            admission: the streams that this server accepts, which must be new.
            coordination: gets the shard's reports; called while no lock is held.
            rules: the job's rules.
            events: the functions that the shard calls; None: none.
            standbys: this shard's; None when the job has none.
        """
        self._times = rules.timeouts
        self._standbys = standbys or NoStandbys()
        self._shard, self._admission = admission.shard, admission
        self.wire = wire
        self._coordination = coordination
        updates = MODES[rules.mode]
        self._answering: Answering = updates
        self._events = events or ShardEvents()
        self._world = 0
        self._occupied_again = 0.0
        # By rank: an absent gradient that was examined last, and how often in a row.
        self._absent: dict[int, tuple[GradientKey, int]] = {}
        self._rejected: dict[int, Reject] = {}  # by rank: the newest whose parts had not all begun to arrive
        self._examined: dict[int, float] = {}  # when a gradient of the rank was examined last

        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # streams wait for it
        self._work = threading.Condition(lock)  # the apply thread waits for it
        self._credits = Credits(updates, rules, lock)
        self._gradients = Gradients(self.wire, self._credits)
        self._publisher = Publisher(updates)
        self._applier = Applier(
            self._changed,
            self._gradients,
            self._publisher,
            self._standbys,
            updates,
            coordination,
            self._events.checkpoint,
        )
        self._orders = Orders(self._applier)
        self._current: Term | None = None
        self._stopped: Refusal | None = None
        self._thread = threading.Thread(target=self._run, name=f"backstay-apply-{self._shard}", daemon=True)
        self._thread.start()

    # ---- Life ----

    def reset(self, term: int, engine: Engine, world: int, offset: int = 0) -> None:
        """Start, or start again, from `engine.version` in a new term. Returns immediately.

        Everything of the previous term is dropped: gradients, orders, waiting streams. Orders of the new term may
        follow immediately.

        Raises:
            ValueError: the term is not higher than the previous one.
        """
        with self._changed:
            if term <= self.term:
                raise ValueError(f"shard {self._shard} is in term {self.term}: cannot start in term {term}")
            for gradient in self._gradients:
                if gradient.complete:
                    self._gradients.give(self._gradients.remove(gradient))
            self._current, self._world = Term(term, engine, engine.version, world, offset), world
            self._applier.begin(self._current)
            self._standbys.end()  # a standby connects again, and is filled with the new term's state
            self._orders.clear()
            self._publisher.begin()
            self._work.notify()
            self._changed.notify_all()

    def inherit(self, prepared: Operand | None, last: Commit | None) -> None:
        """Take over what this shard held as a standby besides its state. Call after `reset`."""
        with self._changed:
            assert self._current is not None
            self._current.prepared, self._current.last = prepared, last

    def admit_replica(self) -> None:
        """A standby waits to be filled."""
        with self._changed:
            self._work.notify()

    def close(self, why: str = "the server is shutting down") -> None:
        """Refuses all streams as `NOT_READY`, finishes the update that is running, and ends the apply thread."""
        self._stop(Refusal(RefusalCode.NOT_READY, why))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def shard(self) -> int:
        return self._shard

    @property
    def term(self) -> int:
        """Is 0 while none has begun."""
        current = self._current
        return 0 if current is None else current.number

    @property
    def version(self) -> int:
        """Updates applied, including the one that is being computed."""
        current = self._current
        return 0 if current is None else current.version

    @property
    def world(self) -> int:
        """The world in the newest commit that arrived, or 0 if no term has begun."""
        return self._world

    @property
    def failed(self) -> str | None:
        """Why the shard cannot continue, or None."""
        stopped = self._stopped
        return stopped.message if stopped is not None and stopped.code == RefusalCode.BROKEN else None

    @property
    def memory(self) -> Credits:
        """How many contributions are in memory."""
        return self._credits

    # ---- ShardPort: called by streams ----

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Take the newest known incarnations, such as ``{"worker-3": 2}``, and refuse older ones from now on."""
        with self._changed:
            self._admission.fence(incarnations)

    def admit(self, hello: Hello) -> None:
        with self._changed:
            self._check_running()
            self._admission.check_server(hello)
            self._check_term(hello.term)
            self._admission.check_peer(hello, self._gradients.members)

    def begin(self, hello: Hello, part: Part, alive: Callable[[], bool] | None = None) -> Incoming:
        with self._changed:
            if alive is None:
                return self._begin(hello, part)
            if self._gradients.expects(part):
                return self._begin(hello, part)
            rank = part.contribution.rank
            turn = self._credits.enter(rank, again=self._gradients.undecided(rank))
        try:
            while True:
                with self._changed:
                    if turn.granted or not self._wants(part) or self._gradients.expects(part):
                        return self._begin(hello, part)
                    if turn.woken.wait(self._times.peer_check):
                        continue
                if not alive():
                    raise PeerLost(f"{describe(part.contribution)} waited for memory: its sender disconnected")
                self._report_occupied()
        finally:
            with self._changed:
                self._credits.leave(turn)

    def _report_occupied(self) -> None:
        """Report what has the memory that pushes wait for, about once in each interval of their checks."""
        now = time.monotonic()
        with self._changed:
            if now < self._occupied_again:
                return
            self._occupied_again = now + self._times.peer_check
            ids = [each.id for each in self._gradients if each.complete and each.applied is None and not each.outcome]
        if ids:
            self._coordination.report(Occupied(ids=ids))

    def _wants(self, part: Part) -> bool:
        """Returns whether a contribution can still be used, or refused when it begins."""
        push = part.contribution
        over = self._stopped is not None or self._publisher.done is not None
        return not over and push.term == self.term and not self._answering.used_up(push.version, self.version)

    def _begin(self, hello: Hello, part: Part) -> Incoming:
        push = part.contribution
        self._check_running()
        self._check_term(push.term)
        self._admission.check_peer(hello, self._gradients.members)
        peer = hello.peer
        check_address(part, self._shard, self._gradients.members)
        own = ("worker", push.rank, push.incarnation, part.member)
        if (peer.role, peer.index, peer.incarnation, peer.member) != own:
            who = f"{peer.role} {peer.index}" + (f", member {peer.member}," if peer.member or part.member else "")
            raise Refusal(
                RefusalCode.INVALID,
                f"{who} of incarnation {peer.incarnation} pushes {describe(push)}: must be its own",
            )
        if push.version > self.version:
            raise Refusal(
                RefusalCode.MOVED,
                f"{describe(push)} is ahead of shard {self._shard}, which is at version {self.version}",
            )
        begun = self._gradients.begin(part)
        late = self._rejected.get(push.rank)
        if late is not None and key_of(late.id) == key_of(push):  # the other members have their answers
            begun.gradient.outcome, begun.gradient.next_key_step = late.reason, late.next_key_step
        if len(begun.gradient.parts) < begun.gradient.members:
            self._credits.wake()  # the other members of the rank need not wait for memory
        return begun

    def moved_on(self, incoming: Incoming) -> bool:
        return self._moved_on(_part(incoming).gradient)

    def _moved_on(self, gradient: StagedGradient) -> bool:
        return gradient.lost or self._is_useless(gradient)

    def _is_useless(self, gradient: StagedGradient) -> bool:
        """Returns whether no update can use a gradient, even if all of it arrives."""
        return (
            gradient.outcome != _NONE
            or self._answering.used_up(gradient.id.version, self.version)
            or gradient.id.term != self.term
            or self._stopped is not None
            or self._publisher.done is not None
        )

    def complete(self, incoming: Incoming, info: GradientInfo) -> None:
        part = _part(incoming)
        gradient = part.gradient
        with self._changed:
            part.info = info
            part.complete = part.finished = usable = not self._moved_on(gradient)
            gradient.complete = staged = usable and gradient.all_parts
            why = gradient.disagreement() if staged else None
            if why is not None:
                self._stop_locked(Refusal(RefusalCode.BROKEN, why))
        if not usable:
            self.lose(part)
        elif staged and why is None:
            self._coordination.report(Staged(id=gradient.id, info=gradient.info))

    def lose(self, incoming: Incoming) -> None:
        part = _part(incoming)
        with self._changed:
            if part.finished:
                return
            part.finished = True
        self._lose(part.gradient)

    def _lose(self, gradient: StagedGradient) -> None:
        """A part of a gradient will not arrive, so no update can use it."""
        with self._changed:
            first = not (gradient.lost or gradient.complete)
            if not gradient.complete:
                self._gradients.lose(gradient)
            if first and gradient.members > 1:
                self._changed.notify_all()  # the streams of its other parts
        if first:
            self._coordination.report(Lost(id=gradient.id))

    def answer(
        self, incoming: Incoming | None, min_version: int, alive: Callable[[], bool], peer: Peer | None = None
    ) -> Answer | None:
        gradient = None if incoming is None else _part(incoming).gradient
        try:
            return self._answer(gradient, min_version, alive, peer)
        finally:
            if gradient is not None and not gradient.complete:
                self._lose(gradient)  # its other parts come too late, if they come

    def _answer(
        self, gradient: StagedGradient | None, min_version: int, alive: Callable[[], bool], peer: Peer | None
    ) -> Answer | None:
        with self._changed, self._publisher.waiting(gradient, min_version) as waiter:
            term = self.term if gradient is None else gradient.id.term
            while True:
                self._check_running()
                self._check_term(term)
                published = self._publisher.answer_to(waiter)
                if published is not None:
                    break
                if gradient is not None and gradient.lost and gradient.members > 1 and not self._is_useless(gradient):
                    why = f"the part of another member in {describe(gradient.id)} was lost: join again"
                    raise Refusal(RefusalCode.MOVED, why)
                if not self._changed.wait(self._times.peer_check) and not alive():
                    return None
            last = self._current.last if self._current is not None else None
            newest = last if last is not None and published.version == last.version + 1 else None
            outcome, next_key_step = _outcome_of(gradient, peer, newest)
            done = has_ended(self._publisher.done, last, published.version)
            return Answer(
                term=self.term,
                version=published.version,
                world=published.world,
                offset=published.offset,
                block=published.block,
                encoded=published.encoded,
                outcome=outcome,
                next_key_step=next_key_step,
                ask=self._shard == 0 and self._credits.limit(published.world) > 0,
                selection=None
                if gradient is None
                else self.wire.selection(
                    self._answering.exchanged(gradient.id.key_step, gradient.id.version, published.version)
                ),
                average=self._average() if done else None,
                done=done,
            )

    def _average(self) -> Callable[[int], np.ndarray] | None:
        """`Answer.average` after the last update. The engine computes no further one, so its state stays the same."""
        engine = None if self._current is None else self._current.engine
        return engine.average if engine is not None and engine.has_average else None

    # ---- ShardSink ----

    def deliver(self, message: Message) -> None:
        """A message of the coordinator; see `ShardSink`."""
        match message:
            case Commit():
                _instrument.reach("commit", message.version)
                self._world = message.world
                self._order(message, self._orders.commit)
            case Gather():
                self._order(message, self._orders.gather)
            case NormRequest():
                self._order(message, self._orders.prepare)
            case Save():
                self._order(message, self._orders.save)
            case Reject():
                self._reject(message)
            case Rollback():
                self._events.rollback(message)
            case Done():
                self._end(message)
                self._events.done(message)
            case Examine():
                self._examine(message.id)

    def _order(self, order: _Order, keep: Callable[[_Order], None]) -> None:
        """Keep an order, unless it is for an earlier version than this shard's."""
        with self._changed:
            if order.term > self.term:
                why = f"a {order.DESCRIPTOR.name} is of term {order.term}: this shard is still in term {self.term}"
                self._stop_locked(Refusal(RefusalCode.BROKEN, why))
            if order.term == self.term and order.version >= self.version:
                keep(order)
                self._work.notify()

    def _reject(self, reject: Reject) -> None:
        with self._changed:
            gradient = self._gradients.find(reject.id)
            if gradient is None:
                return
            self._orders.withdraw(reject.id)
            self._applier.forget(reject.id)
            gradient.outcome = reject.reason
            gradient.next_key_step = reject.next_key_step
            if len(gradient.parts) < gradient.members:
                self._rejected[gradient.id.rank] = reject
            if gradient.complete:  # else the stream that fills it stops by `moved_on`
                self._gradients.give(self._gradients.remove(gradient))
            self._changed.notify_all()

    def _examine(self, gradient: GradientId) -> None:
        """Check whether bytes of a gradient still arrive, for which shard 0 keeps memory that others wait for.

        Messages that have waited while this process was stopped count once: no byte can arrive between two of them.
        """
        now, gone = time.monotonic(), False
        with self._changed:
            if now < self._examined.get(gradient.rank, -math.inf) + self._times.peer_check / 2:
                return
            self._examined[gradient.rank] = now
            found = self._gradients.find(gradient)
            # Read once: the thread of a stream removes it when its push ends.
            every = [] if found is None else [part.examine for part in found.receiving]
            if found is not None and len(found.parts) == found.members:
                self._absent.pop(gradient.rank, None)
            else:
                before, checks = self._absent.get(gradient.rank, (None, 0))
                checks = checks + 1 if before == key_of(gradient) else 1
                self._absent[gradient.rank] = key_of(gradient), checks
                gone = checks == QUIET_CHECKS  # no stream has begun to send a part of it here
        if gone and found is None:
            self._coordination.report(Lost(id=gradient))
        elif gone and found is not None:
            self._lose(found)
        for examine in every:
            if examine is not None:
                examine()

    def _end(self, done: Done) -> None:
        with self._changed:
            self._publisher.done = done
            self._credits.wake()
            if done.failed:
                self._stop_locked(Refusal(RefusalCode.JOB_FAILED, f"{done.reason}: {done.failed}"))
            self._changed.notify_all()

    # ---- The apply thread ----

    def _run(self) -> None:
        reason = ""
        try:
            while (work := self._next()) is not None:
                with contextlib.suppress(TermOver):
                    work()
                del work  # it holds the engine
        except Superseded as error:
            self._stop(Refusal(RefusalCode.NOT_READY, f"this server is shutting down: {error}"))
        except Exception as error:  # noqa: BLE001  # after any error the job must fail instead of waiting
            _LOG.debug("the apply thread of shard %d failed", self._shard, exc_info=True)
            found = describe_failure(error)
            if found.at:  # the optimizer of the script raised it
                reason, text = "ScriptFailed", f"{found.reason}: {found.message} ({found.at})"
            else:
                text = str(error)
            self._stop(Refusal(RefusalCode.BROKEN, f"cannot continue: {text}"))
        if (why := self.failed) is not None:
            self._coordination.report(ShardFailed(why=why, reason=reason))

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next work item. Returns None if the shard stops."""
        with self._changed:
            while self._stopped is None:
                term = self._current
                if term is not None:
                    if term.fresh:
                        return partial(self._applier.publish_first, term)
                    if (replica := self._standbys.joining()) is not None:
                        return partial(self._applier.fill, term, replica)
                    if (work := self._orders.take(term)) is not None:
                        return work
                self._work.wait()
            return None

    # ---- Checks, under the lock ----

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if self._current is None:
            raise Refusal(RefusalCode.NOT_READY, "this server has not started yet")

    def _check_term(self, term: int) -> None:
        if term != self.term:
            raise Refusal(
                RefusalCode.MOVED, f"shard {self._shard} is in term {self.term}, not in term {term}: join again"
            )

    def _stop(self, why: Refusal) -> None:
        with self._changed:
            self._stop_locked(why)

    def _stop_locked(self, why: Refusal) -> None:
        if self._stopped is None:
            self._stopped = why
        self._standbys.stop()
        self._credits.wake()
        self._work.notify()
        self._changed.notify_all()


def _part(incoming: Incoming) -> StagedPart:
    assert isinstance(incoming, StagedPart)
    return incoming


def _outcome_of(gradient: StagedGradient | None, peer: Peer | None, newest: Commit | None) -> tuple[RejectReason, int]:
    """`Answer.outcome` and `Answer.next_key_step`.

    Args:
        gradient: the push that is answered; None: a pull.
        peer: the worker that pulls.
        newest: the commit that made the version of the answer, if this shard has it.
    """
    who, outcome, next_key_step = None if peer is None else (peer.index, peer.incarnation), _NONE, 0
    if gradient is not None:
        who, next_key_step = (gradient.id.rank, gradient.id.incarnation), gradient.next_key_step
        outcome = gradient.outcome or (_LATE if gradient.applied is None else _NONE)
        if outcome == _NONE:
            return outcome, next_key_step
    # The worker may have lost the answer to an earlier attempt, with the same bits, that was applied.
    used = used_in(newest, who, None if gradient is None else gradient.id.key_step)
    return used or (outcome, next_key_step)
