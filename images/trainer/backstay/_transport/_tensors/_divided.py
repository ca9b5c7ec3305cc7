"""Arranges a model that several accelerators hold, of one pod or of the pods of a rank. Each sends and receives a part.

The jitted function that computes a contribution ends with `DividedArrangement.pack`. It makes flat arrays of *rows*,
one for each member of a rank. The rows of a leaf that the members divide (`Partition.divided`) are their ranges of it,
with any sharding of the script. A member alone has all of its large leaves. The rows of an area are the small blocks
of each member, one after another. The devices of a member divide its row, so that it can send and receive without the
others, on the links of all of them. The servers get the number of members, and neither the mesh nor a sharding.

On the way back, each device gets its part of the rows, and a second jitted function makes the leaves of them. XLA's
collectives do both, between the devices of the rank. A process never has more than its rows in the memory of its host.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..._update import (
    GROUP,
    Block,
    DeviceArray,
    DeviceBlock,
    LazyBlocks,
    Partition,
    Piece,
    pinned_memory,
    placed_from,
    range_length,
    shares_host_memory,
)
from ...errors import ConfigurationError
from .._streams._interfaces import Bytes
from ._areas import Areas, coded_in, direct_in, leaf_in, numbered, parts_of
from ._buffers import owner_of
from ._memory import aligned_empty

__all__ = ["DividedArrangement", "DividedSlot"]


@dataclass(frozen=True)
class _Rows:
    """A flat array with a row for each member.

    Attributes:
        length: the elements of a row that are used.
        padded: all elements of a row, which the devices of a member divide.
        coded: whether a codec may encode blocks of it. Then each device has whole groups.
    """

    dtype: np.dtype[Any]
    length: int
    padded: int
    coded: bool


class DividedArrangement:
    """How the blocks of every shard lie in the rows of one member of a rank."""

    def __init__(self, partition: Partition, shardings: Sequence[NamedSharding], member: int) -> None:
        """
        Args:
            partition: made with the number of members.
            shardings: the sharding of each leaf of the tree, all on one mesh of the devices of all members.
            member: the index of this process.

        Raises:
            ConfigurationError: the mesh does not have the devices in the order of the members.
        """
        self.partition, self.member = partition, member
        mesh = shardings[0].mesh
        self.devices = _devices_of(mesh, partition.members, member)
        self._on_host = all(map(shares_host_memory, self.devices))
        spec: Any = jax.sharding.PartitionSpec  # which JAX leaves untyped
        self._by_row = NamedSharding(mesh, spec(tuple(mesh.axis_names)))
        leaves, members = partition.tree.leaves, range(partition.members)
        blocks = numbered(partition)
        coded = coded_in(blocks)
        own_rows = partition.divided if partition.members > 1 else direct_in(blocks)
        self._divided = {leaf: index for index, leaf in enumerate(sorted(own_rows))}
        # The tail of a coded leaf lies in an area, because an accelerator copies no array that it has encoded.
        self._in_rows = {
            (s, b)
            for s, b, block in blocks
            if all(piece.leaf in own_rows and (block.coded or piece.leaf not in coded) for piece in block.pieces)
        }
        rows = [
            self._rows(leaves[leaf].dtype, range_length(leaves[leaf].size, len(members)), leaf in coded)
            for leaf in self._divided
        ]
        dealt = [each for each in blocks if each[:2] not in self._in_rows]
        self._areas = [Areas([each for each in dealt if each[2].member == own]) for own in members]
        kinds = list(dict.fromkeys((area.dtype, area.coded) for areas in self._areas for area in areas.every))
        self._index = {kind: len(rows) + place for place, kind in enumerate(kinds)}  # the array of each kind of area
        for kind in kinds:
            sizes = [area.size for areas in self._areas for area in areas.every if (area.dtype, area.coded) == kind]
            rows.append(self._rows(kind[0], max(sizes), kind[1]))
        self._arrays = tuple(rows)
        pieces = [
            (self._divided[piece.leaf], piece.start, piece)
            for s, b, block in blocks
            if (s, b) in self._in_rows
            for piece in block.pieces
        ]
        for own, areas in enumerate(self._areas):
            for area in areas.every:
                index = self._index[area.dtype, area.coded]
                first = own * rows[index].padded
                pieces += [(index, first + start, piece) for start, piece in area.pieces]
        self._parts_of = parts_of(range(len(leaves)), pieces)
        self._unpack_jit = jax.jit(self._unpack, out_shardings=list(shardings))

    def _rows(self, dtype: np.dtype[Any], length: int, coded: bool) -> _Rows:
        step = len(self.devices) * (GROUP if coded else 1)
        return _Rows(np.dtype(dtype), length, -(-length // step) * step, coded)

    # ---- To the servers ----

    def packed_shardings(self, model: Sequence[Any] = (), everywhere: Any = None) -> list[NamedSharding]:
        """Returns the sharding of each array that `pack` returns. It does not depend on the sharding of the script."""
        del model, everywhere
        return [self._by_row] * len(self._arrays)

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arrays to send, out of all leaves of a tree. To be traced, in the jitted function that computes
        them.

        Args:
            leaves: one array for each leaf of the tree, with the leaf's shape and dtype.

        Returns:
            Flat arrays: the divided leaves by index, then the areas.
        """
        barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
        constrained: Any = jax.lax.with_sharding_constraint
        apart = barrier(list(leaves))
        members, result = self.partition.members, []
        for leaf, rows in zip(self._divided, self._arrays, strict=False):
            flat = jnp.ravel(apart[leaf])
            table = jnp.pad(flat, (0, members * rows.length - flat.size)).reshape(members, rows.length)
            result.append(jnp.pad(table, ((0, 0), (0, rows.padded - rows.length))).reshape(-1))
        for kind, index in self._index.items():
            rows = self._arrays[index]
            own = [[area for area in areas.every if (area.dtype, area.coded) == kind] for areas in self._areas]
            zeros = jnp.zeros(rows.padded, rows.dtype)
            parts = [area[0].packed(apart.__getitem__, rows.padded) if area else zeros for area in own]
            result.append(jnp.concatenate(parts))
        return [constrained(array, self._by_row) for array in result]

    def gradient_blocks(self, packed_leaves: Sequence[jax.Array]) -> list[Sequence[np.ndarray | DeviceBlock]]:
        """Returns the blocks of every shard that this member sends, on its accelerators or in the memory of the host.

        Args:
            packed_leaves: the result of `pack` for the gradient.

        Returns:
            ``[s][b]``, which keep `packed_leaves` alive. In the memory of the host, reading a block waits until it is
            computed. Blocks of other members must not be read.
        """
        own = [self._parts_on_devices(array) for array in packed_leaves]
        if self._on_host:
            return [_MemberBlocks(self, s, own) for s in range(len(self.partition.shards))]
        there = [list(map(DeviceArray, parts)) for parts in own]
        return [
            [self._there(s, b, block, there) for b, block in enumerate(blocks)]
            for s, blocks in enumerate(layout.blocks for layout in self.partition.shards)
        ]

    def block(self, s: int, b: int, own: Sequence[Sequence[jax.Array]]) -> np.ndarray:
        """Returns one block that this member sends. `own`: the parts of its rows, as of `_parts_on_devices`."""
        block = self.partition.shards[s].blocks[b]
        if block.member != self.member:
            raise ValueError(f"block {b} of shard {s} belongs to member {block.member}: this is member {self.member}")
        found = [np.asarray(own[index][part])[start:stop] for index, part, start, stop in self._spans(s, b, block)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _there(self, s: int, b: int, block: Block, there: Sequence[Sequence[DeviceArray]]) -> DeviceBlock:
        """Returns one block on the devices of this member. `there`: the parts of its rows."""
        spans = self._spans(s, b, block)
        return DeviceBlock(*((there[index][part], start, stop) for index, part, start, stop in spans))

    def _parts_on_devices(self, array: jax.Array) -> list[jax.Array]:
        """Returns the parts of this member's row of an array, on its devices in the order of the mesh."""
        parts = {shard.device: shard.data for shard in array.addressable_shards}
        return [parts[device] for device in self.devices]

    def _spans(self, s: int, b: int, block: Block) -> list[tuple[int, int, int, int]]:
        """Returns where the elements of a block lie, in order; nowhere if it belongs to another member.

        Returns:
            Each with the number of the array, the device that has the part, and its first element there, and the one
            after the last.
        """
        return [
            (index, *span)
            for index, start, stop in self._places(s, b, block)
            for span in _spans(start, stop, self._arrays[index].padded // len(self.devices))
        ]

    def _places(self, s: int, b: int, block: Block) -> list[tuple[int, int, int]]:
        """Returns the array of each part of a block, its first element in this member's row, and the one after its
        last; nowhere if the block belongs to another member."""
        if block.member != self.member:
            return []
        if (s, b) in self._in_rows:
            return [self._place(piece) for piece in block.pieces]
        area, start, stop = self._areas[self.member].place(s, b, block)
        found = self._areas[self.member].every[area]
        return [(self._index[found.dtype, found.coded], start, stop)]

    def _place(self, piece: Piece) -> tuple[int, int, int]:
        """See `_places`, of a piece of a divided leaf."""
        index = self._divided[piece.leaf]
        first = self.member * self._arrays[index].length
        return index, piece.start - first, piece.stop - first

    # ---- From the servers ----

    def memory(self) -> tuple[list[list[np.ndarray]], list[list[Any]]]:
        """Returns new memory of the host for this member's rows, which its devices copy by themselves if they can.

        Returns:
            By array, the whole row, or the part of each device; zero where no element is used. Then by array, the
            arrays of JAX that have the parts, or nothing if a row is whole.
        """
        count = len(self.devices)
        own: list[list[np.ndarray]] = []
        pinned: list[list[Any]] = []
        for rows in self._arrays:
            shape = (rows.padded // count,)
            found = [] if self._on_host else pinned_memory([(shape, rows.dtype, device) for device in self.devices])
            if found:
                own.append([view for _, view in found])
                pinned.append([array for array, _ in found])
            else:
                own.append([aligned_empty(rows.padded * rows.dtype.itemsize).view(rows.dtype)])
                pinned.append([])
                own[-1][0].fill(0)
        return own, pinned

    def receive_views(
        self, own: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[list[Bytes]], list[tuple[np.ndarray, list[np.ndarray]]]]:
        """Returns the blocks of every shard in bytes, and those of several parts apart, with the places of their parts.

        Blocks of other members are empty. `own`: see `memory`.
        """
        views: list[list[Bytes]] = []
        packed: list[tuple[np.ndarray, list[np.ndarray]]] = []
        for s, layout in enumerate(self.partition.shards):
            here: list[Bytes] = []
            for b, block in enumerate(layout.blocks):
                places = [
                    own[index][part][start:stop]
                    for index, whole_start, whole_stop in self._places(s, b, block)
                    for part, start, stop in _spans(whole_start, whole_stop, own[index][0].size)
                ]
                memory = np.empty(0, block.dtype) if not places else places[0]
                if len(places) > 1:
                    memory = aligned_empty(block.nbytes).view(block.dtype)
                    packed.append((memory, places))
                here.append(memory.view(np.uint8))
            views.append(here)
        return views, packed

    def placed(self, own: Sequence[Sequence[np.ndarray]], pinned: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
        """This member's row of each array, in parts on its devices. `own` and `pinned`: see `memory`.

        From pinned memory they are copied before this returns.
        """
        count = len(self.devices)
        whole = [part for row, parts in zip(own, pinned, strict=True) if not parts for part in np.split(row[0], count)]
        put = iter(jax.device_put(whole, list(self.devices) * (len(whole) // count), may_alias=True))
        copied = [array for parts in pinned for array in parts]
        there = iter(placed_from(copied, list(self.devices) * (len(copied) // count)))
        return [[next(there if parts else put) for _ in self.devices] for parts in pinned]

    def unpack(self, placed: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Returns the leaves of the tree, in order, with the shardings of the script. All members call it together.

        Args:
            placed: what `placed` returned, on all devices of this process.
        """
        arrays = [
            jax.make_array_from_single_device_arrays((self.partition.members * rows.padded,), self._by_row, list(parts))
            for rows, parts in zip(self._arrays, placed, strict=True)
        ]
        return list(self._unpack_jit(arrays))

    def _unpack(self, arrays: Sequence[Any]) -> list[Any]:
        members, apart = self.partition.members, len(self._divided)
        flat = [
            array.reshape(members, rows.padded)[:, : rows.length].reshape(-1)
            for array, rows in zip(arrays[:apart], self._arrays, strict=False)
        ]
        flat += arrays[apart:]
        return [leaf_in(flat, self._parts_of[leaf], spec) for leaf, spec in enumerate(self.partition.tree.leaves)]


class DividedSlot:
    """Memory for the rows of one set of parameters.

    Attributes:
        own: see `DividedArrangement.memory`.
        blocks: ``[s][b]`` is the memory of block `b` of shard `s`.
    """

    def __init__(self, arrangement: DividedArrangement) -> None:
        self._arrangement = arrangement
        self.own, self._pinned = arrangement.memory()
        self.blocks, self._packed = arrangement.receive_views(self.own)
        self._lent: list[weakref.ref[np.ndarray]] = []

    @property
    def in_use(self) -> bool:
        """Whether an array of JAX that aliases this memory is still in use."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        return bool(self._lent)

    def placed(self) -> list[list[jax.Array]]:
        """See `DividedArrangement.placed`."""
        for values, places in self._packed:
            at = 0
            for place in places:
                place[:] = values[at : at + place.size]
                at += place.size
        lent = [[owner_of(part) for part in row] for row in self.own]
        # Pinned memory was copied when `placed` returns.
        self._lent = [weakref.ref(row[0]) for row, parts in zip(lent, self._pinned, strict=True) if not parts]
        return self._arrangement.placed(lent, self._pinned)

    def host(self) -> list[np.ndarray]:
        """A member has no leaf in the memory of its host."""
        raise RuntimeError("this process has parts of leaves only")

    def params(self, replacing: Sequence[Any] = ()) -> list[jax.Array]:
        """Returns the leaves of the tree, in order. All members call it together. `replacing` is not used."""
        del replacing
        return self._arrangement.unpack(self.placed())


class _MemberBlocks(LazyBlocks[np.ndarray]):
    """The blocks of one shard that a member sends."""

    def __init__(self, arrangement: DividedArrangement, shard: int, own: Sequence[Sequence[jax.Array]]) -> None:
        super().__init__(len(arrangement.partition.shards[shard].blocks))
        self._arrangement, self._shard, self._own = arrangement, shard, own

    def block(self, index: int) -> np.ndarray:
        return self._arrangement.block(self._shard, index, self._own)


def _spans(start: int, stop: int, each: int) -> list[tuple[int, int, int]]:
    """Returns the parts of a range over arrays of `each` elements.

    Returns:
        Of each part the number of the array, the first element in it, and the one after the last.
    """
    parts = range(start // each, (stop - 1) // each + 1) if stop > start else ()
    return [(part, max(start, part * each) - part * each, min(stop, (part + 1) * each) - part * each) for part in parts]


def _devices_of(mesh: Any, members: int, member: int) -> list[Any]:
    """Returns the devices of one member in the order of the mesh.

    Raises:
        ConfigurationError: the devices of a member do not follow each other, or are not as many as those of others.
    """
    devices = list(mesh.devices.flat)
    count = len(devices) // members
    processes = [device.process_index for device in devices]
    parts = [set(processes[own * count : (own + 1) * count]) for own in range(members)]
    firsts = [min(part) for part in parts if part]
    if len(devices) % members or any(len(part) != 1 for part in parts) or firsts != sorted(firsts):
        raise ConfigurationError(
            f"the mesh has {len(devices)} devices, of the processes {processes}: each of the {members} pods of a rank "
            "must have the same number. They must be in the order of the pods, as in the list that a function `mesh` "
            "gets"
        )
    return devices[member * count : (member + 1) * count]
