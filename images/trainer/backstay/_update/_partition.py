"""Which shard holds which element of which leaf, and in what blocks they are sent and updated.

Every pod of a job computes the partition for itself from the tree and the optimizer's rule; so it is a pure function,
and its digest is compared when a pod joins.

Elementwise groups (see `backstay._update._rules`) are laid out as one line of bytes in the order of the leaves and cut
where the shards fill up; at most ``shards - 1`` leaves are cut, always at multiples of 64 bytes. All other groups
stay whole and are dealt out first, the largest first. A shard may end up with nothing, when there is less than one
cache line or one group for each.

Where a rank has several members (decision 0100), each block belongs to one of them, which sends and receives it. A
large leaf of an elementwise group is divided: each member has one range of it, which no block crosses. All other blocks
are dealt out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from ..errors import ConfigurationError
from ._codecs import GROUP, DeviceBlock, host_of
from ._tree import LeafSpec, TreeSpec

BLOCK_BYTES: Final = 4 << 20
"""Large enough that dispatching costs nothing, small enough that sending one hides computing the next."""

LINE_BYTES: Final = 64
"""The alignment that JAX needs to alias host memory; cuts fall on multiples of it."""

DIVIDED_BYTES: Final = 64 << 10
"""A leaf with fewer bytes is not divided among members: sending it is a matter of calls and not of bytes."""

RANGE: Final = 16 * GROUP
"""The ranges of members begin at multiples of this many elements: of a group, and of a cache line for each dtype. 2, 4,
8 or 16 devices of a member have equal parts of it that begin at a group."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of the flattened leaf `leaf` stand at `offset` of a block. All in elements."""

    leaf: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """A one-dimensional array of `size` elements of one dtype, sent and updated as one.

    The pieces cover it without gaps in order of offset. `rule` is the program of `backstay._update._rules` that updates
    it: blocks of equal rule, dtype and size run the same executable when the rule is elementwise. `trained` is False
    for blocks of the model state, whose values no codec may change.

    `coded`: a codec may encode it. Then each piece begins and ends with a group of its leaf
    (`backstay._update._codecs`), except where the block is one whole leaf.

    `fragment` is the fragment of its leaves (`backstay._update._fragments`), or None if it belongs to every exchange.

    `member`: the member of a rank that sends and receives it.
    """

    dtype: np.dtype[Any]
    size: int
    pieces: tuple[Piece, ...]
    rule: int
    trained: bool = True
    coded: bool = False
    fragment: int | None = None
    member: int = 0

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class ShardLayout:
    """The part of one shard, with `blocks` in the order in which they are updated and sent, and `groups` of the rule
    that it holds whole (indices; a group of empty leaves has no block but may have optimizer state)."""

    shard: int
    blocks: tuple[Block, ...]
    groups: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class Partition:
    """All shards of a tree, and three SHA-256 digests of 32 bytes, stable across processes and machines.

    Attributes:
        structure_digest: the digest of the names, shapes and dtypes of parameters and optimizer state, for any number
            of shards. A checkpoint of another structure cannot be continued.
        program_digest: the digest of the optimizer's computation, with constants such as the learning rate. Pods that
            train together must agree about it; a later run of the job may change it.
        digest: the digest of these two and of the layout.
        fragments: the number of fragments.
        members: the number of pods of a rank.
        divided: the leaves, by index, of which each member has the range of `member_range`; empty if there is one
            member.
    """

    tree: TreeSpec
    shards: tuple[ShardLayout, ...]
    structure_digest: bytes
    program_digest: bytes
    digest: bytes
    fragments: int = 1
    members: int = 1
    divided: frozenset[int] = frozenset()


class GroupLike(Protocol):
    """Leaves that are updated together; if `elementwise`, it is a single leaf that may be cut and packed."""

    @property
    def leaves(self) -> tuple[int, ...]: ...
    @property
    def elementwise(self) -> bool: ...
    @property
    def program(self) -> int: ...


class RuleLike(Protocol):
    """The part of `backstay._update._rules.Rule` that the partition depends on."""

    @property
    def groups(self) -> tuple[Any, ...]: ...  # of GroupLike
    @property
    def structure_digest(self) -> bytes: ...
    @property
    def program_digest(self) -> bytes: ...
    def check(self, shards: int) -> None: ...


@dataclass(frozen=True)
class _Range:
    leaf: int
    start: int
    stop: int
    member: int | None = None  # None: the leaf is not divided


def partition(
    tree: TreeSpec,
    rule: RuleLike,
    shards: int,
    block_bytes: int = BLOCK_BYTES,
    coded: frozenset[int] = frozenset(),
    fragments: Sequence[int | None] | None = None,
    members: int = 1,
) -> Partition:
    """Lay `tree` out over `shards` shards.

    Args:
        tree: the model.
        rule: `backstay._update._rules.analyse(optimizer, tree)`: every leaf in exactly one group.
        shards: number of shards, at least 1. More shards than there are cache lines or groups leave some shards without
            blocks.
        block_bytes: the most bytes in a block of an elementwise group, at least 64.
        coded: the leaves, by index, that a codec encodes. They have separate blocks, and are cut between groups.
        fragments: the fragment of each leaf, see `Block.fragment`. No block holds leaves of two fragments. None: there
            are no fragments.
        members: number of pods of a rank, at least 1.

    Raises:
        ConfigurationError: `shards`, `block_bytes` or `members` is too small, or the optimizer updates leaves of two
            fragments together.
        OptimizerError: the rule cannot be computed by this number of shards.
    """
    if shards < 1:
        raise ConfigurationError(f"shards is {shards}: must be at least 1")
    if block_bytes < LINE_BYTES:
        raise ConfigurationError(f"block_bytes is {block_bytes}: must be at least {LINE_BYTES}")
    if members < 1:
        raise ConfigurationError(f"members is {members}: must be at least 1")
    rule.check(shards)
    groups: tuple[GroupLike, ...] = rule.groups
    _check_cover(tree, groups)
    parts = [None] * len(tree.leaves) if fragments is None else list(fragments)
    _check_fragments(tree, groups, parts)

    loads = [0] * shards
    whole: list[list[int]] = [[] for _ in range(shards)]
    bulky = [index for index, group in enumerate(groups) if not group.elementwise]
    # Each pod computes the same layout, so every choice has a tie-break. The largest are dealt first, because the rest
    # fills the gaps.
    for index in sorted(bulky, key=lambda i: (-_nbytes(tree, groups[i]), i)):
        shard = min(range(shards), key=lambda s: (loads[s], len(whole[s]), s))
        whole[shard].append(index)
        loads[shard] += _nbytes(tree, groups[index])

    line = sorted((group for group in groups if group.elementwise), key=lambda group: group.leaves)
    ranges = _cut([(group.leaves[0], tree.leaves[group.leaves[0]]) for group in line], _room(loads, tree, line), coded)
    programs = {group.leaves[0]: group.program for group in line}
    divided = frozenset(leaf for leaf in programs if _is_divided(tree.leaves[leaf], members))

    layouts = []
    dealt = [0] * members
    for shard in range(shards):
        apart = [own for part in ranges[shard] for own in _by_member(part, tree, members, divided)]
        blocks = _pack(tree, apart, programs, block_bytes, coded, parts)
        for index in whole[shard]:
            for leaf in groups[index].leaves:
                spec = tree.leaves[leaf]
                if spec.size:
                    piece = Piece(leaf, 0, spec.size, 0)
                    program, own = groups[index].program, leaf in coded
                    blocks.append(Block(spec.dtype, spec.size, (piece,), program, coded=own, fragment=parts[leaf]))
        blocks.sort(key=lambda block: (block.pieces[0].leaf, block.pieces[0].start))
        layouts.append(ShardLayout(shard, _deal(blocks, divided, dealt), tuple(sorted(whole[shard]))))
    structure, computed = rule.structure_digest, rule.program_digest
    digest = _digest(tree, layouts, structure, computed, members)
    count = len({*parts} - {None}) or 1
    return Partition(tree, tuple(layouts), structure, computed, digest, count, members, divided)


def member_range(size: int, members: int, member: int) -> tuple[int, int]:
    """Returns the elements of a divided leaf that one member has: the first, and the one after the last.

    The ranges of all members are equally long, up to the end of the leaf: the last ones may be shorter, or empty.

    Args:
        size: the number of elements of the leaf.
        members: the number of members.
        member: the index of the member.
    """
    length = range_length(size, members)
    return min(member * length, size), min((member + 1) * length, size)


def range_length(size: int, members: int) -> int:
    """Returns the number of elements of a member's range of a leaf of `size` elements, with the padding behind the
    leaf."""
    return -(-size // (RANGE * members)) * RANGE


def gather(block: Block, leaves: Sequence[Array]) -> Array:
    """Returns the block's elements out of whole leaves: a view where it is one contiguous piece, else a packed copy.

    Args:
        block: a block of a partition of the tree.
        leaves: every leaf of the tree, C-contiguous; only those of the block are touched.

    Returns:
        1-D, ``block.size`` elements of ``block.dtype``.
    """
    if len(block.pieces) == 1:
        piece = block.pieces[0]
        return leaves[piece.leaf].reshape(-1)[piece.start : piece.stop]
    packed = np.empty(block.size, block.dtype)
    for piece in block.pieces:
        packed[piece.offset : piece.offset + piece.size] = leaves[piece.leaf].reshape(-1)[piece.start : piece.stop]
    return packed


def scatter(block: Block, data: Array, leaves: Sequence[Array]) -> None:
    """Write a block's elements to their places in whole, writable, C-contiguous leaves."""
    for piece in block.pieces:
        target = leaves[piece.leaf].reshape(-1)[piece.start : piece.stop]
        target[...] = data[piece.offset : piece.offset + piece.size]


def parts_of_leaves(
    partition: Partition, blocks: Sequence[Sequence[Array | DeviceBlock]], leaves: Sequence[int]
) -> dict[int, list[Array]]:
    """Returns the parts of some leaves in the blocks of all shards: 1-D views, by leaf.

    Args:
        blocks: ``[s][b]``; blocks on an accelerator are copied to the host if they have a part of the leaves.
    """
    parts: dict[int, list[Array]] = {leaf: [] for leaf in leaves}
    for layout, arrays in zip(partition.shards, blocks, strict=True):
        for block, array in zip(layout.blocks, arrays, strict=True):
            found = [piece for piece in block.pieces if piece.leaf in parts]
            if not found:
                continue
            values = host_of(array)  # once, because parts of several accelerators are joined
            for piece in found:
                parts[piece.leaf].append(values[piece.offset : piece.offset + piece.size])
    return parts


def _is_divided(spec: LeafSpec, members: int) -> bool:
    """Returns whether a leaf is divided among members: each has at least a few units of `RANGE`, so the ranges are
    similar."""
    return members > 1 and spec.nbytes >= DIVIDED_BYTES and spec.size >= 4 * RANGE * members


def _by_member(part: _Range, tree: TreeSpec, members: int, divided: frozenset[int]) -> list[_Range]:
    """Returns the parts of a range that different members have."""
    if part.leaf not in divided:
        return [part]
    size = tree.leaves[part.leaf].size
    found = []
    for member in range(members):
        first, last = member_range(size, members, member)
        if (start := max(first, part.start)) < (stop := min(last, part.stop)):
            found.append(_Range(part.leaf, start, stop, member))
    return found


def _deal(blocks: Sequence[Block], divided: frozenset[int], dealt: list[int]) -> tuple[Block, ...]:
    """Returns the blocks of a shard. Each that has no divided leaf goes to the member that has the fewest bytes of such
    blocks.

    Args:
        dealt: for each member, the bytes of such blocks of earlier shards. Those of this one are added.
    """
    if len(dealt) == 1:
        return tuple(blocks)
    result = []
    for block in blocks:
        if block.pieces[0].leaf in divided:
            result.append(block)
            continue
        member = dealt.index(min(dealt))
        dealt[member] += block.nbytes
        result.append(replace(block, member=member))
    return tuple(result)


def _nbytes(tree: TreeSpec, group: GroupLike) -> int:
    return sum(tree.leaves[leaf].nbytes for leaf in group.leaves)


def _check_cover(tree: TreeSpec, groups: Sequence[GroupLike]) -> None:
    held = sorted(leaf for group in groups for leaf in group.leaves)
    if held != list(range(len(tree.leaves))):
        raise ValueError(f"the rule's groups hold the leaves {held}: must hold each of {len(tree.leaves)} once")


def _check_fragments(tree: TreeSpec, groups: Sequence[GroupLike], fragments: Sequence[int | None]) -> None:
    for group in groups:
        for leaf in group.leaves:
            first = group.leaves[0]
            if fragments[leaf] != fragments[first]:
                raise ConfigurationError(
                    f"LocalSteps: fragments: the outer optimizer updates {tree.leaves[first].path} and "
                    f"{tree.leaves[leaf].path} together, which are in two fragments: use an optimizer that updates "
                    "each leaf alone, such as optax.sgd"
                )


def _room(loads: Sequence[int], tree: TreeSpec, line: Sequence[GroupLike]) -> list[int]:
    """Returns how many bytes of the line each shard takes, so that all fill up to the same level. Sums to the line's
    bytes."""
    total = sum(_nbytes(tree, group) for group in line)
    low, high = min(loads), max(loads) + total
    while low < high:  # the lowest level that takes it all
        middle = (low + high) // 2
        if sum(max(0, middle - load) for load in loads) >= total:
            high = middle
        else:
            low = middle + 1
    rooms = [max(0, low - load) for load in loads]
    surplus = sum(rooms) - total
    for shard in range(len(rooms) - 1, -1, -1):
        if surplus and rooms[shard]:
            rooms[shard] -= 1
            surplus -= 1
    return rooms


def _cut(line: Sequence[tuple[int, LeafSpec]], rooms: Sequence[int], coded: frozenset[int]) -> list[list[_Range]]:
    """Walk the line of leaves and give every shard its stretch. Each bound is rounded by itself: errors never add."""
    result: list[list[_Range]] = [[] for _ in rooms]
    bounds = np.cumsum(rooms, dtype=np.int64)
    shard, at = 0, 0  # `at`: the byte of the line where the present leaf starts
    for leaf, spec in line:
        start = 0
        while start < spec.size:
            last = shard == len(rooms) - 1
            stop = spec.size if last else _nearest_cut(int(bounds[shard]) - at, spec, _step(spec, leaf in coded))
            if stop > start:
                result[shard].append(_Range(leaf, start, stop))
                start = stop
            if start < spec.size:
                shard += 1
        at += spec.nbytes
    return result


def _step(spec: LeafSpec, coded: bool) -> int:
    """Returns the number of elements at whose multiples a leaf is cut: of a cache line, or of a group."""
    return GROUP if coded else max(1, LINE_BYTES // spec.dtype.itemsize)


def _nearest_cut(position: int, spec: LeafSpec, step: int) -> int:
    """Returns the element at which to cut, nearest to byte `position`, which is a multiple of `step` or the leaf's
    end."""
    if position >= spec.nbytes:
        return spec.size
    if position <= 0:
        return 0
    below = position // (step * spec.dtype.itemsize) * step
    above = min(below + step, spec.size)
    nearer_above = (above - position / spec.dtype.itemsize) < (position / spec.dtype.itemsize - below)
    return above if nearer_above else below


def _pack(
    tree: TreeSpec,
    ranges: Sequence[_Range],
    programs: dict[int, int],
    block_bytes: int,
    coded: frozenset[int],
    fragments: Sequence[int | None],
) -> list[Block]:
    """Cut ranges into full blocks; the rest of each is packed, by rule, dtype, fragment and member, into common blocks.

    So a rule and dtype has at most two sizes of block, and two executables, in a shard. Coded leaves have two more. The
    tail of a coded leaf, behind its last whole group, is packed with leaves that are not coded.
    """
    blocks: list[Block] = []
    rests: dict[tuple[int, str, bool, int | None, int | None], list[_Range]] = {}
    for part in ranges:
        spec, program, own = tree.leaves[part.leaf], programs[part.leaf], part.leaf in coded
        fragment, member = fragments[part.leaf], part.member or 0
        size = _block_size(spec, block_bytes, own)
        start = part.start
        while part.stop - start >= size:
            piece = Piece(part.leaf, start, start + size, 0)
            blocks.append(Block(spec.dtype, size, (piece,), program, spec.trained, own, fragment, member))
            start += size
        body = part.stop - (part.stop - start) % GROUP if own else start
        for kind, first, last in ((True, start, body), (False, body, part.stop)):
            if first < last:
                key = (program, spec.dtype.name, kind, fragment, part.member)
                rests.setdefault(key, []).append(_Range(part.leaf, first, last))
    for (program, _, own, fragment, holder), rest in rests.items():
        member = holder or 0
        dtype, trained = tree.leaves[rest[0].leaf].dtype, tree.leaves[rest[0].leaf].trained
        size = _block_size(tree.leaves[rest[0].leaf], block_bytes, own)
        pieces: list[Piece] = []
        filled = 0
        for part in rest:
            start = part.start
            while start < part.stop:
                stop = min(part.stop, start + size - filled)
                pieces.append(Piece(part.leaf, start, stop, filled))
                filled += stop - start
                start = stop
                if filled == size:
                    blocks.append(Block(dtype, filled, tuple(pieces), program, trained, own, fragment, member))
                    pieces, filled = [], 0
        if pieces:
            blocks.append(Block(dtype, filled, tuple(pieces), program, trained, own, fragment, member))
    return blocks


def _block_size(spec: LeafSpec, block_bytes: int, coded: bool) -> int:
    step = _step(spec, coded)
    return max(1, block_bytes // (step * spec.dtype.itemsize)) * step


def _digest(tree: TreeSpec, layouts: Sequence[ShardLayout], structure: bytes, program: bytes, members: int) -> bytes:
    document: dict[str, Any] = {
        "structure": structure.hex(),
        "program": program.hex(),
        "leaves": [[leaf.name, list(leaf.shape), leaf.dtype.name] for leaf in tree.leaves],
        "shards": [
            [
                [block.dtype.name, block.size, block.rule, [[p.leaf, p.start, p.stop, p.offset] for p in block.pieces]]
                for block in layout.blocks
            ]
            for layout in layouts
        ],
    }
    # A part that a job does not use is left out, so that its digest stays that of earlier versions.
    if any(block.coded for layout in layouts for block in layout.blocks):
        document["coded"] = [[block.coded for block in layout.blocks] for layout in layouts]
    if any(block.fragment is not None for layout in layouts for block in layout.blocks):
        document["fragments"] = [[block.fragment for block in layout.blocks] for layout in layouts]
    if members > 1:
        document["members"] = [members, [[block.member for block in layout.blocks] for layout in layouts]]
    return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).digest()
