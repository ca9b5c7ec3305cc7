"""Encodes a contribution on accelerators. On each, one compiled function writes into pinned memory of the host.

The processor would need as long for it as a step takes, and all bytes would travel uncoded between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._update import (
    GROUP,
    BlockWire,
    DeviceArray,
    DeviceBlock,
    Encoded,
    body_of,
    encoded_with,
    pinned_like,
    residual_dtype,
    use_ordinary_memory,
)

__all__ = ["DeviceEncoder", "EncodedThere"]

Place = tuple[int, int]
"""Shard and block."""

_Coded = tuple[tuple[Any, ...], Any]
"""The sections of a codec, and all tails."""


@dataclass
class _CodedKind:
    """The coded parts of blocks of one codec and dtype, whose whole groups are encoded as one array.

    Attributes:
        first: a block of this kind.
        segments: the parts of arrays that the array consists of: the number of the array, first and last element.
        tails: the parts of arrays behind the last whole group of a block.
        size: the number of elements.
        numbers: uint32, of each group; see `BlockWire.numbers`.
    """

    first: BlockWire
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    tails: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    numbers: Any = None

    def add(self, array: int, start: int, stop: int, part: int) -> _Found:
        """Append elements of an array, which are a part of a block."""
        body = body_of(stop - start)
        behind = sum(last - first for _, first, last in self.tails)
        found = _Found(self, part, self.size, body, behind, stop - start - body)
        if self.segments and self.segments[-1][0] == array and self.segments[-1][2] == start:
            self.segments[-1] = array, self.segments[-1][1], start + body  # so that few parts are copied
        else:
            self.segments.append((array, start, start + body))
        if found.tail:
            self.tails.append((array, start + body, stop))
        self.size += body
        return found


@dataclass(frozen=True)
class _Found:
    """The place of a part of a block.

    Attributes:
        part: the number of the part in its block.
        start, body: its first element in the array of its kind, and how many there are.
        behind, tail: its first element in all tails, and how many there are.
    """

    kind: _CodedKind
    part: int
    start: int
    body: int
    behind: int
    tail: int

    def views(self, made: _Coded) -> list[np.ndarray[Any, Any]]:
        """Returns the sections and the tail of the part on the host, out of those of its kind; waits until they are
        there."""
        codec, dtype = self.kind.first.codec, self.kind.first.dtype
        assert codec is not None
        before, upto = (codec.sections(size, dtype) for size in (self.start, self.start + self.body))
        sections, tail = made
        return [
            *(np.asarray(each)[a[0] : b[0]] for each, a, b in zip(sections, before, upto, strict=True)),
            np.asarray(tail)[self.behind : self.behind + self.tail],
        ]


class EncodedThere:
    """A contribution that accelerators have encoded, or are encoding."""

    def __init__(self) -> None:
        self._made: list[tuple[Mapping[Place, Sequence[_Found]], Mapping[int, _Coded]]] = []

    def add(self, found: Mapping[Place, Sequence[_Found]], made: Mapping[int, _Coded]) -> None:
        """Add what one accelerator encodes.

        Args:
            found: the parts of each block that it has.
            made: the sections and the tails of each kind, by its identity.
        """
        self._made.append((found, made))

    def block(self, place: Place, wire: BlockWire) -> Encoded:
        """Returns one block on the host, as views if it has one part; waits until it is encoded and copied."""
        assert wire.codec is not None
        parts = [(each, made) for found, made in self._made for each in found.get(place, ())]
        views = [each.views(made[id(each.kind)]) for each, made in sorted(parts, key=lambda one: one[0].part)]
        *sections, tail = views[0] if len(views) == 1 else map(np.concatenate, zip(*views, strict=True))
        return Encoded(tuple(sections), tail, wire.codec, wire.size, wire.dtype)


class DeviceEncoder:
    """Encodes what one accelerator has of contributions that have the same selection of blocks."""

    def __init__(
        self,
        wires: Sequence[Sequence[BlockWire]],
        blocks: Sequence[Sequence[DeviceBlock]],
        device: Any,
        *,
        feedback: bool,
    ) -> None:
        """
        Args:
            wires: how each block of each shard travels.
            blocks: the blocks of a contribution; all others have them in the same places of their arrays.
            device: the `jax.Device`.
            feedback: whether there are residuals.
        """
        arrays: list[DeviceArray] = []
        self._firsts: list[tuple[int, int, int]] = []  # the shard, the block and the part that begin each array
        number: dict[int, int] = {}
        found = []
        for shard, (own, those) in enumerate(zip(wires, blocks, strict=True)):
            for index, (wire, block) in enumerate(zip(own, those, strict=True)):
                if wire.codec is None:
                    continue
                group = 0
                for part, (array, start, stop) in enumerate(block.parts):
                    if array.device == device:
                        if id(array) not in number:
                            number[id(array)] = len(arrays)
                            arrays.append(array)
                            self._firsts.append((shard, index, part))
                        found.append((number[id(array)], start, stop, group, (shard, index), part))
                    group += body_of(stop - start) // GROUP
        kinds: dict[tuple[Any, np.dtype[Any]], _CodedKind] = {}
        numbers: dict[tuple[Any, np.dtype[Any]], list[Any]] = {}
        self._found: dict[Place, list[_Found]] = {}
        for used, start, stop, group, (shard, index), part in sorted(found):
            wire = wires[shard][index]
            key = wire.codec, wire.dtype
            added = kinds.setdefault(key, _CodedKind(wire)).add(used, start, stop, part)
            self._found.setdefault((shard, index), []).append(added)
            numbers.setdefault(key, []).append(wire.numbers[group : group + added.body // GROUP])
        self._kinds = list(kinds.values())
        self._feedback = feedback
        self._function: Callable[..., Any] | None = None
        self._place: Any = None  # the sharding of arrays on the device
        self._pinned: Any = None  # the sharding of the blocks
        if self._kinds:
            example = arrays[0]
            for key, kind in kinds.items():
                kind.numbers = jax.device_put(np.concatenate(numbers[key]), device)
            self._place = example.array.sharding
            self._write_into(pinned_like(example.array))

    def _write_into(self, pinned: Any) -> None:
        """Jit the function whose blocks come into pinned memory, or where JAX has them if it is None."""
        self._pinned = pinned
        self._function = jax.jit(self._encode, out_shardings=(pinned, self._place))

    def no_residuals(self) -> list[Any]:
        """Returns the residuals before the first contribution, which are zeros on the device."""
        return [jnp.zeros(kind.size, residual_dtype(kind.first.dtype), device=self._place) for kind in self._kinds]

    def encode(
        self,
        blocks: Sequence[Sequence[DeviceBlock]],
        words: np.ndarray,
        residuals: Sequence[Any],
        into: EncodedThere,
    ) -> list[Any]:
        """Dispatch the encoding of a contribution.

        Args:
            blocks: the blocks of the contribution.
            words: `seed_of` (seed, step, rank).
            residuals: the residuals before this contribution; empty without feedback.
            into: gets the blocks, or their parts.

        Returns:
            The new residuals, on the device.
        """
        if self._function is None:
            return []
        arrays = [blocks[shard][index].parts[part][0].array for shard, index, part in self._firsts]
        numbers = [kind.numbers for kind in self._kinds]
        given = (arrays, numbers, words, list(residuals))
        if self._pinned is not None and pinned_like(arrays[0]) is None:  # it has become full
            self._write_into(None)
        try:
            made, left = self._function(*given)
        except jax.errors.JaxRuntimeError as error:
            if self._pinned is None:
                raise
            use_ordinary_memory(error, computed=True)
            self._write_into(None)
            made, left = self._function(*given)
        into.add(self._found, {id(kind): each for kind, each in zip(self._kinds, made, strict=True)})
        return list(left)

    def _encode(self, arrays: Sequence[Any], numbers: Sequence[Any], words: Any, residuals: Sequence[Any]) -> Any:
        flat = [array.reshape(-1) for array in arrays]

        def joined(parts: Sequence[tuple[int, int, int]], dtype: np.dtype[Any]) -> Any:
            values = [jax.lax.slice(flat[array], (start,), (stop,)) for array, start, stop in parts]
            return jnp.concatenate(values) if values else jnp.zeros(0, dtype)

        made, left = [], []
        for place, kind in enumerate(self._kinds):
            codec, dtype = kind.first.codec, kind.first.dtype
            assert codec is not None
            values = joined(kind.segments, dtype)
            if self._feedback:
                sections, rest = encoded_with(codec, values, residuals[place], numbers[place], words)
                left.append(rest)
            else:
                sections = codec.encode(values, numbers[place], words)
            made.append((sections, joined(kind.tails, dtype)))
        return made, left
