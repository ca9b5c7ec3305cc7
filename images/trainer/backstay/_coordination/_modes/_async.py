"""Applies each complete gradient alone, in order of completion, none too stale and none twice (Async; T3, T5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason

from .._state import CoordinatorState, Rules, Samples
from ._mode import Candidates, Contributor

__all__ = ["Async"]

_ACCEPTED: Final = RejectReason.REJECT_UNSPECIFIED


def _staleness(state: CoordinatorState, gradient: GradientId) -> int:
    """Returns the staleness of a gradient that is applied now, in versions."""
    return state.version - gradient.version


class Async:
    """See `UpdateMode`."""

    def accept(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        due = state.key_steps.get(gradient.rank, 0)
        if gradient.key_step < due:
            return RejectReason.DUPLICATE
        if gradient.key_step > due or gradient.version > state.version:
            return RejectReason.OUT_OF_ORDER
        if rules.max_staleness is not None and _staleness(state, gradient) > rules.max_staleness:
            return RejectReason.STALE
        return _ACCEPTED

    def choose(self, candidates: Candidates, *, more: bool) -> tuple[Contribution, ...] | None:
        del more  # each update has one contribution
        if not candidates.total:
            return None
        gradient = next(candidates.complete).id
        damping = candidates.rules.staleness_damping
        weight = 1.0 / (1 + _staleness(candidates.state, gradient)) if damping else 1.0
        return (Contribution(id=gradient, weight=weight),)

    def gathers(self, candidates: Candidates) -> list[tuple[int, tuple[Contribution, ...]]]:
        del candidates  # each update has one contribution
        return []

    def ordered(self, backups: int | str, world: int) -> bool:
        del backups, world
        return False

    def spare(self, backups: int | str, world: int) -> int:
        del backups, world
        return 0

    def divisor(self, weights: Sequence[float]) -> float:
        del weights
        return 1.0

    def quorum(self, backups: int | str, world: int) -> int:
        del backups, world
        return 1

    def settle(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        if gradient.rank >= state.world:
            return RejectReason.NOT_IN_WORLD
        return self.accept(state, rules, gradient)

    def commit_rejects(self, state: CoordinatorState, gradient: GradientId, reason: RejectReason) -> bool:
        del state, gradient, reason
        return False

    def rejects_applied(self) -> bool:
        return True

    def next_offset(self, state: CoordinatorState, world: int, batches: int) -> int:
        # Ranks are at different steps: begin above the highest number that the fastest rank can have drawn.
        before = state.worlds[-1]
        fastest = max(state.key_steps.get(rank, 0) for rank in range(before.world))
        slowest = min(state.key_steps.get(rank, 0) for rank in range(world))
        return before.offset + (fastest + 1) * state.batches * before.world - slowest * batches * world

    def owed_since(self, worker: Contributor, version: int, decided: float) -> float | None:
        del version, decided
        return worker.joined if worker.handed_in is None else worker.handed_in

    def waits_for_ranks(self) -> bool:
        return False

    def uses_older_versions(self) -> bool:
        return True

    def account(self, first: Samples, state: CoordinatorState) -> Samples:
        first, stored = replace(first, sync=False), state.samples
        if stored is not None and stored.continues(first):
            return stored
        made, shift = state.version * state.batches, 0
        if stored is not None:
            # Each update of a run in Sync mode took batches of every rank, as its numbers of batches show.
            shift = state.offset + made * (state.world - 1) if stored.sync else stored.shift
        return replace(first, shift=shift).at(made + shift, state.redone)

    def behind(self, versions: Mapping[int, int]) -> Sequence[int]:
        del versions  # the shards apply the same updates at different times
        return ()

    def exchanged(self, key_step: int, gradient_version: int, version: int) -> Iterable[int]:
        del gradient_version, version  # each rank exchanges the fragments in turn by itself
        return (key_step,)

    def used_up(self, gradient_version: int, version: int) -> bool:
        del gradient_version, version
        return False

    def answered_by(self, outcome: RejectReason, gradient_version: int, version: int) -> bool:
        del gradient_version, version
        return outcome != _ACCEPTED
