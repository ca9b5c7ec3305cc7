"""No element is lost between JAX and the wire, and no memory is copied or overwritten without need."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from backstay._transport._tensors._areas import DIRECT_BYTES
from backstay._transport._tensors._buffers import Arrangement, ParamBuffers
from backstay._update import Partition, analyse, describe, partition

RNG = np.random.default_rng(0)


def tree_of() -> dict[str, Any]:
    return {
        "big": RNG.standard_normal((1200, 1100), dtype=np.float32),  # more than one block
        "bias": RNG.standard_normal(1100, dtype=np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "half": RNG.standard_normal((300, 300), dtype=np.float32).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(4.0),
        "odd": RNG.standard_normal(33, dtype=np.float32).astype(np.float16),
    }


def arranged(optimizer: Any, shards: int) -> tuple[Partition, list[Any]]:
    tree = tree_of()
    spec = describe(tree)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
    return partition(spec, analyse(optimizer, spec), shards, 1 << 20), leaves


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.lamb(0.1)], ids=["elementwise", "whole leaves"])
def test_out_to_the_blocks_and_back(optimizer: Any, shards: int) -> None:
    """T4: every element of every leaf comes back bit for bit, packed or not."""
    layout, leaves = arranged(optimizer, shards)
    arrangement = Arrangement(layout)
    blocks = arrangement.gradient_blocks(arrangement.pack(leaves))
    slot = ParamBuffers.of(arrangement).take()
    for views, targets, shard in zip(blocks, slot.blocks, layout.shards, strict=True):
        assert [(view.size, view.dtype) for view in views] == [(b.size, b.dtype) for b in shard.blocks]
        for view, target in zip(views, targets, strict=True):
            assert target.dtype == np.uint8
            target[:] = view.view(np.uint8)
    for received in (slot.params(), slot.host()):
        for given, leaf in zip(leaves, received, strict=True):
            assert (leaf.shape, leaf.dtype) == (given.shape, given.dtype)
            assert np.asarray(leaf).tobytes() == np.asarray(given).tobytes()


def test_the_pack_may_be_part_of_a_jitted_gradient() -> None:
    layout, leaves = arranged(optax.sgd(0.1), 2)
    arrangement = Arrangement(layout)
    fused = jax.jit(lambda values: arrangement.pack([2 * value for value in values]))(leaves)
    doubled = arrangement.pack([2 * leaf for leaf in leaves])
    for ours, theirs in zip(arrangement.gradient_blocks(fused), arrangement.gradient_blocks(doubled), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.tobytes() == b.tobytes()


def pointer(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


def test_large_leaves_are_not_copied() -> None:
    layout, leaves = arranged(optax.sgd(0.1), 2)
    arrangement = Arrangement(layout)
    slot = ParamBuffers.of(arrangement).take()
    params = slot.params()
    assert arrangement.direct
    for leaf in arrangement.direct:
        spec = layout.tree.leaves[leaf]
        assert spec.nbytes >= DIRECT_BYTES
        inside = [view for views in slot.blocks for view in views]
        assert pointer(params[leaf]) in {view.ctypes.data for view in inside}
        sent = [view for views in arrangement.gradient_blocks(arrangement.pack(leaves)) for view in views]
        assert pointer(leaves[leaf]) in {view.ctypes.data for view in sent}


def test_memory_in_use_is_not_received_into() -> None:
    """Parameters that a script keeps never change, however long it keeps them."""
    layout, _ = arranged(optax.sgd(0.1), 1)
    buffers = ParamBuffers.of(Arrangement(layout))
    first = buffers.take()
    params = first.params()
    kept = max(params, key=lambda leaf: leaf.size)
    before = np.array(kept)
    second = buffers.take()
    assert second is not first
    del params
    assert buffers.take() is second
    for views in second.blocks:
        for view in views:
            view[:] = 1
    assert np.asarray(kept).tobytes() == before.tobytes()
    del kept
    gc.collect()  # JAX releases host memory then, or with its next calls
    assert buffers.take() is first
