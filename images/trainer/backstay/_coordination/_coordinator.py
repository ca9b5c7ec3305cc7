"""The coordinator: messages in, decisions out. It owns the history; the rules themselves are in the modules beside it.

Order of a decision: a complete set is chosen, the version moves, and the commit goes out; with `clip_norm` the commit
waits for every shard's norm, and those after it wait for it. The same commits go to all shards in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    GradientInfo,
    Lost,
    Norm,
    NormRequest,
    Reject,
    RejectReason,
    Rollback,
    ShardFailed,
    Staged,
    Written,
)

from . import _async, _sync
from ._conclusion import Ending
from ._decisions import (
    OUTCOME_OF,
    Counted,
    Decision,
    Finished,
    Outcome,
    Restart,
    Send,
    Updated,
    WriteManifest,
)
from ._ledger import Ledger, identity
from ._pending import Pending
from ._schedule import Intervals, Schedule
from ._state import CoordinatorState, Rules, count_samples
from ._succession import Succession, start_of
from ._world import change_world, next_world
from .seam import Report

__all__ = ["Coordinator"]


class Coordinator(Succession):
    """Decides every update of one job. Not thread-safe; `now` never goes back, in seconds of any monotonic clock.

    Args:
        rules: what stays the same during the job.
        state: where the history starts: a fresh one, or that of a checkpoint with its term raised.
        checkpoint: the checkpoint that `state` is from; empty for the seed's initial parameters.
        wished_world: `workers.replicas`.
        intervals: when to write checkpoints.
    """

    def __init__(
        self,
        rules: Rules,
        state: CoordinatorState,
        *,
        checkpoint: str = "",
        wished_world: int | None = None,
        intervals: Intervals | None = None,
        now: float = 0.0,
    ) -> None:
        self.rules = rules
        self.state = state
        self.schedule = Schedule(intervals or Intervals(), rules.shards, now)
        self.wished_world = wished_world or state.world
        self.checkpoint = checkpoint
        self.finished: Finished | None = None
        self._ledger = Ledger(rules.shards)
        self._start = start_of(state, checkpoint)
        self._pending: deque[Pending] = deque()
        self._commits: deque[Commit] = deque()  # those that some shard may not have applied
        self._applied = dict.fromkeys(range(rules.shards), state.version)
        self._incarnations: dict[int, int] = {}
        self._joined: set[int] = set()
        self._used: dict[tuple[int, ...], int] = {}  # gradients of commits that some shard may not have applied
        self._counted: dict[tuple[int, int], GradientId] = {}  # by (rank, incarnation), the newest told of
        self._restarting = False
        self._ending: Ending | None = None
        self._checkpoint_version = state.version if checkpoint else -1
        self._round = 0
        self._deferred: list[tuple[int, Staged]] = []
        self._servers: dict[int, int] = {}  # incarnations, by shard
        self._prepared: tuple[Contribution, ...] | None = None  # taken over: what shard 0 holds of the next version
        self._before: dict[int, CoordinatorState] = {}  # with standbys: by version, from where some shard may stand
        self._infos: tuple[GradientInfo, ...] = ()  # of `_prepared`
        self._ahead = 0  # the newest version of this term that a worker has, if that is why a new term begins
        self._above = 0  # the newest term that any shard was told to begin
        self._accounted = state.version  # updates up to this version were lost before, or count as lost in `redone`
        self._outrun = False  # taken over: the history had gone further than what was held
        if checkpoint:
            self.schedule.reset(now)

    @classmethod
    def resume(
        cls,
        rules: Rules,
        state: CoordinatorState,
        start: Rollback,
        *,
        last: Commit | None,
        prepared: Iterable[Contribution],
        infos: Iterable[GradientInfo] = (),
        checkpoint: str = "",
        checkpoint_at: tuple[int, int] = (0, -1),
        since_checkpoint: float = 0.0,
        wished_world: int | None = None,
        intervals: Intervals | None = None,
        now: float = 0.0,
    ) -> Coordinator:
        """Go on in the same term, in the place of a coordinator that is gone.

        Args:
            state: as of the last commit that this shard's standby held.
            start: where the term began.
            last: the commit that made `state.version`, if one of this term did.
            prepared: the gradients whose mean shard 0 holds for `state.version`: what the commit after it may name.
            infos: of `prepared`, in that order.
            checkpoint, checkpoint_at: the newest whole one that is known, and its (term, version).
            since_checkpoint: seconds since one was begun.
        """
        new = cls(rules, state, checkpoint="", wished_world=wished_world, intervals=intervals, now=now)
        new.checkpoint, new._checkpoint_version = checkpoint, checkpoint_at[1]
        new._outrun = checkpoint_at > (state.term, state.version)
        new._start = start
        new._prepared, new._infos = tuple(prepared), tuple(infos)
        new.schedule.go_on(
            now, since_checkpoint, version=state.version, newest=max(start.version, new._checkpoint_version)
        )
        # Numbers of decisions that nobody else has given: the dead one's answers must not be taken for ours.
        new._round = state.version << 32
        if last is not None:
            new._commits.append(last)
            new._applied = dict.fromkeys(new._applied, last.version)
            for contribution in last.contributions:
                new._used[identity(contribution.id)] = last.version
        if new.over:
            new._ending = Ending(
                now, stored=not rules.stores, evaluated=not rules.evaluates, patience=rules.timeouts.succession
            )
        return new

    # ---- What shards say ----

    def hello(
        self,
        now: float,
        shard: int,
        term: int,
        version: int,
        *,
        incarnation: int = 0,
        last: Commit | None = None,
        prepared: Iterable[Contribution] = (),
        begun: int = 0,
    ) -> list[Decision]:
        """A shard's server connected and stands at (term, version); (0, 0) when it holds nothing yet.

        What it holds of gradients, it tells again after this.

        Args:
            incarnation: the server's.
            last: with standbys, the newest commit of the term that it was told, applied or not.
            prepared: with standbys, the gradients whose mean it holds for `version`.
            begun: the newest term that it was told to begin, though it may hold nothing of it yet.
        """
        start = self._start
        self._above = max(self._above, term, begun)
        before, self._servers[shard] = self._servers.get(shard, incarnation), incarnation
        # The shard reports again what it holds.
        self._ledger.lose_all(shard)
        self._deferred = [(other, staged) for other, staged in self._deferred if other != shard]
        out: list[Decision] = []
        if self.rules.replicates and term == self.state.term and not self._restarting and self.finished is None:
            if incarnation > before:
                # Its gradients died with the one before it: what was not certain yet is decided again.
                out += self._take_back(now)
            known = max(version, last.version + 1 if last is not None else 0)
            if known > self.state.version:
                if not self._adoptable(last):
                    return [*out, *self._lost(shard)]
                assert last is not None
                out += self._adopt(now, last)
            if not self._can_replay(version, tuple(prepared)):
                return [*out, *self._lost(shard)]
            if incarnation > before:
                out += self._write_again(now, shard, version)
            if self._ending is not None and not self._ending.stored and len(self._servers) == self.rules.shards:
                out += self.save(now)  # taken over at the end: nobody else asks for it
        if term == self.state.term and self._replayable(version):
            self._applied[shard] = max(self._applied[shard], version)
            out += [Send(shard, commit) for commit in self._commits if commit.version >= version]
            out += [Send(shard, self._norm_request(pending)) for pending in self._pending if pending.needs_norm]
            return out + self._farewell(shard)
        if self.finished is not None:
            return self._farewell(shard)
        if self._restarting:
            return []
        if self._above > self.state.term or (term, version) > (start.term, start.version):
            # It has lived on after a coordinator that stored nothing, or whose successor did not hear of the term that
            # it began: only a term above that can take it back (T6).
            return [*out, *self._lost(shard)]
        if self.state.version == start.version:
            return [*out, Send(shard, start), *self._farewell(shard)]
        # Gradients are not kept: what this shard has lost can only come from a checkpoint, and then for all shards.
        return [*out, *self._lost(shard)]

    def report(self, now: float, shard: int, report: Report) -> list[Decision]:
        """What a shard's server reports."""
        match report:
            case Staged():
                return self.staged(now, shard, report)
            case Lost():
                return self.lost(now, shard, report.id)
            case Norm():
                return self.norm(now, shard, report)
            case Written():
                return self.written(now, shard, report)
            case Applied():
                return self.applied(now, shard, report.version)
            case ShardFailed():
                return self.failed(now, shard, report.why)

    def restart(self, now: float, state: CoordinatorState, checkpoint: str) -> list[Decision]:
        """Begin a new term at `state`, whose term is higher than any before."""
        if state.term <= self.state.term:
            raise ValueError(f"term {state.term} is not above the term {self.state.term} in force")
        if state.term <= self._above:
            return [Restart(0)]  # a shard has told of it meanwhile
        out = [self._count(staged.id, Outcome.OLD_TERM, staged.info) for staged in self._ledger.open()]
        reached = max(self.state.version, self._ahead)
        state.redone = self.state.redone + max(0, reached - state.version)
        self._accounted, self._ahead = max(self._accounted, reached), 0
        if state.samples is None and self.state.samples is not None:
            state.samples = self.state.samples.at(state.version * state.world + state.offset, state.redone)
        self.state = state
        self.checkpoint, self._checkpoint_version = checkpoint, state.version if checkpoint else -1
        self._start = start_of(state, checkpoint)
        self._ledger.clear()
        self._pending.clear()
        self._commits.clear()
        self._used.clear()
        self._before.clear()
        self._deferred.clear()
        self._prepared = None
        self._applied = dict.fromkeys(self._applied, state.version)
        self._restarting = False
        if not self.over:
            self._ending = None
        self.schedule.reset(now)
        return [*out, Send(None, self._start), *self._end_if_over(now)]

    def staged(self, now: float, shard: int, staged: Staged) -> list[Decision]:
        """A shard holds all of a gradient."""
        gradient = staged.id
        committed = self._used.get(identity(gradient))
        if committed is not None:
            # Its commit is on the way to the shard, or has been there and the worker sent it again.
            if self._applied[shard] > committed and self.rules.mode == "Async":
                return [Send(shard, self._reject(gradient, RejectReason.DUPLICATE))]
            return []
        reason = self._ledger.refusal_of(gradient)
        if reason == RejectReason.REJECT_UNSPECIFIED:
            reason = self._judge(self.state, gradient)
            if self._is_uncertain(gradient, reason):
                self._deferred.append((shard, staged))
                return []
        if reason != RejectReason.REJECT_UNSPECIFIED:
            return self._refuse(staged, reason, shard)
        out: list[Decision] = []
        for older in self._ledger.of_rank(gradient.rank):
            if (older.id.incarnation, older.id.attempt) < (gradient.incarnation, gradient.attempt):
                out += self._refuse(older, RejectReason.ABANDONED, None)
        if self._ledger.hold(shard, staged):
            out += self._advance(now)
        return out

    def lost(self, now: float, shard: int, gradient: GradientId) -> list[Decision]:
        """A gradient's stream to a shard ended before its end mark."""
        del now
        self._ledger.lose(shard, gradient)
        return []

    def norm(self, now: float, shard: int, norm: Norm) -> list[Decision]:
        """A shard's sum of squares."""
        for pending in self._pending:
            current = not self.rules.replicates or pending.round == norm.round
            if current and (pending.commit.term, pending.commit.version) == (norm.term, norm.version):
                pending.norms[shard] = norm.sum_of_squares
        released = self._release()
        judged = self._judge_deferred(now) if released else []
        return [*released, *judged, *self._end_if_over(now)]

    def applied(self, now: float, shard: int, version: int) -> list[Decision]:
        """A shard reached `version`."""
        del now
        self._applied[shard] = max(self._applied[shard], min(version, self.state.version))
        low = min(self._applied.values())
        while self._commits and self._commits[0].version < low:
            for contribution in self._commits.popleft().contributions:
                self._used.pop(identity(contribution.id), None)
        for old in [known for known in self._before if known < low]:
            del self._before[old]
        return []

    def written(self, now: float, shard: int, written: Written) -> list[Decision]:
        """A shard stored its files, or could not."""
        if written.error:
            if written.term != self.state.term or not self.schedule.in_flight(written.version):
                return []
            return self._checkpoint_failed(now, written.version, f"shard {shard}: {written.error}")
        flight = self.schedule.written(shard, written)
        if flight is None:
            return []
        files = tuple(flight.files[index] for index in range(self.rules.shards))
        return [WriteManifest(flight.term, written.version, flight.state, files)]

    def manifest(self, now: float, version: int, uri: str, error: str = "") -> list[Decision]:
        """The manifest that `WriteManifest` asked for is stored at `uri`, or could not be."""
        if not self.schedule.in_flight(version):
            return []
        if error:
            return self._checkpoint_failed(now, version, error)
        self.schedule.end(version)
        if version > self._checkpoint_version:
            self.checkpoint, self._checkpoint_version = uri, version
        return self._end_if_over(now)

    def failed(self, now: float, shard: int, why: str) -> list[Decision]:
        """A shard cannot go on."""
        del now
        return self.fail("ShardFailed", f"shard {shard}: {why}")

    # ---- What workers, evaluator and operator say ----

    def joined(self, now: float, rank: int, incarnation: int) -> list[Decision]:
        """A worker introduced itself: what older incarnations of it left incomplete is given up."""
        del now
        self._joined.add(rank)
        if rank == 0:
            self.evaluates()
        if incarnation <= self._incarnations.get(rank, -1):
            return []
        self._incarnations[rank] = incarnation
        complete = self._ledger.complete_of(rank)
        out: list[Decision] = []
        for staged in self._ledger.of_rank(rank):
            if staged.id.incarnation < incarnation and staged != complete:
                out += self._refuse(staged, RejectReason.OLD_INCARNATION, None)
        return out

    def left(self, now: float, rank: int, incarnation: int) -> list[Decision]:
        """A worker left on purpose."""
        del now
        if incarnation >= self._incarnations.get(rank, -1):
            self._joined.discard(rank)
        return []

    def evaluated(self, now: float, step: int) -> list[Decision]:
        """An evaluation of version `step` was reported."""
        if self._ending is not None and step >= self.state.version:
            self._ending.evaluated = True
        return self._end_if_over(now)

    def wish(self, now: float, world: int, intervals: Intervals | None = None) -> list[Decision]:
        """What the operator wishes now; a world of 0 is no wish, and neither are no intervals."""
        if intervals is not None:
            self.schedule.intervals = intervals
        smaller = 0 < world < self.wished_world
        self.wished_world = world or self.wished_world
        # The ranks that stay may have handed in all that the update needs now.
        return self._advance(now) if smaller else []

    def start(self, now: float) -> list[Decision]:
        """Call once, before anything else: a history that starts at its end is over."""
        return self._lost(0) if self._outrun else self._end_if_over(now)

    def tick(self, now: float) -> list[Decision]:
        """Deadlines: call it once a second or so (T8)."""
        out: list[Decision] = []
        limit = self.rules.timeouts.storing
        for version in self.schedule.overdue(now, limit):
            out += self._checkpoint_failed(now, version, f"not stored within {limit:.0f} s")
        return [*out, *self._end_if_over(now)]

    # ---- Decisions ----

    @property
    def newest_term(self) -> int:
        """The newest term that was ever begun, as far as anybody has told."""
        return max(self.state.term, self._above)

    def _judge(self, state: CoordinatorState, gradient: GradientId) -> RejectReason:
        if gradient.term != state.term:
            return RejectReason.OLD_TERM
        if state.version >= self.rules.steps or self.finished is not None:
            return RejectReason.LATE
        if gradient.rank >= state.world:
            return RejectReason.NOT_IN_WORLD
        if self.rules.mode == "Sync":
            reason = _sync.judge(state, gradient)
        else:
            reason = _async.judge(state, self.rules, gradient)
        if reason != RejectReason.REJECT_UNSPECIFIED:
            return reason
        complete = self._ledger.complete_of(gradient.rank)
        if complete is not None and not self._sent_again(complete.id, gradient):
            return RejectReason.REJECT_UNSPECIFIED if complete.id == gradient else RejectReason.DUPLICATE
        if gradient.incarnation < self._incarnations.get(gradient.rank, -1):
            return RejectReason.OLD_INCARNATION
        if (gradient.incarnation, gradient.attempt) < self._ledger.newest(gradient.rank):
            return RejectReason.ABANDONED
        return RejectReason.REJECT_UNSPECIFIED

    def _reject(self, gradient: GradientId, reason: RejectReason) -> Reject:
        return Reject(id=gradient, reason=reason, next_key_step=self.state.key_steps.get(gradient.rank, 0))

    def _refuse(self, staged: Staged, reason: RejectReason, shard: int | None) -> list[Decision]:
        """Tell all shards; of a late one in Sync mode the commit of its version tells them already."""
        self._ledger.forget([staged.id])
        if reason != RejectReason.OLD_TERM:
            self._ledger.refuse(staged.id, reason)
        out: list[Decision] = []
        if staged.id != self._counted.get((staged.id.rank, staged.id.incarnation)):
            out.append(self._count(staged.id, OUTCOME_OF[reason], staged.info))
        if self.rules.mode == "Async" or staged.id.version >= self.state.version or reason != RejectReason.LATE:
            # Every shard that holds it answers its worker, and those that have not yet seen it will ask again.
            to = shard if reason in {RejectReason.OLD_TERM, RejectReason.NOT_IN_WORLD} else None
            out.append(Send(to, self._reject(staged.id, reason)))
        return out

    def _count(self, gradient: GradientId, outcome: Outcome, info: GradientInfo, staleness: int = 0) -> Counted:
        self._counted[gradient.rank, gradient.incarnation] = gradient
        return Counted(gradient, outcome, info, staleness)

    def _advance(self, now: float) -> list[Decision]:
        """Choose sets while there are complete ones."""
        out: list[Decision] = []
        while not self.over and self.finished is None:
            complete = self._ledger.complete
            if self.rules.mode == "Sync":
                chosen = _sync.choose(self.state, self.rules, complete, self.wished_world)
            else:
                chosen = _async.choose(self.state, self.rules, complete)
            if chosen is None:
                break
            by_rank = {staged.id.rank: staged.info for staged in complete}
            infos = tuple(by_rank[contribution.id.rank] for contribution in chosen)
            out += self._decide(now, chosen, infos)
        return out

    def _decide(self, now: float, chosen: tuple[Contribution, ...], infos: tuple[GradientInfo, ...]) -> list[Decision]:
        state = self.state
        version = state.version
        skip = not all(info.finite for info in infos)
        replicates = self.rules.replicates
        self._prepared = None
        self._round += 1
        before = state.copy() if replicates else None
        if before is not None:
            self._before[version] = before
        counted: list[Counted] = []
        for contribution, info in zip(chosen, infos, strict=True):
            gradient = contribution.id
            outcome = Outcome.APPLIED if info.finite else Outcome.NON_FINITE
            counted.append(self._count(gradient, outcome, info, version - gradient.version))
            state.key_steps[gradient.rank] = gradient.key_step + 1
            self._used[identity(gradient)] = version
        self._ledger.forget(contribution.id for contribution in chosen)
        state.version = version + 1
        world = next_world(state.world, self.wished_world, self._joined)
        ended = count_samples(state, Commit(version=version, contributions=chosen, world=world, skip=skip))
        change_world(state, world, self.rules.mode)
        state.non_finite_run = state.non_finite_run + 1 if skip else 0
        final = self.over
        if final:
            state.last = state.version
        checkpoint = self.rules.stores and (final or self.schedule.due(now, state.version))
        commit = Commit(
            term=state.term,
            version=version,
            contributions=chosen,
            world=state.world,
            offset=state.offset,
            skip=skip,
            clip_factor=1.0,
            checkpoint=checkpoint,
            final=final,
        )
        if checkpoint:
            self.schedule.begin(now, state.term, state.version, state.copy().to_json())
        needs_norm = replicates or (self.rules.clip_norm is not None and not skip)
        pending = Pending(commit, infos, needs_norm=needs_norm, round=self._round, before=before, ended=ended)
        self._pending.append(pending)
        out: list[Decision] = []
        if replicates:
            pending.counted = tuple(counted)
        else:
            out += counted
        if needs_norm:
            out.append(Send(None, self._norm_request(pending)))
        out += self._release()
        out += self._settle(final)
        if skip and state.non_finite_run >= self.rules.max_non_finite:
            gradient = next(c.id for c, info in zip(chosen, infos, strict=True) if not info.finite)
            out += self.fail(
                "NonFiniteGradients",
                f"the gradient of rank {gradient.rank} at step {gradient.version} is not finite, and so were "
                f"{state.non_finite_run} updates in a row (update.maxNonFinite is {self.rules.max_non_finite})",
            )
        if final:
            self._ending = Ending(
                now,
                stored=not self.rules.stores,
                evaluated=not self.rules.evaluates,
                patience=self.rules.timeouts.evaluation,
            )
            out += self._end_if_over(now)
        return out

    def _settle(self, final: bool) -> list[Decision]:
        """What is open and can no longer be used, now that the version moved."""
        out: list[Decision] = []
        for staged in self._ledger.open():
            if final or self.rules.mode == "Sync":
                out += self._refuse(staged, RejectReason.LATE, None)
            elif staged.id.rank >= self.state.world:
                out += self._refuse(staged, RejectReason.NOT_IN_WORLD, None)
            else:
                reason = _async.judge(self.state, self.rules, staged.id)
                if reason != RejectReason.REJECT_UNSPECIFIED:
                    out += self._refuse(staged, reason, None)
        return out

    def _norm_request(self, pending: Pending) -> NormRequest:
        commit = pending.commit
        return NormRequest(
            term=commit.term,
            version=commit.version,
            contributions=commit.contributions,
            round=pending.round,
            replicate=self.rules.replicates,
            unclipped=commit.skip or self.rules.clip_norm is None,
        )

    def _release(self) -> list[Decision]:
        """Send the commits whose norms are known, in order of version."""
        out: list[Decision] = []
        while self._pending:
            pending = self._pending[0]
            commit = pending.commit
            if pending.needs_norm:
                if len(pending.norms) < self.rules.shards:
                    break
                if self.rules.clip_norm is not None and not commit.skip:
                    commit = self._clipped(pending)
            self._pending.popleft()
            self._commits.append(commit)
            out += pending.counted
            out += [Send(None, commit), Updated(commit, pending.infos, ended=pending.ended)]
        return out

    def _clipped(self, pending: Pending) -> Commit:
        limit = self.rules.clip_norm
        assert limit is not None
        # In order of shard, so that the sum is the same run after run.
        norm = math.sqrt(sum(pending.norms[shard] for shard in range(self.rules.shards)))
        factor = 1.0 if norm <= limit else limit / norm
        commit = pending.commit
        commit.clip_factor = factor  # it has not been handed over yet
        return commit

    def _replayable(self, version: int) -> bool:
        first = self._commits[0].version if self._commits else self.state.version - len(self._pending)
        return first <= version <= self.state.version
