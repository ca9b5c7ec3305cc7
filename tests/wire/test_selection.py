"""T1: any selection of blocks travels, cut into frames in any way, and every byte of it arrives exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._transport import Cover, Refusal, Staging, frames
from backstay._update import (
    ALL,
    Selection,
    ShardWire,
    Values,
    Wire,
    analyse,
    coded_leaves,
    describe,
    partition,
    shard_wires,
)
from backstay_rpc.control_pb2 import GradientId, Part, Pull

COUNT = 4
Chunk = tuple[int, int, bytes]  # block, offset, bytes


@st.composite
def wires(draw: st.DrawFn) -> ShardWire:
    """Returns a shard whose blocks have any sizes and fragments; blocks of none belong to every selection."""
    block = st.tuples(st.integers(0, 40), st.sampled_from(["f2", "f4", "f8"]), st.integers(0, COUNT))
    blocks = [
        SimpleNamespace(size=size, dtype=dtype, fragment=None if fragment == COUNT else fragment)
        for size, dtype, fragment in draw(st.lists(block, max_size=8))
    ]
    return ShardWire.exactly(blocks, COUNT)


selections = st.one_of(st.just(ALL), st.frozensets(st.integers(0, COUNT - 1)).map(Selection))


def cut(data: st.DataObject, sent: Sequence[bytes]) -> list[Chunk]:
    """Cut blocks into chunks of any sizes, in order within each block, and mix the blocks."""
    left: list[list[Chunk]] = []
    for block, content in enumerate(sent):
        inner = data.draw(st.sets(st.integers(1, max(1, len(content) - 1)), max_size=4))
        ends = sorted({end for end in inner if end < len(content)} | ({len(content)} if content else set()))
        left.append([(block, start, content[start:end]) for start, end in zip([0, *ends], ends, strict=False)])
    mixed: list[Chunk] = []
    while remaining := [queue for queue in left if queue]:
        mixed.append(data.draw(st.sampled_from(remaining)).pop(0))
    return mixed


def content_of(wire: ShardWire) -> list[bytes]:
    """Other bytes for each block."""
    rng = np.random.default_rng(0)
    return [rng.bytes(block.nbytes) for block in wire.gradients]


@given(wires(), selections, st.data())
def test_t1_every_byte_of_a_selection_arrives_exactly_once(
    wire: ShardWire, selection: Selection, data: st.DataObject
) -> None:
    some = wire.select(selection)
    sent = content_of(some)
    assert [bool(content) for content in sent] == [
        bool(block.nbytes) and selection.has(fragment)
        for block, fragment in zip(wire.gradients, wire.fragments, strict=True)
    ]
    cover = Cover([block.nbytes for block in some.gradients])
    memory = [np.zeros(block.nbytes, np.uint8) for block in some.gradients]
    counts = [np.zeros(block.nbytes, int) for block in some.gradients]
    cover.announce(sum(map(len, sent)))
    for block, offset, content in cut(data, sent):
        with pytest.raises(Refusal):
            cover.end(sum(map(len, sent)))
        _, start, stop = cover.add(block, offset, len(content))
        memory[block][start:stop] = np.frombuffer(content, np.uint8)
        counts[block][start:stop] += 1
        with pytest.raises(Refusal):  # it arrives again
            cover.add(block, offset, len(content))
    cover.end(sum(map(len, sent)))
    assert [bytes(block) for block in memory] == sent
    assert all((count == 1).all() for count in counts)


@given(wires(), selections, st.integers(1, 64))
def test_t1_the_frames_of_a_selection_have_each_byte_of_it_once(
    wire: ShardWire, selection: Selection, chunk_bytes: int
) -> None:
    """`Cover` accepts the chunks that a sender makes, at every size of a chunk."""
    some = wire.select(selection)
    cover = Cover([block.nbytes for block in some.gradients])
    for frame, (block, _, start, stop) in frames.section_chunks(
        [block.sections for block in some.gradients], chunk_bytes
    ):
        assert frame.chunk.block == block
        cover.add(frame.chunk.block, frame.chunk.offset, stop - start)
    cover.end(sum(block.nbytes for block in some.gradients))
    out = frames.Outgoing(some.gradients)
    assert out.total == cover.received
    assert set(out.blocks) == {block for block, one in enumerate(some.gradients) if one.nbytes}


@given(wires(), selections, st.data())
def test_t1_a_block_that_is_not_selected_is_refused(wire: ShardWire, selection: Selection, data: st.DataObject) -> None:
    some = wire.select(selection)
    cover = Cover([block.nbytes for block in some.gradients])
    for block, one in enumerate(some.gradients):
        if not one.nbytes:
            with pytest.raises(Refusal, match="which has 0 bytes"):
                cover.add(block, 0, data.draw(st.integers(1, 8)))
    extra = data.draw(st.integers(1, 100))
    selected = sum(block.nbytes for block in some.gradients)
    with pytest.raises(Refusal, match=f"announced: the selected blocks of this shard have {selected}$"):
        cover.announce(selected + extra)


@given(wires(), st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_an_address_and_a_selection_name_the_same_blocks(wire: ShardWire, key_steps: list[int]) -> None:
    """Sender, memory and frames find a selection as one key."""
    for step in key_steps:
        part = Part(contribution=GradientId(key_step=step))
        assert wire.pushed(part) is wire.select(Selection(frozenset({step % COUNT})))
    several = wire.selection(key_steps)
    assert several.whole == (len({step % COUNT for step in key_steps}) == COUNT)
    assert wire.select(several) is wire.select(wire.selection(reversed(key_steps)))
    assert wire.select(ALL) is wire


@given(st.integers(0, COUNT - 1), st.integers(0, 100))
def test_without_fragments_every_selection_is_the_whole(size: int, step: int) -> None:
    wire = ShardWire.exactly([SimpleNamespace(size=size, dtype="f4", fragment=None)])
    assert wire.selection([step]) is ALL
    assert wire.select(wire.selection([step])) is wire


@pytest.mark.parametrize("codec", ["Exact", "BFloat16"])
@pytest.mark.parametrize("values", get_args(Values))
@given(selections)
def test_the_values_of_a_selection_decide_the_form_of_its_parameters(
    values: Values, codec: Any, selection: Selection
) -> None:
    """Contributions have one form. Parameters are encoded, or in full precision; those that do not travel are empty."""
    tree = describe({name: np.zeros(40, np.float32) for name in "abcd"})
    wire = Wire(parameters=codec)
    coded = coded_leaves(tree, wire)
    parts = partition(tree, analyse(optax.sgd(0.1), tree), 1, 64, coded, list(range(COUNT)))
    (own,) = shard_wires(parts, wire, coded)
    chosen = Selection(selection.fragments, values)
    some, all_encoded = own.select(chosen), own.select(selection)
    assert own.select(chosen) is some, "one key"
    assert [one.nbytes for one in some.gradients] == [one.nbytes for one in all_encoded.gradients]
    wanted = all_encoded.parameters if values == "encoded" else all_encoded.exact
    assert [(one.codec, one.nbytes) for one in some.parameters] == [(one.codec, one.nbytes) for one in wanted]


@cache
def four_leaves() -> tuple[Any, Any]:
    """Returns a tree with leaves that members divide, and its rule."""
    sizes = {"a": 70_000, "b": 5000, "c": 33_000, "d": 100}
    tree = describe({name: np.zeros(size, np.float32) for name, size in sizes.items()})
    return tree, analyse(optax.sgd(0.1), tree)


@pytest.mark.parametrize("codec", ["Exact", "Int8"])
@pytest.mark.parametrize("fragments", [1, 2])
@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 9), st.sampled_from(get_args(Values)))
def test_t1_the_members_of_a_rank_send_and_receive_each_block_once(
    codec: Any, fragments: int, shards: int, members: int, step: int, values: Values
) -> None:
    """Member by member, the bytes of a contribution are those of a rank with one member."""
    tree, rule = four_leaves()
    wire = Wire(gradients=codec, parameters="Exact" if codec == "Exact" else "BFloat16")
    coded = coded_leaves(tree, wire)
    turns = [0, 1, 0, 1] if fragments == 2 else None
    parts = partition(tree, rule, shards, 1 << 15, coded, turns, members)
    for layout, own in zip(parts.shards, shard_wires(parts, wire, coded), strict=True):
        part = Part(contribution=GradientId(key_step=step))
        together = own.select(own.selection([step]))
        selection = Selection(own.selection([step]).fragments, values)
        sent, received = [], []
        for member in range(members):
            part.member = member
            assert own.pushed(part) is own.of_member(member).pushed(part)
            sent.append([one.nbytes for one in own.pushed(part).gradients])
            received.append([one.nbytes for one in own.of_member(member).select(selection).parameters])
        for each, whole in ((sent, together.gradients), (received, own.select(selection).parameters)):
            wanted = [
                [one.nbytes if block.member == m else 0 for m in range(members)]
                for block, one in zip(layout.blocks, whole, strict=True)
            ]
            assert list(map(list, zip(*each, strict=True))) == wanted


def test_a_pull_carries_its_values_and_unknown_ones_are_refused() -> None:
    for values in get_args(Values):
        assert frames.wanted(frames.pull(7, Selection(values=values)).pull) == Selection(values=values)
    unknown = Pull()
    unknown.ParseFromString(b"\x20\x09")
    with pytest.raises(Refusal, match="a pull requests unknown values: 9"):
        frames.wanted(unknown)


@given(wires(), selections)
def test_memory_has_room_for_the_selection_and_no_more(wire: ShardWire, selection: Selection) -> None:
    some = wire.select(selection)
    staging = Staging(some.gradients)
    assert [block.nbytes for block in staging.blocks] == [block.nbytes for block in some.gradients]
    for block, array in zip(some.gradients, staging.arrays, strict=True):
        assert (array is None) == block.absent
