"""Applies the mean of complete gradients of distinct ranks, all of the current version (Sync; T1, T2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged
from backstay_spec.quorum import quorum_of

from ..._update import BRANCHES
from .._state import CoordinatorState, Rules, Samples
from ._counting import held_by_shard
from ._mode import Candidates, Contributor

__all__ = ["Sync"]

_ACCEPTED: Final = RejectReason.REJECT_UNSPECIFIED
# A worker whose gradient arrived too late, or twice, continues with the version that used the other ones.
_ANSWERED_BY_NEXT_VERSION: Final = frozenset({_ACCEPTED, RejectReason.LATE, RejectReason.DUPLICATE})


class Sync:
    """See `UpdateMode`."""

    def accept(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        del rules
        if gradient.version < state.version:
            return RejectReason.LATE
        # A gradient that is ahead of every decision was computed from parameters that no shard can have sent.
        if gradient.version > state.version or gradient.key_step != gradient.version:
            return RejectReason.OUT_OF_ORDER
        return _ACCEPTED

    def choose(self, candidates: Candidates, *, more: bool) -> tuple[Contribution, ...] | None:
        rules, world, gathered = candidates.rules, candidates.world, len(candidates.gathered)
        quorum = self.quorum(rules.backups, world)
        if candidates.total < quorum:
            return None  # most calls end here, so that their cost does not grow with the ranks
        staying = [staged for staged in candidates.complete if staged.id.rank < world]
        if len(staying) < quorum:
            return None
        enough = staying if more else staying[: max(quorum, gathered)]
        chosen = sorted(enough, key=lambda staged: staged.id.rank)
        weights = [_raw(rules, staged) for staged in chosen]
        if len(set(weights)) == 1 and not gathered:
            weights = [1.0] * len(weights)  # the same mean bit for bit as equal weighting
        return tuple(Contribution(id=staged.id, weight=weight) for staged, weight in zip(chosen, weights, strict=True))

    def gathers(self, candidates: Candidates) -> list[tuple[int, tuple[Contribution, ...]]]:
        rules, in_force = candidates.rules, candidates.state.world
        if in_force <= held_by_shard(self, rules, in_force):
            return []
        gathered, world = len(candidates.gathered), candidates.world
        new = {staged.id.rank: staged for staged in candidates.waiting if staged.id.rank < world}
        groups: Iterable[tuple[int, Sequence[int]]]
        if self.ordered(rules.backups, world):
            # Every rank contributes, so its place is known (T4).
            indices = sorted({rank // BRANCHES for rank in new})
            groups = [(index, range(BRANCHES * index, BRANCHES * (index + 1))) for index in indices]
        else:
            ranks, made = list(new), gathered // BRANCHES
            parts = [sorted(ranks[at : at + BRANCHES]) for at in range(0, len(ranks), BRANCHES)]
            groups = enumerate((part for part in parts if len(part) == BRANCHES), made)
        return [
            (index, tuple(Contribution(id=new[rank].id, weight=_raw(rules, new[rank])) for rank in group))
            for index, group in groups
            if all(rank in new for rank in group)
        ]

    def ordered(self, backups: int | str, world: int) -> bool:
        return self.spare(backups, world) == 0

    def spare(self, backups: int | str, world: int) -> int:
        return world - self.quorum(backups, world)

    def divisor(self, weights: Sequence[float]) -> float:
        return math.fsum(weights)

    def quorum(self, backups: int | str, world: int) -> int:
        return quorum_of(backups, world)

    def settle(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        del state, rules, gradient
        return RejectReason.LATE

    def commit_rejects(self, state: CoordinatorState, gradient: GradientId, reason: RejectReason) -> bool:
        return reason == RejectReason.LATE and gradient.version < state.version

    def rejects_applied(self) -> bool:
        return False

    def next_offset(self, state: CoordinatorState, world: int, batches: int) -> int:
        # Numbers continue after those of the ranks that made the last update. The numbers of ranks
        # that leave are drawn again, by the ranks that stay (T9, decision 0029).
        before = state.worlds[-1]
        contributions = (state.version - 1) * before.world + min(before.world, world)
        return before.offset + contributions * state.batches - state.version * batches * world

    def owed_since(self, worker: Contributor, version: int, decided: float) -> float | None:
        return None if worker.handed_version >= version else max(worker.joined, decided)

    def waits_for_ranks(self) -> bool:
        return True

    def uses_older_versions(self) -> bool:
        return False

    def account(self, first: Samples, state: CoordinatorState) -> Samples:
        if state.samples is not None and state.samples.continues(first):
            return state.samples
        return first.at(state.offset + state.version * state.batches * state.world, state.redone)

    def behind(self, versions: Mapping[int, int]) -> Sequence[int]:
        # A worker that was late may get answers from before and after an update; the lower ones follow it.
        newest = max(versions.values())
        return [shard for shard, version in versions.items() if version < newest]

    def exchanged(self, key_step: int, gradient_version: int, version: int) -> Iterable[int]:
        del key_step
        return range(gradient_version, version)

    def used_up(self, gradient_version: int, version: int) -> bool:
        return gradient_version < version

    def answered_by(self, outcome: RejectReason, gradient_version: int, version: int) -> bool:
        return outcome not in _ANSWERED_BY_NEXT_VERSION or version > gradient_version


def _raw(rules: Rules, staged: Staged) -> float:
    """Returns the weight of a contribution, before it is known that those of all others are the same."""
    return 1.0 if rules.weighting == "Equal" else float(staged.info.examples)
