"""Encodes float32 as bfloat16, which is its upper half, rounded to nearest, ties to even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._codec import Bound, CodecName

__all__ = ["BFloat16"]

_FLOAT32 = np.dtype(np.float32)
_UINT16 = np.dtype(np.uint16)


@dataclass(frozen=True)
class BFloat16:
    """Two bytes an element. Rounding is integer arithmetic on the bits, so subnormal numbers keep what fits, on every
    processor. A finite element never becomes infinite: what would be rounded up to infinity is cut off instead."""

    name: CodecName = "BFloat16"

    def covers(self, dtype: np.dtype[Any]) -> bool:
        """float32 alone. A float64 may be larger than any bfloat16; narrower dtypes would not become smaller."""
        return dtype == _FLOAT32

    def bound(self, dtype: np.dtype[Any]) -> Bound:
        # Half a unit of 8 significant bits is at most 2**-8, and so is what the largest float32 is cut off by. Half of
        # the smallest subnormal bfloat16 is 2**-134.
        return Bound(relative=2.0**-8, of="element", group=1, floor=2.0**-134)

    def sections(self, body: int, dtype: np.dtype[Any]) -> tuple[tuple[int, np.dtype[Any]], ...]:
        return ((body, _UINT16),)

    def encode(self, values: Any, numbers: Any, seed: Any) -> tuple[Any, ...]:
        bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
        sign, size = bits & jnp.uint32(0x80000000), bits & jnp.uint32(0x7FFFFFFF)
        # Numbers above 0x7F7F7FFF would be rounded up to infinity.
        kept = jnp.minimum(size, jnp.uint32(0x7F7F7FFF))
        kept = kept + 0x7FFF + ((kept >> 16) & 1)
        # Infinity, or a NaN that stays one without the bits that are cut off.
        other = size | jnp.where(size > 0x7F800000, jnp.uint32(0x400000), jnp.uint32(0))
        return (((sign | jnp.where(size < 0x7F800000, kept, other)) >> 16).astype(jnp.uint16),)

    def decode(self, sections: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
        return jax.lax.bitcast_convert_type(sections[0].astype(jnp.uint32) << 16, jnp.float32)

    def refuse(self, sections: tuple[np.ndarray, ...]) -> str | None:
        return None  # every bit pattern is a bfloat16
