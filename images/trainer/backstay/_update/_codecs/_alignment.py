"""Host memory that JAX can use without copying it. JAX does so only if the memory starts at a multiple of 64 bytes."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "aligned_empty"]

ALIGNMENT: Final = 64


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory of `nbytes` bytes, uint8, that starts at a multiple of 64 bytes."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
