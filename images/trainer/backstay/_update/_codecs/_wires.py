"""Which codec every block uses in each direction, and blocks on the host as they are sent and received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...errors import ConfigurationError
from .._selection import Selection
from .._tree import TreeSpec
from ._bfloat16 import BFloat16
from ._codec import GROUP, Bound, Codec, CodecName, Encoded, body_of, encoded, exact_bound
from ._integers import Integers, residual_dtype, seed_of, with_residual

if TYPE_CHECKING:
    from backstay_rpc.control_pb2 import Part

__all__ = [
    "CODECS",
    "SMALL",
    "BlockWire",
    "Rounding",
    "ShardWire",
    "Wire",
    "bound_of",
    "coded_leaves",
    "encoded_with",
    "shard_wires",
]

CODECS: Final[Mapping[CodecName, Codec]] = {
    "BFloat16": BFloat16(),
    "Int8": Integers("Int8", bits=8, share=128),
    "Int4": Integers("Int4", bits=4, share=64),
}
"""All codecs by name, except `Exact`, which encodes nothing."""

_PARAMETERS: Final = ("Exact", "BFloat16")

SMALL: Final = 4096
"""A leaf with fewer elements travels exactly, because norms and biases are few bytes and matter much."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Wire:
    """How tensors are encoded on the wire: `spec.wire` of a TrainingJob.

    Attributes:
        gradients: the codec of contributions, from workers to servers: ``Exact``, ``BFloat16``, ``Int8`` or ``Int4``.
        parameters: the codec of parameters, from servers to workers: ``Exact`` or ``BFloat16``. The servers keep full
            precision.
        error_feedback: whether a worker adds what rounding took from a contribution to its next one. It needs
            `gradients` to be ``Int8`` or ``Int4``. None: with local steps, where they are.

    Raises:
        ConfigurationError: a value is not one of these.
    """

    gradients: CodecName = "Exact"
    parameters: CodecName = "Exact"
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        if self.gradients != "Exact" and self.gradients not in CODECS:
            raise ConfigurationError(f"gradients is {self.gradients!r}: must be one of Exact, {', '.join(CODECS)}")
        if self.parameters not in _PARAMETERS:
            raise ConfigurationError(f"parameters is {self.parameters!r}: must be Exact or BFloat16")
        if self.error_feedback not in (None, True, False):
            raise ConfigurationError(f"error_feedback is {self.error_feedback!r}: must be True, False or None")
        if self.error_feedback and self.gradients not in ("Int8", "Int4"):
            raise ConfigurationError(
                f"error_feedback is true, and gradients is {self.gradients}: error feedback needs Int8 or Int4"
            )

    def resolved(self, *, local: bool) -> Wire:
        """Returns the settings with `error_feedback` set to true or false.

        Args:
            local: whether workers make local steps: a contribution then stands for many steps.
        """
        if self.error_feedback is not None:
            return self
        return replace(self, error_feedback=local and self.gradients in ("Int8", "Int4"))

    @property
    def exact(self) -> bool:
        """Whether everything travels as it is."""
        return self.gradients == self.parameters == "Exact"

    def settings(self) -> dict[str, str]:
        """Returns the settings that must be equal in every pod of a run, as text."""
        return {
            "wire.gradients": self.gradients,
            "wire.parameters": self.parameters,
            "wire.errorFeedback": str(bool(self.error_feedback)).lower(),
        }


def _codec(name: CodecName, dtype: np.dtype[Any]) -> Codec | None:
    codec = CODECS.get(name)
    return codec if codec is not None and codec.covers(dtype) else None


def bound_of(name: CodecName, dtype: np.dtype[Any]) -> Bound:
    """Returns how far a decoded element of `dtype` may be from the encoded one."""
    codec = _codec(name, np.dtype(dtype))
    return exact_bound() if codec is None else codec.bound(np.dtype(dtype))


def coded_leaves(tree: TreeSpec, wire: Wire) -> frozenset[int]:
    """Returns the leaves of `tree`, by index, that a codec of `wire` encodes: those that are neither small nor model
    state."""
    return frozenset(
        index
        for index, leaf in enumerate(tree.leaves)
        if leaf.trained
        and leaf.size >= SMALL
        and (_codec(wire.gradients, leaf.dtype) or _codec(wire.parameters, leaf.dtype))
    )


def _first_groups(tree: TreeSpec, coded: frozenset[int]) -> dict[int, int]:
    """Returns the number of the first group of each coded leaf, among the groups of all of them."""
    first, at = {}, 0
    for leaf in sorted(coded):
        first[leaf] = at
        at += tree.leaves[leaf].size // GROUP
    return first


@cache
def _device() -> Any:
    """Returns where the host's arrays are encoded: the CPU, even where another device computes."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


@dataclass(frozen=True, eq=False)
class BlockWire:
    """How one block travels in one direction.

    Attributes:
        size, dtype: the block's number of elements and dtype.
        codec: None where it travels as it is.
        numbers: uint32, the number of each group of the block; empty without a codec.
        absent: whether the block does not travel, because it is not selected. It then has no bytes, and `views` is
            None.
    """

    size: int
    dtype: np.dtype[Any]
    codec: Codec | None = None
    numbers: Array = field(default_factory=lambda: np.empty(0, np.uint32))
    absent: bool = False

    @cached_property
    def _parts(self) -> tuple[tuple[int, np.dtype[Any]], ...]:
        """Elements and dtype of each section, the tail last."""
        if self.absent:
            return ()
        if self.codec is None:
            return ((self.size, self.dtype),)
        body = body_of(self.size)
        return (*self.codec.sections(body, self.dtype), (self.size - body, self.dtype))

    @cached_property
    def sections(self) -> tuple[int, ...]:
        """The bytes of each section, in the order in which they travel."""
        return tuple(count * dtype.itemsize for count, dtype in self._parts)

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes on the wire."""
        return sum(self.sections)

    def views(self, memory: Array) -> Any:
        """Returns the block in `memory` (uint8[nbytes]), as the engine takes it: an array, `Encoded`, or None if
        absent."""
        if self.absent:
            return None
        parts, at = [], 0
        for (_, dtype), nbytes in zip(self._parts, self.sections, strict=True):
            parts.append(memory[at : at + nbytes].view(dtype))
            at += nbytes
        if self.codec is None:
            return parts[0]
        return Encoded(tuple(parts[:-1]), parts[-1], self.codec, self.size, self.dtype)

    def zero(self) -> Any:
        """Returns a block of zeros, encoded."""
        return self.views(np.zeros(self.nbytes, np.uint8))

    def refuse(self, block: Any) -> str | None:
        """Returns why `block`, of `views`, is not what a sender can have encoded; None when it may be."""
        return None if self.codec is None else self.codec.refuse(block.sections)

    def encode(self, values: Array, seed: Array | None = None) -> Encoded:
        """Dispatch the encoding of `values` and return; its sections are JAX arrays.

        Args:
            values: 1-D of the block's size and dtype; they must stay unchanged until the sections are computed.
            seed: uint32[2], see `seed_of`; a codec that rounds to nearest needs none.
        """
        assert self.codec is not None
        block: Encoded = _encode(self.codec)(_put(values), self._numbers, _NO_SEED if seed is None else seed)
        return block

    def encode_with(self, values: Array, residual: Any, seed: Array) -> tuple[Encoded, Any]:
        """`encode` of `with_residual` values, and what rounding took from these, as `residual`.

        Values that are not finite leave a residual of zero where they are.

        Args:
            values, seed: see `encode`.
            residual: what rounding took before, as `no_residual`.
        """
        assert self.codec is not None
        sections, tail, rest = _encode_with(self.codec)(_put(values), residual, self._numbers, seed)
        return Encoded(sections, tail, self.codec, self.size, self.dtype), rest

    def no_residual(self) -> Array:
        """Returns the residual before the first contribution, which has zeros."""
        return np.zeros(self.size, residual_dtype(self.dtype))

    def receive(self, into: Array, offset: int, body: Array) -> str | None:
        """Write bytes of parameters that arrived to their place; of ``Exact`` and ``BFloat16`` only.

        Args:
            into: uint8, the block's memory.
            offset: the position of `body` in the encoded block, in bytes.
            body: uint8, inside one section.

        Returns:
            Why it cannot be done, or None.
        """
        if self.codec is None:
            np.copyto(into[offset : offset + body.nbytes], body)
            return None
        codes = self.sections[0]
        if offset >= codes:
            start = body_of(self.size) * self.dtype.itemsize + offset - codes
            np.copyto(into[start : start + body.nbytes], body)
            return None
        if offset % 2 or body.nbytes % 2 or offset + body.nbytes > codes:
            return f"bytes {offset} to {offset + body.nbytes} of a block in BFloat16 do not hold whole elements"
        # One pass in registers; a shift of integers would first convert them into a buffer.
        into.view(np.float32)[offset // 2 : (offset + body.nbytes) // 2] = body.view(ml_dtypes.bfloat16)
        return None

    @cached_property
    def _numbers(self) -> Any:
        return jax.device_put(self.numbers, _device())


@dataclass(frozen=True, eq=False)
class ShardWire:
    """How the blocks of one shard travel.

    Attributes:
        gradients: the encoding of contributions, to the server.
        parameters: the encoding of parameters, to the worker.
        exact: parameters in full precision, for a worker that requests them.
        fragments: the fragment of each block, see `Block.fragment`; empty: there are no fragments.
        count: the number of fragments, over all shards.
        members: the number of members of a rank. 1 also in the part of one of them.
        member_of: the member that sends and receives each block; empty if there is one member.
    """

    gradients: tuple[BlockWire, ...]
    parameters: tuple[BlockWire, ...]
    exact: tuple[BlockWire, ...]
    fragments: tuple[int | None, ...] = ()
    count: int = 1
    members: int = 1
    member_of: tuple[int, ...] = ()
    _selected: dict[Selection, ShardWire] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def exactly(cls, blocks: Sequence[Any], count: int = 1) -> ShardWire:
        """Nothing is encoded. `blocks` have a `size` and a `dtype`; with a `count` above 1 a `fragment`."""
        exact = tuple(BlockWire(int(block.size), np.dtype(block.dtype)) for block in blocks)
        return cls(exact, exact, exact, tuple(block.fragment for block in blocks) if count > 1 else (), count)

    def of_member(self, member: int) -> ShardWire:
        """Returns how the blocks of one member of a rank travel. The same object each time, as of `select`."""
        return self if self.members == 1 else self._of_members[member]

    @cached_property
    def _of_members(self) -> tuple[ShardWire, ...]:
        def apart(member: int) -> ShardWire:
            own = [holder == member for holder in self.member_of]
            exact = _present(self.exact, own)
            sent = exact if self.parameters is self.exact else _present(self.parameters, own)
            return ShardWire(_present(self.gradients, own), sent, exact, self.fragments, self.count)

        return tuple(map(apart, range(self.members)))

    def selection(self, key_steps: Iterable[int]) -> Selection:
        """Returns the selection that contributions with these numbers (`GradientId.key_step`) exchange."""
        return Selection.of(key_steps, self.count)

    def pushed(self, part: Part) -> ShardWire:
        """Returns how the blocks of a part travel. No other function reads a selection from an address."""
        return self.of_member(part.member).select(self.selection([part.contribution.key_step]))

    def select(self, selection: Selection) -> ShardWire:
        """Returns how blocks travel if only those of `selection` do. The same object each time, in all threads, so it
        is a key for what belongs to it."""
        encoded = selection.values == "encoded" or self.parameters is self.exact
        every = self.count == 1 or selection.whole
        if encoded and every:
            return self
        key = Selection(selection.fragments, "encoded" if encoded else "exact")  # an average travels as exact values
        found = self._selected.get(key)
        if found is not None:
            return found

        def some(wires: tuple[BlockWire, ...]) -> tuple[BlockWire, ...]:
            if every:
                return wires
            return _present(wires, [selection.has(own) for own in self.fragments])

        exact = some(self.exact)
        sent = some(self.parameters) if encoded else exact
        made = ShardWire(some(self.gradients), sent, exact, self.fragments, self.count, self.members, self.member_of)
        return self._selected.setdefault(key, made)

    @cached_property
    def earliest_last(self) -> int:
        """The first block that can complete an answer to a push, over all fragments and members; -1: an answer has no
        block."""
        members = map(self.of_member, range(self.members))
        each = (own.select(own.selection([step])).parameters for own in members for step in range(self.count))
        return min(max((b for b, wire in enumerate(wires) if wire.nbytes), default=-1) for wires in each)


def _present(wires: tuple[BlockWire, ...], present: Sequence[bool]) -> tuple[BlockWire, ...]:
    """Returns the wires of blocks of which only some travel."""
    return tuple(
        wire if travels or wire.absent else BlockWire(wire.size, wire.dtype, absent=True)
        for wire, travels in zip(wires, present, strict=True)
    )


_NO_SEED: Final = np.zeros(2, np.uint32)


def _put(values: Array) -> Any:
    return jax.device_put(values, _device(), may_alias=True)


@cache
def _encode(codec: Codec) -> Callable[..., Any]:
    return jax.jit(partial(encoded, codec))


@cache
def _encode_with(codec: Codec) -> Callable[..., Any]:
    def encode(values: Any, residual: Any, numbers: Any, seed: Any) -> Any:
        body = body_of(values.size)
        sections, rest = encoded_with(codec, values[:body], residual[:body], numbers, seed)
        return sections, values[body:], jnp.concatenate([rest, jnp.zeros_like(residual[body:])])

    return jax.jit(encode)


def encoded_with(codec: Codec, values: Any, residual: Any, numbers: Any, seed: Any) -> tuple[tuple[Any, ...], Any]:
    """Sections and the new residual of whole groups with their `residual`; to be traced."""
    wanted = with_residual(values, residual)
    sections = codec.encode(wanted, numbers, seed)
    return sections, _left(wanted, codec.decode(sections, values.dtype))


def _left(wanted: Any, decoded: Any) -> Any:
    """Returns the values that rounding took, in the dtype of `wanted`; zero where that is not finite. To be traced.

    Apart, so that the compiler does not contract the two into one operation: what one process keeps is the same.
    """
    barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
    rest = wanted - barrier(decoded).astype(wanted.dtype)
    return jnp.where(jnp.isfinite(rest), rest, 0)


def shard_wires(partition: Any, wire: Wire, coded: frozenset[int]) -> tuple[ShardWire, ...]:
    """Returns how the blocks of every shard travel.

    Args:
        partition: `backstay._update._partition.Partition`, made with `coded`.
        wire: the codecs.
        coded: `coded_leaves` of the partition's tree.
    """
    first = _first_groups(partition.tree, coded)

    def wires(blocks: Sequence[Any], name: CodecName) -> tuple[BlockWire, ...]:
        return tuple(_wire_of(block, name, first) for block in blocks)

    return tuple(
        ShardWire(
            wires(layout.blocks, wire.gradients),
            wires(layout.blocks, wire.parameters),
            wires(layout.blocks, "Exact"),
            tuple(block.fragment for block in layout.blocks) if partition.fragments > 1 else (),
            partition.fragments,
            partition.members,
            tuple(block.member for block in layout.blocks) if partition.members > 1 else (),
        )
        for layout in partition.shards
    )


def _wire_of(block: Any, name: CodecName, first: Mapping[int, int]) -> BlockWire:
    codec = _codec(name, block.dtype) if block.coded else None
    if codec is None:
        return BlockWire(block.size, block.dtype)
    numbers = [
        np.arange(first[piece.leaf] + piece.start // GROUP, first[piece.leaf] + piece.stop // GROUP, dtype=np.uint32)
        for piece in block.pieces
    ]
    return BlockWire(block.size, block.dtype, codec, np.concatenate(numbers))


def _encoded_leaves(tree: TreeSpec, name: CodecName, coded: frozenset[int]) -> tuple[int, ...]:
    """Returns the leaves that the codec `name` encodes."""
    return tuple(leaf for leaf in sorted(coded) if _codec(name, tree.leaves[leaf].dtype))


class Rounding:
    """Rounds whole trees as blocks are rounded on the wire: what training in one process computes with."""

    def __init__(self, tree: TreeSpec, wire: Wire) -> None:
        """
        Args:
            tree: the model's tree.
            wire: the codecs.
        """
        self._wire = wire
        self._coded = coded_leaves(tree, wire)
        self._first = _first_groups(tree, self._coded)
        self._tree = tree
        self._residual: dict[int, list[Any]] = {}
        self._round = jax.jit(self._leaves, static_argnums=0)

    def parameters(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the given leaves of the tree, as workers receive them."""
        return self._rounded(self._wire.parameters, leaves, _NO_SEED)

    def gradients(
        self,
        leaves: Sequence[Any],
        seed: int,
        step: int,
        rank: int,
        sent: Callable[[list[Any], list[Any]], list[Any]] = lambda new, old: new,
    ) -> list[Any]:
        """Returns the gradient of a rank for a step, as servers decode it; with error feedback, call it in order of
        steps.

        `sent` selects the new residuals of leaves that were sent, and the old ones of the others.
        """
        residual = self._residual.get(rank)
        if residual is None:
            residual = self.no_residual(leaves)
        rounded, new = self.contribution(leaves, residual, seed_of(seed, step, rank))
        self._residual[rank] = sent(new, list(residual))
        return rounded

    def no_residual(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the residual before the first contribution, which with error feedback has zeros for each encoded leaf
        and an empty array for each other leaf. Without error feedback: nothing."""
        if not self._wire.error_feedback:
            return []
        encoded = _encoded_leaves(self._tree, self._wire.gradients, self._coded)
        return [
            jnp.zeros(leaf.shape if index in encoded else (0,), residual_dtype(leaf.dtype))
            for index, leaf in enumerate(leaves)
        ]

    def contribution(self, leaves: Sequence[Any], residual: Sequence[Any], words: Any) -> tuple[list[Any], list[Any]]:
        """Returns a gradient as servers decode it, and the residual after it; may be traced.

        Args:
            leaves: the gradient's leaves.
            residual: the residual before this contribution; `no_residual` returns the first one.
            words: `seed_of` (seed, step, rank).
        """
        name = self._wire.gradients
        if not self._wire.error_feedback:
            return self._rounded(name, leaves, words), []
        encoded = _encoded_leaves(self._tree, name, self._coded)
        rounded, left = list(leaves), list(residual)
        made = self._round(name, [leaves[leaf] for leaf in encoded], words, [residual[leaf] for leaf in encoded])
        for leaf, value, rest in zip(encoded, *made, strict=True):
            rounded[leaf], left[leaf] = value, rest
        return rounded, left

    def _rounded(self, name: CodecName, leaves: Sequence[Any], seed: Array) -> list[Any]:
        encoded = _encoded_leaves(self._tree, name, self._coded)
        if not encoded:
            return list(leaves)
        result = list(leaves)
        values, _ = self._round(name, [leaves[leaf] for leaf in encoded], seed, [])
        for leaf, value in zip(encoded, values, strict=True):
            result[leaf] = value
        return result

    def _leaves(
        self, name: CodecName, values: Sequence[Any], seed: Any, residual: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the encoded leaves as they are decoded and, if there is a residual before, the residual after it."""
        result, left = [], []
        for place, (leaf, value) in enumerate(zip(_encoded_leaves(self._tree, name, self._coded), values, strict=True)):
            codec, flat = CODECS[name], value.reshape(-1)
            body = body_of(flat.size)
            numbers = jnp.arange(body // GROUP, dtype=jnp.uint32) + jnp.uint32(self._first[leaf])
            wanted = with_residual(flat[:body], residual[place].reshape(-1)[:body]) if residual else flat[:body]
            # Apart from what is computed with it, so that the compiler contracts nothing across.
            barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
            decoded = barrier(codec.decode(codec.encode(wanted, numbers, seed), flat.dtype))
            result.append(jnp.concatenate([decoded, flat[body:]]).reshape(value.shape))
            if residual:
                rest = _left(wanted, decoded)
                zeros = jnp.zeros(flat.size - body, rest.dtype)
                left.append(jnp.concatenate([rest, zeros]).reshape(value.shape))
        return result, left
