"""The order in which many values are added: a fixed tree. Its result does not depend on the order of arrival. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

__all__ = ["BRANCHES", "Tree"]

T = TypeVar("T")

BRANCHES: Final = 4
"""The number of neighbours that become one node of the next level. Larger numbers read memory less often."""


class Tree(Generic[T]):
    """Adds `BRANCHES` neighbours as soon as all of them have arrived, at every level.

    Of n values it holds at most three at each of its log4(n) levels where they arrive in order.
    """

    def __init__(self, add: Callable[[Sequence[T]], T]) -> None:
        """`add` adds 2 to `BRANCHES` neighbours, in order."""
        self._add = add
        self._nodes: dict[tuple[int, int], T] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, index: int, value: T, level: int = 0) -> None:
        """Put a value at its place.

        Args:
            index: among the nodes of its level.
            level: 0 for a single value; 1 for the sum of `BRANCHES` of them.
        """
        self._nodes[level, index] = value
        start = index - index % BRANCHES
        places = [(level, start + offset) for offset in range(BRANCHES)]
        if all(place in self._nodes for place in places):
            self.put(index // BRANCHES, self._add([self._nodes.pop(place) for place in places]), level + 1)

    def root(self) -> T:
        """Returns the sum of all values, which must be at the places 0 .. n-1. The tree is empty afterwards.

        At each level, the last nodes are added although they are fewer than `BRANCHES`.
        """
        carried: list[T] = []
        for level in range(1 + max(level for level, _ in self._nodes)):
            places = sorted(place for place in self._nodes if place[0] == level)
            carried = [*(self._nodes.pop(place) for place in places), *carried]
            if len(carried) > 1:
                carried = [self._add(carried)]
        return carried[0]
