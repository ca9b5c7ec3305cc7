"""Codecs against the errors that they state (T10), on every kind of number."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._update._codecs import CODECS, GROUP, BlockWire, Codec, body_of, bound_of, seed_of

FLOAT32 = np.dtype(np.float32)
DTYPES = [FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
CASES = [(codec, dtype) for codec in CODECS.values() for dtype in DTYPES if codec.covers(dtype)]
SIZE = 5 * GROUP + 3  # five groups and a tail


@cache
def decoder(codec: Codec) -> Any:
    return jax.jit(lambda block: block.decode())


def wire_of(codec: Codec, size: int, dtype: np.dtype, first: int = 0) -> BlockWire:
    return BlockWire(size, dtype, codec, np.arange(first, first + size // GROUP, dtype=np.uint32))


def through(codec: Codec, values: np.ndarray, seed: tuple[int, ...] = (0, 0, 0), first: int = 0) -> np.ndarray:
    """`values` as the other end has them: encoded, sent as bytes, and decoded."""
    wire = wire_of(codec, values.size, values.dtype, first)
    memory = np.zeros(wire.nbytes, np.uint8)
    at = 0
    block = wire.encode(values, seed_of(*seed))
    for section, nbytes in zip((*block.sections, block.tail), wire.sections, strict=True):
        data = np.asarray(section).reshape(-1).view(np.uint8)
        assert data.nbytes == nbytes
        memory[at : at + nbytes] = data
        at += nbytes
    received = wire.views(memory)
    assert wire.refuse(received) is None
    decoded = np.asarray(decoder(codec)(received))
    assert (decoded.shape, decoded.dtype) == (values.shape, values.dtype)
    return decoded


def check(codec: Codec, values: np.ndarray, **more: Any) -> np.ndarray:
    """Returns the decoded values, of which each is within the bound, and the tail is exact."""
    decoded = through(codec, values, **more)
    bound = bound_of(codec.name, values.dtype)
    body = body_of(values.size)
    wide, found = values.astype(np.float64), decoded.astype(np.float64)
    np.testing.assert_array_equal(found[body:], wide[body:])
    groups = np.abs(wide[:body]).reshape(-1, bound.group)
    scale = groups.max(axis=1, keepdims=True) if bound.of == "group" else groups
    error = np.abs(found[:body] - wide[:body]).reshape(-1, bound.group)
    worst = np.argmax(error - bound.relative * scale)
    assert (error <= bound.relative * scale + bound.floor).all(), (
        f"{wide[:body][worst]!r} became {found[:body][worst]!r}"
    )
    return decoded


def bits_of(dtype: np.dtype) -> Any:
    return np.dtype({2: np.uint16, 4: np.uint32}[dtype.itemsize])


@st.composite
def finite(draw: st.DrawFn, dtype: np.dtype) -> np.ndarray:
    """Returns arrays of every finite bit pattern, also of groups in which all have one exponent, or only few are not
    zero."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, SIZE, dtype=bits_of(dtype), endpoint=False)
    values = bits.view(dtype).copy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values[~np.isfinite(values)] = 0
    kind = draw(st.sampled_from(["any", "one exponent", "sparse", "large and small"]))
    limits = ml_dtypes.finfo(dtype)
    if kind != "any":
        exponent = draw(st.integers(int(np.log2(float(limits.smallest_subnormal))), limits.maxexp - 1))
        values = np.ldexp(rng.uniform(-1.99, 1.99, SIZE), exponent).astype(dtype)
    if kind == "sparse":
        values[rng.random(SIZE) < 0.98] = 0
    if kind == "large and small":
        values[rng.integers(0, SIZE, 3)] = limits.max
    return values


@pytest.mark.parametrize(("codec", "dtype"), CASES, ids=lambda case: getattr(case, "name", str(case)))
@given(data=st.data())
def test_t10_every_finite_block_is_within_the_bound(codec: Codec, dtype: np.dtype, data: st.DataObject) -> None:
    """T10."""
    check(codec, data.draw(finite(dtype)), seed=(data.draw(st.integers(0, 2**32 - 1)), 1, 2))


EXTREMES: dict[str, Any] = {
    "all zero": lambda limits: [0.0],
    "all minus zero": lambda limits: [-0.0],
    "all equal": lambda limits: [0.1],
    "all the largest": lambda limits: [limits.max],
    "largest of both signs": lambda limits: [limits.max, -limits.max],
    "the largest and zero": lambda limits: [limits.max, 0, 0, 0],
    "the largest and the smallest": lambda limits: [limits.max, limits.tiny, limits.smallest_subnormal],
    "all the smallest normal": lambda limits: [limits.tiny],
    "all subnormal": lambda limits: [limits.smallest_subnormal],
    "subnormal of both signs": lambda limits: [limits.smallest_subnormal, -limits.tiny / 2, 0],
    "just below a power of two": lambda limits: [np.nextafter(np.float32(2), np.float32(0))],
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize(("codec", "dtype"), CASES, ids=lambda case: getattr(case, "name", str(case)))
def test_t10_extreme_blocks(codec: Codec, dtype: np.dtype, case: str) -> None:
    """T10."""
    values = np.resize(np.asarray(EXTREMES[case](ml_dtypes.finfo(dtype)), dtype), SIZE)
    decoded = check(codec, values)
    assert np.isfinite(decoded.astype(np.float64)).all()
    if case.startswith("all zero") or case == "all minus zero":
        assert (decoded == 0).all()


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.covers(np.dtype(np.float64))], ids=lambda c: c.name)
def test_t10_float64(codec: Codec) -> None:
    """T10: in double precision, whose scales are of double precision too."""
    with jax.enable_x64(True):
        limits = np.finfo(np.float64)
        rng = np.random.default_rng(0)
        for values in (rng.standard_normal(SIZE) * 1e-9, np.resize([limits.max, 1.0], SIZE), np.full(SIZE, 5e-324)):
            check(codec, values)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_encoded_as_valid_data(codec: Codec, wrong: float) -> None:
    """The end mark says that a contribution is not finite; what travels is never refused for it, and the groups
    without such an element are as always."""
    values = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    whole = through(codec, values)
    values[GROUP + 7] = wrong
    decoded = through(codec, values)
    others = np.r_[0:GROUP, 2 * GROUP : SIZE]
    np.testing.assert_array_equal(decoded[others], whole[others])
    if codec.name == "BFloat16":
        np.testing.assert_array_equal(decoded[GROUP + 7], np.float32(wrong))


def test_bfloat16_rounds_to_nearest_even() -> None:
    """The result equals that of `ml_dtypes`, for every upper half and the lower halves around a tie."""
    upper = np.arange(0, 1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        values = values[np.isfinite(values) & (np.abs(values) < ml_dtypes.finfo(ml_dtypes.bfloat16).max)]
        values = np.resize(values, -(-values.size // GROUP) * GROUP)
        with np.errstate(over="ignore"):
            wanted = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(through(CODECS["BFloat16"], values).view(np.uint32), wanted.view(np.uint32))


def test_workers_decode_every_bfloat16_as_servers_do() -> None:
    codec, halves = CODECS["BFloat16"], np.arange(1 << 16, dtype=np.uint16)
    wire = wire_of(codec, halves.size, FLOAT32)
    into = np.empty(4 * halves.size, np.uint8)
    assert wire.receive(into, 0, halves.view(np.uint8)) is None
    np.testing.assert_array_equal(into.view(np.uint32), halves.astype(np.uint32) << 16)
    wanted = np.asarray(codec.decode((halves,), FLOAT32))
    np.testing.assert_array_equal(into.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("name", ["Int8", "Int4"])
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_scale_is_zero_where_its_group_is_not_finite(name: Any, wrong: float) -> None:
    codec: Any = CODECS[name]
    values = np.random.default_rng(1).uniform(-1, 1, (codec.share, codec.share)).astype(np.float32)
    np.fill_diagonal(values, wrong)  # at another place of each share
    block = wire_of(codec, values.size, FLOAT32).encode(values.reshape(-1), seed_of(0))
    assert not np.asarray(block.sections[1]).any()


@pytest.mark.parametrize("name", ["Int8", "Int4"])
def test_rounding_is_unbiased(name: Any) -> None:
    """The mean over many steps comes near the elements, and nothing is lost but variance."""
    values = np.random.default_rng(1).uniform(-1, 1, 16 * GROUP).astype(np.float32)
    rounds = 400
    total = sum(through(CODECS[name], values, seed=(7, step, 0)).astype(np.float64) for step in range(rounds))
    step_size = 1 / (127 if name == "Int8" else 7)
    error = (total / rounds - values) / step_size
    # Each rounding has a standard deviation of at most half an integer.
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(rounds)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(rounds * values.size)


@pytest.mark.parametrize("name", ["Int8", "Int4"])
def test_t4_the_same_seed_gives_the_same_bits(name: Any) -> None:
    """T4: and another seed, step, rank or group gives others."""
    values = np.random.default_rng(1).uniform(-1, 1, 4 * GROUP).astype(np.float32)
    one = through(CODECS[name], values, seed=(1, 2, 3))
    np.testing.assert_array_equal(one, through(CODECS[name], values, seed=(1, 2, 3)))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (one != through(CODECS[name], values, seed=other)).any()
    assert (one != through(CODECS[name], values, seed=(1, 2, 3), first=4)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Int8", "Int4"])
@settings(max_examples=20)
@given(data=st.data())
def test_t10_error_feedback_is_within_the_bound(name: Any, dtype: np.dtype, data: st.DataObject) -> None:
    """T10: for every finite gradient and residual. A sum beyond the dtype's largest number is that number."""
    codec = CODECS[name]
    wire, bound = wire_of(codec, SIZE, dtype), bound_of(name, dtype)
    limits, body = ml_dtypes.finfo(dtype), body_of(SIZE)
    residual: Any = wire.no_residual()
    # The largest number again and again leaves a residual of its sign.
    for step, values in enumerate([data.draw(finite(dtype)), *[np.full(SIZE, limits.max, dtype)] * 3]):
        with np.errstate(over="ignore"):
            wanted = np.clip(values.astype(np.float64) + residual.astype(np.float64), limits.min, limits.max)
        wanted = wanted.astype(residual.dtype).astype(np.float64)[:body]
        block, rest = wire.encode_with(values, residual, seed_of(0, step, 0))
        decoded = np.asarray(decoder(codec)(block)).astype(np.float64)[:body]
        scale = np.abs(wanted).reshape(-1, bound.group).max(axis=1, keepdims=True)
        # The processor may take a subnormal operand or sum for zero.
        most = bound.relative * scale + bound.floor + 3 * float(limits.tiny)
        residual = np.asarray(rest)
        for error in (decoded - wanted, residual[:body].astype(np.float64)):
            assert (np.abs(error).reshape(-1, bound.group) <= most).all()
        assert not residual[body:].any()


@pytest.mark.parametrize("name", ["Int8", "Int4"])
def test_t10_every_code_is_decoded_to_a_finite_number(name: Any) -> None:
    """T10: also codes that no encoder makes, such as -128, with the largest scale that is not refused."""
    wire = wire_of(CODECS[name], 2 * GROUP, FLOAT32)
    block, limits = wire.zero(), np.finfo(np.float32)
    codes = block.sections[0].view(np.uint8)
    codes[:] = np.resize(np.arange(256, dtype=np.uint8), codes.size)
    block.sections[1][:] = np.float32(limits.max)
    assert wire.refuse(block) is not None
    block.sections[1][:] = np.asarray(wire.encode(np.full(2 * GROUP, limits.max), seed_of(0)).sections[1])
    assert wire.refuse(block) is None
    assert np.isfinite(np.asarray(decoder(CODECS[name])(block))).all()


@pytest.mark.parametrize("name", ["Int8", "Int4"])
def test_multiples_of_the_scale_stay_what_they_are(name: Any) -> None:
    codec: Any = CODECS[name]
    top = codec.top
    values = np.resize(np.arange(-top, top + 1), 2 * GROUP).astype(np.float32) / 64
    values.reshape(-1, codec.share)[:, 0] = top / 64
    np.testing.assert_allclose(through(codec, values), values, rtol=1e-6)


@pytest.mark.parametrize("name", ["Int8", "Int4"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0, 3e38])
def test_scales_that_no_encoder_makes_are_refused(name: Any, wrong: float) -> None:
    """O7: a server finds them before the contribution counts."""
    wire = wire_of(CODECS[name], 4 * GROUP, FLOAT32)
    block = wire.zero()
    block.sections[1][2] = wrong
    assert "the scale of group 2 is" in str(wire.refuse(block))


@pytest.mark.parametrize(("name", "bits"), [("BFloat16", 16), ("Int8", 8.25), ("Int4", 4.5)])
def test_bits_of_an_element(name: Any, bits: float) -> None:
    assert wire_of(CODECS[name], 1 << 16, FLOAT32).nbytes * 8 == bits * (1 << 16)
