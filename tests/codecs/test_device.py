"""An accelerator encodes with the bits of the host, and blocks come to the wire through pinned memory.

The CPU stands for the accelerator: JAX has pinned memory there too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backstay import BatchKey
from backstay._compute import Encoder, Summary
from backstay._transport import Arrangement, ParamBuffers, frames
from backstay._update import DeviceBlock, Wire, analyse, coded_leaves, describe, partition, shard_wires
from backstay._update._codecs import CODECS, GROUP, _integers, encoded
from backstay._update._partition import parts_of_leaves

SHARES = "backstay._transport._tensors._buffers.shares_host_memory"
KEY = BatchKey(step=3, rank=1, world=2, seed=7)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as an accelerator."""
    monkeypatch.setattr(SHARES, lambda device: False)


class Packed:
    """A contribution out of packed leaves."""

    def __init__(self, arrangement: Arrangement, packed: Any, key: BatchKey = KEY) -> None:
        self.key, self.summary = key, Summary(True, 1, 0.0, {})
        self.blocks = arrangement.gradient_blocks(packed)

    def wait(self) -> None:
        pass


def tree_of(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"large": (700, 900), "bias": (130,), "middle": (70, 80), "odd": (4111,), "scalar": ()}
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def bytes_of(contribution: Any, encoder: Encoder, *, applied: bool = True) -> list[list[bytes]]:
    """Returns the bytes that travel of each block of each shard."""
    with encoder.sending(contribution) as sending:
        found = [[b"".join(map(bytes, frames.sections_of(block))) for block in blocks] for blocks in sending.blocks]
        (sending.applied if applied else sending.dropped)()
    return found


@pytest.mark.parametrize(
    ("dtype", "codec", "feedback"),
    [
        (np.float32, "Exact", False),
        (np.float32, "BFloat16", False),
        (np.float32, "Int8", True),
        (np.float32, "Int4", False),
        (np.float32, "Int4", True),
        (jnp.bfloat16, "Int8", False),
        (jnp.bfloat16, "Int8", True),
    ],
)
def test_the_same_bytes_travel(dtype: Any, codec: Any, feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """T4, over three contributions, of which the second one is not applied."""
    tree = tree_of(dtype)
    wire, spec = Wire(gradients=codec, error_feedback=feedback), describe(tree)
    coded = coded_leaves(spec, wire)
    layout = partition(spec, analyse(optax.sgd(0.1), spec), 3, 1 << 18, coded)
    wires = shard_wires(layout, wire, coded)
    arrangement = Arrangement(layout)
    encoders = [Encoder(wires, 7, error_feedback=feedback) for _ in range(2)]
    for number in range(3):
        packed = jax.jit(arrangement.pack)([leaf * (number + 1) for leaf in jax.tree_util.tree_leaves(tree)])
        on_host = Packed(arrangement, packed)
        with monkeypatch.context() as patched:
            patched.setattr(SHARES, lambda device: False)
            there = Packed(arrangement, packed)
        assert all(isinstance(block, DeviceBlock) for blocks in there.blocks for block in blocks)
        coded_in: dict[int, set[bool]] = {}
        for own, blocks in zip(wires, there.blocks, strict=True):
            for one, block in zip(own.gradients, blocks, strict=True):
                ((array, _, _),) = block.parts
                coded_in.setdefault(id(array), set()).add(one.codec is not None)
        assert all(len(kinds) == 1 for kinds in coded_in.values()), "an array would be encoded and copied"
        ours, theirs = (
            bytes_of(one, encoder, applied=number != 1) for one, encoder in zip((there, on_host), encoders, strict=True)
        )
        assert ours == theirs
        parts = [parts_of_leaves(layout, one.blocks, range(len(spec.leaves))) for one in (there, on_host)]
        for leaf in parts[0]:
            for a, b in zip(parts[0][leaf], parts[1][leaf], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("apart")
def test_what_is_received_into_pinned_memory_is_what_the_device_gets() -> None:
    tree = tree_of()
    spec = describe(tree)
    arrangement = Arrangement(partition(spec, analyse(optax.sgd(0.1), spec), 2, 1 << 18))
    buffers = ParamBuffers.of(arrangement, jax.devices()[0])
    leaves = jax.tree_util.tree_leaves(tree)
    before: Any = None
    for factor in (1, 2, 3):  # in the same memory
        slot = buffers.take()
        assert before is None or before[0] is slot
        packed = jax.jit(arrangement.pack)([factor * leaf for leaf in leaves])
        for blocks, targets in zip(arrangement.gradient_blocks(packed), slot.blocks, strict=True):
            for block, target in zip(blocks, targets, strict=True):
                assert isinstance(block, DeviceBlock)
                target[:] = block.host().view(np.uint8)
        params = slot.params(before[1] if factor == 3 else ())
        for leaf, found in zip(leaves, params, strict=True):
            assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
            np.testing.assert_array_equal(found, factor * leaf)
        if factor == 2:  # the first ones have not changed
            for leaf, found in zip(leaves, before[1], strict=True):
                np.testing.assert_array_equal(found, leaf)
        if factor == 3:
            assert all(leaf.is_deleted() for leaf in before[1] if leaf.size)
        before = slot, params


NUMBERS = st.floats(width=32, min_value=2.0**-126, max_value=2.0**126, allow_subnormal=False)
_corrected = jax.jit(_integers._corrected)


@given(arrays(np.float32, 64, elements=NUMBERS))
def test_a_corrected_reciprocal_is_the_nearest(values: np.ndarray) -> None:
    np.testing.assert_array_equal(_corrected(values), np.float32(1) / values)


@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
def test_a_reciprocal_that_is_inexact_in_the_last_places_is_corrected(error: int, monkeypatch: Any) -> None:
    """A division on a GPU is inexact by up to two units in the last place."""

    def near(values: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(1 / values, jnp.int32)
        return jax.lax.bitcast_convert_type(bits + error, jnp.float32)

    monkeypatch.setattr(_integers, "_divided", near)
    rng = np.random.default_rng(0)
    some = (rng.random(1 << 20) + 1).astype(np.float32) * np.float32(2.0) ** rng.integers(-120, 120, 1 << 20)
    powers = np.float32(2.0) ** np.arange(-126, 126, dtype=np.float32)
    beside = [np.nextafter(powers, np.float32(bound)) for bound in (0, 1e38)]  # whose reciprocals are beside powers
    for values in (some.astype(np.float32), powers, *(each[1:-1].astype(np.float32) for each in beside)):
        found = np.asarray(jax.jit(lambda each: 1 * _integers._corrected(each))(values))
        np.testing.assert_array_equal(found, np.float32(1) / values)
    assert _corrected(np.float32(np.inf)) == 0


@pytest.mark.parametrize("codec", ["Int8", "Int4"])
def test_codes_do_not_depend_on_how_a_platform_divides(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    values[: 2 * GROUP] = 0
    values[2 * GROUP : 3 * GROUP] *= np.float32(1e30)
    numbers, seed = np.arange(values.size // GROUP, dtype=np.uint32), np.arange(2, dtype=np.uint32)

    def bits() -> list[bytes]:
        block = jax.jit(lambda v: encoded(CODECS[codec], v, numbers, seed))(values)
        return [np.asarray(section).tobytes() for section in block.sections]

    plain = bits()
    monkeypatch.setattr(_integers, "_reciprocal", _integers._corrected)
    assert bits() == plain
