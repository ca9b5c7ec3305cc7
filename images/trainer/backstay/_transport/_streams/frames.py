"""Defines the rules of a data stream without the stream, which are sizes, the chunks of a block, and valid frames.
Pure.

All values from a peer are checked here, before memory is allocated or written for them. A violation is a `Refusal`. It
ends the peer's stream and has no effect on other streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from backstay_rpc.control_pb2 import (
    Abandon,
    Chunk,
    End,
    Frame,
    GradientInfo,
    ParamsBegin,
    Pull,
    PushBegin,
    Received,
)
from backstay_rpc.control_pb2 import Refused as RefusedFrame
from backstay_rpc.limits import HEADER_BYTES, MAX_CHUNK_BYTES
from backstay_rpc.refusals import RefusalCode

from ..._update import ALL, Selection, Values
from ._interfaces import Bytes, Place, Refusal

if TYPE_CHECKING:
    from ..._update import BlockWire

__all__ = [
    "BARE_BYTES",
    "CHUNK_BYTES",
    "WHOLE_BYTES",
    "WINDOW_BYTES",
    "Cover",
    "Outgoing",
    "SectionSpan",
    "Span",
    "chunks",
    "decode",
    "first_chunks",
    "kind_of",
    "section_chunks",
]

CHUNK_BYTES: Final = 1 << 20
"""The bytes in one frame. Below 0.5 MiB the cost of a frame shows, above 4 MiB copies leave the caches."""

BARE_BYTES: Final = 64 << 10
"""The bytes that a frame without a body counts for, where the frames that a peer may still send are limited."""

WHOLE_BYTES: Final = 1 << 20
"""A shard of at most this many bytes travels in one frame, which is header, chunks and end mark in one. A frame costs
both ends several changes of threads; copying the blocks into one body costs less (decision 0068)."""

WINDOW_BYTES: Final = 4 << 20
"""The bytes of a push after which the server acknowledges them or refuses the rest.

The client is never more than two windows ahead of the last acknowledgement. So a late push stops soon. The two ends
never write much at the same time, because a server writes its answer after the client has written everything.
"""

Span: TypeAlias = tuple[int, int, int]
"""Bytes ``start:stop`` of a block, as (block, start, stop)."""

SectionSpan: TypeAlias = tuple[int, int, int, int]
"""Bytes ``start:stop`` of a section of a block, as (block, section, start, stop)."""


def chunks(blocks: Sequence[Sequence[int]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, SectionSpan]]:
    """Yields the chunks in which blocks are sent, in order: each with its offset in the encoded block.

    Args:
        blocks: the bytes of each section of each block. A chunk lies in one section; empty sections have none.
        chunk_bytes: the most in one chunk.
    """
    for block, sections in enumerate(blocks):
        offset = 0
        for section, size in enumerate(sections):
            for start in range(0, size, chunk_bytes):
                yield offset + start, (block, section, start, min(start + chunk_bytes, size))
            offset += size


def decode(header: bytes) -> Frame:
    """Parse a frame.

    Raises:
        Refusal: `INVALID`, `header` is not a frame, or too long.
    """
    if len(header) > HEADER_BYTES:
        raise Refusal(
            RefusalCode.INVALID, f"a frame's header has {len(header)} bytes: at most {HEADER_BYTES} are allowed"
        )
    try:
        frame = Frame.FromString(header)
    except DecodeError:
        raise Refusal(RefusalCode.INVALID, f"{len(header)} bytes are not a frame of backstay.v1") from None
    if frame.WhichOneof("kind") is None:
        raise Refusal(RefusalCode.INVALID, "a frame is empty, or of a kind that this version does not know")
    return frame


def kind_of(frame: Frame) -> str:
    """Returns the kind of a frame as the name of its field, such as ``push_begin`` or ``chunk``."""
    return frame.WhichOneof("kind") or "empty"


class Cover:
    """How much of a selection of a shard's blocks has arrived. Each byte must arrive exactly once.

    Blocks arrive in any order and may alternate. Within a block the chunks arrive in order. So a repeated chunk, an
    overlap or a gap is refused immediately, at the cost of one number for each block.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are those of each block, in bytes. A block that is not selected has 0."""
        self._sizes = sizes
        self._filled = [0] * len(sizes)
        self._missing = sum(sizes)
        self._total = self._missing

    @property
    def received(self) -> int:
        """Bytes that have arrived."""
        return self._total - self._missing

    @property
    def missing(self) -> int:
        """Bytes that have not arrived."""
        return self._missing

    def announce(self, nbytes: int) -> None:
        """The sender announces how many bytes it will send. Raises `Refusal` unless it is all of the selection."""
        if nbytes != self._total:
            raise Refusal(
                RefusalCode.INVALID,
                f"{nbytes} bytes are announced: the selected blocks of this shard have {self._total}",
            )

    def add(self, block: int, offset: int, nbytes: int) -> Span:
        """Record a chunk of `nbytes` that arrived for `offset` (bytes) of `block`.

        Returns:
            Where it goes.

        Raises:
            Refusal: `INVALID`, it is not the next part of a block of this shard, or too large.
        """
        if not 0 <= block < len(self._sizes):
            raise Refusal(RefusalCode.INVALID, f"a chunk is of block {block}: this shard has {len(self._sizes)} blocks")
        size, filled = self._sizes[block], self._filled[block]
        if not 0 < nbytes <= MAX_CHUNK_BYTES:
            raise Refusal(RefusalCode.INVALID, f"a chunk has {nbytes} bytes: must be 1 to {MAX_CHUNK_BYTES}")
        if offset + nbytes > size:
            raise Refusal(
                RefusalCode.INVALID,
                f"a chunk is of bytes {offset} to {offset + nbytes} of block {block}, which has {size} bytes",
            )
        if offset < filled:
            raise Refusal(
                RefusalCode.INVALID,
                f"a chunk is of byte {offset} of block {block}: up to byte {filled} arrived already",
            )
        if offset > filled:
            raise Refusal(
                RefusalCode.INVALID, f"a chunk is of byte {offset} of block {block}: byte {filled} must be next"
            )
        self._filled[block] = offset + nbytes
        self._missing -= nbytes
        return block, offset, offset + nbytes

    def place(self, blocks: Sequence[Bytes | None]) -> Place:
        """Returns the argument of `FrameStream.read` that receives chunks into the memory of their blocks.

        Args:
            blocks: the memory of each block; None: its chunks are received into other memory.
        """

        def place(frame: Frame, nbytes: int) -> Sequence[Bytes] | None:
            if kind_of(frame) != "chunk":
                return None
            block, start, stop = self.add(frame.chunk.block, frame.chunk.offset, nbytes)
            memory = blocks[block]
            return None if memory is None else (memory[start:stop],)

        return place

    def whole(self, nbytes: int, blocks: Sequence[Bytes]) -> list[Bytes]:
        """Returns the pieces of memory for all blocks, which arrive in one frame, in `nbytes` bytes.

        Args:
            blocks: the memory of each block.

        Raises:
            Refusal: `INVALID`, it is another size than the shard's.
        """
        if nbytes != self._total:
            raise Refusal(RefusalCode.INVALID, f"a frame with all blocks has {nbytes} bytes: must be {self._total}")
        self._missing = 0
        return [memory for memory, size in zip(blocks, self._sizes, strict=True) if size]

    def end(self, nbytes: int) -> None:
        """The end mark arrived. Raises `Refusal` unless all bytes have arrived, and the sender counted the same."""
        if self._missing:
            raise Refusal(
                RefusalCode.INVALID, f"the end mark arrived with {self._missing} of {self._total} bytes missing"
            )
        if nbytes != self._total:
            raise Refusal(RefusalCode.INVALID, f"the end mark counts {nbytes} bytes: {self._total} arrived")


# Building a frame costs a few microseconds, and there are hundreds in a step: those that stay the same are made once.
ABANDON: Final = Frame(abandon=Abandon())
RECEIVED: Final = Frame(received=Received())
MOVED_ON: Final = Frame(received=Received(moved_on=True))


def section_chunks(blocks: Sequence[Sequence[int]], chunk_bytes: int = CHUNK_BYTES) -> list[tuple[Frame, SectionSpan]]:
    """`chunks` with the frame of each, to be used again in every step."""
    return [(Frame(chunk=Chunk(block=span[0], offset=offset)), span) for offset, span in chunks(blocks, chunk_bytes)]


class Outgoing:
    """The frames of blocks that are sent, to be used again in every step.

    Attributes:
        blocks: the blocks that travel.
        total: number of bytes.
        chunks: see `section_chunks`.
        end: the end mark of parameters.
    """

    def __init__(self, wires: Sequence[BlockWire]) -> None:
        """`wires` define how each block travels."""
        self.blocks = [index for index, wire in enumerate(wires) if wire.nbytes]
        self.total = sum(wire.nbytes for wire in wires)
        self.chunks: list[tuple[Frame, SectionSpan]] = section_chunks([wire.sections for wire in wires])
        self.end = end_of(self.total)


def first_chunks(sizes: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> list[tuple[Frame, Span]]:
    """`section_chunks` of blocks of `sizes` bytes that have one section each."""
    return [
        (frame, (block, start, stop))
        for frame, (block, _, start, stop) in section_chunks([[size] for size in sizes], chunk_bytes)
    ]


def sections_of(block: Any) -> tuple[Bytes, ...]:
    """Returns the bytes of each section of a block, which is a host array or `Encoded`. Waits until they are
    computed."""
    arrays = (block,) if isinstance(block, np.ndarray) else (*block.sections, block.tail)
    return tuple(np.asarray(array).reshape(-1).view(np.uint8) for array in arrays)


def push_begin(begin: PushBegin) -> Frame:
    return Frame(push_begin=begin)


def params_begin(begin: ParamsBegin) -> Frame:
    return Frame(params_begin=begin)


def end_of(nbytes: int, info: GradientInfo | None = None) -> Frame:
    """Returns the end mark of `nbytes` bytes. `info`: of a push."""
    return Frame(end=End(bytes=nbytes, info=info))


_VALUES: Final[Mapping[Values, Pull.Values]] = {
    "encoded": Pull.VALUES_ENCODED,
    "exact": Pull.VALUES_EXACT,
    "average": Pull.VALUES_AVERAGE,
}


def pull(min_version: int, wanted: Selection = ALL) -> Frame:
    """Returns a request for all blocks. `wanted` names the values."""
    return Frame(pull=Pull(min_version=min_version, values=_VALUES[wanted.values]))


def wanted(pull: Pull) -> Selection:
    """Returns the selection that a pull requests.

    Raises:
        Refusal: `INVALID`: values that this version does not know.
    """
    for values, number in _VALUES.items():
        if number == pull.values:
            return Selection(values=values)
    raise Refusal(RefusalCode.INVALID, f"a pull requests unknown values: {pull.values}")


def refused(refusal: Refusal) -> Frame:
    return Frame(refused=RefusedFrame(code=refusal.code, message=refusal.message[:4096]))
