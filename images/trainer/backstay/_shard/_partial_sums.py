"""The sums that a shard makes before an update is decided, of contributions that the next commit names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from backstay_rpc.control_pb2 import Contribution, Gather, GradientId

from .._coordination import identity
from .._transport import Engine
from .._update import BRANCHES, Tree

__all__ = ["PartialSums"]


class PartialSums:
    """The contributions to one version that a shard has added up, so that their memory is free again.

    The apply thread calls `add` and `mean`. The other methods are called under the shard's lock.
    """

    def __init__(self, engine: Engine, version: int, number: int) -> None:
        """
        Args:
            version: the update's version.
            number: `Gather.round`.
        """
        self.version, self.round = version, number
        self._engine = engine
        self._tree = Tree[Any](engine.add)
        self._names: set[tuple[int, ...]] = set()

    def __len__(self) -> int:
        return len(self._names)

    def has(self, gradient: GradientId) -> bool:
        """Returns whether a contribution is one of those."""
        return identity(gradient) in self._names

    def names(self, contributions: Iterable[Contribution]) -> None:
        """Record that the sums contain these contributions from now on."""
        self._names |= {identity(contribution.id) for contribution in contributions}

    def add(self, gather: Gather, gradients: Sequence[Sequence[Any]]) -> None:
        """Add up the contributions of a `Gather`. Their memory is free when it returns.

        Args:
            gradients: the gradients of the contributions, in the same order.
        """
        nodes = [
            self._engine.nodes(blocks, contribution.weight)
            for blocks, contribution in zip(gradients, gather.contributions, strict=True)
        ]
        self._tree.put(gather.index, self._engine.add(nodes), level=1)

    def mean(self, rest: Sequence[Contribution], gradients: Sequence[Sequence[Any]], divisor: float) -> list[Any]:
        """Returns the mean of the contributions of a commit. The sums are void afterwards.

        Args:
            rest: the contributions that are not part of the sums, in order of rank.
            gradients: the gradients of `rest`.
        """
        start = len(self._names) // BRANCHES * BRANCHES
        for index, (blocks, contribution) in enumerate(zip(gradients, rest, strict=True)):
            self._tree.put(start + index, self._engine.nodes(blocks, contribution.weight))
        mean: list[Any] = self._engine.finish(self._tree.root(), divisor)
        return mean
