"""Divides models of six devices among the members of a rank in one process, and prints how many it has compared.

usage: python divided.py [optimized]
"""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 6)

import itertools  # noqa: E402
import sys  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from backstay import BatchKey  # noqa: E402
from backstay._compute import Encoder, placement_of  # noqa: E402
from backstay._transport import DividedArrangement, DividedSlot, frames  # noqa: E402
from backstay._update import (  # noqa: E402
    DeviceBlock,
    Wire,
    analyse,
    coded_leaves,
    describe,
    partition,
    pinned_memory,
    shard_wires,
)

SHAPES = {
    "table": (3001, 70),
    "layers": {"kernel": (6, 120, 180), "bias": (6, 180)},
    "head": (198, 1000),
    "norm": (40,),
    "empty": (0, 4),
    "scale": (),
}


def model(rng: np.random.Generator) -> Any:
    """Parameters and a model state."""
    made = jax.tree_util.tree_map(
        lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=lambda part: isinstance(part, tuple)
    )
    return made | {"half": rng.normal(size=(90_000,)).astype(np.float16)}, {"seen": rng.integers(0, 99, 70_000)}


def transposed(mesh: Any, shapes: Any) -> Any:
    """Returns the last dimension over the last axis of the mesh."""
    last = mesh.axis_names[-1]

    def spec(leaf: Any) -> Any:
        if leaf.ndim < 2 or leaf.shape[-1] % mesh.shape[last]:
            return None
        return PartitionSpec(*[None] * (leaf.ndim - 1), last)

    return jax.tree_util.tree_map(spec, shapes)


def compare(members: int, axes: dict[str, int], sharding: Any, shards: int, codec: Any) -> int:
    leaves = jax.tree_util.tree_leaves(params := model(np.random.default_rng(members)))
    tree = describe(params, has_state=True)
    placement = placement_of(tree, axes, sharding)
    shardings = placement.model(tree)
    optimizer = optax.adam(1e-3) if shards < 3 else optax.adafactor(1e-3)  # whole leaves are shared
    coded = coded_leaves(tree, Wire(gradients=codec))
    parts = partition(tree, analyse(optimizer, tree), shards, 1 << 17, coded, members=members)
    every = [DividedArrangement(parts, shardings, member) for member in range(members)]
    assert [device for one in every for device in one.devices] == placement.devices
    assert bool(parts.divided) == (members > 1)

    packed = jax.jit(every[0].pack, out_shardings=every[0].packed_shardings())(jax.device_put(leaves, shardings))
    compared, placed = 0, []
    for member, one in enumerate(every):
        slot, blocks = DividedSlot(one), one.gradient_blocks(packed)
        for s, layout in enumerate(parts.shards):
            for b, block in enumerate(layout.blocks):
                parts_of = (leaves[piece.leaf].reshape(-1)[piece.start : piece.stop] for piece in block.pieces)
                wanted = np.concatenate(list(parts_of))
                if block.member == member:
                    assert blocks[s][b].tobytes() == wanted.tobytes(), (s, b, block)
                    compared += 1
                    slot.blocks[s][b].view(block.dtype)[:] = wanted
                else:
                    assert not slot.blocks[s][b].size
        placed.append(slot.placed())
        assert slot.in_use
        several = [block for layout in parts.shards for block in layout.blocks if len(block.pieces) > 1]
        assert len(slot._packed) <= len(several), "a block on two devices needs no memory of its own"
        largest = max(block.nbytes for layout in parts.shards for block in layout.blocks)
        memory = sum(part.nbytes for row in slot.own for part in row)
        large = len(one._divided)
        ends = 3 if members > 1 else 3 + large  # a member alone has the ends of large leaves twice
        assert memory <= tree.nbytes / members + ends * largest + 2048 * 8 * large, (memory, tree.nbytes)
        del slot
    whole = every[0].unpack([list(itertools.chain(*each)) for each in zip(*placed, strict=True)])
    for value, leaf, sharding_ in zip(whole, leaves, shardings, strict=True):
        assert value.sharding == sharding_, (value.sharding, sharding_)
        assert np.asarray(value).tobytes() == leaf.tobytes()
    return compared


def full(wanted: Any) -> Any:
    """Pinned memory that has no room for large arrays."""
    return [] if any(np.prod(shape) * dtype.itemsize > 100_000 for shape, dtype, _ in wanted) else pinned_memory(wanted)


def encode(members: int, axes: dict[str, int], shards: int, wire: Wire, sharding: str = "fsdp") -> int:
    """Compares the bytes of accelerators with those of the host, with feedback over three contributions.

    The second contribution is lost. The members have one, two or three devices. Where they have several, some blocks
    are divided among them.
    """
    params = model(np.random.default_rng(members))
    params[0]["layers"]["odd"] = np.random.default_rng(0).normal(size=(70_001,)).astype(np.float32)  # it has a tail
    leaves = jax.tree_util.tree_leaves(params)
    tree = describe(params, has_state=True)
    coded = coded_leaves(tree, wire)
    optimizer = optax.adam(1e-3) if shards < 3 else optax.adafactor(1e-3)  # coded leaves that are whole blocks
    parts = partition(tree, analyse(optimizer, tree), shards, 1 << 17, coded, members=members)
    wires = shard_wires(parts, wire, coded)
    placement = placement_of(tree, axes, sharding)
    shardings = placement.model(tree)
    compared, most, devices = 0, 0, set()
    for member in {0, members - 1}:
        one = DividedArrangement(parts, shardings, member)
        pack = jax.jit(one.pack, out_shardings=one.packed_shardings(shardings, placement.everywhere))
        own = [each.of_member(member) for each in wires]
        encoders = [Encoder(own, 7, error_feedback=bool(wire.error_feedback)) for _ in range(2)]
        for number in range(3 if wire.error_feedback else 1):
            packed = pack(jax.device_put([(number + 1) * leaf for leaf in leaves], shardings))
            key = BatchKey(step=number, rank=1, world=2, seed=7)
            on_host = one.gradient_blocks(packed)
            with patch("backstay._transport._tensors._divided.shares_host_memory", lambda device: False):
                apart = DividedArrangement(parts, shardings, member)
                there = apart.gradient_blocks(packed)
            arrays: dict[int, set[bool]] = {}
            for of, blocks in zip(own, there, strict=True):
                for each, block in zip(of.gradients, blocks, strict=True):
                    assert isinstance(block, DeviceBlock)
                    most = max(most, len(block.parts) if each.codec else 0)
                    for array, _, _ in block.parts:
                        arrays.setdefault(id(array), set()).add(each.codec is not None)
                        devices.add(array.device)
            assert all(len(kinds) == 1 for kinds in arrays.values()), "an array would be encoded and copied"
            found = []
            for encoder, blocks in zip(encoders, (on_host, there), strict=True):
                contribution: Any = SimpleNamespace(key=key, blocks=blocks)
                with encoder.sending(contribution) as sending:
                    found.append(
                        [
                            [
                                b"".join(map(bytes, frames.sections_of(of[b])))
                                for b, each in enumerate(own[s].gradients)
                                if not each.absent
                            ]
                            for s, of in enumerate(sending.blocks)
                        ]
                    )
                    (sending.dropped if number == 1 else sending.applied)()
            assert found[0] == found[1], (members, axes, wire, member, number)
            compared += sum(map(len, found[0]))
            with patch("backstay._transport._tensors._divided.pinned_memory", full if members == 6 else pinned_memory):
                slot = DividedSlot(apart)
            for blocks, targets in zip(there, slot.blocks, strict=True):
                for block, target in zip(blocks, targets, strict=True):
                    target[:] = block.host().view(np.uint8) if target.size else 0
            placed = slot.placed()
            assert all([part.device for part in row] == apart.devices for row in placed)
            for s, targets in enumerate(slot.blocks):
                for b, target in enumerate(targets):
                    assert not target.size or apart.block(s, b, placed).tobytes() == there[s][b].host().tobytes()
            assert slot.in_use == (members == 6), "pinned memory is free when it was copied"
    assert most > 1 or members == 6 or wire.gradients == "Exact"
    assert len(devices) == 6 // members * min(2, members)
    return compared


def check_memory() -> None:
    """No device gets a large leaf whole on the way to the rows or back, if the members divide it."""
    tree = describe({"layers": jax.ShapeDtypeStruct((12, 240, 360), np.float32)})
    for axis, members in ((0, 3), (1, 3), (2, 3), (0, 1), (2, 1)):
        parts = partition(tree, analyse(optax.adam(1e-3), tree), 2, members=members)
        spec = PartitionSpec(*[None] * axis, "batch")
        placement = placement_of(tree, {"batch": 6}, lambda mesh, shapes, spec=spec: {"layers": spec})
        (leaf,) = placement.shapes(tree)
        one = DividedArrangement(parts, placement.model(tree), 0)
        packed = jax.jit(one.pack, out_shardings=one.packed_shardings())
        rows = [
            jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=place)
            for row, place in zip(jax.eval_shape(packed, [leaf]), one.packed_shardings(), strict=True)
        ]
        there = packed.lower([leaf]).compile().memory_analysis()
        back = one._unpack_jit.lower(rows).compile().memory_analysis()
        for found in (there, back):
            assert found.temp_size_in_bytes < tree.nbytes / 2, (axis, members, found)  # a part is a sixth
            assert found.output_size_in_bytes <= tree.nbytes / 6 + 4096, (axis, members, found)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    cases = [
        (2, {"batch": 6}, "fsdp", 1, "Exact"),
        (3, {"batch": 6}, "fsdp", 2, "Int8"),
        (6, {"batch": 2, "model": 3}, transposed, 2, "Int4"),
        (2, {"batch": 2, "model": 3}, transposed, 3, "Exact"),
        (3, {"batch": -1}, "replicate", 2, "BFloat16"),
        (1, {"batch": 2, "model": 3}, transposed, 2, "Int8"),
        (1, {"batch": 6}, "replicate", 3, "Exact"),
    ]
    feedback = Wire(gradients="Int4", error_feedback=True)
    ways: list[Any] = [
        (6, {"batch": 6}, 1, Wire(gradients="Int8")),
        (2, {"batch": 6}, 2, Wire(gradients="BFloat16")),
        (2, {"batch": 6}, 1, Wire()),
        (1, {"batch": 6}, 2, Wire(gradients="Int8"), "replicate"),
        (1, {"batch": 6}, 3, feedback),
    ]
    if sys.argv[1:] == ["optimized"]:
        print(encode(3, {"batch": 6}, 3, feedback))
    else:
        check_memory()
        print(sum(compare(*case) for case in cases), sum(encode(*way) for way in ways))
