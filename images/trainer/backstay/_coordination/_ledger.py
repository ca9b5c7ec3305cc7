"""Records which shards hold which gradient, which is complete when all of them do (T1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from backstay_rpc.control_pb2 import Commit, GradientId, RejectReason, Staged

__all__ = ["HeldContribution", "Ledger", "identity", "sent", "used_in"]


def identity(gradient: GradientId) -> tuple[int, ...]:
    """Returns all fields of a gradient's id as a key, because messages have no hash."""
    return (
        gradient.term,
        gradient.version,
        gradient.rank,
        gradient.key_step,
        gradient.incarnation,
        gradient.attempt,
    )


def sent(gradient: GradientId) -> tuple[int, int]:
    """Orders the gradients of one rank, where a later one replaces an earlier one."""
    return gradient.incarnation, gradient.attempt


def used_in(
    commit: Commit | None, worker: tuple[int, int] | None, key_step: int | None
) -> tuple[RejectReason, int] | None:
    """Returns the outcome of a worker's contribution in an update, and its next key step, or None if the update has
    none.

    Args:
        worker: its rank and incarnation.
        key_step: the key step of the contribution; None: any.
    """
    for used in () if commit is None else (contribution.id for contribution in commit.contributions):
        if (used.rank, used.incarnation) == worker and key_step in (None, used.key_step):
            outcome = RejectReason.SKIPPED if commit is not None and commit.skip else RejectReason.REJECT_UNSPECIFIED
            return outcome, used.key_step + 1
    return None


@dataclass
class HeldContribution:
    """A gradient that at least one shard holds, or held until its stream broke."""

    staged: Staged
    shards: set[int] = field(default_factory=set)


class Ledger:
    """The undecided gradients, by rank; complete ones in the order in which they became complete."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._by_rank: dict[int, dict[tuple[int, ...], HeldContribution]] = {}
        self._complete: dict[int, Staged] = {}
        self._gathered: dict[int, Staged] = {}
        # Newest (incarnation, attempt) of each rank: its worker has abandoned older ones.
        self._newest: dict[int, tuple[int, int]] = {}
        # Newest refused gradient of each rank. A shard with a broken link did not receive the rejection. When it
        # reports the gradient again, the answer must be the same.
        self._refused: dict[int, tuple[GradientId, RejectReason]] = {}

    def newest(self, rank: int) -> tuple[int, int]:
        """Returns the newest (incarnation, attempt) of `rank` that any shard held."""
        return self._newest.get(rank, (-1, -1))

    def complete_of(self, rank: int) -> Staged | None:
        """Returns the complete gradient of `rank`, if there is one."""
        return self._gathered.get(rank) or self._complete.get(rank)

    @property
    def waiting(self) -> Mapping[int, Staged]:
        """rank -> the complete gradient that is not gathered, in the order of their completion."""
        return self._complete

    @property
    def gathered(self) -> Mapping[int, Staged]:
        """rank -> the complete gradient that the shards add up before the decision that uses it."""
        return self._gathered

    def gather(self, ranks: Iterable[int]) -> None:
        """Record that the shards add up the complete gradients of these ranks.

        A shard no longer holds them one by one. They stay complete until they are forgotten.
        """
        for rank in ranks:
            self._gathered[rank] = self._complete.pop(rank)

    def open(self) -> list[Staged]:
        """Returns all undecided gradients."""
        return [held.staged for of_rank in self._by_rank.values() for held in of_rank.values()]

    def of_rank(self, rank: int) -> list[Staged]:
        """Returns the undecided gradients of `rank`."""
        return [held.staged for held in self._by_rank.get(rank, {}).values()]

    def hold(self, shard: int, staged: Staged) -> bool:
        """Record that `shard` holds it; True when that completes it."""
        gradient = staged.id
        held = self._by_rank.setdefault(gradient.rank, {}).setdefault(identity(gradient), HeldContribution(staged))
        self._newest[gradient.rank] = max(self.newest(gradient.rank), (gradient.incarnation, gradient.attempt))
        if shard in held.shards:
            return False
        held.shards.add(shard)
        if len(held.shards) < self._shards or self._is_gathered(gradient):
            return False
        self._complete[gradient.rank] = staged
        return True

    def lacking(self, gradient: GradientId) -> list[int]:
        """Returns the shards that do not hold all of a gradient that some shard holds; none of a complete one."""
        held = self._by_rank.get(gradient.rank, {}).get(identity(gradient))
        complete = self.complete_of(gradient.rank)
        if held is None or (complete is not None and complete.id == gradient):
            return []
        return [shard for shard in range(self._shards) if shard not in held.shards]

    def lose(self, shard: int, gradient: GradientId) -> None:
        """Record that `shard` holds nothing of it; a complete gradient stays complete."""
        held = self._by_rank.get(gradient.rank, {}).get(identity(gradient))
        if held is not None and len(held.shards) < self._shards:
            held.shards.discard(shard)

    def lose_all(self, shard: int) -> None:
        """Record that `shard` holds nothing, not even of complete gradients, until it reports them again."""
        for of_rank in self._by_rank.values():
            for held in of_rank.values():
                held.shards.discard(shard)
        self._complete.clear()

    def forget(self, gradients: Iterable[GradientId]) -> None:
        """Remove gradients that are decided."""
        for gradient in gradients:
            of_rank = self._by_rank.get(gradient.rank, {})
            of_rank.pop(identity(gradient), None)
            if not of_rank:
                self._by_rank.pop(gradient.rank, None)
            for complete in (self._complete, self._gathered):
                if (found := complete.get(gradient.rank)) is not None and found.id == gradient:
                    del complete[gradient.rank]

    def _is_gathered(self, gradient: GradientId) -> bool:
        found = self._gathered.get(gradient.rank)
        return found is not None and found.id == gradient

    def refuse(self, gradient: GradientId, reason: RejectReason) -> None:
        """Record that a gradient of this term was refused: no update ever uses it."""
        refused = self._refused.get(gradient.rank)
        if refused is None or sent(refused[0]) <= sent(gradient):
            self._refused[gradient.rank] = gradient, reason

    def refusal_of(self, gradient: GradientId) -> RejectReason:
        """Returns why a gradient that a shard reports was refused before; unspecified: it was not.

        A gradient that its worker sent before the newest refused one counts as abandoned, unless it is undecided.
        """
        refused, reason = self._refused.get(gradient.rank, (None, RejectReason.REJECT_UNSPECIFIED))
        if (
            refused is None
            or gradient.term != refused.term
            or identity(gradient) in self._by_rank.get(gradient.rank, {})
        ):
            return RejectReason.REJECT_UNSPECIFIED
        if gradient == refused:
            return reason
        return RejectReason.ABANDONED if sent(gradient) < sent(refused) else RejectReason.REJECT_UNSPECIFIED

    def clear(self) -> None:
        """Remove everything, because a new term began."""
        self._refused.clear()
        self._by_rank.clear()
        self._complete.clear()
        self._gathered.clear()
        self._newest.clear()
