"""A sequence of blocks, each of which is made when it is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

__all__ = ["LazyBlocks"]

_T = TypeVar("_T")


class LazyBlocks(Sequence[_T]):
    """The blocks for one shard. A subclass has `block`, which is called each time that a block is read."""

    def __init__(self, count: int) -> None:
        self._count = count

    @abstractmethod
    def block(self, index: int) -> _T:
        """Make one block; any thread."""

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        every = range(self._count)
        return [self.block(i) for i in every[index]] if isinstance(index, slice) else self.block(every[index])
