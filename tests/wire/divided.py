"""Divides models of six devices among the members of a rank in one process, and prints how many it has compared."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 6)

import itertools  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from backstay._compute import placement_of  # noqa: E402
from backstay._transport import DividedArrangement, DividedSlot  # noqa: E402
from backstay._update import Wire, analyse, coded_leaves, describe, partition  # noqa: E402

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
    """The last dimension over the last axis of the mesh."""
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
    assert parts.divided

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
        largest = max(block.nbytes for layout in parts.shards for block in layout.blocks)
        memory = sum(row.nbytes for row in slot.own)
        assert memory <= tree.nbytes / members + 3 * largest + 2048 * 8 * len(parts.divided), (memory, tree.nbytes)
        del slot
    whole = every[0].unpack([list(itertools.chain(*each)) for each in zip(*placed, strict=True)])
    for value, leaf, sharding_ in zip(whole, leaves, shardings, strict=True):
        assert value.sharding == sharding_, (value.sharding, sharding_)
        assert np.asarray(value).tobytes() == leaf.tobytes()
    return compared


def check_memory() -> None:
    """No device gets a large leaf whole on the way to the rows or back, if the members divide it."""
    tree = describe({"layers": jax.ShapeDtypeStruct((12, 240, 360), np.float32)})
    parts = partition(tree, analyse(optax.adam(1e-3), tree), 2, members=3)
    for axis in range(3):
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
            assert found.temp_size_in_bytes < tree.nbytes / 2, (axis, found)  # a part is a sixth
            assert found.output_size_in_bytes <= tree.nbytes / 6 + 4096, (axis, found)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    check_memory()
    cases = [
        (2, {"batch": 6}, "fsdp", 1, "Exact"),
        (3, {"batch": 6}, "fsdp", 2, "Int8"),
        (6, {"batch": 2, "model": 3}, transposed, 2, "Int4"),
        (2, {"batch": 2, "model": 3}, transposed, 3, "Exact"),
        (3, {"batch": -1}, "replicate", 2, "BFloat16"),
    ]
    print(sum(compare(*case) for case in cases))
