"""A `Selection` names the part of the parameters that travels, in memory and in answers. Pure.

The blocks of one member of a rank follow from the address of a contribution (`ShardWire.pushed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["ALL", "ALL_AVERAGED", "ALL_EXACT", "Selection", "Values"]

Values: TypeAlias = Literal["encoded", "exact", "average"]
"""The parameters as ``wire.parameters`` encodes them, or in full precision, or their moving average in full precision.
Only the last version has an average."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Names the blocks that travel in one exchange, and which values they have, for every shard (decision 0080).

    Equal selections are one key: frames and memory that belong to a selection are found by it.

    Attributes:
        fragments: the fragments (`Block.fragment`) whose blocks travel; None: all blocks. A block without a fragment,
            such as model state, belongs to every selection.
        values: the values that the server sends.
    """

    fragments: frozenset[int] | None = None
    values: Values = "encoded"

    @classmethod
    def of(cls, key_steps: Iterable[int], count: int) -> Selection:
        """Returns what contributions exchange.

        Args:
            key_steps: the numbers of the contributions (`GradientId.key_step`).
            count: the number of fragments of the model.
        """
        if count == 1:
            return ALL
        fragments = frozenset(step % count for step in key_steps)
        return ALL if len(fragments) == count else cls(fragments)

    @property
    def whole(self) -> bool:
        """Whether all blocks travel."""
        return self.fragments is None

    def has(self, fragment: int | None) -> bool:
        """Returns whether blocks and leaves of `fragment` travel."""
        return fragment is None or self.fragments is None or fragment in self.fragments


ALL: Final = Selection()
ALL_EXACT: Final = Selection(values="exact")
ALL_AVERAGED: Final = Selection(values="average")
"""These three have every block of every shard."""
