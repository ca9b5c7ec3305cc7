"""The gradients that a shard holds and that no decision has used yet.

One place records which memory belongs to which gradient, and limits each rank to two gradients. Each member of a rank
sends its part of a gradient on its own stream. Memory of a gradient that is being received belongs to these streams,
and the last one returns it. Memory of a complete gradient belongs to the shard.
Not thread-safe: `ShardRuntime` calls it under its own lock.
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

__all__ = [
    "MAX_PER_RANK",
    "GradientKey",
    "Gradients",
    "StagedGradient",
    "StagedPart",
    "check_address",
    "describe",
    "key_of",
]

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


def check_address(part: Part, shard: int, members: int) -> None:
    """Check the member that sends a part, and the shard that it is addressed to.

    Args:
        members: the number of members of a rank.

    Raises:
        Refusal: `INVALID`, `shard` is not meant, or the member does not exist.
    """
    if part.shard != shard:
        raise Refusal(
            RefusalCode.INVALID, f"{describe(part.contribution)} is addressed to shard {part.shard}: this is {shard}"
        )
    if part.member >= members:
        names = "one member, 0" if members == 1 else f"{members} members, 0 to {members - 1}"
        raise Refusal(
            RefusalCode.INVALID,
            f"{describe(part.contribution)} comes from member {part.member}: ranks of this job have {names}",
        )


class StagedPart:
    """The part of one member in a gradient; `Incoming` for the stream that receives it.

    Attributes:
        gradient: the gradient that it belongs to.
        info: the content of its end mark; empty until the end mark arrives.
        complete: its end mark came while it could still be used.
        finished: whether its stream has reported it as complete or as lost.
        examine: ends the stream that receives it, after several calls without a further byte; None: no stream does.
    """

    __slots__ = ("_wires", "complete", "examine", "finished", "gradient", "info")

    def __init__(self, gradient: StagedGradient, wires: Sequence[BlockWire]) -> None:
        """
        Args:
            wires: how each block of this member travels.
        """
        self.gradient = gradient
        self._wires = wires
        self.info = GradientInfo()
        self.complete = False
        self.finished = False
        self.examine: Callable[[], None] | None = None

    @property
    def blocks(self) -> list[Bytes]:
        """The memory of this member's blocks; none of the others."""
        every = self._staging().blocks
        if self.gradient.members == 1:
            return every
        return [block if wire.nbytes else block[:0] for block, wire in zip(every, self._wires, strict=True)]

    def check(self) -> None:
        """Raises `Refusal`, `INVALID`, when the codec cannot have made the received bytes."""
        if self.gradient.staging is None:
            return
        for index, (wire, block) in enumerate(zip(self._wires, self.gradient.staging.arrays, strict=True)):
            if not wire.absent and (why := wire.refuse(block)) is not None:
                raise Refusal(RefusalCode.INVALID, f"block {index} of {describe(self.gradient.id)}: {why}")

    def _staging(self) -> Staging:
        if self.gradient.staging is None:
            raise RuntimeError(f"{describe(self.gradient.id)} is not in staging any more")
        return self.gradient.staging


class StagedGradient:
    """One gradient in staging memory.

    Attributes:
        parts: the parts that have begun to arrive, by member.
        members: the number of members of a rank.
        complete: all parts are complete, and it was reported as staged.
        lost: a part will not arrive, and it was reported as lost.
        applied: the version that holds it, once an update has used it.
        outcome: why it was not used, once that is known.
        next_key_step: the `next_key_step` of the rejection.
    """

    __slots__ = (
        "applied",
        "complete",
        "id",
        "lost",
        "members",
        "next_key_step",
        "outcome",
        "parts",
        "staging",
    )

    def __init__(self, gradient: GradientId, staging: Staging, members: int) -> None:
        self.id = gradient
        self.staging: Staging | None = staging
        self.parts: dict[int, StagedPart] = {}
        self.members = members
        self.complete = False
        self.lost = False
        self.applied: int | None = None
        self.outcome = RejectReason.REJECT_UNSPECIFIED
        self.next_key_step = 0

    @property
    def info(self) -> GradientInfo:
        """The end mark of member 0, with the bytes of all members that have arrived; empty until it arrives."""
        part = self.parts.get(0)
        if part is None or self.members == 1:
            return GradientInfo() if part is None else part.info
        whole = GradientInfo()
        whole.CopyFrom(part.info)
        whole.carried = sum(one.info.carried for one in self.parts.values())
        whole.exact = sum(one.info.exact for one in self.parts.values())
        return whole

    @property
    def receiving(self) -> list[StagedPart]:
        """The parts whose streams may still write into the memory."""
        return [part for part in self.parts.values() if not part.finished]

    @property
    def all_parts(self) -> bool:
        """Whether the parts of all members are complete."""
        return len(self.parts) == self.members and all(part.complete for part in self.parts.values())

    def disagreement(self) -> str | None:
        """Returns the reason why the end marks cannot be of one gradient, or None if they can. Call it when all parts
        are complete."""
        first = self.parts[0].info
        for member, part in sorted(self.parts.items()):
            if (part.info.finite, part.info.examples) != (first.finite, first.examples):
                return (
                    f"the members of rank {self.id.rank} disagree about one gradient: member 0 reports "
                    f"finite={first.finite} and {first.examples} examples, member {member} reports "
                    f"finite={part.info.finite} and {part.info.examples}"
                )
        return None


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

    @property
    def members(self) -> int:
        """The number of members of a rank."""
        return self.wire.members

    def expects(self, part: Part) -> bool:
        """Returns whether the gradient of a part has memory, since parts of other members have begun to arrive."""
        held = self._held.get(key_of(part.contribution))
        return held is not None and part.member not in held.parts

    def begin(self, part: Part) -> StagedPart:
        """Allocates memory for a gradient when the first part of it begins to arrive.

        Raises:
            Refusal: `REPEATED`, the part is here already; `FULL`, two gradients of its rank are.
        """
        gradient = part.contribution
        key = key_of(gradient)
        if self.expects(part):
            entry = self._held[key]
            entry.parts[part.member] = made = StagedPart(entry, self.wire.pushed(part).gradients)
            return made
        if key in self._held:
            raise Refusal(
                RefusalCode.REPEATED, f"{describe(gradient)} is here already: each attempt has its own number"
            )
        if sum(held.id.rank == gradient.rank for held in self._held.values()) >= MAX_PER_RANK:
            raise Refusal(
                RefusalCode.FULL,
                f"rank {gradient.rank} has {MAX_PER_RANK} contributions here that are not decided yet, and may have no "
                "more: the worker joins again",
            )
        every = self.wire.select(self.wire.selection([gradient.key_step]))  # the parts of all members
        self.credits.take()
        if every not in self._pools:
            self._pools[every] = BufferPool(every.gradients)
        entry = self._held[key] = StagedGradient(gradient, self._pools[every].take(), self.members)
        entry.parts[part.member] = made = StagedPart(entry, self.wire.pushed(part).gradients)
        return made

    def find(self, gradient: GradientId) -> StagedGradient | None:
        """Returns the gradient, if it is here and computed at the same version."""
        entry = self._held.get(key_of(gradient))
        return entry if entry is not None and entry.id.version == gradient.version else None

    def undecided(self, rank: int) -> bool:
        """Returns whether a complete gradient of this rank waits for a decision."""
        return any(
            held.id.rank == rank and held.complete and held.applied is None and not held.outcome
            for held in self._held.values()
        )

    def remove(self, entry: StagedGradient) -> Staging | None:
        """Removes a gradient from the record. Its memory belongs to the caller then, who hands it to `give`."""
        self._held.pop(key_of(entry.id), None)
        staging, entry.staging = entry.staging, None
        return staging

    def lose(self, entry: StagedGradient) -> None:
        """Removes a gradient of which a part will not arrive. Its memory is free once no stream writes into it."""
        entry.lost = True
        if self._held.get(key_of(entry.id)) is entry:
            del self._held[key_of(entry.id)]
        if not entry.receiving:
            self.free(entry)

    def free(self, entry: StagedGradient) -> None:
        """The memory of a gradient is not used any more. The gradient stays in the record."""
        staging, entry.staging = entry.staging, None
        self.give(staging)

    def give(self, staging: Staging | None) -> None:
        """Nothing uses this memory any more."""
        if staging is not None:
            staging.give()
            self.credits.give()
