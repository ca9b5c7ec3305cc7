"""Encodes a worker's contributions block by block, beside the transfer, and keeps what rounding took from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np

from .._update import BlockWire, Encoded, ShardWire, seed_of
from ._contribution import ComputedContribution

__all__ = ["Encoder", "Sending"]


class Encoder:
    """Encodes the contributions of one worker.

    With error feedback it keeps one residual for each encoded block, in host memory: what was to be sent, minus what
    the servers decode. Residuals are float32 (float64 for float64) for every dtype. A residual is added to the next
    contribution. A replacement of this worker begins without residuals, so what rounding took from the contributions of
    its predecessor stays lost.
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
        self._residuals: dict[tuple[int, int], Any] = {}

    @contextmanager
    def sending(self, contribution: ComputedContribution) -> Iterator[Sending]:
        """The blocks of a contribution as they travel; the same bits each time they are read.

        The caller reports how the contribution ended, and the residuals follow. After an exception, or without a
        report, it is unknown whether the contribution was applied, and the residuals are dropped.
        """
        wires = [wire.select(wire.selection([contribution.key.step])).gradients for wire in self._wires]
        sending = Sending(wires, contribution, self._seed, self._residuals if self._feedback else None)
        kept: dict[tuple[int, int], Any] = {}
        try:
            yield sending
            kept = sending.left
        finally:
            if self._feedback:
                self._residuals = kept


class Sending:
    """One contribution while it is sent.

    Attributes:
        blocks: ``[s][b]``, for `Push`.
        left: the residuals that the next contribution gets.
    """

    def __init__(
        self,
        wires: Sequence[Sequence[BlockWire]],
        contribution: ComputedContribution,
        seed: int,
        residuals: dict[tuple[int, int], Any] | None,
    ) -> None:
        self._residuals = residuals
        self._new: dict[tuple[int, int], Any] = {}
        self.left: dict[tuple[int, int], Any] = {}
        self.blocks: list[Sequence[Any]] = list(contribution.blocks)
        coded = [shard for shard, blocks in enumerate(wires) if any(wire.codec is not None for wire in blocks)]
        if coded:
            words = seed_of(seed, contribution.key.step, contribution.key.rank)
            for shard in coded:
                self.blocks[shard] = _EncodedBlocks(self, shard, wires[shard], self.blocks[shard], words)

    def applied(self) -> None:
        """Record that the contribution was applied as it was sent."""
        self.left = (self._residuals or {}) | self._new

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


class _EncodedBlocks(Sequence[Any]):
    """The blocks for one shard. Reading one dispatches the encoding of the next, which runs while this one is sent."""

    def __init__(
        self,
        sending: Sending,
        shard: int,
        wires: Sequence[BlockWire],
        blocks: Sequence[np.ndarray],
        words: np.ndarray,
    ) -> None:
        self._sending, self._shard, self._wires, self._blocks, self._words = sending, shard, wires, blocks, words
        self._ahead: dict[int, Encoded] = {}

    def __len__(self) -> int:
        return len(self._wires)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
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
