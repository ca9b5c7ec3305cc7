"""Holds the decisions of one term, which are pending or certain, and the version that each shard has applied.

A decision is *pending* until every shard has answered its `NormRequest`, then it is a commit. Without `clip_norm` and
without standbys it is a commit immediately. Pending decisions can be withdrawn, commits cannot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo, Norm, NormRequest, Rollback

from .._update import clip_factor
from ._decisions import Counted
from ._ledger import identity
from ._modes import Counting, change_world
from ._state import CoordinatorState, EpochEnded, Rules, apply, count_samples

__all__ = ["Pending", "UpdateHistory", "start_of"]


def start_of(state: CoordinatorState, checkpoint: str) -> Rollback:
    """Returns the message that begins a term at `state`."""
    return Rollback(
        term=state.term,
        version=state.version,
        checkpoint=checkpoint,
        world=state.world,
        offset=state.offset,
        history=state.history,
        start_from=state.start_from,
    )


@dataclass
class Pending:
    """A decision whose commit is not sent yet.

    Attributes:
        commit: complete but for the clip factor.
        infos: the infos of the contributions, in the same order.
        round: number of the decision; a withdrawn decision is made again under another number.
        before: the state before the decision; None in a job without standbys.
        needs_norms: whether the shards must answer a `NormRequest` first.
        norms: the sums of squares that shards have answered, by shard.
        norm: the norm of the mean gradient before clipping; None: not computed.
        counted: how the contributions are counted once the decision is certain.
        ended: the accounts of the epochs that end with it.
    """

    commit: Commit
    infos: tuple[GradientInfo, ...]
    round: int
    before: CoordinatorState | None
    needs_norms: bool
    norms: dict[int, float] = field(default_factory=dict)
    norm: float | None = None
    counted: tuple[Counted, ...] = ()
    ended: tuple[EpochEnded, ...] = ()


class UpdateHistory:
    """The decisions of one term.

    Attributes:
        state: the newest decided state.
        start: where the term began.
        lost: a shard lost its part of this history: only a new term can follow.
    """

    def __init__(self, rules: Rules, counting: Counting, state: CoordinatorState, start: Rollback) -> None:
        self._rules, self._counting = rules, counting
        self._round = 0
        self._begin(state, start)

    def _begin(self, state: CoordinatorState, start: Rollback) -> None:
        self.state, self.start, self.lost = state, start, False
        self._pending: deque[Pending] = deque()
        self._commits: deque[Commit] = deque()  # those that some shard may not have applied
        self._applied = dict.fromkeys(range(self._rules.shards), state.version)
        self._used: dict[
            tuple[int, ...], int
        ] = {}  # gradients of pending decisions and of `_commits`, with the version
        self._before: dict[int, CoordinatorState] = {}  # with standbys: the state at each version where a shard may be

    def begin(self, state: CoordinatorState, start: Rollback) -> None:
        """A new term begins at `state`."""
        if state.samples is None and self.state.samples is not None:
            state.samples = self.state.samples.at(
                state.version * state.batches * state.world + state.offset, state.redone
            )
        self._begin(state, start)

    def resume(self, last: Commit | None, incarnation: int) -> None:
        """Continue the term of a coordinator that is gone.

        Args:
            last: the commit that made the state's version.
            incarnation: the incarnation of this coordinator's server.
        """
        # An answer to a decision of a previous coordinator must not count as an answer to one of this coordinator.
        self._round = incarnation << 32
        if last is not None:
            self._keep(last)
            self._applied = dict.fromkeys(self._applied, last.version)

    # ---- Reading ----

    @property
    def over(self) -> bool:
        """Whether the last version is decided."""
        return self.ends_at(self.state)

    def ends_at(self, state: CoordinatorState) -> bool:
        """Returns whether `state` is at the version that ends training."""
        return state.version >= self._end_of(state)

    @property
    def last_version(self) -> int:
        """The version that ends training."""
        return self._end_of(self.state)

    def _end_of(self, state: CoordinatorState) -> int:
        return min(state.last or self._rules.steps, self._rules.steps)

    def stop_early(self) -> None:
        """End training with the next update, as if it were the last of `Rules.steps`."""
        if not self.over:
            self.state.last = min(self.last_version, self.state.version + 1)

    @property
    def pending(self) -> Sequence[Pending]:
        """The decisions that are not certain yet, oldest first."""
        return self._pending

    @property
    def stores(self) -> set[int]:
        """The versions whose commit requests a checkpoint, of the commits that some shard may not have applied."""
        commits = (*self._commits, *(pending.commit for pending in self._pending))
        return {commit.version + 1 for commit in commits if commit.checkpoint}

    @property
    def certain(self) -> CoordinatorState:
        """The newest state that is never withdrawn."""
        before = self._pending[0].before if self._pending else None
        return self.state if before is None else before

    @property
    def round(self) -> int:
        """The number of the newest decision. It also distinguishes the sums that shards make before a decision."""
        return self._round

    def next_round(self) -> None:
        """Begin another round, because contributions that were gathered for the next decision are taken back."""
        self._round += 1

    def used_by(self, gradient: GradientId) -> int | None:
        """Returns the version of the decision that uses this gradient, as far back as some shard may not have applied
        it."""
        return self._used.get(identity(gradient))

    def has_applied(self, shard: int, version: int) -> bool:
        """Returns whether a shard has applied the commit of `version`."""
        return self._applied[shard] > version

    def state_at(self, term: int, version: int) -> CoordinatorState | None:
        """Returns a copy of the state at `version` of some shard, or None if the history is past it, or is another."""
        if term != self.state.term:
            return None
        state = self.state if version == self.state.version else self._before.get(version)
        return None if state is None else state.copy()

    def norm_request(self, pending: Pending) -> NormRequest:
        """Returns the request that shards answer before a decision becomes a commit."""
        commit = pending.commit
        return NormRequest(
            term=commit.term,
            version=commit.version,
            contributions=commit.contributions,
            round=pending.round,
            replicate=self._rules.replicates,
            unclipped=commit.skip or self._rules.clip_norm is None,
        )

    # ---- Decisions ----

    def decide(
        self, contributions: tuple[Contribution, ...], infos: tuple[GradientInfo, ...], *, world: int
    ) -> Pending:
        """Decide the next update.

        Args:
            contributions: its set, in order of rank.
            infos: the infos of the contributions, in the same order.
            world: ranks in force from the next version on.
        """
        state, rules = self.state, self._rules
        version = state.version
        skip = not all(info.finite for info in infos)
        before = state.copy() if rules.replicates else None
        if before is not None:
            self._before[version] = before
        for contribution in contributions:
            state.key_steps[contribution.id.rank] = contribution.id.key_step + 1
            self._used[identity(contribution.id)] = version
        state.version += 1
        ended = count_samples(state, Commit(version=version, contributions=contributions, world=world, skip=skip))
        if world != state.world:
            change_world(state, world, self._counting.next_offset(state, world, state.batches))
        state.non_finite_run = state.non_finite_run + 1 if skip else 0
        if self.over:
            state.last = state.version
        commit = Commit(
            term=state.term,
            version=version,
            contributions=contributions,
            world=state.world,
            offset=state.offset,
            skip=skip,
            clip_factor=1.0,
            final=self.over,
        )
        self._round += 1
        needs_norms = rules.replicates or (rules.clip_norm is not None and not skip)
        pending = Pending(commit, infos, self._round, before, needs_norms, ended=ended)
        self._pending.append(pending)
        return pending

    def answer(self, shard: int, norm: Norm) -> None:
        """A shard answered a `NormRequest`."""
        for pending in self._pending:
            current = not self._rules.replicates or pending.round == norm.round
            if current and (pending.commit.term, pending.commit.version) == (norm.term, norm.version):
                pending.norms[shard] = norm.sum_of_squares

    def release(self) -> list[Pending]:
        """Returns the decisions that have become commits now, in order of version."""
        out: list[Pending] = []
        while self._pending:
            pending = self._pending[0]
            if pending.needs_norms and len(pending.norms) < self._rules.shards:
                break
            self._clip(pending)
            self._pending.popleft()
            self._commits.append(pending.commit)
            out.append(pending)
        return out

    def _clip(self, pending: Pending) -> None:
        limit = self._rules.clip_norm
        if limit is None or not pending.needs_norms or pending.commit.skip:
            return
        # In order of shard, so that the sum is the same run after run.
        squares = sum(pending.norms[shard] for shard in range(self._rules.shards))
        pending.norm = math.sqrt(squares)
        pending.commit.clip_factor = clip_factor(limit, squares)

    def take_back(self) -> list[Pending]:
        """Withdraw the pending decisions; returns them, oldest first."""
        taken = list(self._pending)
        self._pending.clear()
        if taken:
            before = taken[0].before
            assert before is not None, "only with standbys"
            # A request to stop early stays. The end that the final decision, which is the last one, made is withdrawn.
            newest = taken[-1].before if taken[-1].commit.final else self.state
            assert newest is not None
            before.last = newest.last
            self.state = before
        for pending in taken:
            self._before.pop(pending.commit.version, None)
            for contribution in pending.commit.contributions:
                self._used.pop(identity(contribution.id), None)
        return taken

    def adopt(self, commit: Commit) -> tuple[EpochEnded, ...]:
        """Append a commit that the previous coordinator sent. Returns the accounts of the epochs that end with it."""
        self._before[self.state.version] = self.state
        self.state, ended = apply(self.state, commit)
        self._keep(commit)
        return ended

    def _keep(self, commit: Commit) -> None:
        self._commits.append(commit)
        for contribution in commit.contributions:
            self._used[identity(contribution.id)] = commit.version

    # ---- Shards ----

    def applied(self, shard: int, version: int) -> None:
        """Record that a shard reached `version`, and forget the commits that every shard has applied."""
        self._applied[shard] = max(self._applied[shard], min(version, self.state.version))
        low = min(self._applied.values())
        while self._commits and self._commits[0].version < low:
            for contribution in self._commits.popleft().contributions:
                self._used.pop(identity(contribution.id), None)
        for old in [known for known in self._before if known < low]:
            del self._before[old]

    def replays_from(self, version: int) -> bool:
        """Returns whether a shard at `version` can reach the newest one with the commits that are kept."""
        first = self._commits[0].version if self._commits else self.state.version - len(self._pending)
        return first <= version <= self.state.version

    def replay(self, shard: int, version: int) -> list[Commit | NormRequest]:
        """Returns the messages that a shard at `version`, from which `replays_from` is true, has missed."""
        self._applied[shard] = max(self._applied[shard], version)
        commits = [commit for commit in self._commits if commit.version >= version]
        return [*commits, *(self.norm_request(pending) for pending in self._pending if pending.needs_norms)]

    def holds_next(self, version: int, prepared: Sequence[Contribution]) -> bool:
        """Returns whether a shard at `version` that holds the mean of `prepared` can apply the next commit, if there is
        one."""
        due = next((commit for commit in self._commits if commit.version == version), None)
        return due is None or tuple(due.contributions) == tuple(prepared)
