"""Every element is in exactly one block; shards are balanced; every pod computes the same layout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._update import _partition
from backstay._update._codecs import GROUP
from backstay._update._partition import LINE_BYTES, gather, member_range, partition, range_length, scatter
from backstay._update._rules import analyse
from backstay._update._tree import LeafSpec, TreeSpec, describe
from backstay.errors import ConfigurationError, OptimizerError


@dataclass(frozen=True)
class FakeGroup:
    leaves: tuple[int, ...]
    elementwise: bool
    program: int


@dataclass(frozen=True)
class FakeRule:
    groups: tuple[FakeGroup, ...]
    structure_digest: bytes = b"structure"
    program_digest: bytes = b"program"

    def check(self, shards):
        pass


DTYPES = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64)]
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def trees(draw, whole=True):
    leaves = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2)), min_size=1, max_size=8))
    specs = tuple(LeafSpec(f"leaf{i}", shape, dtype) for i, (shape, dtype, _) in enumerate(leaves))
    tree = TreeSpec(specs, jax.tree.structure([0] * len(specs)))
    groups, taken = [], set()
    for i, (_, _, program) in enumerate(leaves):
        if i in taken:
            continue
        if whole and draw(st.booleans()):
            others = [j for j in range(i + 1, len(specs)) if j not in taken and draw(st.integers(0, 3)) == 0]
            taken.update(others)
            groups.append(FakeGroup((i, *others), False, 3 + i))
        else:
            groups.append(FakeGroup((i,), True, program))
    return tree, FakeRule(tuple(groups))


def covered(parts):
    counts = [np.zeros(leaf.size, int) for leaf in parts.tree.leaves]
    for layout in parts.shards:
        for block in layout.blocks:
            offset = 0
            for piece in block.pieces:
                assert piece.offset == offset
                assert 0 <= piece.start < piece.stop <= parts.tree.leaves[piece.leaf].size
                assert parts.tree.leaves[piece.leaf].dtype == block.dtype
                counts[piece.leaf][piece.start : piece.stop] += 1
                offset += piece.size
            assert offset == block.size
    return counts


@settings(deadline=None)
@given(trees(), st.integers(1, 7), st.sampled_from([64, 256, 1000, 1 << 22]))
def test_every_element_is_in_exactly_one_block(tree_and_rule, shards, block_bytes):
    tree, rule = tree_and_rule
    parts = partition(tree, rule, shards, block_bytes)
    assert all((count == 1).all() for count in covered(parts))
    group_of = {leaf: index for index, group in enumerate(rule.groups) for leaf in group.leaves}
    for layout in parts.shards:
        for block in layout.blocks:
            groups = {group_of[piece.leaf] for piece in block.pieces}
            assert {rule.groups[index].program for index in groups} == {block.rule}
            if all(rule.groups[index].elementwise for index in groups):
                assert block.nbytes <= block_bytes
            else:
                assert groups <= set(layout.groups)
                assert [(p.start, p.stop) for p in block.pieces] == [(0, block.size)]
    placed = sorted(index for layout in parts.shards for index in layout.groups)
    assert placed == [index for index, group in enumerate(rule.groups) if not group.elementwise]


@settings(deadline=None)
@given(trees(whole=False), st.integers(1, 7))
def test_shards_are_balanced_where_leaves_may_be_cut(tree_and_rule, shards):
    tree, rule = tree_and_rule
    parts = partition(tree, rule, shards, 256)
    for layout in parts.shards:
        assert abs(layout.nbytes - tree.nbytes / shards) <= LINE_BYTES


@settings(deadline=None)
@given(trees(), st.integers(1, 7))
def test_whole_groups_are_never_more_unbalanced_than_the_largest(tree_and_rule, shards):
    tree, rule = tree_and_rule
    parts = partition(tree, rule, shards, 256)
    largest = max(
        [sum(tree.leaves[i].nbytes for i in group.leaves) for group in rule.groups if not group.elementwise] or [0]
    )
    assert max(layout.nbytes for layout in parts.shards) <= tree.nbytes / shards + largest + LINE_BYTES


@settings(deadline=None)
@given(trees(), st.integers(1, 5))
def test_gather_and_scatter_are_inverse(tree_and_rule, shards):
    tree, rule = tree_and_rule
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in tree.leaves]
    back = [np.zeros_like(leaf) for leaf in leaves]
    for layout in partition(tree, rule, shards, 512).shards:
        for block in layout.blocks:
            data = gather(block, leaves)
            assert data.shape == (block.size,)
            assert data.dtype == block.dtype
            if len(block.pieces) == 1:
                assert np.shares_memory(data, leaves[block.pieces[0].leaf])
            scatter(block, data, back)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(leaves, back, strict=True))


@settings(deadline=None)
@given(trees(), st.integers(1, 4), st.integers(2, 5), st.sampled_from([512, 4096, 1 << 22]), st.sets(st.integers(0, 7)))
def test_each_member_has_its_range_of_large_leaves_and_nothing_else(
    tree_and_rule, shards, members, block_bytes, chosen
):
    tree, rule = tree_and_rule
    coded = frozenset(chosen) & set(range(len(tree.leaves)))
    with mock.patch.multiple(_partition, DIVIDED_BYTES=1, RANGE=GROUP):
        parts = partition(tree, rule, shards, block_bytes, coded, members=members)
        ranges = [[member_range(leaf.size, members, member) for member in range(members)] for leaf in tree.leaves]
    assert all((count == 1).all() for count in covered(parts))
    whole = {leaf for group in rule.groups if not group.elementwise for leaf in group.leaves}
    assert not parts.divided & whole
    for layout in parts.shards:
        for block in layout.blocks:
            divided = {piece.leaf in parts.divided for piece in block.pieces}
            assert len(divided) == 1
            assert 0 <= block.member < members
            for piece in block.pieces:
                if divided == {True}:
                    first, last = ranges[piece.leaf][block.member]
                    assert first <= piece.start < piece.stop <= last
                if block.coded and piece.leaf not in whole:
                    assert piece.start % GROUP == piece.stop % GROUP == 0


@given(st.integers(1, 10**7), st.integers(1, 9))
def test_ranges_of_members_follow_each_other_to_the_end_of_the_leaf(size, members):
    ranges = [member_range(size, members, member) for member in range(members)]
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == size
    length = range_length(size, members)
    assert length % (16 * GROUP) == 0
    assert all(last - first == length or last == size for first, last in ranges)


def test_members_divide_large_leaves_and_a_small_leaf_belongs_to_one_of_them():
    tree = describe(
        {"table": np.zeros((4000, 50), np.float32), "norms": [np.zeros(300, np.float32) for _ in range(20)]}
    )
    rule = analyse(optax.adam(1e-3), tree)
    alone, three = partition(tree, rule, 2), partition(tree, rule, 2, members=3)
    assert alone.digest != three.digest
    assert (alone.structure_digest, alone.program_digest) == (three.structure_digest, three.program_digest)
    assert alone.digest == partition(tree, rule, 2, members=1).digest
    assert [tree.leaves[leaf].path for leaf in three.divided] == ["table"]
    blocks = [block for layout in three.shards for block in layout.blocks]
    table = [block for block in blocks if block.pieces[0].leaf in three.divided]
    own = [sum(block.size for block in table if block.member == member) for member in range(3)]
    assert own == [67584, 67584, 64832]
    assert sum(block.size for block in blocks if block not in table) == 20 * 300
    assert not any(block.member for layout in alone.shards for block in layout.blocks)


def test_a_rank_has_at_least_one_member():
    tree = describe(model())
    with pytest.raises(ConfigurationError, match="members is 0: must be at least 1"):
        partition(tree, analyse(optax.sgd(1.0), tree), 1, members=0)


def model():
    return {"a": np.zeros((300, 70), np.float32), "b": np.zeros(70, np.float32), "c": np.zeros((64, 64), np.float32)}


def test_blocks_of_large_leaves_lie_aligned_in_the_leaf_and_few_sizes_are_compiled():
    tree = describe(model())
    parts = partition(tree, analyse(optax.adam(1e-3), tree), 3, block_bytes=4096)
    for layout in parts.shards:
        for block in layout.blocks:
            if len(block.pieces) == 1 and block.nbytes == 4096:
                assert block.pieces[0].start * 4 % LINE_BYTES == 0
        assert len({block.size for block in layout.blocks}) <= 2
    cut = [
        leaf
        for leaf in range(3)
        if sum(any(p.leaf == leaf for b in s.blocks for p in b.pieces) for s in parts.shards) > 1
    ]
    assert len(cut) <= 2


def test_the_digest_is_of_the_layout():
    tree = describe(model())
    rule = analyse(optax.adam(1e-3), tree)
    digests = {partition(tree, rule, shards).digest for shards in (1, 2, 3)}
    digests.add(partition(tree, rule, 2, block_bytes=4096).digest)
    digests.add(partition(tree, analyse(optax.lamb(1e-3), tree), 2).digest)
    renamed = describe({"A": model()["a"], "b": model()["b"], "c": model()["c"]})
    digests.add(partition(renamed, analyse(optax.adam(1e-3), renamed), 2).digest)
    assert len(digests) == 6
    assert all(len(digest) == 32 for digest in digests)


def test_every_process_computes_the_same_layout():
    program = (
        "import numpy as np, optax\n"
        "from backstay._update._tree import describe\n"
        "from backstay._update._rules import analyse\n"
        "from backstay._update._partition import partition\n"
        "tree = describe({'a': np.zeros((300, 70), np.float32), 'b': np.zeros(70, np.float32),"
        " 'c': np.zeros((64, 64), np.float32)})\n"
        "print(partition(tree, analyse(optax.adam(1e-3), tree), 2).digest.hex())\n"
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": "", "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tree = describe(model())
    assert done.stdout.strip() == partition(tree, analyse(optax.adam(1e-3), tree), 2).digest.hex()


def test_more_shards_than_there_is_to_hold_leaves_some_empty():
    tree = describe({"scale": np.float32(1)})
    parts = partition(tree, analyse(optax.adam(1e-3), tree), 3)
    assert sorted(len(layout.blocks) for layout in parts.shards) == [0, 0, 1]
    tree = describe({"a": np.zeros((4, 4)), "b": np.zeros((3, 3))})
    parts = partition(tree, analyse(optax.lamb(1e-3), tree), 3)
    assert sorted(len(layout.blocks) for layout in parts.shards) == [0, 1, 1]


def test_bad_numbers_are_refused():
    tree = describe(model())
    rule = analyse(optax.sgd(0.1), tree)
    with pytest.raises(ConfigurationError, match="shards is 0: must be at least 1"):
        partition(tree, rule, 0)
    with pytest.raises(ConfigurationError, match="block_bytes is 63: must be at least 64"):
        partition(tree, rule, 1, block_bytes=63)
    clipped = analyse(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), tree)
    with pytest.raises(OptimizerError, match=r"leaf a depends on leaf b .* pass `clip_norm=` to train"):
        partition(tree, clipped, 2)
