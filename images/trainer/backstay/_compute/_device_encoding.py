"""Encodes a whole contribution on an accelerator, by one compiled function that writes into pinned memory of the host.

The processor would need as long for it as a step takes, and all bytes would travel uncoded between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._update import BlockWire, DeviceArray, DeviceBlock, Encoded, body_of, encoded_with, residual_dtype

__all__ = ["DeviceEncoder", "EncodedThere"]

Place = tuple[int, int]
"""Shard and block."""


@dataclass
class _CodedKind:
    """The coded blocks of one codec and dtype, whose whole groups are encoded as one array.

    Attributes:
        first: a block of this kind.
        segments: the parts of arrays that the array consists of: the number of the array, first and last element.
        tails: the parts of arrays behind the last whole group of a block.
        offsets: the first element of each block in the array, and in all tails.
        size: the number of elements.
        numbers: uint32, of each group; see `BlockWire.numbers`.
    """

    first: BlockWire
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    tails: list[tuple[int, int, int]] = field(default_factory=list)
    offsets: dict[Place, tuple[int, int]] = field(default_factory=dict)
    size: int = 0
    numbers: Any = None

    def add(self, place: Place, array: int, start: int, wire: BlockWire) -> None:
        body = body_of(wire.size)
        self.offsets[place] = self.size, sum(stop - start for _, start, stop in self.tails)
        if self.segments and self.segments[-1][0] == array and self.segments[-1][2] == start:
            self.segments[-1] = array, self.segments[-1][1], start + body  # so that few parts are copied
        else:
            self.segments.append((array, start, start + body))
        if body < wire.size:
            self.tails.append((array, start + body, start + wire.size))
        self.size += body


class EncodedThere:
    """A contribution that an accelerator has encoded, or is encoding."""

    def __init__(self, kinds: Sequence[_CodedKind], made: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        self._of = {place: (kind, each) for kind, each in zip(kinds, made, strict=True) for place in kind.offsets}

    def block(self, place: Place, wire: BlockWire) -> Encoded:
        """One block on the host, as views; waits until it is encoded and copied."""
        kind, (sections, tail) = self._of[place]
        codec, body = kind.first.codec, body_of(wire.size)
        assert codec is not None
        start, behind = kind.offsets[place]
        before, upto = (codec.sections(size, wire.dtype) for size in (start, start + body))
        views = tuple(
            np.asarray(section)[first[0] : last[0]] for section, first, last in zip(sections, before, upto, strict=True)
        )
        return Encoded(views, np.asarray(tail)[behind : behind + wire.size - body], codec, wire.size, wire.dtype)


class DeviceEncoder:
    """Encodes the coded blocks of contributions that have the same selection of blocks."""

    def __init__(
        self, wires: Sequence[Sequence[BlockWire]], blocks: Sequence[Sequence[DeviceBlock]], *, feedback: bool
    ) -> None:
        """
        Args:
            wires: how each block of each shard travels.
            blocks: the blocks of a contribution; all others have them in the same places of their arrays.
            feedback: whether there are residuals.
        """
        arrays = _arrays_of(blocks)
        number = {id(array): index for index, array in enumerate(arrays)}
        found = sorted(
            (number[id(block.of)], block.start, (shard, index))
            for shard, (own, those) in enumerate(zip(wires, blocks, strict=True))
            for index, (wire, block) in enumerate(zip(own, those, strict=True))
            if wire.codec is not None
        )
        kinds: dict[tuple[Any, np.dtype[Any]], _CodedKind] = {}
        numbers: dict[tuple[Any, np.dtype[Any]], list[Any]] = {}
        for array, start, (shard, index) in found:
            wire = wires[shard][index]
            key = wire.codec, wire.dtype
            kinds.setdefault(key, _CodedKind(wire)).add((shard, index), array, start, wire)
            numbers.setdefault(key, []).append(wire.numbers)
        self._kinds = list(kinds.values())
        self._used = sorted({array for kind in self._kinds for array, _, _ in (*kind.segments, *kind.tails)})
        self._function: Callable[..., Any] | None = None
        self._place: Any = None  # the sharding of arrays on the device
        self._feedback = feedback
        if self._kinds:
            example = arrays[self._used[0]]
            (device,) = example.array.devices()
            for key, kind in kinds.items():
                kind.numbers = jax.device_put(np.concatenate(numbers[key]), device)
            self._place = example.array.sharding
            self._function = jax.jit(self._encode, out_shardings=(example.pinned, self._place))

    def no_residuals(self) -> list[Any]:
        """The residuals before the first contribution, which are zeros on the device."""
        return [jnp.zeros(kind.size, residual_dtype(kind.first.dtype), device=self._place) for kind in self._kinds]

    def encode(
        self, blocks: Sequence[Sequence[DeviceBlock]], words: np.ndarray, residuals: Sequence[Any]
    ) -> tuple[EncodedThere, list[Any]]:
        """Dispatch the encoding of a contribution.

        Args:
            blocks: the blocks of the contribution.
            words: `seed_of` (seed, step, rank).
            residuals: the residuals before this contribution; empty without feedback.

        Returns:
            The contribution, and the new residuals, on the device.
        """
        if self._function is None:
            return EncodedThere((), ()), []
        arrays = _arrays_of(blocks)
        numbers = [kind.numbers for kind in self._kinds]
        made, left = self._function([arrays[index].array for index in self._used], numbers, words, list(residuals))
        return EncodedThere(self._kinds, made), left

    def _encode(self, arrays: Sequence[Any], numbers: Sequence[Any], words: Any, residuals: Sequence[Any]) -> Any:
        flat = {index: array.reshape(-1) for index, array in zip(self._used, arrays, strict=True)}

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


def _arrays_of(blocks: Sequence[Sequence[DeviceBlock]]) -> list[DeviceArray]:
    """The arrays that blocks are parts of, each once, in the order in which they appear."""
    return list({id(block.of): block.of for those in blocks for block in those}.values())
