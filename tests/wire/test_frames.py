"""The rules of a stream never accept a part of a gradient, without a stream (T1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._transport._streams._interfaces import Refusal
from backstay._transport._streams.frames import Cover, chunks, decode, first_chunks
from backstay_rpc.control_pb2 import Frame
from backstay_rpc.limits import HEADER_BYTES

SIZES = st.lists(st.integers(0, 50), max_size=6)


@given(st.lists(SIZES, max_size=4), st.integers(1, 20))
def test_chunks_are_each_byte_once_in_order(blocks: list[list[int]], chunk: int) -> None:
    spans = list(chunks(blocks, chunk))
    assert [(b, s, i) for _, (b, s, start, stop) in spans for i in range(start, stop)] == [
        (b, s, i) for b, sections in enumerate(blocks) for s, size in enumerate(sections) for i in range(size)
    ]
    assert all(0 < stop - start <= chunk for _, (_, _, start, stop) in spans)
    assert all(offset == sum(blocks[b][:s]) + start for offset, (b, s, start, _) in spans)


@given(SIZES, st.integers(1, 20), st.randoms())
def test_blocks_may_come_in_any_order(sizes: list[int], chunk: int, random: object) -> None:
    """T1: in any order of the blocks, all chunks together are accepted, and no smaller set."""
    queues = [[s for _, s in first_chunks(sizes, chunk) if s[0] == b] for b in range(len(sizes))]
    queues = [queue for queue in queues if queue]
    cover = Cover(sizes)
    cover.announce(sum(sizes))
    while queues:
        with pytest.raises(Refusal, match="missing"):
            cover.end(sum(sizes))
        queue = random.choice(queues)  # type: ignore[attr-defined]
        block, start, stop = queue.pop(0)
        assert cover.add(block, start, stop - start) == (block, start, stop)
        queues = [queue for queue in queues if queue]
    cover.end(sum(sizes))


@given(SIZES, st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 60), st.integers(-1, 60)), max_size=12))
def test_what_is_accepted_covers_every_byte_once(sizes: list[int], tries: list[tuple[int, int, int]]) -> None:
    """T1: in no sequence of chunks, however invalid, does a byte count twice or a gap count as filled."""
    cover = Cover(sizes)
    seen: set[tuple[int, int]] = set()
    for block, offset, nbytes in tries:
        try:
            b, start, stop = cover.add(block, offset, nbytes)
        except Refusal:
            continue
        new = {(b, i) for i in range(start, stop)}
        assert new
        assert not new & seen
        assert stop <= sizes[b]
        seen |= new
    assert cover.missing == sum(sizes) - len(seen)


def test_the_end_mark_must_count_the_same() -> None:
    cover = Cover([4])
    cover.add(0, 0, 4)
    with pytest.raises(Refusal, match="counts 5 bytes: 4 arrived"):
        cover.end(5)


def test_another_size_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(Refusal, match=r"1099511627776 bytes are announced: .* have 4"):
        Cover([4]).announce(1 << 40)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "empty"),
        (b"\xff\xff\xff", "not a frame"),
        (b"\x00" * (HEADER_BYTES + 1), "at most"),
        (b"\xa2\x06\x00", "does not know"),  # a field of a later version
    ],
)
def test_headers_that_are_none(header: bytes, why: str) -> None:
    with pytest.raises(Refusal, match=why) as refusal:
        decode(header)
    assert refusal.value.code == "INVALID_ARGUMENT"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_refusal(header: bytes) -> None:
    try:
        frame = decode(header)
    except Refusal:
        return
    assert isinstance(frame, Frame)
