"""How many ranks are in force, and when that changes: only by a commit, so that it is the same for everybody."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

__all__ = ["next_world"]


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
