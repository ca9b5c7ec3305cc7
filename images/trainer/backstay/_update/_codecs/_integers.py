"""Encodes floats as integers with a scale for each few elements, rounded at random so that the mean is exact.

The integer of an element is ``element / scale + u`` rounded to nearest, with `u` uniform between -1/2 and 1/2: its
expectation is ``element / scale``. `u` is a function of (seed, step, rank, group, lane), so a replacement that computes
the same gradient sends the same bits (T4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ._codec import GROUP, Bound, CodecName

__all__ = ["Integers", "residual_dtype", "seed_of", "with_residual"]

_UINT8 = np.dtype(np.uint8)
_INT8 = np.dtype(np.int8)


def seed_of(*words: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32[2] that depends on every word, such as (seed, step, rank); the same on every machine.

    Args:
        words: integers of 0 or more.
    """
    return np.random.SeedSequence(entropy=words).generate_state(2, np.uint32).astype(np.uint32)


def residual_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype of residuals, which is float64 for float64, else float32.

    In a narrower dtype, the sum of a residual and a small element would be the residual, and the element would be lost.

    Args:
        dtype: the dtype of the leaf.
    """
    return _real(dtype)


def with_residual(values: Any, residual: Any) -> Any:
    """``values + residual`` in the dtype of the residual, traced.

    A sum beyond the largest number of the dtype of `values` becomes that number. Otherwise a finite element would
    become infinite, and its group would be lost.

    Args:
        values: array of any real floating-point dtype; where an element is not finite, so is the sum.
        residual: finite, of `residual_dtype`.
    """
    largest = float(_limits(values.dtype).max)
    # Behind the barrier, a compiler cannot use the values of narrow dtypes before they were rounded.
    barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
    total = barrier(values).astype(residual.dtype) + residual
    return jnp.where(jnp.isfinite(values), jnp.clip(total, -largest, largest), total)


@dataclass(frozen=True)
class Integers:
    """`bits` (8 or 4) for each element, and one scale of the leaf's precision for each `share` elements."""

    name: CodecName
    bits: int
    share: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or GROUP % self.share:
            raise ValueError(f"{self.bits} bits and {self.share} elements a scale: must be 4 or 8, and divide {GROUP}")

    @property
    def top(self) -> int:
        """The largest integer, which is 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def covers(self, dtype: np.dtype[Any]) -> bool:
        """Returns whether `dtype` is a real floating-point dtype."""
        return bool(jnp.issubdtype(dtype, jnp.floating))

    def bound(self, dtype: np.dtype[Any]) -> Bound:
        # One integer, and a little for the division; what is decoded is rounded to the leaf's dtype. A group whose
        # scale would be subnormal becomes zero.
        own, real = _limits(dtype), _limits(_real(dtype))
        floor = 1.01 * self.top * float(real.tiny)
        if own.dtype != real.dtype:
            floor += float(own.tiny)
        return Bound((1 + 1e-5) / self.top + float(own.eps), "group", self.share, floor)

    def sections(self, body: int, dtype: np.dtype[Any]) -> tuple[tuple[int, np.dtype[Any]], ...]:
        codes = (body, _INT8) if self.bits == 8 else (body // 2, _UINT8)
        return codes, (body // self.share, _real(dtype))

    def encode(self, values: Any, numbers: Any, seed: Any) -> tuple[Any, ...]:
        """Elements that are not finite count as zero: the end mark says that the contribution is not finite."""
        real = _real(values.dtype)
        shares = GROUP // self.share
        # A product, because XLA makes one of a division by a constant on some platforms, with other bits.
        scale = _largest(values.astype(real), self.share) * (real.type(1) / real.type(self.top))
        limits = _limits(real)
        # Subnormal scales would be flushed by some processors. A scale that is not finite compares as false.
        usable = (scale >= limits.tiny) & (scale <= limits.max)
        scale = jnp.where(usable, jnp.minimum(scale, self._largest(real)), 0)
        key = _mixed(_mixed(numbers + seed[0]) ^ seed[1])
        # Without the barrier the compiler computes what belongs to a group once for each of its elements.
        barrier: Any = jax.lax.optimization_barrier  # which JAX leaves untyped
        scale, key = barrier((scale, key))
        # Explicitly, because XLA makes a product with the reciprocal of such a division on every platform.
        inverse = _reciprocal(jnp.where(scale > 0, scale, jnp.inf)).reshape(-1, shares, 1)
        elements = values.astype(real).reshape(-1, shares, self.share)
        # Not an array of constants, for which the compiler makes no vector instructions.
        iota: Any = jax.lax.broadcasted_iota  # which JAX leaves untyped
        lanes = iota(jnp.uint32, elements.shape, 1) * self.share + iota(jnp.uint32, elements.shape, 2)

        def codes(part: slice) -> Any:
            """Returns the integers of these elements of each share."""
            words = key[:, None, None] + lanes[:, :, part] * jnp.uint32(0x9E3779B9)
            # Every platform with FMA computes it as one operation.
            shifted = elements[:, :, part] * inverse + _uniform(words, real)
            return _nearest(jnp.clip(shifted, -self.top, self.top))

        if self.bits == 8:
            return codes(slice(None)).astype(jnp.int8).reshape(-1), scale
        half = self.share // 2
        low, high = codes(slice(0, half)), codes(slice(half, None))
        return ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8).reshape(-1), scale

    def decode(self, sections: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
        codes, scale = sections
        if self.bits == 4:
            # In 32 bits: in some fusions for CPUs, jaxlib 0.10.2 computes a difference of 8 bits as if it had no sign.
            halves = codes.reshape(-1, 1, self.share // 2).astype(jnp.int32) >> jnp.asarray([[0], [4]], jnp.int32)
            codes = ((halves & 15) ^ 8) - 8
        integer = codes.reshape(-1, self.share).astype(scale.dtype)
        return (integer * scale[:, None]).astype(dtype).reshape(-1)

    def refuse(self, sections: tuple[np.ndarray, ...]) -> str | None:
        scale = sections[1]
        limit = self._largest(scale.dtype)
        wrong = ~((scale >= 0) & (scale <= limit))  # true for NaN as well
        if wrong.any():
            return f"the scale of group {int(np.argmax(wrong))} is {scale[np.argmax(wrong)]}: must be 0 to {limit:g}"
        return None

    def _largest(self, real: np.dtype[Any]) -> float:
        """Returns the largest scale. Times any integer that `bits` can hold, which is at most top + 1, it stays
        finite."""
        return float(_limits(real).max) / (self.top + 1)


def _real(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype of the arithmetic, and of the scales."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 else np.float32)


def _limits(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _largest(values: Any, share: int) -> Any:
    """Returns the largest magnitude of each `share` values; not finite where one of them is not.

    The bits of magnitudes have the order of the numbers. The compiler makes vector instructions of halves that are
    compared, and of a last step of 16 integers.
    """
    word = jnp.uint64 if values.dtype == jnp.float64 else jnp.uint32
    sizes = jax.lax.bitcast_convert_type(jnp.abs(values), word).reshape(-1, share)
    while (half := sizes.shape[1] // 2) >= 16:
        sizes = jnp.maximum(sizes[:, :half], sizes[:, half:])
    return jax.lax.bitcast_convert_type(jnp.max(sizes, axis=1), values.dtype)


def _reciprocal(values: Any) -> Any:
    """``1 / values`` rounded to nearest on every platform, so that codes have the same bits everywhere.

    A division on a GPU is inexact by up to two units in the last place.

    Args:
        values: positive float32 or float64; normal numbers whose reciprocals are normal, or infinite.
    """
    platform_dependent: Any = jax.lax.platform_dependent  # which JAX leaves untyped
    if values.dtype == jnp.float64:
        return 1 / values
    return platform_dependent(values, cpu=_divided, default=_corrected)


def _divided(values: Any) -> Any:
    return 1 / values


def _corrected(values: Any) -> Any:
    """`_reciprocal` where `_divided` is only nearly right.

    The remainder of a near reciprocal is a float32, so it is exact. The first correction leaves an error of hardly more
    than half a unit, and the second one compares the exact remainder with half a unit. Every product is exact, so it
    does not matter whether a compiler contracts a product and a sum.
    """
    # Multiplied with a power of two, which is exact, they are between 1 and 2.
    exponent = jax.lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(jnp.uint32(254 << 23) - exponent, jnp.float32)
    finite = jnp.isfinite(values)
    value = jnp.where(finite, values * power, 1)
    high, low = _halves(value)

    def remainder(near: Any) -> Any:
        of_high, of_low = _halves(near)
        return (((1 - of_high * high) - of_high * low) - of_low * high) - of_low * low

    near = _divided(value)
    near = near + _divided(value) * remainder(near)
    left = remainder(near)
    bits = jax.lax.bitcast_convert_type(near, jnp.uint32)
    unit = jax.lax.bitcast_convert_type((bits & jnp.uint32(0x7F800000)) - jnp.uint32(23 << 23), jnp.float32)
    # Below a power of two the units are half as large.
    half = jnp.where((left > 0) | (bits & jnp.uint32(0x7FFFFF) != 0), 0.5, 0.25) * unit * value
    moved = jax.lax.bitcast_convert_type(jnp.where(left > 0, bits + 1, bits - 1), jnp.float32)
    return jnp.where(finite, jnp.where(jnp.abs(left) > half, moved, near) * power, 0)


def _halves(values: Any) -> tuple[Any, Any]:
    """Returns two float32 of at most 12 significant bits, whose sum is the value."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, values - high


def _uniform(words: Any, real: Any) -> Any:
    """Returns an odd multiple of 2**-17 between -1/2 and 1/2 for each word.

    With so few bits its sum with an integer is exact and never a tie, so what is a multiple of the scale stays that.
    """
    bits = (_mixed(words) >> 16 << 7) | jnp.uint32(0x3F800040)
    return (jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.5).astype(real)


def _nearest(values: Any) -> Any:
    """Returns integers as int32, of which the lower 8 bits count, for `values` between -128 and 127.

    Adding a number with a unit of 1 in its last place rounds as no conversion does: in one vector instruction.
    """
    if values.dtype == jnp.float64:
        return jnp.round(values).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(values + np.float32(3 << 22), jnp.int32)


def _mixed(word: Any) -> Any:
    """Returns a permutation of the 32-bit words in which every bit of the result depends on every bit of `word`.

    Multiplications and shifts as in Chris Wellons, "Prospecting for Hash Functions" (2018), which is in the public
    domain.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)
