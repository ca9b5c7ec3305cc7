"""Synchronous updates: the mean of the first `quorum` complete gradients of this version (T1, T2)."""

from __future__ import annotations

from collections.abc import Sequence

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged
from backstay_spec.quorum import quorum_of

from ._state import CoordinatorState, Rules
from ._world import effective_world

__all__ = ["choose", "judge"]


def judge(state: CoordinatorState, gradient: GradientId) -> RejectReason:
    """Whether a gradient of this term, of a rank of the world, can become part of an update; unspecified: it can."""
    if gradient.version < state.version:
        return RejectReason.LATE
    # One that is ahead of every decision was computed from parameters that no shard can have given.
    if gradient.version > state.version or gradient.key_step != gradient.version:
        return RejectReason.OUT_OF_ORDER
    return RejectReason.REJECT_UNSPECIFIED


def choose(
    state: CoordinatorState, rules: Rules, complete: Sequence[Staged], wished_world: int
) -> tuple[Contribution, ...] | None:
    """The set of the next update in order of rank, or None while there are fewer than `quorum`.

    Args:
        complete: complete gradients of distinct ranks of the world, all of `state.version`, first come first.
        wished_world: where it is smaller than the world in force, only the ranks that stay make the update.
    """
    world = effective_world(state.world, wished_world)
    staying = [staged.id for staged in complete if staged.id.rank < world]
    quorum = quorum_of(rules.backups, world)
    if len(staying) < quorum:
        return None
    chosen = sorted(staying[:quorum], key=lambda gradient: gradient.rank)
    return tuple(Contribution(id=gradient, weight=1.0) for gradient in chosen)
