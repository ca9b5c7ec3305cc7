"""Keeps the history of a run in one process, as of a synchronous job with one rank and without a coordinator. Pure."""

from __future__ import annotations

from ._modes import MODES, change_batches, change_world
from ._state import CoordinatorState, EpochEnded

__all__ = ["advance", "begin_alone"]


def begin_alone(state: CoordinatorState, batches: int) -> None:
    """Prepare `state` for updates that have `batches` batches each."""
    change_batches(state, batches, MODES["Sync"])


def advance(state: CoordinatorState, *, applied: bool) -> tuple[EpochEnded, ...]:
    """Count one update, of rank 0 alone.

    If several ranks are in force, as in the checkpoint of a job, all except rank 0 leave with this update.

    Args:
        applied: whether the update was applied; otherwise its gradient was not finite.

    Returns:
        The accounts of the epochs that ended with it.
    """
    number = state.offset + state.version * state.batches * state.world
    ended: tuple[EpochEnded, ...] = ()
    state.key_steps[0] = state.version + 1
    state.version += 1
    state.non_finite_run = 0 if applied else state.non_finite_run + 1
    if state.samples is not None:
        state.samples, ended = state.samples.add(number, [applied] * state.batches, state.redone)
    if state.world != 1:
        change_world(state, 1, MODES["Sync"].next_offset(state, 1, state.batches))
    return ended
