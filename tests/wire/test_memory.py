"""Memory that JAX can alias, and that is used again."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay._transport._tensors._memory import ALIGNMENT, BufferPool, aligned_empty, layout_offsets
from backstay._update import BlockWire


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


def test_memory_that_the_pool_does_not_keep_is_freed_immediately() -> None:
    """A shard may be gigabytes, and the collector of cycles seldom runs."""
    pool = BufferPool([BlockWire(3, np.dtype(np.float32))], keep=0)
    gc.disable()
    try:
        given, held = pool.take(), pool.take()
        array = weakref.ref(given.blocks[0])
        given.give()
        del given
        assert array() is None
        array = weakref.ref(held.blocks[0])
        del pool, held
        assert array() is None, "nor does memory that is never given back wait"
    finally:
        gc.enable()


def test_memory_is_given_back_once() -> None:
    """Given back twice, it would belong to two contributions."""
    pool = BufferPool([BlockWire(3, np.dtype(np.float32))])
    staging = pool.take()
    staging.give()
    staging.give()
    assert pool.take() is staging
    assert pool.take() is not staging
