"""Arranges JAX's arrays for the wire, where large leaves are sent from their own memory and small ones are packed.

A large leaf is sent from, and received into, one contiguous piece of memory that JAX aliases. So no copy besides the
socket's is made. Small leaves would cost more in calls than in bytes. So the jitted gradient packs them into one array
or two for each dtype, the *areas*, in which their blocks lie one after another. On the way back they are read inside
the area. So neither the compiled program nor the number of frames grows with the number of leaves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..._update import (
    DeviceArray,
    DeviceBlock,
    LazyBlocks,
    Partition,
    Piece,
    pinned_memory,
    placed_from,
    shares_host_memory,
)
from .._streams._interfaces import Bytes
from ._memory import ALIGNMENT, aligned_empty

__all__ = ["DIRECT_BYTES", "Arrangement", "BufferSlot", "ParamBuffers"]

DIRECT_BYTES: Final = 64 << 10
"""A leaf with its own block of at least this many bytes is sent from its memory."""


@dataclass(frozen=True)
class _Area:
    """Packed blocks of one dtype, one after another and aligned, with the place where each block starts."""

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
        # A block lies in its leaf when it is part of one direct leaf only; else in an area. Blocks that a codec may
        # encode have areas apart, so that an accelerator copies no area that it has encoded.
        self._in_leaf: dict[tuple[int, int], Piece] = {}
        self._area_of: dict[tuple[int, int], int] = {}  # (shard, block) -> area
        areas: dict[tuple[np.dtype[Any], bool], int] = {}
        sizes: list[int] = []
        starts: list[dict[tuple[int, int], int]] = []
        self._packed: list[tuple[int, int, Piece]] = []  # area, element of it, piece
        for s, b, block in blocks:
            if len(block.pieces) == 1 and block.pieces[0].leaf in self.direct:
                self._in_leaf[s, b] = block.pieces[0]
                continue
            dtype = np.dtype(block.dtype)
            step = max(1, ALIGNMENT // dtype.itemsize)
            if (key := (dtype, bool(block.coded))) not in areas:
                areas[key] = len(sizes)
                sizes.append(0)
                starts.append({})
            self._area_of[s, b] = area = areas[key]
            starts[area][s, b] = start = sizes[area]
            sizes[area] = start + -(-block.size // step) * step
            self._packed += [(area, start + piece.offset, piece) for piece in block.pieces]
        self.areas = tuple(_Area(dtype, sizes[area], starts[area]) for (dtype, _), area in areas.items())
        self.small = tuple(leaf for leaf in range(len(leaves)) if leaf not in self.direct)
        self._parts_of: dict[int, list[tuple[int, int, int]]] = {leaf: [] for leaf in self.small}  # area, start, stop
        for index, start, piece in sorted(self._packed, key=lambda part: (part[2].leaf, part[2].start)):
            if piece.leaf not in self.direct:
                self._parts_of[piece.leaf].append((index, start, start + piece.size))
        self._unpack_jit = jax.jit(self._unpack)
        self._settle_jit = jax.jit(self._settle, donate_argnums=1, keep_unused=True)

    @property
    def places(self) -> list[int | None]:
        """For each array that `pack` returns, the leaf that it is; None: an area."""
        return [*sorted(self.direct), *[None] * len(self.areas)]

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """The arrays to send, out of all leaves of a tree. To be traced, in the jitted function that computes them.

        Args:
            leaves: one array for each leaf of the tree, with the leaf's shape and dtype.

        Returns:
            The direct leaves as they are, by index; then a 1-D array for each of `areas`, zero between its blocks.
        """
        # A barrier: leaves are compiled as if nothing were packed, so that their bits do not depend on the partition.
        packed = sorted({piece.leaf for _, _, piece in self._packed})
        barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
        apart = dict(zip(packed, barrier([leaves[leaf] for leaf in packed]), strict=True))
        result = [leaves[leaf] for leaf in sorted(self.direct)]
        for number, area in enumerate(self.areas):
            parts, at = [], 0
            for index, start, piece in sorted(self._packed, key=lambda p: p[1]):
                if index != number:
                    continue
                if start > at:
                    parts.append(jnp.zeros(start - at, area.dtype))
                flat = jnp.ravel(apart[piece.leaf])
                parts.append(flat if piece.size == flat.size else jax.lax.slice(flat, (piece.start,), (piece.stop,)))
                at = start + piece.size
            if at < area.size:
                parts.append(jnp.zeros(area.size - at, area.dtype))
            result.append(jnp.concatenate(parts))
        return result

    def gradient_blocks(self, packed_leaves: Sequence[jax.Array]) -> list[Sequence[np.ndarray | DeviceBlock]]:
        """The blocks of every shard, out of a gradient on the device.

        Args:
            packed_leaves: the result of `pack` for the gradient, on one device, or divided over several.

        Returns:
            ``[s][b]``, which keep `packed_leaves` alive. On the CPU, 1-D views of the memory of `packed_leaves`, of
            which reading one waits until it is computed. An array on several devices is first copied to the host.
        """
        apart = any(len(array.devices()) > 1 for array in packed_leaves)  # the host puts them together
        there = [] if apart or all(map(_on_host, packed_leaves)) else [DeviceArray(array) for array in packed_leaves]
        place = {leaf: index for index, leaf in enumerate(sorted(self.direct))}
        result: list[Sequence[np.ndarray | DeviceBlock]] = []
        for s, layout in enumerate(self.partition.shards):
            spans: list[tuple[int, int, int]] = []
            for b, block in enumerate(layout.blocks):
                if (piece := self._in_leaf.get((s, b))) is not None:
                    spans.append((place[piece.leaf], piece.start, piece.stop))
                else:
                    index = self._area_of[s, b]
                    start = self.areas[index].starts[s, b]
                    spans.append((len(place) + index, start, start + block.size))
            if there:
                result.append([DeviceBlock(there[array], start, stop) for array, start, stop in spans])
            else:
                result.append(_HostBlocks(packed_leaves, spans))
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
                    index = self._area_of[s, b]
                    start = self.areas[index].starts[s, b]
                    part = areas[index][start : start + block.size]
                views.append(part.view(np.uint8))
            result.append(views)
        return result

    def fill_edges(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> None:
        """Copies the ends of direct leaves, which are sent in packed blocks, from the areas to their places."""
        for area, start, piece in self._packed:
            if piece.leaf in self.direct:
                leaves[piece.leaf][piece.start : piece.stop] = areas[area][start : start + piece.size]

    def read(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All leaves of the tree, from flat direct `leaves` and `areas`: views, except the few small leaves that
        are cut over blocks, which are copied."""
        result: list[np.ndarray] = []
        for leaf, spec in enumerate(self.partition.tree.leaves):
            if leaf in self.direct:
                flat = leaves[leaf]
            else:
                parts = [areas[area][start:stop] for area, start, stop in self._parts_of[leaf]]
                flat = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, spec.dtype), *parts])
            result.append(flat.reshape(spec.shape))
        return result

    def unpack(self, areas: Sequence[Any]) -> dict[int, jax.Array]:
        """The small leaves, by index, out of areas on the device."""
        return dict(zip(self.small, self._unpack_jit(tuple(areas)), strict=True)) if self.small else {}

    def settle(self, placed: Sequence[Any], replacing: Sequence[Any]) -> list[jax.Array]:
        """All leaves of the tree, out of the direct leaves and the areas on a device, in the memory of earlier leaves,
        which are donated."""
        return list(self._settle_jit(tuple(placed), tuple(replacing)))

    def _settle(self, placed: tuple[Any, ...], replacing: tuple[Any, ...]) -> list[Any]:
        del replacing
        large = dict(zip(sorted(self.direct), map(jnp.copy, placed), strict=False))
        small = dict(zip(self.small, self._unpack(placed[len(large) :]), strict=True))
        return [large[leaf] if leaf in large else small[leaf] for leaf in range(len(self.partition.tree.leaves))]

    def _unpack(self, areas: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        result = []
        for leaf in self.small:
            spec = self.partition.tree.leaves[leaf]
            parts = [jax.lax.slice(areas[area], (start,), (stop,)) for area, start, stop in self._parts_of[leaf]]
            flat = jnp.concatenate(parts) if parts else jnp.zeros(0, spec.dtype)
            result.append(flat.reshape(spec.shape))
        return tuple(result)


def _on_host(array: jax.Array) -> bool:
    return all(shares_host_memory(device) for device in array.devices())


class _HostBlocks(LazyBlocks[np.ndarray]):
    """Blocks of arrays of JAX in the memory of the host; each is a view, once it is read."""

    def __init__(self, arrays: Sequence[jax.Array], spans: Sequence[tuple[int, int, int]]) -> None:
        """`spans` name the array of each block, its first element and the one after its last."""
        super().__init__(len(spans))
        self._arrays, self._spans = arrays, spans

    def block(self, index: int) -> np.ndarray:
        array, start, stop = self._spans[index]
        return np.asarray(self._arrays[array]).reshape(-1)[start:stop]


class BufferSlot:
    """Memory for one whole set of parameters, with `blocks` to receive into, then `host` or `params`."""

    def __init__(self, arrangement: Arrangement, device: Any = None) -> None:
        """
        Args:
            device: the accelerator that `params` is for; None: its memory is that of the host.
        """
        self._arrangement, self._device = arrangement, device
        tree = arrangement.partition.tree.leaves
        self._pinned: list[Any] = []  # arrays of JAX in the same memory: the direct leaves in order, then the areas
        self._leaves = {leaf: self._memory(tree[leaf].shape, tree[leaf].dtype) for leaf in sorted(arrangement.direct)}
        self._areas = [self._memory((area.size,), area.dtype) for area in arrangement.areas]
        self.blocks: list[list[Bytes]] = arrangement.receive_views(self._leaves, self._areas)
        self._lent: list[weakref.ref[np.ndarray]] = []

    def _memory(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        made = None if self._device is None else pinned_memory(shape, dtype, self._device)
        if made is not None:
            self._pinned.append(made[0])
            return made[1]
        return aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype)

    @property
    def in_use(self) -> bool:
        """Whether an array that was handed out, or an array of JAX that aliases one, still uses this memory."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        return bool(self._lent)

    def host(self) -> list[np.ndarray]:
        """The leaves of the tree, in order, in this memory. A function that is jitted for one CPU uses aligned
        arguments without a copy. A thousand of them cost a millisecond or two."""
        leaves, areas = self._lend()
        return self._arrangement.read(leaves, areas)

    def params(self, replacing: Sequence[Any] = ()) -> list[jax.Array]:
        """The leaves of the tree, in order, on the device: large ones alias this memory where the device can. The small
        ones are unpacked there by a function that takes long to compile if they are many.

        From pinned memory they are copied before this returns, so the memory is free then.

        Args:
            replacing: an earlier result that nothing uses any more, whose memory on an accelerator the leaves take.
                Otherwise they would lie anywhere, and could divide the memory that a step needs in one piece.
        """
        arrangement = self._arrangement
        tree = arrangement.partition.tree.leaves
        if self._pinned:
            arrangement.fill_edges(self._leaves, self._areas)
            placed = placed_from(self._pinned, self._device)
            if replacing and not any(leaf.is_deleted() for leaf in replacing):
                return arrangement.settle(placed, replacing)
        else:
            leaves, areas = self._lend()
            sources = [*(leaves[leaf].reshape(tree[leaf].shape) for leaf in sorted(leaves)), *areas]
            placed = jax.device_put(sources, self._device, may_alias=True)
        large = dict(zip(sorted(arrangement.direct), placed, strict=False))
        small = arrangement.unpack(placed[len(large) :])
        return [large[leaf] if leaf in large else small[leaf] for leaf in range(len(tree))]

    def _lend(self) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
        self._arrangement.fill_edges(self._leaves, self._areas)
        leaves = {leaf: _owner(memory) for leaf, memory in self._leaves.items()}
        areas = [_owner(area) for area in self._areas]
        self._lent = [weakref.ref(owner) for owner in (*leaves.values(), *areas)]
        return leaves, areas


def _owner(memory: np.ndarray) -> np.ndarray:
    """An array of the same memory that lives as long as any view of it, because JAX keeps one while it uses the memory.

    A view of a view refers to the owner of the memory, and the views between them are freed. An array made from an
    object of another type counts as an owner, so every loan has its own owner.
    """
    return np.frombuffer(memory.view(np.uint8).data, memory.dtype)


class ParamBuffers:
    """Slots, taken in turn; memory that any array still uses is never taken."""

    def __init__(self, arrangement: Arrangement, device: Any = None) -> None:
        """
        Args:
            device: see `BufferSlot`.
        """
        self._arrangement = arrangement
        self._device = None if device is None or shares_host_memory(device) else device
        self.pinned = self._device is not None  # whether `BufferSlot.params` makes use of `replacing`
        self._slots: list[BufferSlot] = []
        self._lock = threading.Lock()

    def take(self) -> BufferSlot:
        """A slot whose memory is unused. Usually there are two: one that the computation reads, one to receive into.

        The caller uses `host` or `params` of the slot before another slot is taken, or gives it up.
        """
        with self._lock:
            for slot in self._slots:
                if not slot.in_use:
                    return slot
            slot = BufferSlot(self._arrangement, self._device)
            self._slots.append(slot)
            return slot
