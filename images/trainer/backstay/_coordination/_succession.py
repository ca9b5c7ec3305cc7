"""What the coordinator does because its place may be taken, or because a shard's may: only with standbys.

A decision is taken in two steps then: first every shard's standby holds the mean that it names, then the commit goes
out. So what any shard was told as a commit can be finished by whoever comes after, and what none was told can be taken
back. It is a part of `Coordinator`, cut off to be read alone; docs/internals/standby.md tells why it is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from backstay_rpc.control_pb2 import (
    Commit,
    Contribution,
    GradientId,
    GradientInfo,
    Reject,
    RejectReason,
    Rollback,
    Save,
    Staged,
)

from ._conclusion import Conclusion, Ending
from ._decisions import Decision, Redone, Restart, Send, Updated
from ._ledger import Ledger, identity, sent
from ._state import CoordinatorState, apply

__all__ = ["Succession", "start_of"]


def start_of(state: CoordinatorState, checkpoint: str) -> Rollback:
    return Rollback(
        term=state.term,
        version=state.version,
        checkpoint=checkpoint,
        world=state.world,
        offset=state.offset,
        history=state.history,
        start_from=state.start_from,
    )


class Succession(Conclusion):
    """See the module; the attributes are `Coordinator`'s."""

    _commits: deque[Commit]
    _used: dict[tuple[int, ...], int]
    _prepared: tuple[Contribution, ...] | None
    _infos: tuple[GradientInfo, ...]
    _start: Rollback
    _accounted: int
    _ahead: int
    _before: dict[int, CoordinatorState]
    _ledger: Ledger
    _deferred: list[tuple[int, Staged]]

    def staged(self, now: float, shard: int, staged: Staged) -> list[Decision]:
        raise NotImplementedError

    def _reject(self, gradient: GradientId, reason: RejectReason) -> Reject:
        raise NotImplementedError

    def _judge(self, state: CoordinatorState, gradient: GradientId) -> RejectReason:
        raise NotImplementedError

    def _lost(self, shard: int) -> list[Decision]:
        self._restarting = True
        return [Restart(shard)]

    def _write_again(self, now: float, shard: int, version: int) -> list[Decision]:
        """The checkpoints that a server which is gone was writing: its standby can, if it stands there."""
        out: list[Decision] = []
        for due in self.schedule.waited_for(shard):
            if due == version:
                out.append(Send(shard, Save(term=self.state.term, version=due)))
            elif due < version:
                self.schedule.give_up(due)
        return out

    def _can_replay(self, version: int, prepared: tuple[Contribution, ...]) -> bool:
        """Whether a shard at `version` can apply the commit that is next for it, if that is made already."""
        due = next((commit for commit in self._commits if commit.version == version), None)
        return due is None or tuple(due.contributions) == prepared

    def _adoptable(self, last: Commit | None) -> bool:
        """Whether a commit that the coordinator before this one made can be made part of this history."""
        return (
            last is not None
            and bool(self._prepared)
            and (last.term, last.version) == (self.state.term, self.state.version)
            and tuple(last.contributions) == self._prepared
        )

    def _adopt(self, now: float, commit: Commit) -> list[Decision]:
        self._prepared = None
        self._before[self.state.version] = self.state
        self.state, ended = apply(self.state, commit)
        for contribution in commit.contributions:
            self._used[identity(contribution.id)] = commit.version
        if commit.checkpoint:
            self.schedule.begin(now, commit.term, self.state.version, self.state.copy().to_json())
        self._commits.append(commit)
        if commit.final:
            self._ending = Ending(
                now,
                stored=not self.rules.stores,
                evaluated=not self.rules.evaluates,
                patience=self.rules.timeouts.evaluation,
            )
        told = [Updated(commit, self._infos, adopted=True, ended=ended)] if self._infos else []
        return [Send(None, commit), *told]

    def _sent_again(self, complete: GradientId, gradient: GradientId) -> bool:
        """A server may be gone, and a worker know it, before anybody has told us: then it sends again what is not
        complete any more."""
        return self.rules.replicates and sent(complete) < sent(gradient)

    def _is_uncertain(self, gradient: GradientId, reason: RejectReason) -> bool:
        """Whether the fate of a gradient depends on decisions that may be taken back.

        The gradient is judged again when these decisions are certain or taken back.
        """
        if not self.rules.replicates or not self._pending:
            return False
        before = self._pending[0].before
        assert before is not None
        certain = self._judge(before, gradient)
        return (reason == RejectReason.REJECT_UNSPECIFIED) != (certain == RejectReason.REJECT_UNSPECIFIED)

    def _judge_deferred(self, now: float) -> list[Decision]:
        """Judge again the gradients whose fate was uncertain."""
        deferred, self._deferred = self._deferred, []
        out: list[Decision] = []
        for shard, staged in deferred:
            out += self.staged(now, shard, staged)
        return out

    def _take_back(self, now: float) -> list[Decision]:
        """Undo the decisions that were sent to no shard as a commit; workers send their gradients again."""
        if not self._pending:
            return []
        first = self._pending[0].before
        assert first is not None
        out: list[Decision] = []
        for pending in self._pending:
            self._before.pop(pending.commit.version, None)
            if pending.commit.checkpoint:
                self.schedule.give_up(pending.commit.version + 1)
            for contribution in pending.commit.contributions:
                gradient = contribution.id
                self._used.pop(identity(gradient), None)
        first.last = self.state.last if self._ending is None else 0
        self.state = first
        self._ending = None
        for pending in self._pending:
            for contribution in pending.commit.contributions:
                self._ledger.refuse(contribution.id, RejectReason.ABANDONED)
                out.append(Send(None, self._reject(contribution.id, RejectReason.ABANDONED)))
        self._pending.clear()
        return out + self._judge_deferred(now)

    def open_gradients(self) -> Iterable[Staged]:
        """Gradients whose fate is open, for tests and reports."""
        return self._ledger.open()

    def state_at(self, term: int, version: int) -> CoordinatorState | None:
        """A copy of the state as of `version`, where some shard stands; None: the history has left it behind."""
        if term != self.state.term:
            return None
        state = self.state if version == self.state.version else self._before.get(version)
        return None if state is None else state.copy()

    @property
    def start_of_term(self) -> Rollback:
        """Where this term began."""
        return self._start

    def told(self, now: float, term: int, version: int) -> list[Decision]:
        """A worker that joins has parameters of (term, version), with which it lost its servers.

        What it has beyond the history here was lost with an earlier coordinator, and is made again. With standbys a
        coordinator that is behind a worker in its own term has missed a part of the history: a new term begins.
        """
        del now
        ahead = term == self.state.term and version > self.state.version
        if self.finished is not None or (term == self.state.term and not ahead):
            return []
        if not self.rules.replicates or not ahead:
            return self._redo(version)
        if self._prepared and version == self.state.version + 1:
            return []  # a shard has told it that much, and will tell us
        self._ahead = max(self._ahead, version)
        return [] if self._restarting else self._lost(0)

    def _redo(self, version: int) -> list[Decision]:
        """Count the updates up to `version` as lost; those that were counted already are not counted again."""
        lost = version - max(self._accounted, self._start.version)
        if lost <= 0:
            return []
        self._accounted = version
        self.state.redone += lost
        return [Redone(lost)]
