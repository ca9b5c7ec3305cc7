"""A worker computes a gradient of one batch between a pull and a push, behind the interface."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay import BatchKey
from backstay._compute._contribution import Computation, ComputedContribution, GradientComputation, Start
from backstay._compute._gradient import GradientFn
from backstay._transport import Arrangement
from backstay._update import Objective
from backstay._update._partition import partition
from backstay._update._rules import analyse
from backstay._update._tree import describe

KEY = BatchKey(step=3, rank=1, world=2, seed=7)


def loss(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"] ** 2 * batch[0]) + params["b"] * 2, {"half": params["b"] / 2}


@pytest.fixture
def params() -> dict[str, Any]:
    return {"b": np.float32(3), "w": np.arange((1 << 16) + 5, dtype=np.float32)}


def computation_of(params: Any, keys: list[BatchKey], value: float = 0.5) -> tuple[Computation, Arrangement]:
    tree = describe(params)
    arrangement = Arrangement(partition(tree, analyse(optax.sgd(0.1), tree), 2))

    def batch_of(key: BatchKey) -> Any:
        keys.append(key)
        return np.full(4, value, np.float32)

    gradient_of = GradientFn(Objective(loss, tree), pack=arrangement)
    return GradientComputation(gradient_of, tree, arrangement, batch_of), arrangement


def test_a_gradient_is_a_contribution(params: dict[str, Any]) -> None:
    """The contribution has the blocks of every shard, and the summary that travels with the end mark."""
    keys: list[BatchKey] = []
    computation, arrangement = computation_of(params, keys)
    assert computation.batches == 1
    contribution: ComputedContribution = computation.start(Start(jax.tree_util.tree_leaves(params), KEY))
    contribution.wait()
    assert arrangement.direct == {1}, "one leaf travels in blocks of its own, the other one is packed"
    assert (contribution.key, keys) == (KEY, [KEY])
    summary = contribution.summary
    assert (summary.finite, summary.examples, dict(summary.metrics)) == (True, 4, {"half": 1.5})
    leaves = [np.full((), 2, np.float32), params["w"]]  # d/dw of w**2 / 2 is w
    seen = 0
    for s, layout in enumerate(arrangement.partition.shards):
        assert len(contribution.blocks[s]) == len(layout.blocks)
        for b, block in enumerate(layout.blocks):
            for piece in block.pieces:
                part = contribution.blocks[s][b][piece.offset : piece.offset + piece.size]
                np.testing.assert_array_equal(part, leaves[piece.leaf].reshape(-1)[piece.start : piece.stop])
                seen += piece.size
    assert seen == params["w"].size + 1


def test_a_contribution_that_is_not_finite_reports_it(params: dict[str, Any]) -> None:
    """T1: the end mark carries it, so the update is skipped."""
    computation, _ = computation_of(params, [], float("inf"))
    assert not computation.start(Start(jax.tree_util.tree_leaves(params), KEY)).summary.finite


def test_what_is_sent_again_is_the_same(params: dict[str, Any]) -> None:
    """T3: reading a block a second time gives the same memory, regardless of later computations."""
    computation, _ = computation_of(params, [])
    leaves = jax.tree_util.tree_leaves(params)
    first = computation.start(Start(leaves, KEY))
    before = [block.copy() for blocks in first.blocks for block in blocks]
    computation.start(Start([leaf * 2 for leaf in leaves], KEY)).wait()
    for block, copy in zip([block for blocks in first.blocks for block in blocks], before, strict=True):
        np.testing.assert_array_equal(block, copy)
