"""Memory that JAX can alias, and that is used again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay._update._codecs import BlockWire
from backstay._wire.memory import ALIGNMENT, BufferPool, aligned_empty, layout_offsets


@given(st.integers(1, 5000))
def test_alignment(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % ALIGNMENT == 0


@given(st.lists(st.integers(0, 300), min_size=1))
def test_parts_are_aligned_and_apart(sizes: list[int]) -> None:
    offsets, total = layout_offsets(sizes)
    ends = [*offsets[1:], total]
    for offset, size, end in zip(offsets, sizes, ends, strict=True):
        assert offset % ALIGNMENT == 0
        assert offset + size <= end < offset + size + ALIGNMENT


def test_what_is_given_back_is_taken_again() -> None:
    pool = BufferPool([BlockWire(3, np.dtype(np.float32)), BlockWire(1, np.dtype(np.float64))], keep=1)
    first = pool.take()
    assert [a.size for a in first.arrays] == [3, 1]
    first.blocks[0][:] = 0
    assert first.arrays[0].tolist() == [0, 0, 0]
    assert pool.take() is not first
    pool.give(first)
    assert pool.take() is first
