"""Decides which gradients that shards report are accepted, refused or complete, and which shards get a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from backstay_rpc.control_pb2 import (
    Contribution,
    Examine,
    Gather,
    GradientId,
    GradientInfo,
    Reject,
    RejectReason,
    Staged,
)

from ._conclusion import Conclusion
from ._decisions import OUTCOME_OF, Counted, Decision, Outcome, Send
from ._history import Pending, UpdateHistory
from ._ledger import Ledger, sent
from ._modes import Candidates, Choosing
from ._state import CoordinatorState, Rules

__all__ = ["Intake"]

_ACCEPTED: Final = RejectReason.REJECT_UNSPECIFIED
_ONLY_ITS_SHARD: Final = frozenset({RejectReason.OLD_TERM, RejectReason.NOT_IN_WORLD})


class Intake:
    """The undecided gradients.

    Attributes:
        ledger: the record of which shards hold which contributions.
    """

    def __init__(self, rules: Rules, choosing: Choosing, history: UpdateHistory, conclusion: Conclusion) -> None:
        self._rules, self._choosing = rules, choosing
        self._history, self._conclusion = history, conclusion
        self.ledger = Ledger(rules.shards)
        self._incarnations: dict[int, int] = {}
        self._joined: set[int] = set()
        # By (rank, incarnation), the newest two that were counted: as many as a shard holds, and may report again.
        self._counted: dict[tuple[int, int], tuple[GradientId, ...]] = {}
        self._uncertain: list[tuple[int, Staged]] = []
        self._gathers: list[Gather] = []

    def begin(self) -> list[Decision]:
        """A new term begins: all undecided gradients are of the old one."""
        out: list[Decision] = [
            self._count(staged.id, Outcome.OLD_TERM, staged.info)
            for staged in self.ledger.open()
            if not self._is_counted(staged.id)
        ]
        self.ledger.clear()
        self._gathers.clear()
        self._uncertain.clear()
        return out

    # ---- Workers ----

    @property
    def joined_ranks(self) -> AbstractSet[int]:
        """The ranks that have joined and not left."""
        return self._joined

    def joined(self, rank: int, incarnation: int) -> list[Decision]:
        """Record that a worker joined, and refuse incomplete gradients of its older incarnations."""
        self._joined.add(rank)
        if incarnation <= self._incarnations.get(rank, -1):
            return []
        self._incarnations[rank] = incarnation
        complete = self.ledger.complete_of(rank)
        out: list[Decision] = []
        for staged in self.ledger.of_rank(rank):
            if staged.id.incarnation < incarnation and staged != complete:
                out += self._refuse(staged, RejectReason.OLD_INCARNATION, None)
        return out

    def left(self, rank: int, incarnation: int) -> None:
        """A worker left on purpose."""
        if incarnation >= self._incarnations.get(rank, -1):
            self._joined.discard(rank)

    # ---- Shards ----

    def connected(self, shard: int) -> None:
        """Record that a shard's server connected, which reports its gradients again."""
        self.ledger.lose_all(shard)
        self._uncertain = [(other, staged) for other, staged in self._uncertain if other != shard]

    def staged(self, shard: int, staged: Staged) -> tuple[list[Decision], bool]:
        """A shard holds a whole gradient. Returns the refusals, and whether this completes the gradient."""
        gradient = staged.id
        used = self._history.used_by(gradient)
        if used is not None:
            # Its commit is on the way to the shard, or was applied there and the worker sent the gradient again.
            again = self._history.has_applied(shard, used) and self._choosing.rejects_applied()
            return [Send(shard, self._reject(gradient, RejectReason.DUPLICATE))] if again else [], False
        reason = self.ledger.refusal_of(gradient)
        if reason == _ACCEPTED:
            reason = self._judge(self._history.state, gradient)
            if (reason == _ACCEPTED) != (self._judge(self._history.certain, gradient) == _ACCEPTED):
                # It depends on decisions that may be withdrawn.
                self._uncertain.append((shard, staged))
                return [], False
        if reason != _ACCEPTED:
            return self._refuse(staged, reason, shard), False
        out: list[Decision] = []
        gathered = self.ledger.gathered.get(gradient.rank)
        if gathered is not None and gathered.id != gradient:
            out += self.take_back_gathered()  # with another attempt of the rank
        for older in self.ledger.of_rank(gradient.rank):
            if sent(older.id) < sent(gradient):
                out += self._refuse(older, RejectReason.ABANDONED, None)
        return out, self.ledger.hold(shard, staged)

    def abandon(self, shard: int, gradient: GradientId) -> list[Decision]:
        """Drop a gradient of the current term of which a shard has lost its part, so that no update can use it.

        Shards that hold other parts free their memory, and its worker sends it again. Otherwise a worker that stops in
        the middle would keep the memory of shard 0 until its heartbeats are missed (decision 0029).
        """
        if self.ledger.refusal_of(gradient) != _ACCEPTED or self._history.used_by(gradient) is not None:
            return []
        held = [staged for staged in self.ledger.of_rank(gradient.rank) if staged.id == gradient]
        if not held:
            # Another shard may report its part later. A late one is refused then, and counted as late (T2).
            if self._judge(self._history.state, gradient) == _ACCEPTED:
                self.ledger.refuse(gradient, RejectReason.ABANDONED)
            return []
        if not self.ledger.lacking(gradient):
            return []
        self.ledger.lose(shard, gradient)
        return self._refuse(held[0], RejectReason.ABANDONED, None)

    def occupied(self, gradients: Sequence[GradientId]) -> list[Decision]:
        """Shard 0 holds these gradients, and other pushes wait for their memory: examine the shards that lack them."""
        return [Send(shard, Examine(id=gradient)) for gradient in gradients for shard in self.ledger.lacking(gradient)]

    def gather(self, desired_world: int) -> list[Decision]:
        """Let the shards add up complete gradients, where they do not hold those of all ranks at the same time."""
        state, out = self._history.state, list[Decision]()
        for index, chosen in self._choosing.gathers(self.candidates(desired_world)):
            self.ledger.gather(contribution.id.rank for contribution in chosen)
            self._gathers.append(
                Gather(
                    term=state.term,
                    version=state.version,
                    round=self._history.round,
                    index=index,
                    contributions=chosen,
                )
            )
            out.append(Send(None, self._gathers[-1]))
        return out

    def candidates(self, desired_world: int) -> Candidates:
        """Returns the complete gradients, from which the next update is chosen."""
        gathered, waiting = self.ledger.gathered.values(), self.ledger.waiting.values()
        return Candidates(self._history.state, self._rules, gathered, waiting, desired_world)

    @property
    def gathers(self) -> Sequence[Gather]:
        """The `Gather` messages of the next update, for a shard that may not have received them."""
        return self._gathers

    def take_back_gathered(self) -> list[Decision]:
        """The next update may not have exactly the gathered gradients: their workers send again."""
        out: list[Decision] = []
        for staged in list(self.ledger.gathered.values()):
            out += self._refuse(staged, RejectReason.ABANDONED, None)
        if out:
            self._gathers.clear()
            self._history.next_round()
        return out

    def uncertain(self) -> list[tuple[int, Staged]]:
        """Returns the reports that `staged` could not decide about, with their shards; call `staged` again with
        each."""
        found, self._uncertain = self._uncertain, []
        return found

    # ---- Decisions ----

    def use(
        self, contributions: tuple[Contribution, ...], infos: tuple[GradientInfo, ...], version: int
    ) -> list[Counted]:
        """A decision uses these gradients, to make an update of `version`. Returns how each is counted."""
        counted = []
        finite = Outcome.APPLIED if all(info.finite for info in infos) else Outcome.SKIPPED
        for contribution, info in zip(contributions, infos, strict=True):
            gradient = contribution.id
            outcome = finite if info.finite else Outcome.NON_FINITE
            counted.append(self._count(gradient, outcome, info, version - gradient.version))
        self.ledger.forget(contribution.id for contribution in contributions)
        self._gathers.clear()
        return counted

    def late(self, gradient: GradientId) -> list[Decision]:
        """Count a gradient that shard 0 did not keep, if an update without it is certain."""
        late = self._judge(self._history.certain, gradient) == RejectReason.LATE
        return [self._count(gradient, Outcome.LATE, GradientInfo())] if late and not self._is_counted(gradient) else []

    def settle(self, *, final: bool) -> list[Decision]:
        """Refuse what can no longer be used, now that an update was decided; `final`: it was the last one."""
        state = self._history.state
        out: list[Decision] = []
        for staged in self.ledger.open():
            reason = RejectReason.LATE if final else self._choosing.settle(state, self._rules, staged.id)
            if reason != _ACCEPTED:
                out += self._refuse(staged, reason, None)
        return out

    def take_back(self, decisions: list[Pending]) -> list[Decision]:
        """Refuse the contributions of withdrawn decisions, so that their workers send again."""
        out: list[Decision] = []
        for pending in decisions:
            for contribution in pending.commit.contributions:
                self.ledger.refuse(contribution.id, RejectReason.ABANDONED)
                out.append(Send(None, self._reject(contribution.id, RejectReason.ABANDONED)))
        return out

    # ---- Inside ----

    def _judge(self, state: CoordinatorState, gradient: GradientId) -> RejectReason:
        """Returns whether an update after `state` can use a gradient, and the reason if none can."""
        if gradient.term != state.term:
            return RejectReason.OLD_TERM
        if self._history.ends_at(state) or self._conclusion.finished is not None:
            return RejectReason.LATE
        if gradient.rank >= state.world:
            return RejectReason.NOT_IN_WORLD
        reason = self._choosing.accept(state, self._rules, gradient)
        if reason != _ACCEPTED:
            return reason
        complete = self.ledger.complete_of(gradient.rank)
        if complete is not None and not self._replaces(complete.id, gradient):
            return _ACCEPTED if complete.id == gradient else RejectReason.DUPLICATE
        if gradient.incarnation < self._incarnations.get(gradient.rank, -1):
            return RejectReason.OLD_INCARNATION
        if sent(gradient) < self.ledger.newest(gradient.rank):
            return RejectReason.ABANDONED
        return _ACCEPTED

    def _replaces(self, complete: GradientId, gradient: GradientId) -> bool:
        """Returns whether `gradient` replaces the complete gradient of the same rank.

        In a job with standbys, a worker may detect a server's death before the coordinator does. Then it sends again a
        gradient that is no longer complete."""
        return self._rules.replicates and sent(complete) < sent(gradient)

    def _reject(self, gradient: GradientId, reason: RejectReason) -> Reject:
        due = self._history.state.key_steps.get(gradient.rank, 0)
        return Reject(id=gradient, reason=reason, next_key_step=due)

    def _refuse(self, staged: Staged, reason: RejectReason, shard: int | None) -> list[Decision]:
        """Refuse a gradient permanently: count it, and notify the shards that hold it unless a commit does."""
        self.ledger.forget([staged.id])
        if reason != RejectReason.OLD_TERM:
            self.ledger.refuse(staged.id, reason)
        out: list[Decision] = []
        if not self._is_counted(staged.id):
            out.append(self._count(staged.id, OUTCOME_OF[reason], staged.info))
        if not self._choosing.commit_rejects(self._history.state, staged.id, reason):
            out.append(Send(shard if reason in _ONLY_ITS_SHARD else None, self._reject(staged.id, reason)))
        return out

    def _is_counted(self, gradient: GradientId) -> bool:
        return gradient in self._counted.get((gradient.rank, gradient.incarnation), ())

    def _count(self, gradient: GradientId, outcome: Outcome, info: GradientInfo, staleness: int = 0) -> Counted:
        key = gradient.rank, gradient.incarnation
        self._counted[key] = (*self._counted.get(key, ()), gradient)[-2:]
        return Counted(gradient, outcome, info, staleness)
