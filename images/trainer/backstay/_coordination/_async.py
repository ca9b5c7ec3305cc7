"""Asynchronous updates: each complete gradient alone, in order of completion, none too stale, none twice (T3, T5)."""

from __future__ import annotations

from collections.abc import Sequence

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged

from ._state import CoordinatorState, Rules

__all__ = ["choose", "judge", "staleness"]


def staleness(state: CoordinatorState, gradient: GradientId) -> int:
    """In versions, if it were applied now."""
    return state.version - gradient.version


def judge(state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
    """Whether a gradient of this term, of a rank of the world, can be applied now; unspecified: it can."""
    due = state.key_steps.get(gradient.rank, 0)
    if gradient.key_step < due:
        return RejectReason.DUPLICATE
    if gradient.key_step > due or gradient.version > state.version:
        return RejectReason.OUT_OF_ORDER
    if rules.max_staleness is not None and staleness(state, gradient) > rules.max_staleness:
        return RejectReason.STALE
    return RejectReason.REJECT_UNSPECIFIED


def choose(state: CoordinatorState, rules: Rules, complete: Sequence[Staged]) -> tuple[Contribution, ...] | None:
    """The next update's one gradient, or None when nothing is complete."""
    if not complete:
        return None
    gradient = complete[0].id
    weight = 1.0 / (1 + staleness(state, gradient)) if rules.staleness_damping else 1.0
    return (Contribution(id=gradient, weight=weight),)
