"""The gradients that a shard holds and that no decision has used yet.

One place records which memory belongs to which gradient, and limits each rank to two gradients. Memory of a gradient
that is being received belongs to the stream that receives it, and only that stream returns it. Memory of a complete
gradient belongs to the shard. Not thread-safe: `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from backstay_rpc.control_pb2 import GradientId, GradientInfo, Part, RejectReason
from backstay_rpc.refusals import RefusalCode

from .._transport import BufferPool, Bytes, Refusal, Staging
from ._credits import Credits

if TYPE_CHECKING:
    from .._update import BlockWire, ShardWire

__all__ = ["MAX_PER_RANK", "GradientKey", "Gradients", "StagedGradient", "check_address", "describe", "key_of"]

MAX_PER_RANK: Final = 2
"""The most undecided gradients of a rank, of which one is being decided, and one is of the pod that replaces its
sender."""

GradientKey: TypeAlias = tuple[int, int, int, int]
"""(term, rank, incarnation, attempt)."""


def key_of(gradient: GradientId) -> GradientKey:
    return gradient.term, gradient.rank, gradient.incarnation, gradient.attempt


def describe(gradient: GradientId) -> str:
    return (
        f"the gradient of rank {gradient.rank} (incarnation {gradient.incarnation}, attempt {gradient.attempt}) "
        f"at version {gradient.version}"
    )


def check_address(part: Part, shard: int) -> None:
    """Check the member and the shard that a part is addressed to.

    Raises:
        Refusal: `INVALID`, `shard` is not meant, or the member does not exist.
    """
    if part.shard != shard:
        raise Refusal(
            RefusalCode.INVALID, f"{describe(part.contribution)} is addressed to shard {part.shard}: this is {shard}"
        )
    if part.member != 0:
        raise Refusal(
            RefusalCode.INVALID,
            f"{describe(part.contribution)} comes from member {part.member}: ranks of this job have one member, 0",
        )


class StagedGradient:
    """One gradient in staging memory; `Incoming` for the stream that receives it.

    Attributes:
        info: the content of its end mark; empty until the end mark arrives.
        complete: its end mark came while it could still be used, and it was reported as staged.
        finished: whether the gradient was reported as staged or as lost.
        applied: the version that holds it, once an update has used it.
        outcome: why it was not used, once that is known.
        next_key_step: the `next_key_step` of the rejection.
        examine: ends the stream that receives it, after several calls without a further byte; None: no stream does.
    """

    __slots__ = (
        "applied",
        "complete",
        "examine",
        "finished",
        "id",
        "info",
        "next_key_step",
        "outcome",
        "staging",
        "wires",
    )

    def __init__(self, gradient: GradientId, staging: Staging, wires: Sequence[BlockWire]) -> None:
        self.id = gradient
        self.info = GradientInfo()
        self.staging: Staging | None = staging
        self.wires = wires
        self.complete = False
        self.finished = False
        self.applied: int | None = None
        self.outcome = RejectReason.REJECT_UNSPECIFIED
        self.next_key_step = 0
        self.examine: Callable[[], None] | None = None

    @property
    def blocks(self) -> list[Bytes]:
        if self.staging is None:
            raise RuntimeError(f"{describe(self.id)} is not in staging any more")
        return self.staging.blocks

    def check(self) -> None:
        """Raises `Refusal`, `INVALID`, when the codec cannot have made the received bytes."""
        if self.staging is None:
            return
        for index, (wire, block) in enumerate(zip(self.wires, self.staging.arrays, strict=True)):
            if (why := wire.refuse(block)) is not None:
                raise Refusal(RefusalCode.INVALID, f"block {index} of {describe(self.id)}: {why}")


class Gradients:
    """The record of all staged gradients.

    Attributes:
        wire: how blocks are encoded on the wire.
        credits: decides which pushes get memory.
    """

    def __init__(self, wire: ShardWire, memory: Credits) -> None:
        """
        Args:
            wire: how blocks are encoded on the wire.
            memory: counts the gradients in memory.
        """
        self.wire, self.credits = wire, memory
        self._pools: dict[ShardWire, BufferPool] = {}
        self._held: dict[GradientKey, StagedGradient] = {}

    def __iter__(self) -> Iterator[StagedGradient]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, part: Part) -> StagedGradient:
        """Allocates memory for a part of a gradient.

        Raises:
            Refusal: `REPEATED`, it is here already; `FULL`, two of its rank are.
        """
        gradient = part.contribution
        key = key_of(gradient)
        if key in self._held:
            raise Refusal(
                RefusalCode.REPEATED, f"{describe(gradient)} is here already: each attempt has its own number"
            )
        if sum(held.id.rank == gradient.rank for held in self._held.values()) >= MAX_PER_RANK:
            raise Refusal(
                RefusalCode.FULL, f"rank {gradient.rank} has {MAX_PER_RANK} gradients here that are not decided yet"
            )
        some = self.wire.pushed(part)
        self.credits.take()
        if some not in self._pools:
            self._pools[some] = BufferPool(some.gradients)
        entry = self._held[key] = StagedGradient(gradient, self._pools[some].take(), some.gradients)
        return entry

    def find(self, gradient: GradientId) -> StagedGradient | None:
        """The gradient, if it is here and computed at the same version."""
        entry = self._held.get(key_of(gradient))
        return entry if entry is not None and entry.id.version == gradient.version else None

    def undecided(self, rank: int) -> bool:
        """Whether a complete gradient of this rank waits for a decision."""
        return any(
            held.id.rank == rank and held.complete and held.applied is None and not held.outcome
            for held in self._held.values()
        )

    def remove(self, entry: StagedGradient) -> Staging | None:
        """Removes a gradient from the record. Its memory belongs to the caller then, who hands it to `give`."""
        self._held.pop(key_of(entry.id), None)
        staging, entry.staging = entry.staging, None
        return staging

    def free(self, entry: StagedGradient) -> None:
        """The memory of a gradient is not used any more. The gradient stays in the record."""
        staging, entry.staging = entry.staging, None
        self.give(staging)

    def give(self, staging: Staging | None) -> None:
        """Nothing uses this memory any more."""
        if staging is not None:
            staging.give()
            self.credits.give()
