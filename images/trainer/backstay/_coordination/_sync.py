"""Synchronous updates: the mean of complete gradients of distinct ranks, all of the current version (T1, T2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged
from backstay_spec.quorum import quorum_of

from ._samples import Samples
from ._state import CoordinatorState, Mode, Rules
from ._world import effective_world

__all__ = ["Sync"]

_ACCEPTED: Final = RejectReason.REJECT_UNSPECIFIED
# A worker whose gradient came too late, or twice, continues with the version that used the other ones.
_ANSWERED_BY_NEXT_VERSION: Final = frozenset({_ACCEPTED, RejectReason.LATE, RejectReason.DUPLICATE})


class Sync:
    """See `UpdateMode`."""

    name: Mode = "Sync"

    def accept(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        del rules
        if gradient.version < state.version:
            return RejectReason.LATE
        # A gradient that is ahead of every decision was computed from parameters that no shard can have sent.
        if gradient.version > state.version or gradient.key_step != gradient.version:
            return RejectReason.OUT_OF_ORDER
        return _ACCEPTED

    def choose(
        self, state: CoordinatorState, rules: Rules, complete: Sequence[Staged], desired_world: int, *, more: bool
    ) -> tuple[Contribution, ...] | None:
        world = effective_world(state.world, desired_world)
        staying = [staged for staged in complete if staged.id.rank < world]
        quorum = self.quorum(rules.backups, world)
        if len(staying) < quorum:
            return None
        chosen = sorted(staying if more else staying[:quorum], key=lambda staged: staged.id.rank)
        weights = _weights(rules, [staged.info.examples for staged in chosen])
        return tuple(Contribution(id=staged.id, weight=weight) for staged, weight in zip(chosen, weights, strict=True))

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
        # Numbers continue after those of the ranks that made the last update. The ranks that stay draw the unused
        # later numbers of ranks that leave again (T9). With local steps, numbers of ranks that leave lie between those
        # of ranks that stay: these are left out.
        before = state.worlds[-1]
        made = before.offset + (state.version * state.batches - 1) * before.world + min(before.world, world)
        return made - state.version * batches * world

    def owed_since(
        self, joined: float, handed_in: float | None, handed_version: int, version: int, version_since: float
    ) -> float | None:
        del handed_in
        return None if handed_version >= version else max(joined, version_since)

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


def _weights(rules: Rules, examples: Sequence[int]) -> list[float]:
    """The weights of an update's contributions. They add up to their number, by which the weighted sum is divided.

    Equal numbers of examples give weights of exactly 1, and so the same mean bit for bit as equal weighting.
    """
    total = sum(examples)
    if rules.weighting == "Equal" or total == 0:
        return [1.0] * len(examples)
    return [len(examples) * own / total for own in examples]
