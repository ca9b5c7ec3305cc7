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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
from ._areas import Areas, coded_in, direct_in, leaf_in, numbered, parts_of
from ._memory import aligned_empty

__all__ = ["Arrangement", "BufferSlot", "ParamBuffers"]


class Arrangement:
    """How the blocks of every shard lie in leaves and areas. A function of the partition alone."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        leaves = partition.tree.leaves
        blocks = numbered(partition)
        self.direct = direct_in(blocks)
        coded = coded_in(blocks)
        # A block lies in its leaf when it is part of one direct leaf only; else in an area. So does the tail of a coded
        # leaf, because an accelerator copies no array that it has encoded.
        self._in_leaf: dict[tuple[int, int], Piece] = {
            (s, b): block.pieces[0]
            for s, b, block in blocks
            if len(block.pieces) == 1 and (leaf := block.pieces[0].leaf) in self.direct
            if block.coded or leaf not in coded
        }
        self._areas = Areas([each for each in blocks if each[:2] not in self._in_leaf])
        self.areas = self._areas.every
        self.small = tuple(leaf for leaf in range(len(leaves)) if leaf not in self.direct)
        pieces = [(index, *each) for index, area in enumerate(self.areas) for each in area.pieces]
        self._parts_of = parts_of(self.small, pieces)
        self._unpack_jit = jax.jit(self._unpack)
        self._settle_jit = jax.jit(self._settle, donate_argnums=1, keep_unused=True)

    def packed_shardings(self, model: Sequence[Any], everywhere: Any) -> list[Any]:
        """Returns the sharding of each array that `pack` returns.

        Args:
            model: the sharding of each leaf of the tree.
            everywhere: the sharding of an area.
        """
        return [model[leaf] for leaf in sorted(self.direct)] + [everywhere] * len(self.areas)

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arrays to send, out of all leaves of a tree. To be traced, in the jitted function that computes
        them.

        Args:
            leaves: one array for each leaf of the tree, with the leaf's shape and dtype.

        Returns:
            The direct leaves as they are, by index; then a 1-D array for each of `areas`, zero between its blocks.
        """
        # A barrier: leaves are compiled as if nothing were packed, so that their bits do not depend on the partition.
        packed = sorted({piece.leaf for area in self.areas for _, piece in area.pieces})
        barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
        apart = dict(zip(packed, barrier([leaves[leaf] for leaf in packed]), strict=True))
        areas = [area.packed(apart.__getitem__, area.size) for area in self.areas]
        return [*(leaves[leaf] for leaf in sorted(self.direct)), *areas]

    def gradient_blocks(self, packed_leaves: Sequence[jax.Array]) -> list[Sequence[np.ndarray | DeviceBlock]]:
        """Returns the blocks of every shard, out of a gradient on the device.

        Args:
            packed_leaves: the result of `pack` for the gradient, on one device or on several of the CPU.

        Returns:
            ``[s][b]``, which keep alive what they need of `packed_leaves`. On the CPU, 1-D views of that memory, of
            which reading one waits until it is computed. Arrays that several devices divide are first joined.
        """
        if any(len(array.devices()) > 1 for array in packed_leaves):
            packed_leaves = [each.addressable_data(0) if each.is_fully_replicated else each for each in packed_leaves]
        there = [] if all(map(_on_host, packed_leaves)) else [DeviceArray(array) for array in packed_leaves]
        place = {leaf: index for index, leaf in enumerate(sorted(self.direct))}
        result: list[Sequence[np.ndarray | DeviceBlock]] = []
        for s, layout in enumerate(self.partition.shards):
            spans: list[tuple[int, int, int]] = []
            for b, block in enumerate(layout.blocks):
                if (piece := self._in_leaf.get((s, b))) is not None:
                    spans.append((place[piece.leaf], piece.start, piece.stop))
                else:
                    area, start, stop = self._areas.place(s, b, block)
                    spans.append((len(place) + area, start, stop))
            if there:
                result.append([DeviceBlock((there[array], start, stop)) for array, start, stop in spans])
            else:
                result.append(_HostBlocks(packed_leaves, spans))
        return result

    def receive_views(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> list[list[Bytes]]:
        """Returns the blocks of every shard, in bytes, in host memory of flat direct `leaves` and `areas`."""
        result: list[list[Bytes]] = []
        for s, layout in enumerate(self.partition.shards):
            views: list[Bytes] = []
            for b, block in enumerate(layout.blocks):
                if (piece := self._in_leaf.get((s, b))) is not None:
                    part = leaves[piece.leaf][piece.start : piece.stop]
                else:
                    area, start, stop = self._areas.place(s, b, block)
                    part = areas[area][start:stop]
                views.append(part.view(np.uint8))
            result.append(views)
        return result

    def fill_edges(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> None:
        """Copies the ends of direct leaves, which are sent in packed blocks, from the areas to their places."""
        for values, area in zip(areas, self.areas, strict=True):
            for start, piece in area.pieces:
                if piece.leaf in self.direct:
                    leaves[piece.leaf][piece.start : piece.stop] = values[start : start + piece.size]

    def read(self, leaves: dict[int, np.ndarray], areas: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns all leaves of the tree, from flat direct `leaves` and `areas`: views, except the few small leaves
        that are cut over blocks, which are copied."""
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
        """Returns the small leaves, by index, out of areas on the device."""
        return dict(zip(self.small, self._unpack_jit(tuple(areas)), strict=True)) if self.small else {}

    def settle(self, placed: Sequence[Any], replacing: Sequence[Any]) -> list[jax.Array]:
        """Returns all leaves of the tree, out of the direct leaves and the areas on a device. Their memory is that of
        earlier leaves, which are donated."""
        return list(self._settle_jit(tuple(placed), tuple(replacing)))

    def _settle(self, placed: tuple[Any, ...], replacing: tuple[Any, ...]) -> list[Any]:
        del replacing
        large = dict(zip(sorted(self.direct), map(jnp.copy, placed), strict=False))
        small = dict(zip(self.small, self._unpack(placed[len(large) :]), strict=True))
        return [large[leaf] if leaf in large else small[leaf] for leaf in range(len(self.partition.tree.leaves))]

    def _unpack(self, areas: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        tree = self.partition.tree.leaves
        return tuple(leaf_in(areas, self._parts_of[leaf], tree[leaf]) for leaf in self.small)


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


class ParamSlot(Protocol):
    """Memory for one set of parameters, with `blocks` to receive into."""

    @property
    def blocks(self) -> list[list[Bytes]]:
        """``[s][b]`` is the memory of block `b` of shard `s`."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether an array that was handed out, or an array of JAX that aliases one, still uses this memory."""
        ...

    def host(self) -> list[np.ndarray]:
        """Returns the leaves of the tree, in order, in this memory."""
        ...

    def params(self, replacing: Sequence[Any] = ()) -> list[jax.Array]:
        """Returns the leaves of the tree, in order, on the devices.

        Args:
            replacing: an earlier result that nothing uses any more, whose memory the leaves may take.
        """
        ...


class BufferSlot:
    """Memory for one whole set of parameters, with `blocks` to receive into, then `host` or `params`."""

    def __init__(self, arrangement: Arrangement, device: Any = None) -> None:
        """
        Args:
            device: the accelerator that `params` is for; None: its memory is that of the host.
        """
        self._arrangement, self._device = arrangement, device
        tree = arrangement.partition.tree.leaves
        direct = sorted(arrangement.direct)
        shapes = [(tree[leaf].shape, tree[leaf].dtype) for leaf in direct]
        shapes += [((area.size,), area.dtype) for area in arrangement.areas]
        # Arrays of JAX in the same memory, or nothing.
        self._pinned = [] if device is None else pinned_memory([(*shape, device) for shape in shapes])
        memory = [view for _, view in self._pinned] or [
            aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype) for shape, dtype in shapes
        ]
        self._leaves = dict(zip(direct, memory, strict=False))
        self._areas = memory[len(direct) :]
        self.blocks: list[list[Bytes]] = arrangement.receive_views(self._leaves, self._areas)
        self._lent: list[weakref.ref[np.ndarray]] = []

    @property
    def in_use(self) -> bool:
        """Whether an array that was handed out, or an array of JAX that aliases one, still uses this memory."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        return bool(self._lent)

    def host(self) -> list[np.ndarray]:
        """Returns the leaves of the tree, in order, in this memory. A function that is jitted for one CPU uses aligned
        arguments without a copy. A thousand of them cost a millisecond or two."""
        leaves, areas = self._lend()
        return self._arrangement.read(leaves, areas)

    def params(self, replacing: Sequence[Any] = ()) -> list[jax.Array]:
        """Returns the leaves of the tree, in order, on the device: large ones alias this memory where the device can.
        The small ones are unpacked there by a function that takes long to compile if they are many.

        From pinned memory they are copied before this returns, so the memory is free then.

        Args:
            replacing: an earlier result that nothing uses any more, whose memory on an accelerator the leaves take.
                Otherwise they would lie anywhere, and could divide the memory that a step needs in one piece.
        """
        arrangement = self._arrangement
        tree = arrangement.partition.tree.leaves
        if self._pinned:
            arrangement.fill_edges(self._leaves, self._areas)
            placed = placed_from([array for array, _ in self._pinned], [self._device] * len(self._pinned))
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
        leaves = {leaf: owner_of(memory) for leaf, memory in self._leaves.items()}
        areas = [owner_of(area) for area in self._areas]
        self._lent = [weakref.ref(owner) for owner in (*leaves.values(), *areas)]
        return leaves, areas


def owner_of(memory: np.ndarray) -> np.ndarray:
    """Returns an array of the same memory that lives as long as any view of it, because JAX keeps one while it uses the
    memory.

    A view of a view refers to the owner of the memory, and the views between them are freed. An array made from an
    object of another type counts as an owner, so every loan has its own owner.
    """
    return np.frombuffer(memory.view(np.uint8).data, memory.dtype)


class ParamBuffers:
    """Slots, taken in turn; memory that any array still uses is never taken."""

    def __init__(self, make: Callable[[], ParamSlot], *, pinned: bool = False) -> None:
        """
        Args:
            make: returns a new slot.
            pinned: whether `ParamSlot.params` makes use of `replacing`.
        """
        self._make = make
        self.pinned = pinned
        self._slots: list[ParamSlot] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, arrangement: Arrangement, device: Any = None) -> ParamBuffers:
        """Returns memory for whole sets of parameters. `device`: see `BufferSlot`."""
        own = None if device is None or shares_host_memory(device) else device
        return cls(lambda: BufferSlot(arrangement, own), pinned=own is not None)

    def take(self) -> ParamSlot:
        """Returns a slot whose memory is unused. Usually there are two: one that the computation reads, one to receive
        into.

        The caller uses `host` or `params` of the slot before another slot is taken, or gives it up.
        """
        with self._lock:
            for slot in self._slots:
                if not slot.in_use:
                    return slot
            slot = self._make()
            self._slots.append(slot)
            return slot
