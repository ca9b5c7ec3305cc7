"""Leaves that no gradient reaches are named once; leaves whose gradients only come late are not."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._update._partition import partition, parts_of_leaves
from backstay._update._rules import analyse
from backstay._update._tree import describe
from backstay._update._untrained import UPDATES, SameLeaves, Untrained, ZeroLeaves
from backstay.testing import train_local

TREE = describe({name: np.zeros(3, np.float32) for name in "abcd"} | {"empty": np.zeros((0, 2), np.float32)})

GRADIENTS = st.lists(st.sets(st.integers(0, 3)), min_size=UPDATES + 3, max_size=UPDATES + 3)


def arrays(nonzero):
    return lambda leaves: {leaf: [np.zeros(2), np.asarray([0, float(leaf in nonzero)])] for leaf in leaves}


@given(st.lists(GRADIENTS, min_size=1, max_size=3))
def test_named_are_the_leaves_that_are_zero_in_every_gradient_of_the_first_updates(workers):
    mine, all_of_them = [ZeroLeaves(TREE) for _ in workers], Untrained()
    said = []
    for step in range(UPDATES + 3):
        examined = [each.examine(step, arrays(gradients[step])) for each, gradients in zip(mine, workers, strict=True)]
        said += all_of_them.update(examined)
    reached = {leaf for gradients in workers for step in range(UPDATES) for leaf in gradients[step]}
    assert said == [leaf for leaf in range(4) if leaf not in reached]


def test_after_the_first_updates_nothing_is_read():
    def never(leaves):
        raise AssertionError(leaves)

    left = ZeroLeaves(TREE)
    assert left.examine(UPDATES, never) is None
    assert left.examine(0, arrays({0, 1, 2, 3})) == []
    assert left.examine(1, never) == []  # nothing is left


def test_a_run_that_is_continued_is_not_judged():
    judged = Untrained()
    assert [judged.update([[0], None]), judged.update([[0], [0]])] == [[], []]
    assert all(judged.update([[0]]) == [] for _ in range(UPDATES))


def test_a_leaf_that_is_cut_over_shards_is_read_whole():
    params = {"a": np.zeros((40, 8), np.float32), "b": np.zeros(5, np.float32)}
    tree = describe(params)
    parts = partition(tree, analyse(optax.adam(1e-3), tree), 3, block_bytes=256)
    flat = [np.arange(320, dtype=np.float32), np.arange(5, dtype=np.float32)]
    blocks = [
        [
            np.concatenate([flat[piece.leaf][piece.start : piece.stop] for piece in block.pieces])
            for block in layout.blocks
        ]
        for layout in parts.shards
    ]
    found = parts_of_leaves(parts, blocks, [0, 1])
    assert sorted(np.concatenate(found[0])) == list(flat[0])
    assert sorted(np.concatenate(found[1])) == list(flat[1])


@pytest.mark.parametrize("used", [True, False])
def test_one_process_warns_once(used, caplog):
    params = {"w": jnp.ones(3), "running": {"mean": jnp.zeros(3)}}

    def loss(params, batch):
        return jnp.sum((params["w"] * batch + params["running"]["mean"] * used) ** 2)

    with caplog.at_level(logging.WARNING, "backstay"):
        train_local(lambda _: params, loss, lambda key: np.ones(3, np.float32), optax.sgd(1e-3), UPDATES + 5)
    said = [record.getMessage() for record in caplog.records if "exactly zero" in record.getMessage()]
    assert len(said) == (0 if used else 1)
    assert used or "the gradient of running.mean (1 of 2 leaves) was exactly zero in the first 10 updates" in said[0]


@pytest.mark.parametrize(
    ("steps", "versions", "found"),
    [
        (12, [0, *range(1, UPDATES), UPDATES], [None] * UPDATES + [[0, 2]]),
        (90, [7, 7, 8, 7 + UPDATES + 3, 40], [None, None, None, [0, 2], None]),  # Async: other ranks update between
        (90, [20, 3, 40], [None, None, None]),  # a rollback: the versions do not count updates
        (400, [0, 39, 40], [None, None, [0, 2]]),
        (10**6, [0, 999, 1000], [None, None, [0, 2]]),
    ],
)
def test_leaves_that_are_received_again_are_found_once(steps, versions, found):
    """The second leaf changes with each version; the last one is empty."""
    assert examined(steps, versions, lambda version: (1.0, 0.5 + version)) == found


@pytest.mark.parametrize("values", [lambda version: (1.0, 1.0), lambda version: (version, version)])
def test_a_warm_up_and_a_smaller_part_cause_no_warning(values):
    """Nothing has changed, or only a part with fewer bytes has not."""
    assert examined(12, [0, 5, 10, 11], values) == [None] * 4


def examined(steps, versions, values):
    tree = describe(
        ({"a": jnp.ones(3), "b": jnp.ones(2)}, {"c": jnp.ones(2, jnp.int32), "d": jnp.ones(0)}), has_state=True
    )
    watch, answers = SameLeaves(tree, steps), []
    for version in versions:
        first, second = values(version)
        leaves = [np.full(3, first, np.float32), np.full(2, second, np.float32), np.ones(2, np.int32), np.ones(0)]
        answers.append(watch.examine(version, leaves))
    return answers
