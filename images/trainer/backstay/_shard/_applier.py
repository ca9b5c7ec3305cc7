"""Carries out a shard's orders, which prepare, apply and publish updates, and fill a standby."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    Gather,
    GradientId,
    Norm,
    NormRequest,
    RejectReason,
    ReplicaState,
)
from backstay_rpc.refusals import RefusalCode

from .. import _instrument
from .._coordination import Answering, Coordination, identity
from .._transport import CheckpointHook, Engine, Refusal, Staging
from ._operand import Hold, Operand, PreparedMean
from ._partial_sums import PartialSums
from ._publisher import Published, Publisher
from ._replication import Replica
from ._staging import Gradients, StagedGradient, describe
from ._standbys import Standbys

__all__ = ["Applier", "Term", "TermOver"]

_LOG = logging.getLogger(__name__)

_LATE: Final = RejectReason.LATE


@dataclass(eq=False)
class Term:
    """A shard's position in one term.

    Attributes:
        number: the term's number.
        engine: the shard's state.
        version: the version of the newest update that has begun.
        world: number of ranks in force at that version.
        offset: `BatchKey.offset` of that world.
        last: the commit that made the version, if one of this term did.
        prepared: the operand of the next update, once it is known.
        fresh: the version is not published yet.
    """

    number: int
    engine: Engine
    version: int
    world: int
    offset: int
    last: Commit | None = None
    prepared: Operand | None = None
    fresh: bool = True


class TermOver(Exception):  # noqa: N818  # it is what happened
    """Another term began while an order of this one was being carried out."""


class Applier:
    """The work of a shard's apply thread; every method is called by that thread, without the lock.

    An order is for `term.version`. `TermOver`: another term has begun, and the order has no effect.
    No update is ever applied in part. Before the engine is called, every gradient that a commit names is here and
    complete, or their mean is here. Otherwise the shard fails.
    """

    def __init__(
        self,
        lock: threading.Condition,
        gradients: Gradients,
        publisher: Publisher,
        standbys: Standbys,
        answering: Answering,
        coordination: Coordination,
        hook: CheckpointHook | None,
    ) -> None:
        """
        Args:
            lock: the shard's lock, which guards `gradients` and `publisher`; streams wait for its notifications.
            coordination: gets the reports.
            hook: see `CheckpointHook`; None: the job stores nothing.
        """
        self._lock = lock
        self._gradients, self._publisher, self._standbys = gradients, publisher, standbys
        self._answering, self._coordination, self._hook = answering, coordination, hook
        self._wires, self._earliest = gradients.wire.parameters, gradients.wire.earliest_last
        self._current: Term | None = None
        self._early: PartialSums | None = None

    def begin(self, term: Term) -> None:
        """A term begins, under the lock: unfinished work for the previous term is not published or reported."""
        self._current, self._early = term, None
        self._gradients.credits.begin(term.world)

    def forget(self, gradient: GradientId) -> None:
        """A contribution was rejected, under the lock. A sum that has it is void: all of its contributions are."""
        if self._early is not None and self._early.has(gradient):
            self._early = None
            assert self._current is not None
            self._gradients.credits.begin(self._current.world)

    def publish_first(self, term: Term) -> None:
        """Hand out the version with which a term begins."""
        term.fresh = False
        self._publish(term, None)

    def fill(self, term: Term, replica: Replica) -> None:
        """Send the whole state to a standby."""
        state = ReplicaState(
            term=term.number, version=term.version, world=term.world, offset=term.offset, last=term.last
        )
        self._standbys.fill(replica, state, term.engine.snapshot(whole=True), term.prepared)
        with self._lock:
            if term is not self._current:  # a rollback ended the standbys that it knew, without this one
                replica.end()

    def save(self, term: Term) -> None:
        """Have the version written as it is."""
        if self._hook is not None and term is self._current:
            self._hook(term.engine.snapshot(), term.number, term.version)

    # ---- Prepare ----

    def gather(self, term: Term, gather: Gather) -> None:
        """Add up contributions that the next commit names, and free their memory."""
        contributions = gather.contributions
        with self._lock:
            self._check(term)
            early = self._early
            if early is None or (early.version, early.round) != (gather.version, gather.round):
                early = PartialSums(term.engine, gather.version, gather.round)
            if all(early.has(contribution.id) for contribution in contributions):
                return  # it came again after a broken link
            held = self._held(contributions)
            arrays = [gradient.staging.arrays for gradient in held if gradient.staging is not None]
            if len(arrays) != len(contributions):
                _LOG.debug("contributions to version %d were taken back before they were added up", gather.version)
                return
            early.names(contributions)
            self._early = early
        early.add(gather, arrays)
        with self._lock:
            for gradient in held:
                self._gradients.free(gradient)
            if self._early is early:
                self._gradients.credits.summed({gradient.id.rank for gradient in held})

    def prepare(self, term: Term, request: NormRequest) -> None:
        """Prepare an update; answer once a successor of this server could apply it."""
        prepared = self._prepared(term, request.version, request.contributions)
        if prepared is None:
            if not request.replicate:
                raise RuntimeError(self._missing("request for the norm", request.version, request.contributions))
            _LOG.debug("the decision of version %d was withdrawn before it was prepared", request.version)
            return
        hold = self._standbys.send_prepared(prepared)
        total = 0.0 if request.unclipped else prepared.sum_of_squares(term.engine)
        hold()
        if term is self._current:
            _instrument.reach("norm", request.version)
            norm = Norm(term=request.term, version=request.version, sum_of_squares=float(total), round=request.round)
            self._coordination.report(norm)

    def _prepared(self, term: Term, version: int, contributions: Sequence[Contribution]) -> Operand | None:
        """Returns the operand of the update of `version`, or None if a gradient or the prepared mean is missing."""
        prepared = term.prepared
        if prepared is None or not prepared.is_of(version, contributions):
            with self._lock:
                self._check(term)
                held = self._held(contributions)
                early = self._early if self._early is not None and self._early.version == version else None
                rest = [one for one in contributions if early is None or not early.has(one.id)]
                arrays = [gradient.staging.arrays for gradient in held if gradient.staging is not None]
                added = 0 if early is None else len(early)
                if len(held) != len(contributions) or not len(arrays) == len(rest) == len(contributions) - added:
                    return None
            infos = [gradient.info for gradient in held]
            divisor = self._answering.divisor([contribution.weight for contribution in contributions])
            if early is None:
                prepared = self._standbys.prepare(term.engine, version, contributions, arrays, infos, divisor)
            else:
                prepared = PreparedMean(version, contributions, early.mean(rest, arrays, divisor), infos)
            term.prepared = prepared
        return prepared

    # ---- Apply ----

    def apply(self, term: Term, commit: Commit, arrived: float) -> None:
        """Apply an update, and publish its version. `arrived`: when the commit did, by `time.monotonic`."""
        names = {identity(contribution.id) for contribution in commit.contributions}
        if len(names) != len(commit.contributions) or not (names or commit.skip):
            raise RuntimeError(f"the commit of version {commit.version} names no gradient, or one gradient twice")
        prepared = self._prepared(term, commit.version, commit.contributions)
        if prepared is None:
            raise RuntimeError(self._missing("commit", commit.version, commit.contributions))
        freed = self._use(term, commit)
        hold = self._standbys.send_commit(commit)
        term.prepared, term.last = None, commit
        if commit.skip:
            term.engine.skip()
        else:
            prepared.apply(term.engine, commit.clip_factor)
        try:
            self._publish(term, hold)
        finally:
            # Not earlier: the engine reads the gradients until the last block is computed.
            with self._lock:
                for staging in freed:
                    self._gradients.give(staging)
        if term is not self._current:
            return
        _instrument.reach("applied", commit.version + 1)
        _instrument.record("apply", arrived, time.monotonic(), commit.version)
        self._coordination.report(Applied(version=commit.version + 1))
        if commit.checkpoint:
            self.save(term)

    def _use(self, term: Term, commit: Commit) -> list[Staging | None]:
        """Move to the next version. Returns the memory of the gradients that this removes from staging."""
        version = commit.version + 1
        with self._lock:
            self._check(term)
            # A server that was the standby holds the mean of the gradients, and not the gradients.
            used = self._held(commit.contributions)
            freed = [self._gradients.remove(gradient) for gradient in used]
            for gradient in used:
                gradient.applied = version
                if commit.skip:
                    gradient.outcome = RejectReason.SKIPPED
            for gradient in self._gradients:
                if gradient.complete and self._answering.used_up(gradient.id.version, version):
                    gradient.outcome = _LATE
                    freed.append(self._gradients.remove(gradient))
            # Streams of pushes that arrive too late see the new version now.
            term.version, term.world, term.offset = version, commit.world, commit.offset
            self._publisher.withdraw()
            self._early = None
            self._gradients.credits.begin(commit.world)
        return freed

    def _publish(self, term: Term, hold: Hold | None) -> None:
        """Publish a version as soon as its first block is computed, so that waiting streams wake once.

        `hold` waits until the standby has the version too: no stream gets the last block of its answer before that.
        """
        count = len(self._wires)
        published = Published(term.version, term.world, count, term.offset)
        try:
            if hold is not None and self._earliest < 1:
                hold()
            if count:
                self._put(published, term.engine, 0)
            with self._lock:
                if term is self._current:
                    self._publisher.publish(published)
                    self._lock.notify_all()
            for b in range(1, count):
                if hold is not None and b == self._earliest:
                    hold()
                self._put(published, term.engine, b)
        except BaseException:
            published.stop(Refusal(RefusalCode.BROKEN, f"failed to compute version {published.version}"))
            raise

    def _put(self, published: Published, engine: Engine, b: int) -> None:
        """Publish a block when it is computed, encoded once for all streams: by the update, or now."""
        data, wire = engine.block(b), self._wires[b]
        published.put(b, data, None if wire.codec is None else engine.encoded(b) or wire.encode(data))

    # ---- Checks ----

    def _check(self, term: Term) -> None:
        if term is not self._current:
            raise TermOver

    def _held(self, contributions: Sequence[Contribution]) -> list[StagedGradient]:
        """Returns the contributions that this shard holds completely. The caller has the lock."""
        found = [self._gradients.find(contribution.id) for contribution in contributions]
        return [gradient for gradient in found if gradient is not None and gradient.complete]

    def _missing(self, what: str, version: int, contributions: Sequence[Contribution]) -> str:
        with self._lock:
            for contribution in contributions:
                found = self._gradients.find(contribution.id)
                if found is None or not found.complete:
                    return (
                        f"the {what} of version {version} names {describe(contribution.id)}, which this shard "
                        f"{'does not hold' if found is None else 'holds only in part'} ({len(self._gradients)} are "
                        "here)"
                    )
        return f"the {what} of version {version} names gradients that are not here any more"
