"""Host memory that JAX can use without copying it, and that is used again.

New memory costs a page fault for each 4 KiB, about as much as the copy into it. So buffers are aligned, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..._update import ALIGNMENT, aligned_empty
from .._streams._interfaces import Bytes

if TYPE_CHECKING:
    from ..._update import BlockWire

__all__ = ["ALIGNMENT", "BufferPool", "aligned_empty", "layout_offsets"]


def layout_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of parts of `sizes` bytes, one after another and each aligned, and the total length."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


class Staging:
    """Memory for one contribution to one shard.

    Attributes:
        blocks: uint8, of each block what travels.
        arrays: the same memory as the engine takes it: 1-D arrays of the blocks' dtypes, `Encoded`, or None.
    """

    # Only a taken staging refers to its pool, so there is no reference cycle. Memory that the pool does not keep is
    # then free immediately, before the collector of cycles runs.
    __slots__ = ("_pool", "arrays", "blocks")

    def __init__(self, wires: Sequence[BlockWire]) -> None:
        self._pool: BufferPool | None = None
        sizes = [wire.nbytes for wire in wires]
        offsets, total = layout_offsets(sizes)
        memory = aligned_empty(total)
        self.blocks: list[Bytes] = [memory[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
        self.arrays: list[Any] = [wire.views(block) for wire, block in zip(wires, self.blocks, strict=True)]

    def give(self) -> None:
        """Return the memory to its pool."""
        if self._pool is not None:
            self._pool.give(self)


class BufferPool:
    """Stagings of one shape, taken and given back. Thread-safe."""

    def __init__(self, wires: Sequence[BlockWire], *, keep: int = 64) -> None:
        """
        Args:
            wires: how each block travels.
            keep: the most unused buffers that are kept; more are returned to the system.
        """
        self._wires = tuple(wires)
        self._keep = keep
        self._free: list[Staging] = []
        self._lock = threading.Lock()

    def take(self) -> Staging:
        """Returns memory with undefined content, the most recently used first."""
        with self._lock:
            staging = self._free.pop() if self._free else None
        if staging is None:
            staging = Staging(self._wires)
        staging._pool = self
        return staging

    def give(self, staging: Staging) -> None:
        """Return memory that is not used any more."""
        staging._pool = None
        with self._lock:
            if len(self._free) < self._keep:
                self._free.append(staging)
