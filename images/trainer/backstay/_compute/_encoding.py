"""Encodes a worker's contributions beside the transfer, and keeps what rounding took from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .._update import BlockWire, DeviceBlock, Encoded, LazyBlocks, ShardWire, seed_of
from ._contribution import ComputedContribution
from ._device_encoding import DeviceEncoder, EncodedThere

__all__ = ["Encoder", "Sending"]

Residuals = Mapping[Any, Any]


class Encoder:
    """Encodes the contributions of one worker.

    Contributions in host memory are encoded block by block, while they are sent. An accelerator encodes a contribution
    as a whole; `begin` lets it do that before what is computed next.

    With error feedback it keeps residuals where it encodes: what was to be sent, minus what the servers decode.
    Residuals are float32 (float64 for float64) for every dtype. A residual is added to the next contribution. A
    replacement of this worker begins without residuals, so what rounding took from the contributions of its predecessor
    stays lost.
    """

    def __init__(self, wires: Sequence[ShardWire], seed: int, *, error_feedback: bool = False) -> None:
        """
        Args:
            wires: how the blocks of each shard travel.
            seed: the job's seed.
            error_feedback: whether to keep residuals.
        """
        self._wires = wires
        self._seed = seed
        self._feedback = error_feedback
        self._residuals: Residuals = {}
        self._there: dict[tuple[ShardWire, ...], list[DeviceEncoder]] = {}
        self._begun: list[Sending] = []

    def begin(self, contribution: ComputedContribution) -> None:
        """Dispatch the encoding of a contribution, if it is on an accelerator. The fate of the previous one is known.

        Without this call `sending` does it, behind all that was dispatched to the accelerator meanwhile.
        """
        if devices := _accelerators(contribution):
            self._begun = [*self._begun[-1:], self._sending(contribution, devices)]

    @contextmanager
    def sending(self, contribution: ComputedContribution) -> Iterator[Sending]:
        """The blocks of a contribution as they travel; the same bits each time they are read.

        The caller reports how the contribution ended, and the residuals follow. After an exception, or without a
        report, it is unknown whether the contribution was applied, and the residuals are dropped.
        """
        begun = [one for one in self._begun if one.of is contribution]
        self._begun = [one for one in self._begun if one.of is not contribution]
        sending = begun[0] if begun else self._sending(contribution, _accelerators(contribution))
        kept: Residuals = {}
        try:
            yield sending
            kept = sending.left
        finally:
            if self._feedback:
                self._residuals = kept

    def _sending(self, contribution: ComputedContribution, devices: Sequence[Any]) -> Sending:
        selected = tuple(wire.select(wire.selection([contribution.key.step])) for wire in self._wires)
        wires = [wire.gradients for wire in selected]
        words = seed_of(self._seed, contribution.key.step, contribution.key.rank)
        if devices and selected not in self._there:
            blocks: Any = contribution.blocks
            self._there[selected] = [
                DeviceEncoder(wires, blocks, device, feedback=self._feedback) for device in devices
            ]
        residuals = self._residuals if self._feedback else None
        return Sending(wires, contribution, words, residuals, self._there[selected] if devices else ())


class Sending:
    """One contribution while it is sent.

    Attributes:
        of: the contribution.
        blocks: ``[s][b]``, for `Push`.
        left: the residuals that the next contribution gets.
    """

    def __init__(
        self,
        wires: Sequence[Sequence[BlockWire]],
        contribution: ComputedContribution,
        words: np.ndarray,
        residuals: Residuals | None,
        there: Sequence[DeviceEncoder],
    ) -> None:
        self.of = contribution
        self._residuals = residuals
        self._new: dict[Any, Any] = {}
        self.left: Residuals = {}
        self.blocks: list[Sequence[Any]] = list(contribution.blocks)
        if there:
            self._encode_there(wires, there, words)
            return
        coded = [shard for shard, blocks in enumerate(wires) if any(wire.codec is not None for wire in blocks)]
        for shard in coded:
            self.blocks[shard] = _EncodedBlocks(self, shard, wires[shard], self.blocks[shard], words)

    def _encode_there(
        self, wires: Sequence[Sequence[BlockWire]], there: Sequence[DeviceEncoder], words: np.ndarray
    ) -> None:
        blocks: Any = self.of.blocks
        made = EncodedThere()
        for encoder in there:
            before: Sequence[Any] = ()
            if self._residuals is not None:
                before = self._residuals.get(encoder) or encoder.no_residuals()
            left = encoder.encode(blocks, words, before, made)
            if self._residuals is not None:
                self._new[encoder] = left
        self.blocks = [_BlocksThere(shard, *each, made) for shard, each in enumerate(zip(wires, blocks, strict=True))]

    def applied(self) -> None:
        """Record that the contribution was applied as it was sent."""
        self.left = {**(self._residuals or {}), **self._new}

    def dropped(self) -> None:
        """Record that the contribution was not applied: residuals stay as they were."""
        self.left = self._residuals or {}

    def encode(self, place: tuple[int, int], wire: BlockWire, values: np.ndarray, words: np.ndarray) -> Encoded:
        """Dispatch the encoding of one block. Any thread."""
        if self._residuals is None:
            return wire.encode(values, words)
        residual = self._residuals.get(place)
        if residual is None:
            residual = wire.no_residual()
        block, self._new[place] = wire.encode_with(values, residual, words)
        return block


def _accelerators(contribution: ComputedContribution) -> list[Any]:
    """Returns the accelerators that a contribution lies on; none if it is on the host."""
    # Blocks that are made when they are read are on the host, and reading one waits until it is computed.
    made = (blocks for blocks in contribution.blocks if not isinstance(blocks, LazyBlocks))
    found = (block for blocks in made for block in blocks if isinstance(block, DeviceBlock))
    return list(dict.fromkeys(array.device for block in found for array, _, _ in block.parts))


class _BlocksThere(LazyBlocks[Any]):
    """The blocks for one shard of a contribution on an accelerator. The copies of those that travel as they are begin
    here."""

    def __init__(
        self, shard: int, wires: Sequence[BlockWire], blocks: Sequence[DeviceBlock], encoded: EncodedThere
    ) -> None:
        super().__init__(len(wires))
        self._shard, self._wires, self._blocks, self._encoded = shard, wires, blocks, encoded
        for wire, block in zip(wires, blocks, strict=True):
            if wire.codec is None and not wire.absent:
                block.begin()

    def block(self, index: int) -> Any:
        wire = self._wires[index]
        return self._blocks[index].host() if wire.codec is None else self._encoded.block((self._shard, index), wire)


class _EncodedBlocks(LazyBlocks[Any]):
    """The blocks for one shard. Reading one dispatches the encoding of the next, which runs while this one is sent."""

    def __init__(
        self,
        sending: Sending,
        shard: int,
        wires: Sequence[BlockWire],
        blocks: Sequence[np.ndarray],
        words: np.ndarray,
    ) -> None:
        super().__init__(len(wires))
        self._sending, self._shard, self._wires, self._blocks, self._words = sending, shard, wires, blocks, words
        self._ahead: dict[int, Encoded] = {}

    def block(self, index: int) -> Any:
        wire = self._wires[index]
        block = self._ahead.pop(index, None)
        if block is None and wire.codec is not None:
            block = self._encode(index)
        following = index + 1
        if following < len(self) and self._wires[following].codec is not None:
            self._ahead[following] = self._encode(following)
        return self._blocks[index] if block is None else block

    def _encode(self, index: int) -> Encoded:
        return self._sending.encode((self._shard, index), self._wires[index], self._blocks[index], self._words)
