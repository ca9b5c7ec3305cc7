"""How many ranks are in force, and when that changes: only by a commit, so that it is the same for everybody."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ._state import CoordinatorState, Mode, World

__all__ = ["change_world", "effective_world", "next_world"]


def effective_world(world: int, wished: int) -> int:
    """How many ranks make the update of this version: those that are to leave are not waited for any more.

    So a job that is scaled down to the ranks that live is free, whichever of those that leave are dead. Their batches
    are still those of the world in force, which changes with the commit.
    """
    return min(world, wished)


def next_world(world: int, wished: int, joined: AbstractSet[int]) -> int:
    """The world in force after the next commit.

    Down at once: the highest ranks leave first. Up only to the longest run of joined ranks from 0, so that an update
    never waits for a rank whose pod does not run yet.
    """
    if wished <= world:
        return wished
    run = 0
    while run < wished and run in joined:
        run += 1
    return max(world, run)


def change_world(state: CoordinatorState, world: int, mode: Mode) -> None:
    """Put `world` in force from `state.version` on, and record it; the same world changes nothing.

    `BatchKey.number` is ``offset + step * world + rank``. In Sync mode the new offset makes it continue after the
    numbers of the ranks that made the update before: those that leave have drawn later numbers in vain, and the ranks
    that stay draw these again (T9). In Async mode each rank is at a step of its own, so numbers continue above the
    highest one that the fastest rank can have drawn.
    """
    old = state.worlds[-1]
    if world == state.world:
        return
    if mode == "Sync":
        offset = old.offset + (state.version - 1) * old.world + min(old.world, world) - state.version * world
    else:
        fastest = max(state.key_steps.get(rank, 0) for rank in range(old.world))
        slowest = min(state.key_steps.get(rank, 0) for rank in range(world))
        offset = old.offset + (fastest + 1) * old.world - slowest * world
    state.world = world
    state.worlds = (*state.worlds, World(version=state.version, world=world, offset=offset))
