"""How many ranks are in force. Only a commit changes the number, so that it is the same for every shard and worker."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from .._state import CoordinatorState, World
from ._counting import Counting

__all__ = ["change_batches", "change_world", "effective_world", "next_world"]


def effective_world(world: int, desired: int) -> int:
    """Returns how many ranks make the update of this version: the update does not wait for ranks that are to leave.

    So a job that is scaled down to its living ranks continues, even if all ranks that leave are dead. Their batches are
    still those of the world in force, which changes with the commit.
    """
    return min(world, desired)


def next_world(world: int, desired: int, joined: AbstractSet[int]) -> int:
    """Returns the world in force after the next commit.

    It shrinks immediately: the highest ranks leave first. It grows only to the longest run of joined ranks from 0. So
    an update never waits for a rank whose pod does not run yet.
    """
    if desired <= world:
        return desired
    run = 0
    while run < desired and run in joined:
        run += 1
    return max(world, run)


def change_world(state: CoordinatorState, world: int, offset: int) -> None:
    """Put `world` in force from `state.version` on, with this `BatchKey.offset`, and record it."""
    state.world = world
    # No update was made with a world that came in force at this version too.
    before = (one for one in state.worlds if one.version < state.version)
    state.worlds = (*before, World(version=state.version, world=world, offset=offset))


def change_batches(state: CoordinatorState, batches: int, counting: Counting) -> None:
    """Put in force how many batches each contribution takes from `state.version` on, where another run took others."""
    if batches != state.batches:
        if state.version:  # else no batch has been used
            change_world(state, state.world, counting.next_offset(state, state.world, batches))
        if state.samples is not None:
            state.samples = state.samples.with_batches(state.version, state.batches, batches)
        state.batches = batches
