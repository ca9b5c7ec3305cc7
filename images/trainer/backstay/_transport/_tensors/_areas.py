"""Places small blocks in areas, which are arrays of many blocks of one dtype, and reads leaves out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._update import GROUP, Block, LeafSpec, Partition, Piece
from ._memory import ALIGNMENT

__all__ = ["DIRECT_BYTES", "Area", "Areas", "coded_in", "direct_in", "leaf_in", "numbered", "parts_of"]

DIRECT_BYTES: Final = 64 << 10
"""A leaf with its own block of at least this many bytes is sent from its memory."""


@dataclass
class Area:
    """Packed blocks of one dtype, one after another and aligned; those of a codec to groups, so that several devices
    may have parts of the area with whole groups of each block.

    Attributes:
        coded: whether a codec may encode its blocks.
        size: the number of elements.
        starts: the element where each block starts, by shard and block.
        pieces: the element where each piece starts, in order.
    """

    dtype: np.dtype[Any]
    coded: bool
    size: int = 0
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    pieces: list[tuple[int, Piece]] = field(default_factory=list)

    def add(self, s: int, b: int, block: Block) -> None:
        """Give a block the next place."""
        step = GROUP if self.coded else max(1, ALIGNMENT // self.dtype.itemsize)
        self.starts[s, b] = self.size
        self.pieces += [(self.size + piece.offset, piece) for piece in block.pieces]
        self.size += -(-block.size // step) * step

    def packed(self, leaf_of: Callable[[int], Any], size: int) -> Any:
        """Returns the area as one array of `size` elements, zero between its blocks and behind them; to be traced.

        Args:
            leaf_of: returns a leaf of the tree.
        """
        parts, at = [], 0
        for start, piece in self.pieces:
            if start > at:
                parts.append(jnp.zeros(start - at, self.dtype))
            flat = jnp.ravel(leaf_of(piece.leaf))
            parts.append(flat if piece.size == flat.size else jax.lax.slice(flat, (piece.start,), (piece.stop,)))
            at = start + piece.size
        if at < size:
            parts.append(jnp.zeros(size - at, self.dtype))
        return jnp.concatenate(parts)


class Areas:
    """The areas of some blocks. Blocks that a codec may encode have areas apart, so that an accelerator copies no area
    that it has encoded.

    Attributes:
        every: all areas.
    """

    def __init__(self, blocks: Sequence[tuple[int, int, Block]]) -> None:
        """
        Args:
            blocks: the shard, the index and the block of each block that lies in an area.
        """
        found: dict[tuple[np.dtype[Any], bool], Area] = {}
        self._of: dict[tuple[int, int], int] = {}
        for s, b, block in blocks:
            key = np.dtype(block.dtype), bool(block.coded)
            found.setdefault(key, Area(*key)).add(s, b, block)
            self._of[s, b] = list(found).index(key)
        self.every = tuple(found.values())

    def place(self, s: int, b: int, block: Block) -> tuple[int, int, int]:
        """Returns the area of a block, its first element there, and the one after its last."""
        area = self._of[s, b]
        start = self.every[area].starts[s, b]
        return area, start, start + block.size


def numbered(partition: Partition) -> list[tuple[int, int, Block]]:
    """Returns each block of a partition, with its shard and its index there."""
    return [(s, b, block) for s, layout in enumerate(partition.shards) for b, block in enumerate(layout.blocks)]


def coded_in(blocks: Iterable[tuple[int, int, Block]]) -> set[int]:
    """Returns the leaves of which a codec may encode a part."""
    return {piece.leaf for _, _, block in blocks if block.coded for piece in block.pieces}


def direct_in(blocks: Iterable[tuple[int, int, Block]]) -> frozenset[int]:
    """Returns the leaves that are sent from their memory."""
    return frozenset(
        block.pieces[0].leaf for _, _, block in blocks if len(block.pieces) == 1 and block.nbytes >= DIRECT_BYTES
    )


Part: TypeAlias = tuple[int, int, int]
"""The area of a part of a leaf, its first element there, and the one after the last."""


def parts_of(leaves: Sequence[int], pieces: Iterable[tuple[int, int, Piece]]) -> dict[int, list[Part]]:
    """Returns the parts of some leaves, in the order of each leaf. A leaf without elements has none.

    Args:
        pieces: the area of each piece, and the element where it starts. Pieces that follow each other are one part.
    """
    result: dict[int, list[Part]] = {leaf: [] for leaf in leaves}
    for area, start, piece in sorted(pieces, key=lambda each: (each[2].leaf, each[2].start)):
        if (parts := result.get(piece.leaf)) is None:
            continue
        begin, stop = start, start + piece.size
        if parts and parts[-1][0] == area and parts[-1][2] == start:
            begin = parts.pop()[1]
        parts.append((area, begin, stop))
    return result


def leaf_in(areas: Sequence[Any], parts: Sequence[Part], spec: LeafSpec) -> Any:
    """Returns a leaf out of areas on the devices; to be traced."""
    found = [jax.lax.slice(areas[area], (start,), (stop,)) for area, start, stop in parts]
    flat = jnp.concatenate(found) if found else jnp.zeros(0, spec.dtype)
    return flat.reshape(spec.shape)
