"""Fragments divide layers, and an update of one fragment changes its part of a server."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import LocalSteps
from backstay._coordination import MODES
from backstay._update._codecs import ShardWire, Wire, coded_leaves, shard_wires
from backstay._update._engine import ShardEngine
from backstay._update._fragments import fragments_of, layer_of
from backstay._update._partition import Partition, partition
from backstay._update._rules import Rule, analyse
from backstay._update._selection import ALL, Selection
from backstay._update._tree import describe
from backstay.errors import ConfigurationError

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
COUNT = 3


def model(layers: int = 5) -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    blocks = [{"w": normal(30 + 7 * layer, 40), "b": normal(40)} for layer in range(layers)]
    return {"embed": normal(50, 100), "blocks": blocks}, {"mean": normal(11)}


def laid_out(shards: int = 2, wire: Wire | None = None) -> tuple[Rule, Partition, tuple[ShardWire, ...]]:
    tree = describe(model(), has_state=True)
    wire = wire or Wire()
    coded = coded_leaves(tree, wire)
    rule = analyse(OUTER, tree)
    parts = partition(tree, rule, shards, block_bytes=4096, coded=coded, fragments=fragments_of(tree, COUNT))
    return rule, parts, shard_wires(parts, wire, coded)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("blocks.3.qkv", "blocks.3"),
        ("blocks.3.mlp.0.w", "blocks.3"),
        ("dense.kernel", "dense"),
        ("params.encoder.w", "params.encoder"),
        ("w", "w"),
    ],
)
def test_the_layer_of_a_leaf(path: str, layer: str) -> None:
    assert layer_of(path) == layer


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), data=st.data())
def test_layers_stay_whole_and_fragments_are_about_equal(sizes: list[int], data: Any) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    layers = {f"layer{n}": {"w": np.zeros(size, np.float32), "b": np.zeros(1)} for n, size in enumerate(sizes)}
    tree = describe(layers)
    found = fragments_of(tree, count)
    assert set(found) == set(range(count))
    by_layer: dict[str, set[int | None]] = {}
    loads: Counter[int | None] = Counter()
    for leaf, fragment in zip(tree.leaves, found, strict=True):
        by_layer.setdefault(layer_of(leaf.path), set()).add(fragment)
        loads[fragment] += leaf.nbytes
    assert all(len(fragments) == 1 for fragments in by_layer.values())
    assert max(loads.values()) - min(loads.values()) <= max(4 * size for size in sizes) + 8


def test_more_fragments_than_layers_and_a_mixing_optimizer_are_refused() -> None:
    tree = describe(model(), has_state=True)
    with pytest.raises(ConfigurationError, match=r"fragments is 7, and the model has 6 layers: must be at most 6"):
        fragments_of(tree, 7)
    mixing = optax.chain(optax.clip_by_global_norm(1.0), OUTER)
    with pytest.raises(ConfigurationError, match=r"updates .* and .* together, which are in two fragments"):
        partition(tree, analyse(mixing, tree), 1, fragments=fragments_of(tree, 2))


def test_a_user_can_request_the_fragments() -> None:
    params, _ = model(2)
    found = LocalSteps(6, optax.sgd(0.1), fragments=3).fragment_of(params)
    assert found == {"embed": 0, "blocks": [{"w": 2, "b": 2}, {"w": 1, "b": 1}]}


def test_no_block_holds_two_fragments_and_pods_agree_about_them() -> None:
    rule, parts, _ = laid_out()
    fragments = fragments_of(rule.tree, COUNT)
    for layout in parts.shards:
        for block in layout.blocks:
            assert {fragments[piece.leaf] for piece in block.pieces} == {block.fragment}
            assert (block.fragment is None) == (not block.trained)
    assert parts.fragments == COUNT
    assert parts.digest != partition(rule.tree, rule, 2, block_bytes=4096).digest


def selected(wire: ShardWire, step: int) -> ShardWire:
    return wire.select(wire.selection([step]))


@pytest.mark.parametrize("wire", [Wire(), Wire("Int4", "BFloat16")], ids=str)
def test_each_exchange_has_one_fragment_and_all_of_them_the_whole(wire: Wire) -> None:
    _, parts, wires = laid_out(wire=wire)
    for layout, one in zip(parts.shards, wires, strict=True):
        for step in range(2 * COUNT):
            some = selected(one, step)
            assert one.select(Selection(frozenset({step % COUNT}))) is some, "buffers and frames are kept by it"
            for block, sent in zip(layout.blocks, some.gradients, strict=True):
                assert bool(sent.nbytes) == (block.fragment in (step % COUNT, None))
        state = sum(block.nbytes for block in layout.blocks if not block.trained)
        whole = sum(block.nbytes for block in one.gradients)
        assert (
            sum(block.nbytes for s in range(COUNT) for block in selected(one, s).gradients)
            == whole + (COUNT - 1) * state
        )
        assert one.select(ALL) is one
        assert one.select(one.selection(range(COUNT))) is one


def test_an_answer_brings_what_changed_since() -> None:
    _, _, (wire, _) = laid_out()
    sync, apart = MODES["Sync"], MODES["Async"]
    assert wire.selection(sync.exchanged(7, 7, 8)).fragments == {7 % COUNT}
    assert wire.selection(sync.exchanged(7, 7, 9)).fragments == {7 % COUNT, 8 % COUNT}, "a worker that was late"
    assert wire.selection(sync.exchanged(7, 7, 20)) == ALL
    assert wire.selection(apart.exchanged(4, 90, 97)).fragments == {4 % COUNT}


def gradients(parts: Partition, wire: ShardWire, step: int, rank: int) -> list[Any]:
    rng = np.random.default_rng([step, rank])
    return [
        None if sent.absent else rng.normal(size=block.size).astype(block.dtype)
        for block, sent in zip(parts.shards[0].blocks, selected(wire, step).gradients, strict=True)
    ]


def engine_of(rule: Rule, parts: Partition) -> ShardEngine:
    return ShardEngine(parts, 0, rule, model())


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_an_update_changes_its_fragment_alone(ranks: int) -> None:
    """Parameters and momentum of the others keep their bits; those of the fragment are as in an update of all."""
    rule, parts, (wire,) = laid_out(shards=1)
    engine, whole = engine_of(rule, parts), engine_of(rule, parts)
    for step in range(COUNT + 1):
        before = {entry.key: np.array(entry.value) for entry in engine.snapshot().entries if not entry.start}
        given = [gradients(parts, wire, step, rank) for rank in range(ranks)]
        norm = engine.sum_of_squares(given, divisor=ranks)
        wanted = engine.mean(given, weights=[1.0] * ranks, divisor=ranks)
        trained = [
            value
            for value, block in zip(wanted, parts.shards[0].blocks, strict=True)
            if value is not None and block.trained
        ]
        assert norm == pytest.approx(sum(float(np.sum(np.square(np.float64(value)))) for value in trained), rel=1e-5)
        engine.apply(given, divisor=ranks)
        after = {entry.key: np.array(entry.value) for entry in engine.snapshot().entries if not entry.start}
        changed = {key for key in after if not np.array_equal(after[key], before[key])}
        leaves = fragments_of(rule.tree, COUNT)
        mine = {leaf.path for leaf, own in zip(rule.tree.leaves, leaves, strict=True) if own in (step % COUNT, None)}
        assert changed
        assert all(any(key.endswith(path) for path in mine) for key in changed)
        if step == 0:
            full = [
                [np.zeros(block.size, block.dtype) if value is None else value for value, block in pair]
                for pair in (list(zip(each, parts.shards[0].blocks, strict=True)) for each in given)
            ]
            whole.apply(full, divisor=ranks)
            for index, value in enumerate(given[0]):
                if value is not None:
                    assert np.array_equal(engine.block(index), whole.block(index))
    assert engine.version == COUNT + 1
    broken = [gradients(parts, wire, 0, 0), gradients(parts, wire, 1, 1)]
    with pytest.raises(ValueError, match=r"contribution 1, block .* is missing"):
        engine.apply(broken, divisor=2)
