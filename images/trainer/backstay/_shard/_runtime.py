"""A shard at work: the meeting place of data streams, the coordinator's decisions and the engine.

Streams stage gradients and wait for versions; the coordinator's decisions come in from any thread and only queue; one
apply thread carries them out, strictly in order of version. Nothing is ever applied in part: before the engine is
called every gradient that a commit names is here and complete, or the shard fails.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    Done,
    GradientId,
    GradientInfo,
    Hello,
    Lost,
    Norm,
    NormRequest,
    Reject,
    RejectReason,
    ReplicaState,
    Rollback,
    Save,
    ShardFailed,
    Staged,
)

from .._coordination.seam import Coordination, Message
from .._timeouts import Timeouts
from .._wire.memory import BufferPool, Staging
from .._wire.seam import (
    Answer,
    CheckpointHook,
    Engine,
    Incoming,
    LayoutLike,
    Mode,
    Refusal,
    block_nbytes,
)
from ..errors import Superseded
from ._admission import Admission
from ._published import Published, Waiter
from ._replication import Prepared, Replica, Replication
from ._staging import Gradient, Gradients, describe

__all__ = ["ShardRuntime"]

_LOG = logging.getLogger(__name__)

_LATE = RejectReason.LATE
_NONE = RejectReason.REJECT_UNSPECIFIED
# Sync: what comes too late, or twice, is answered with the version that it should have been part of.
_WAITS_FOR_ITS_VERSION: Final = frozenset({RejectReason.LATE, RejectReason.DUPLICATE})


class ShardRuntime:
    """One shard: a `ShardPort` for data streams, and a `ShardSink` for the coordinator. Thread-safe."""

    def __init__(
        self,
        layout: LayoutLike,
        digest: bytes,
        coordination: Coordination,
        *,
        incarnation: int,
        mode: Mode,
        on_checkpoint: CheckpointHook | None = None,
        replication: Replication | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Starts the apply thread. Streams are refused as `UNAVAILABLE` until `reset` gives an engine.

        Args:
            layout: of this shard.
            digest: of the partition.
            coordination: gets the shard's reports; called while no lock is held.
            incarnation: of this server.
            mode: of the job.
            on_checkpoint: see `CheckpointHook`.
            replication: to this shard's standby; None when the job has none.
            timeouts: None for the usual ones.
        """
        self._times = timeouts or Timeouts()
        self._replication = replication
        self._layout = layout
        self._shard = layout.shard
        self._sizes = block_nbytes(layout)
        self._coordination = coordination
        self._sync = mode == "Sync"
        self._hook = on_checkpoint

        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # streams wait for it
        self._work = threading.Condition(lock)  # the apply thread waits for it
        self._waiting: set[Waiter] = set()
        self._gradients = Gradients(BufferPool(self._sizes, [np.dtype(b.dtype) for b in layout.blocks]))
        self._admission = Admission(self._shard, incarnation, digest)
        # The state of a term; replaced as a whole by `reset`.
        self._term = 0
        self._engine: Engine | None = None
        self._version = 0  # of the newest update that has begun
        self._world = 0
        self._offset = 0  # of batches, in that world
        self._published: Published | None = None
        self._commits: dict[int, Commit] = {}
        self._norms: dict[int, NormRequest] = {}
        self._saves: set[int] = set()
        self._fresh = False  # the engine's version is not published yet
        self._prepared: Prepared | None = None  # of the version that comes next
        self._last: Commit | None = None  # that made the version, if one of this term did
        self._done: Done | None = None
        self._stopped: Refusal | None = None
        self._thread = threading.Thread(target=self._run, name=f"backstay-apply-{self._shard}", daemon=True)
        self._thread.start()

    # ---- Life ----

    def reset(self, term: int, engine: Engine, world: int, offset: int = 0) -> None:
        """Starts, or starts again: from `engine.version` in a new term. Returns at once.

        Everything of the term before is dropped: gradients, decisions, waiting streams. Decisions of the new term may
        follow at once.

        Raises:
            ValueError: the term is not higher than the one before.
        """
        with self._changed:
            if term <= self._term:
                raise ValueError(f"shard {self._shard} is in term {self._term}: cannot start in term {term}")
            for gradient in self._gradients:
                if gradient.complete:
                    self._gradients.give(self._gradients.remove(gradient))
            self._term, self._engine, self._world, self._offset = term, engine, world, offset
            self._prepared = self._last = None
            if self._replication is not None:
                self._replication.end()  # it dials again, and is filled with the new term's state
            self._version = engine.version
            self._published = None
            self._commits.clear()
            self._norms.clear()
            self._saves.clear()
            self._done = None
            self._fresh = True
            self._work.notify()
            self._changed.notify_all()

    def inherit(self, prepared: Prepared | None, last: Commit | None) -> None:
        """After `reset`: what this shard held as a standby besides its state."""
        with self._changed:
            self._prepared, self._last = prepared, last

    def admit_replica(self) -> None:
        """A standby waits to be filled."""
        with self._changed:
            self._work.notify()

    def close(self, why: str = "the server is going away") -> None:
        """Refuses all streams as `UNAVAILABLE`, finishes the update that is running, and ends the apply thread."""
        self._stop(Refusal("UNAVAILABLE", why))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def shard(self) -> int:
        return self._shard

    @property
    def term(self) -> int:
        return self._term

    @property
    def version(self) -> int:
        """Updates applied, the one that is being computed included."""
        return self._version

    @property
    def failed(self) -> str | None:
        """Why the shard cannot go on, or None."""
        stopped = self._stopped
        return stopped.message if stopped is not None and stopped.code == "INTERNAL" else None

    # ---- ShardPort: called by streams ----

    @property
    def block_nbytes(self) -> tuple[int, ...]:
        return self._sizes

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """The newest incarnations known, such as ``{"worker-3": 2}``: from now on older ones are refused."""
        with self._changed:
            self._admission.fence(incarnations)

    def admit(self, hello: Hello) -> None:
        with self._changed:
            self._check_running()
            self._admission.check_server(hello)
            self._check_term(hello.term)
            self._admission.admit(hello)

    def begin(self, hello: Hello, push: GradientId, info: GradientInfo) -> Incoming:
        with self._changed:
            self._check_running()
            self._check_term(push.term)
            self._admission.check_peer(hello)
            peer = hello.peer
            if (peer.role, peer.index, peer.incarnation) != ("worker", push.rank, push.incarnation):
                raise Refusal(
                    "INVALID_ARGUMENT",
                    f"{peer.role} {peer.index} of incarnation {peer.incarnation} pushes {describe(push)}: only its own",
                )
            if push.version > self._version:
                raise Refusal(
                    "FAILED_PRECONDITION",
                    f"{describe(push)} is ahead of shard {self._shard}, which is at version {self._version}",
                )
            return self._gradients.begin(push, info)

    def moved_on(self, incoming: Incoming) -> bool:
        gradient = _gradient(incoming)
        return (
            gradient.outcome != _NONE
            or (self._sync and gradient.id.version < self._version)
            or gradient.id.term != self._term
            or self._stopped is not None
            or self._done is not None
        )

    def complete(self, incoming: Incoming) -> None:
        gradient = _gradient(incoming)
        with self._changed:
            usable = not self.moved_on(gradient)
            gradient.complete = usable
            gradient.finished = usable
        if usable:
            self._coordination.report(Staged(id=gradient.id, info=gradient.info))
        else:
            self.lose(gradient)

    def lose(self, incoming: Incoming) -> None:
        gradient = _gradient(incoming)
        with self._changed:
            if gradient.finished:
                return
            gradient.finished = True
            self._gradients.give(self._gradients.remove(gradient))
        self._coordination.report(Lost(id=gradient.id))

    def answer(self, incoming: Incoming | None, min_version: int, alive: Callable[[], bool]) -> Answer | None:
        gradient = None if incoming is None else _gradient(incoming)
        waiter = Waiter(gradient, min_version)
        with self._changed:
            term = self._term if gradient is None else gradient.id.term
            self._waiting.add(waiter)
            try:
                while True:
                    self._check_running()
                    self._check_term(term)
                    published = waiter.published or self._published
                    if published is not None and self._answers(published, gradient, min_version):
                        break
                    if not self._changed.wait(self._times.peer_check) and not alive():
                        return None
            finally:
                self._waiting.discard(waiter)
            outcome, next_key_step, last = _NONE, 0, self._last
            if gradient is not None:
                outcome, next_key_step = gradient.outcome, gradient.next_key_step
                if outcome == _NONE and gradient.applied is None:
                    outcome = _LATE
            return Answer(
                term=self._term,
                version=published.version,
                world=published.world,
                offset=published.offset,
                block=published.block,
                outcome=outcome,
                next_key_step=next_key_step,
                # Training may end before the version that workers expect.
                done=self._done is not None or (last is not None and last.final and published.version > last.version),
            )

    def _answers(self, published: Published, gradient: Gradient | None, min_version: int) -> bool:
        if self._done is not None and published.version >= self._done.version:
            return True
        if gradient is None:
            return published.version >= min_version
        if gradient.applied is not None:
            return published.version >= gradient.applied
        if self._sync and gradient.outcome in (_NONE, *_WAITS_FOR_ITS_VERSION):
            return published.version > gradient.id.version
        return gradient.outcome != _NONE

    # ---- ShardSink ----

    def deliver(self, message: Message) -> None:
        """What the coordinator decided; see `ShardSink`."""
        with self._changed:
            match message:
                case Commit():
                    if self._current(message.term, "a commit") and message.version >= self._version:
                        self._commits.setdefault(message.version, message)
                        self._work.notify()
                case Reject():
                    self._reject(message)
                case NormRequest():
                    if self._current(message.term, "a request for a norm") and message.version >= self._version:
                        self._norms[message.version] = message
                        self._work.notify()
                case Save():
                    if self._current(message.term, "a request to save"):
                        self._saves.add(message.version)
                        self._work.notify()
                case Rollback():
                    pass  # the server loads that state, and calls `reset`
                case Done():
                    self._done = message
                    if message.failed:
                        self._stop_locked(Refusal("ABORTED", f"the job has failed: {message.failed}"))
                    self._changed.notify_all()

    def _reject(self, reject: Reject) -> None:
        gradient = self._gradients.find(reject.id)
        if gradient is None:
            return
        if self._replication is not None:  # a decision that named it was taken back
            for version, request in list(self._norms.items()):
                if any(c.id == reject.id for c in request.contributions):
                    del self._norms[version]
        gradient.outcome = reject.reason
        gradient.next_key_step = reject.next_key_step
        if gradient.complete:  # else the stream that fills it sees that the shard moved on
            self._gradients.give(self._gradients.remove(gradient))
        self._changed.notify_all()

    # ---- The apply thread ----

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
                del work  # it holds gradients and the engine
        except Superseded as error:
            self._stop(Refusal("UNAVAILABLE", f"this server is going away: {error}"))
        except Exception as error:  # noqa: BLE001  # whatever it is, the job must hear of it instead of waiting
            _LOG.debug("the apply thread of shard %d failed", self._shard, exc_info=True)
            self._stop(Refusal("INTERNAL", f"cannot go on: {error}"))
        if (why := self.failed) is not None:
            self._coordination.report(ShardFailed(why=why))

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next thing to do: what belongs to the present version first, then the update to the next."""
        with self._changed:
            while True:
                if self._stopped is not None:
                    return None
                engine, term, version = self._engine, self._term, self._version
                if engine is not None:
                    if self._fresh:
                        self._fresh = False
                        return lambda: self._fill(
                            engine, Published(version, self._world, len(self._sizes), self._offset), term
                        )
                    if self._replication is not None and (joining := self._replication.joining()) is not None:
                        return lambda: self._fill_replica(engine, joining, term)
                    if version in self._saves:
                        self._saves.discard(version)
                        return lambda: self._save(engine, term, version)
                    if (request := self._norms.pop(version, None)) is not None:
                        return lambda: self._norm(engine, request)
                    if (commit := self._commits.pop(version, None)) is not None:
                        return lambda: self._apply(engine, commit)
                self._work.wait()

    def _publish(self, published: Published) -> None:
        """Under the lock. Whoever waits for this version gets it, also when the next update begins before it wakes."""
        self._published = published
        for waiter in self._waiting:
            if waiter.published is None and self._answers(published, waiter.gradient, waiter.min_version):
                waiter.published = published
        self._changed.notify_all()

    def _apply(self, engine: Engine, commit: Commit) -> None:
        with self._changed:
            if commit.term != self._term:
                return
            prepared = self._prepared
            if self._replication is None:
                used = [self._held(c.id, "commit", commit.version) for c in commit.contributions]
            else:
                if not commit.skip and (prepared is None or not prepared.is_of(commit.version, commit.contributions)):
                    raise RuntimeError(f"the commit of version {commit.version} names gradients that were not prepared")
                # Where this server was the standby, it holds their mean and not themselves.
                used = self._still_held(commit.contributions)
            if len(set(used)) != len(used) or not (commit.contributions or commit.skip):
                raise RuntimeError(f"the commit of version {commit.version} names no gradient, or one of them twice")
            freed: list[Staging | None] = [self._gradients.remove(gradient) for gradient in used]
            for gradient in used:
                gradient.applied = commit.version + 1
            if self._sync:
                for gradient in self._gradients:
                    if gradient.complete and gradient.id.version <= commit.version:
                        gradient.outcome = _LATE
                        freed.append(self._gradients.remove(gradient))
            # Streams of pushes that come too late see it now; nobody may take the old version any more, and its
            # memory may be used for the new one.
            self._version = commit.version + 1
            self._world, self._offset = commit.world, commit.offset
            self._published = None
        hold: Callable[[], None] | None = None
        if self._replication is not None:
            hold = self._replication.commit(commit)
            self._prepared = None
        self._last = commit
        if commit.skip:
            engine.skip()
        elif self._replication is not None:
            assert prepared is not None
            engine.apply([prepared.arrays()], weights=[1.0], divisor=1, clip_factor=commit.clip_factor)
        else:
            weights = [c.weight for c in commit.contributions]
            engine.apply(
                [staging.arrays for staging in freed[: len(used)] if staging is not None],
                weights=weights,
                divisor=len(weights),
                clip_factor=commit.clip_factor,
            )
        try:
            published = Published(commit.version + 1, commit.world, len(self._sizes), commit.offset)
            self._fill(engine, published, commit.term, hold)
        finally:
            # Not before: the engine reads the gradients until the last block is computed.
            with self._changed:
                for staging in freed:
                    self._gradients.give(staging)
        del used, freed, prepared
        if commit.term != self._term:
            return
        self._coordination.report(Applied(version=commit.version + 1))
        if commit.checkpoint:
            self._save(engine, commit.term, commit.version + 1)

    def _fill(self, engine: Engine, published: Published, term: int, hold: Callable[[], None] | None = None) -> None:
        """Hands a version out, from when its first block is computed: whoever waits wakes once to something to send.

        `hold` waits until the standby has the version too: nobody gets the last block before that.
        """
        count = len(self._sizes)
        try:
            if hold is not None and count < 2:
                hold()
            if count:
                published.put(0, engine.block(0))
            with self._changed:
                if term == self._term:
                    self._publish(published)
            for b in range(1, count):
                if hold is not None and b == count - 1:
                    hold()
                published.put(b, engine.block(b))
        except BaseException:
            published.stop(Refusal("INTERNAL", f"failed to compute version {published.version}"))
            raise

    def _fill_replica(self, engine: Engine, replica: Replica, term: int) -> None:
        assert self._replication is not None
        with self._changed:
            state = ReplicaState(
                term=term, version=self._version, world=self._world, offset=self._offset, last=self._last
            )
        self._replication.fill(replica, state, engine.snapshot(whole=True), self._prepared)

    def _prepare(self, engine: Engine, request: NormRequest, replication: Replication) -> float | None:
        """The mean of these gradients, held by the standby too when this returns. None: nobody wants it any more."""
        prepared = self._prepared
        if prepared is None or not prepared.is_of(request.version, request.contributions):
            with self._changed:
                held = self._still_held(request.contributions)
                arrays = [g.staging.arrays for g in held if g.staging is not None]
                if len(arrays) != len(request.contributions):
                    _LOG.debug("the decision of version %d was taken back before it was prepared", request.version)
                    return None
            infos = [g.info for g in held]
            prepared = Prepared.of(engine, request, arrays, infos, copy=not replication.in_sync)
            self._prepared = prepared
        hold = replication.mean(prepared)
        total = 0.0 if request.unclipped else engine.sum_of_squares([prepared.arrays()], weights=[1.0], divisor=1)
        hold()
        return total

    def _norm(self, engine: Engine, request: NormRequest) -> None:
        if self._replication is not None and request.replicate:
            total = self._prepare(engine, request, self._replication)
            if total is not None and request.term == self._term:
                self._coordination.report(
                    Norm(term=request.term, version=request.version, sum_of_squares=total, round=request.round)
                )
            return
        with self._changed:
            if request.term != self._term:
                return
            used = [self._held(c.id, "request for the norm", request.version) for c in request.contributions]
            arrays = [gradient.staging.arrays for gradient in used if gradient.staging is not None]
        weights = [c.weight for c in request.contributions]
        total = engine.sum_of_squares(arrays, weights=weights, divisor=len(weights))
        self._coordination.report(
            Norm(term=request.term, version=request.version, sum_of_squares=float(total), round=request.round)
        )

    def _save(self, engine: Engine, term: int, version: int) -> None:
        if self._hook is not None and term == self._term:
            self._hook(engine.snapshot(), term, version)

    # ---- Checks, under the lock ----

    def _held(self, gradient: GradientId, what: str, version: int) -> Gradient:
        found = self._gradients.find(gradient)
        if found is None or not found.complete:
            raise RuntimeError(
                f"the {what} of version {version} names {describe(gradient)}, which this shard "
                f"{'does not hold' if found is None else 'holds only in part'} ({len(self._gradients)} are here)"
            )
        return found

    def _still_held(self, contributions: Iterable[Contribution]) -> list[Gradient]:
        """Those of the gradients that are here and complete."""
        found = [self._gradients.find(contribution.id) for contribution in contributions]
        return [gradient for gradient in found if gradient is not None and gradient.complete]

    def _current(self, term: int, what: str) -> bool:
        if term > self._term:
            self._stop_locked(
                Refusal("INTERNAL", f"{what} is of term {term}: this shard is still in term {self._term}")
            )
        return term == self._term

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if self._engine is None:
            raise Refusal("UNAVAILABLE", "this server has not started yet")

    def _check_term(self, term: int) -> None:
        if term != self._term:
            raise Refusal(
                "FAILED_PRECONDITION", f"shard {self._shard} is in term {self._term}, not in term {term}: join again"
            )

    def _stop(self, why: Refusal) -> None:
        with self._changed:
            self._stop_locked(why)

    def _stop_locked(self, why: Refusal) -> None:
        if self._stopped is None:
            self._stopped = why
        if self._replication is not None:
            self._replication.stop()
        self._work.notify()
        self._changed.notify_all()


def _gradient(incoming: Incoming) -> Gradient:
    assert isinstance(incoming, Gradient)
    return incoming
