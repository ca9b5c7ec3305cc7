"""The rounding of a leaf by codecs depends neither on blocks nor on shards (T4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey
from backstay._compute import Encoder, Summary
from backstay._transport import frames
from backstay._update._codecs import (
    GROUP,
    SMALL,
    BlockWire,
    Rounding,
    Wire,
    coded_leaves,
    seed_of,
    shard_wires,
)
from backstay._update._engine import ShardEngine
from backstay._update._partition import Partition, gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import TreeSpec, describe
from backstay.errors import ConfigurationError

SIZES = [3, SMALL - 1, SMALL, SMALL + 200, 3 * SMALL + 77]
KEY = BatchKey(step=5, rank=1, world=2, seed=9)


def tree_of(dtype: Any = np.float32) -> tuple[TreeSpec, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    leaves = {f"w{size}": rng.standard_normal(size).astype(dtype) for size in SIZES}
    return describe(leaves), jax.tree_util.tree_leaves(leaves)


def layout_of(
    tree: TreeSpec, wire: Wire, shards: int, block_bytes: int, optimizer: Any = None
) -> tuple[Partition, tuple[Any, ...]]:
    coded = coded_leaves(tree, wire)
    parts = partition(tree, analyse(optimizer or optax.sgd(0.1), tree), shards, block_bytes, coded)
    return parts, shard_wires(parts, wire, coded)


@jax.jit
def decoded(block: Any) -> Any:
    """Returns a block's values. One function, so that JAX compiles it once for each shape and codec."""
    return block.decode()


def received(wire: BlockWire, block: Any) -> np.ndarray:
    """Returns a block of a contribution, decoded from its bytes."""
    data = np.concatenate(frames.sections_of(block))
    assert data.nbytes == wire.nbytes
    views = wire.views(data)
    return views if isinstance(views, np.ndarray) else np.asarray(decoded(views))


class Given:
    """A contribution of leaves on the host."""

    def __init__(self, parts: Partition, leaves: Sequence[np.ndarray], key: BatchKey = KEY) -> None:
        self.key = key
        self.summary = Summary(True, 1, 0.0, {})
        self.blocks = [[np.array(gather(block, leaves)) for block in layout.blocks] for layout in parts.shards]

    def wait(self) -> None:
        pass


def sent(parts: Partition, wires: Sequence[Any], encoder: Encoder, leaves: Sequence[np.ndarray], key: BatchKey) -> Any:
    """Returns a contribution as the servers decode it, as leaves."""
    result = [np.zeros_like(leaf) for leaf in leaves]
    with encoder.sending(Given(parts, leaves, key)) as sending:
        for s, layout in enumerate(parts.shards):
            for b, block in enumerate(layout.blocks):
                scatter(block, received(wires[s].gradients[b], sending.blocks[s][b]), result)
        sending.applied()
    return result


@pytest.mark.parametrize(
    ("optimizer", "gradients"), [("sgd", "BFloat16"), ("sgd", "Int8"), ("sgd", "Int4"), ("lars", "Int4")]
)
def test_t4_one_process_rounds_as_any_number_of_shards(gradients: Any, optimizer: str) -> None:
    """T4: bit for bit, also of leaves that are updated as a whole."""
    tree, leaves = tree_of()
    wire = Wire(gradients=gradients)
    alone = [np.asarray(leaf) for leaf in Rounding(tree, wire).gradients(leaves, KEY.seed, KEY.step, KEY.rank)]
    rule = getattr(optax, optimizer)(0.1)
    for shards, block_bytes in ((1, 1 << 22), (3, 4096)):
        parts, wires = layout_of(tree, wire, shards, block_bytes, rule)
        ours = sent(parts, wires, Encoder(wires, KEY.seed), leaves, KEY)
        for name, one, other in zip(tree.leaves, alone, ours, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name.path)
    for leaf, before, after in zip(tree.leaves, leaves, alone, strict=True):
        exact = leaf.size < SMALL
        assert (before == after).all() == exact
        np.testing.assert_array_equal(before[leaf.size // GROUP * GROUP :], after[leaf.size // GROUP * GROUP :])


@pytest.mark.parametrize("shards", [1, 3])
def test_t4_parameters_are_rounded_the_same_for_any_number_of_shards(shards: int) -> None:
    """T4: what a worker receives, in chunks of any even size, is what one process computes with."""
    tree, leaves = tree_of()
    wire = Wire(parameters="BFloat16")
    alone = Rounding(tree, wire).parameters(leaves)
    parts, wires = layout_of(tree, wire, shards, 8192)
    result = [np.zeros_like(leaf) for leaf in leaves]
    for s, layout in enumerate(parts.shards):
        for block, one in zip(layout.blocks, wires[s].parameters, strict=True):
            values = np.array(gather(block, leaves))
            into = np.zeros(values.nbytes, np.uint8)
            data = frames.sections_of(values if one.codec is None else one.encode(values))
            offset = 0
            for section in data:
                for start in range(0, section.nbytes, 1000):
                    assert one.receive(into, offset + start, section[start : start + 1000]) is None
                offset += section.nbytes
            scatter(block, into.view(values.dtype), result)
    for one, other in zip(alone, result, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 2), (0, 3), (2 * GROUP - 2, 4)])
def test_parameters_that_do_not_hold_whole_elements_are_refused(offset: int, nbytes: int) -> None:
    tree, _ = tree_of()
    _, wires = layout_of(tree, Wire(parameters="BFloat16"), 1, 1 << 22)
    wire = next(one for one in wires[0].parameters if one.codec is not None)
    wire = BlockWire(GROUP + 1, wire.dtype, wire.codec, wire.numbers[:1])
    into = np.zeros(4 * (GROUP + 1), np.uint8)
    assert "do not hold whole elements" in str(wire.receive(into, offset, np.ones(nbytes, np.uint8)))
    assert not into.any()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6 * GROUP), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([64, 1024, 1 << 22]),
)
def test_pieces_of_coded_leaves_are_whole_groups(leaves: list[tuple[int, bool]], shards: int, block_bytes: int) -> None:
    """Every element is in exactly one block; coded blocks hold whole groups of coded leaves and nothing else."""
    tree = describe({f"w{i}": np.zeros(size, np.float32) for i, (size, _) in enumerate(leaves)})
    coded = frozenset(i for i, (_, own) in enumerate(leaves) if own)
    parts = partition(tree, analyse(optax.sgd(0.1), tree), shards, block_bytes, coded)
    counts = [np.zeros(leaf.size, int) for leaf in tree.leaves]
    for layout in parts.shards:
        for block in layout.blocks:
            assert block.size == sum(piece.size for piece in block.pieces)
            for piece in block.pieces:
                counts[piece.leaf][piece.start : piece.stop] += 1
                if block.coded:
                    assert piece.leaf in coded
                    assert piece.start % GROUP == piece.size % GROUP == piece.offset % GROUP == 0
                elif piece.leaf in coded:
                    assert piece.start >= tree.leaves[piece.leaf].size // GROUP * GROUP
    assert all((count == 1).all() for count in counts)


def test_what_is_not_coded_keeps_its_layout() -> None:
    """A job whose tensors travel exactly has the digest that it would have without codecs; any codec changes it."""
    tree, _ = tree_of()
    rule = analyse(optax.sgd(0.1), tree)
    plain = partition(tree, rule, 2)
    assert coded_leaves(tree, Wire()) == frozenset()
    assert partition(tree, rule, 2, coded=coded_leaves(tree, Wire())).digest == plain.digest
    assert partition(tree, rule, 2, coded=coded_leaves(tree, Wire(gradients="Int8"))).digest != plain.digest


def test_small_leaves_and_other_dtypes_travel_exactly() -> None:
    mixed = {
        "bias": np.zeros(SMALL - 1, np.float32),
        "complex": np.zeros(SMALL, np.complex64),
        "half": np.zeros(SMALL, ml_dtypes.bfloat16),
        "weight": np.zeros(SMALL, np.float32),
    }
    tree = describe(mixed)
    paths = [leaf.path for leaf in tree.leaves]

    def coded(wire: Wire) -> list[str]:
        return [paths[leaf] for leaf in sorted(coded_leaves(tree, wire))]

    assert coded(Wire(gradients="Int8")) == ["half", "weight"]
    assert coded(Wire(gradients="BFloat16")) == ["weight"]
    assert coded(Wire(parameters="BFloat16")) == ["weight"]


def test_model_state_travels_exactly() -> None:
    big = np.zeros(SMALL, np.float32)
    tree = describe((big, big + 1), has_state=True)
    assert coded_leaves(tree, Wire(gradients="Int4", parameters="BFloat16")) == {0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradients": "int8"}, "gradients is 'int8': must be one of Exact, BFloat16, Int8, Int4"),
        ({"parameters": "Int8"}, "parameters is 'Int8': must be Exact or BFloat16"),
        ({"gradients": "BFloat16", "error_feedback": True}, "error feedback needs Int8 or Int4"),
    ],
)
def test_codecs_that_do_not_exist_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Wire(**arguments)


def test_a_contribution_that_is_sent_again_has_the_same_bits() -> None:
    """T3, T4: even with error feedback, whose residual changes only when the contribution has ended."""
    tree, leaves = tree_of()
    wire = Wire(gradients="Int4", error_feedback=True)
    parts, wires = layout_of(tree, wire, 2, 1 << 22)
    encoder = Encoder(wires, 0, error_feedback=True)
    sent(parts, wires, encoder, leaves, KEY)
    with encoder.sending(Given(parts, leaves)) as sending:
        for s, layout in enumerate(parts.shards):
            for _ in range(2):
                passes = [
                    [frames.sections_of(sending.blocks[s][b]) for b in range(len(layout.blocks))] for _ in range(2)
                ]
                for first, second in zip(*passes, strict=True):
                    for one, other in zip(first, second, strict=True):
                        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_error_feedback_loses_nothing_over_time(dtype: Any) -> None:
    """All that the servers have decoded, and the residual, are the sum of all contributions."""
    tree, leaves = tree_of(dtype)
    wire = Wire(gradients="Int4", error_feedback=True)
    parts, wires = layout_of(tree, wire, 2, 1 << 22)
    encoder = Encoder(wires, 0, error_feedback=True)
    total = [np.zeros(leaf.size) for leaf in leaves]
    alone = Rounding(tree, wire)
    steps = 20
    for step in range(steps):
        key = replace(KEY, step=step)
        back = sent(parts, wires, encoder, leaves, key)
        expected = alone.gradients(leaves, 0, step, KEY.rank)
        for index, leaf in enumerate(back):
            total[index] += leaf.astype(np.float64)
            np.testing.assert_allclose(
                leaf.astype(np.float64), np.asarray(expected[index]).astype(np.float64), rtol=1e-5, atol=1e-5
            )
    for have, leaf in zip(total, leaves, strict=True):
        # The residual is at most one integer of the largest element of a group.
        wide = leaf.astype(np.float64)
        np.testing.assert_allclose(have / steps, wide, atol=2 * np.abs(wide).max() / 7 / steps + 1e-5)


def test_residuals_follow_the_outcome() -> None:
    """An applied contribution takes the new ones, a dropped one keeps the old ones, and an unknown outcome drops
    all."""
    tree, leaves = tree_of()
    wire = Wire(gradients="Int4", error_feedback=True)
    parts, wires = layout_of(tree, wire, 1, 1 << 22)

    def encoder_after(*outcomes: str) -> Encoder:
        encoder = Encoder(wires, 0, error_feedback=True)
        for step, outcome in enumerate(outcomes):
            try:
                with encoder.sending(Given(parts, leaves, replace(KEY, step=step))) as sending:
                    for b in range(len(wires[0].gradients)):
                        frames.sections_of(sending.blocks[0][b])
                    if outcome == "raised":
                        raise ZeroDivisionError
                    if outcome != "unknown":
                        getattr(sending, outcome)()
            except ZeroDivisionError:
                pass
        return encoder

    def last(*outcomes: str) -> list[np.ndarray]:
        return sent(parts, wires, encoder_after(*outcomes), leaves, replace(KEY, step=9))

    def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all((a == b).all() for a, b in zip(one, other, strict=True))

    assert not same(last(), last("applied"))
    assert same(last("applied"), last("applied", "dropped"))
    assert same(last(), last("applied", "unknown"))
    assert same(last(), last("applied", "raised"))


@pytest.mark.parametrize("gradients", ["BFloat16", "Int8", "Int4"])
def test_servers_add_up_what_they_decode(gradients: Any) -> None:
    """T1: an update of encoded contributions is that of the decoded ones, even with weights and clipped."""
    tree, leaves = tree_of()
    wire = Wire(gradients=gradients)
    parts, wires = layout_of(tree, wire, 1, 1 << 22)
    rule = analyse(optax.sgd(0.1), tree)
    params = tree.unflatten(leaves)
    encoded, plain = [], []
    for rank in range(3):
        encoder = Encoder(wires, 0)
        with encoder.sending(Given(parts, leaves, replace(KEY, rank=rank))) as sending:
            views = [
                one.views(np.concatenate(frames.sections_of(sending.blocks[0][b])))
                for b, one in enumerate(wires[0].gradients)
            ]
        encoded.append(views)
        plain.append([view if isinstance(view, np.ndarray) else np.asarray(decoded(view)) for view in views])
    how: dict[str, Any] = {"weights": [1.0, 0.5, 1.0], "divisor": 3}
    ours, theirs = (ShardEngine(parts, 0, rule, params) for _ in range(2))
    if gradients == "Int8":  # what is compiled before is what computes
        ours.compile([3], weighted=True, clipped=True, wires=wires[0].gradients)
    assert ours.sum_of_squares(encoded, **how) == pytest.approx(theirs.sum_of_squares(plain, **how), rel=1e-6)
    ours.apply(encoded, **how, clip_factor=0.5)
    theirs.apply(plain, **how, clip_factor=0.5)
    for b in range(len(ours.blocks)):
        np.testing.assert_allclose(ours.block(b), theirs.block(b), rtol=1e-5, atol=1e-6)
    for mean, wanted in zip(ours.mean(encoded, **how), ours.mean(plain, **how), strict=True):
        np.testing.assert_allclose(np.asarray(mean), np.asarray(wanted), rtol=1e-5, atol=1e-6)


def test_seeds_depend_on_every_word() -> None:
    seen = {tuple(seed_of(*words)) for words in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 2**40, 7))}
    assert len(seen) == 5
