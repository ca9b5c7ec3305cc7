"""The operand of an update, which is the gradients that a decision names, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from backstay_rpc.control_pb2 import Contribution, Frame, GradientInfo, ReplicaMean
from backstay_rpc.control_pb2 import Replica as ReplicaFrame

from .._transport import Engine, frames

__all__ = ["WHOLE", "Gathered", "Hold", "Operand", "PreparedMean"]

WHOLE: Final = Frame(replica=ReplicaFrame(whole=True))

Hold: TypeAlias = Callable[[], None]
"""Returns when the standby holds what was sent, or is certain not to be promoted. Raises `Superseded` if it was."""


class Operand(Protocol):
    """The values that the engine applies for one decision."""

    def is_of(self, version: int, contributions: Sequence[Contribution]) -> bool:
        """Returns whether it belongs to the decision about `version` that names `contributions`."""

    def apply(self, engine: Engine, clip_factor: float) -> None:
        """Start the update."""

    def sum_of_squares(self, engine: Engine) -> float:
        """Returns the sum of squares of the mean gradient's elements in this shard."""


class Gathered:
    """The gradients themselves; the engine computes their mean as a part of the update."""

    def __init__(
        self,
        version: int,
        contributions: Sequence[Contribution],
        gradients: Sequence[Sequence[np.ndarray]],
        divisor: float,
    ) -> None:
        """
        Args:
            gradients: the gradients of the contributions, in the same order; their memory must not change until the
                update is computed.
            divisor: the divisor of the weighted sum.
        """
        self._version = version
        self._contributions = tuple(contributions)
        self._gradients = gradients
        self._weights, self._divisor = [contribution.weight for contribution in contributions], divisor

    def is_of(self, version: int, contributions: Sequence[Contribution]) -> bool:
        return version == self._version and self._contributions == tuple(contributions)

    def apply(self, engine: Engine, clip_factor: float) -> None:
        engine.apply(self._gradients, weights=self._weights, divisor=self._divisor, clip_factor=clip_factor)

    def sum_of_squares(self, engine: Engine) -> float:
        return engine.sum_of_squares(self._gradients, weights=self._weights, divisor=self._divisor)


class PreparedMean:
    """The mean of the gradients that a decision names. A standby can hold it, and repeat the update bit for bit."""

    def __init__(
        self,
        version: int,
        contributions: Sequence[Contribution],
        blocks: Sequence[Any],
        infos: Sequence[GradientInfo],
        *,
        borrowed: bool = False,
    ) -> None:
        """
        Args:
            blocks: arrays of the blocks' dtypes and sizes; arrays of JAX need not be computed yet.
            infos: the infos of the contributions, in the same order.
            borrowed: the memory belongs to a gradient, and is used for another one after the update.
        """
        self.version = version
        self.contributions = tuple(contributions)
        self.infos = tuple(infos)
        self._blocks = blocks
        self._borrowed = borrowed

    @classmethod
    def of(
        cls,
        engine: Engine,
        version: int,
        contributions: Sequence[Contribution],
        gradients: Sequence[Sequence[np.ndarray]],
        infos: Sequence[GradientInfo],
        divisor: float,
        *,
        copy: bool,
    ) -> PreparedMean:
        """
        Args:
            gradients, infos: the gradients and the infos of the contributions, in the same order.
            divisor: the divisor of the weighted sum.
            copy: whether the mean must stay valid longer than the gradients.
        """
        weights = [contribution.weight for contribution in contributions]
        if weights == [1.0] and all(block is None or isinstance(block, np.ndarray) for block in gradients[0]):
            alone = cls(version, contributions, gradients[0], infos, borrowed=True)
            return alone.kept() if copy else alone
        mean = engine.mean(gradients, weights=weights, divisor=divisor)
        return cls(version, contributions, mean, infos)

    def kept(self) -> PreparedMean:
        """Returns a copy of the mean in its own memory, which may be sent after the mean is applied."""
        if not self._borrowed:
            return self
        blocks = [None if block is None else block.copy() for block in self._blocks]
        return PreparedMean(self.version, self.contributions, blocks, self.infos)

    def is_of(self, version: int, contributions: Sequence[Contribution]) -> bool:
        return version == self.version and self.contributions == tuple(contributions)

    def apply(self, engine: Engine, clip_factor: float) -> None:
        engine.apply([self.arrays()], weights=[1.0], divisor=1, clip_factor=clip_factor)

    def sum_of_squares(self, engine: Engine) -> float:
        return engine.sum_of_squares([self.arrays()], weights=[1.0], divisor=1)

    def arrays(self) -> list[Any]:
        """Host arrays; waits until they are computed."""
        return [None if block is None else np.asarray(block) for block in self._blocks]

    def frames(self) -> Iterator[tuple[Frame, Sequence[np.ndarray]]]:
        """Yields the frames for the stream to a standby, which are one for a small mean, else each block when it is
        computed."""
        mean = ReplicaMean(version=self.version, contributions=self.contributions, infos=self.infos)
        mean.whole = sum(block.nbytes for block in self._blocks if block is not None) <= frames.WHOLE_BYTES
        if mean.whole:
            # A standby may be given up while the frame is sent: it must not receive what is in that memory later.
            yield Frame(replica=ReplicaFrame(mean=mean)), [one for one in self.kept().arrays() if one is not None]
            return
        yield Frame(replica=ReplicaFrame(mean=mean)), ()
        for index, block in enumerate(self._blocks):
            if block is None:  # not selected
                continue
            data = np.asarray(block).view(np.uint8)
            for frame, (_, start, stop) in frames.first_chunks([data.nbytes]):
                frame.chunk.block = index
                yield frame, (data[start:stop],)
        yield WHOLE, ()
