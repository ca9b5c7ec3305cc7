"""Between JAX's arrays and what travels: which leaves travel where they lie, and which are packed.

A large leaf is sent from, and received into, one contiguous piece of memory that JAX aliases: no copy besides the
socket's. Small leaves would cost more in calls than in bytes, so they are packed by one jitted function into one array
for each dtype, the *area*, in which the blocks that hold them lie one after another; and unpacked by another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._partition import Partition, Piece
from .memory import ALIGNMENT, aligned_empty
from .seam import Bytes

__all__ = ["DIRECT_BYTES", "Arrangement", "ParamBuffers", "Slot"]

DIRECT_BYTES: Final = 64 << 10
"""A leaf with a block of its own of at least this many bytes travels where it lies."""


@dataclass(frozen=True)
class _Area:
    """The packed blocks of one dtype, one after another, each aligned: elements, and where each block starts."""

    dtype: np.dtype[Any]
    size: int
    starts: dict[tuple[int, int], int]  # (shard, block) -> element


class Arrangement:
    """How the blocks of every shard lie in leaves and areas. A function of the partition alone."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        leaves = partition.tree.leaves
        blocks = [(s, b, block) for s, layout in enumerate(partition.shards) for b, block in enumerate(layout.blocks)]
        self.direct = frozenset(
            block.pieces[0].leaf for _, _, block in blocks if len(block.pieces) == 1 and block.nbytes >= DIRECT_BYTES
        )
        # A block lies in its leaf when it is part of one direct leaf only; else in the area of its dtype.
        self._in_leaf: dict[tuple[int, int], Piece] = {}
        sizes: dict[np.dtype[Any], int] = {}
        starts: dict[np.dtype[Any], dict[tuple[int, int], int]] = {}
        self._packed: list[tuple[np.dtype[Any], int, Piece]] = []  # area, element of it, piece
        for s, b, block in blocks:
            if len(block.pieces) == 1 and block.pieces[0].leaf in self.direct:
                self._in_leaf[s, b] = block.pieces[0]
                continue
            dtype = np.dtype(block.dtype)
            step = max(1, ALIGNMENT // dtype.itemsize)
            start = sizes.get(dtype, 0)
            starts.setdefault(dtype, {})[s, b] = start
            sizes[dtype] = start + -(-block.size // step) * step
            self._packed += [(dtype, start + piece.offset, piece) for piece in block.pieces]
        self.areas = tuple(_Area(dtype, sizes[dtype], starts[dtype]) for dtype in sizes)
        self._area_of = {area.dtype: index for index, area in enumerate(self.areas)}
        self.small = tuple(leaf for leaf in range(len(leaves)) if leaf not in self.direct)
        self._pack_jit = jax.jit(self.pack)
        self._unpack_jit = jax.jit(self._unpack)

    def pack(self, leaves: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The areas, out of all leaves of a tree. May be called inside a jitted function, where it fuses.

        Args:
            leaves: one array for each leaf of the tree, of its shape and dtype.

        Returns:
            One 1-D array for each of `areas`; elements between blocks are zero.
        """
        result = []
        for area in self.areas:
            parts, at = [], 0
            for dtype, start, piece in sorted(self._packed, key=lambda p: p[1]):
                if dtype != area.dtype:
                    continue
                if start > at:
                    parts.append(jnp.zeros(start - at, area.dtype))
                flat = jnp.ravel(leaves[piece.leaf])
                parts.append(flat if piece.size == flat.size else jax.lax.slice(flat, (piece.start,), (piece.stop,)))
                at = start + piece.size
            if at < area.size:
                parts.append(jnp.zeros(area.size - at, area.dtype))
            result.append(jnp.concatenate(parts))
        return tuple(result)

    def gradient_blocks(self, leaves: Sequence[Any], areas: Sequence[Any] | None = None) -> list[list[np.ndarray]]:
        """The blocks of every shard, out of a gradient on the device; waits until it is computed.

        Args:
            leaves: one JAX array for each leaf of the tree, of its shape and dtype.
            areas: `pack(leaves)`, when that was computed already.

        Returns:
            ``[s][b]``: 1-D views (on the CPU) of the memory of `leaves` and `areas`, which they keep alive.
        """
        if areas is None:
            areas = self._pack_jit(leaves) if self.areas else ()
        host = {leaf: np.asarray(leaves[leaf]).reshape(-1) for leaf in self.direct}
        packed = [np.asarray(area) for area in areas]
        result: list[list[np.ndarray]] = []
        for s, layout in enumerate(self.partition.shards):
            views = []
            for b, block in enumerate(layout.blocks):
                if (piece := self._in_leaf.get((s, b))) is not None:
                    views.append(host[piece.leaf][piece.start : piece.stop])
                else:
                    index = self._area_of[np.dtype(block.dtype)]
                    start = self.areas[index].starts[s, b]
                    views.append(packed[index][start : start + block.size])
            result.append(views)
        return result

    def receive_views(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> list[list[Bytes]]:
        """The blocks of every shard, in bytes, in host memory of flat direct `leaves` and `areas`."""
        result: list[list[Bytes]] = []
        for s, layout in enumerate(self.partition.shards):
            views: list[Bytes] = []
            for b, block in enumerate(layout.blocks):
                if (piece := self._in_leaf.get((s, b))) is not None:
                    part = leaves[piece.leaf][piece.start : piece.stop]
                else:
                    index = self._area_of[np.dtype(block.dtype)]
                    start = self.areas[index].starts[s, b]
                    part = areas[index][start : start + block.size]
                views.append(part.view(np.uint8))
            result.append(views)
        return result

    def mend(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> None:
        """Copies the ends of direct leaves, which travel in packed blocks, from the areas to their places."""
        for dtype, start, piece in self._packed:
            if piece.leaf in self.direct:
                leaves[piece.leaf][piece.start : piece.stop] = areas[self._area_of[dtype]][start : start + piece.size]

    def unpack(self, areas: Sequence[Any]) -> dict[int, jax.Array]:
        """The small leaves, by index, out of areas on the device."""
        return dict(zip(self.small, self._unpack_jit(tuple(areas)), strict=True)) if self.small else {}

    def _unpack(self, areas: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        by_leaf: dict[int, list[tuple[int, Any]]] = {}
        for dtype, start, piece in self._packed:
            if piece.leaf not in self.direct:
                part = jax.lax.slice(areas[self._area_of[dtype]], (start,), (start + piece.size,))
                by_leaf.setdefault(piece.leaf, []).append((piece.start, part))
        result = []
        for leaf in self.small:
            spec = self.partition.tree.leaves[leaf]
            parts = [part for _, part in sorted(by_leaf.get(leaf, []), key=lambda p: p[0])]
            flat = jnp.concatenate(parts) if parts else jnp.zeros(0, spec.dtype)
            result.append(flat.reshape(spec.shape))
        return tuple(result)


class Slot:
    """Memory for one whole set of parameters: `blocks` to receive into, then `params`."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        tree = arrangement.partition.tree.leaves
        self._leaves = {leaf: aligned_empty(tree[leaf].nbytes).view(tree[leaf].dtype) for leaf in arrangement.direct}
        self._areas = [aligned_empty(area.size * area.dtype.itemsize).view(area.dtype) for area in arrangement.areas]
        self.blocks: list[list[Bytes]] = arrangement.receive_views(self._leaves, self._areas)
        self._lent: list[weakref.ref[np.ndarray]] = []

    @property
    def in_use(self) -> bool:
        """Some array of JAX still uses this memory."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        return bool(self._lent)

    def params(self, device: Any = None) -> list[jax.Array]:
        """The leaves of the tree, in order, on the device: large ones alias this memory where the device can.

        Args:
            device: a `jax.Device` or `jax.sharding.Sharding`; None is JAX's default.
        """
        arrangement = self._arrangement
        arrangement.mend(self._leaves, self._areas)
        tree = arrangement.partition.tree.leaves
        owners = [_owner(self._leaves[leaf]) for leaf in sorted(arrangement.direct)]
        owners += [_owner(area) for area in self._areas]
        self._lent = [weakref.ref(owner) for owner in owners]
        shapes = [tree[leaf].shape for leaf in sorted(arrangement.direct)] + [area.shape for area in self._areas]
        sources = [owner.reshape(shape) for owner, shape in zip(owners, shapes, strict=True)]
        placed = jax.device_put(sources, device, may_alias=True)
        large = dict(zip(sorted(arrangement.direct), placed, strict=False))
        small = arrangement.unpack(placed[len(large) :])
        return [large[leaf] if leaf in large else small[leaf] for leaf in range(len(tree))]


def _owner(memory: np.ndarray) -> np.ndarray:
    """An array of the same memory that lives as long as any view of it: JAX keeps one while it uses the memory.

    A view of a view refers to the owner of the memory, and the views between them die. An array made from something
    that is no array counts as an owner, so every loan has one of its own.
    """
    return np.frombuffer(memory.view(np.uint8).data, memory.dtype)


class ParamBuffers:
    """Slots, taken in turn; memory that a JAX array still uses is never taken, whoever holds that array."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

    def take(self) -> Slot:
        """A slot whose memory no JAX array uses. Usually there are two: one that the computation reads, one to receive
        into. Whoever takes a slot calls its `params` before another is taken, or gives it up."""
        with self._lock:
            for slot in self._slots:
                if not slot.in_use:
                    return slot
            slot = Slot(self._arrangement)
            self._slots.append(slot)
            return slot
