"""Holds the frozen arrays of a model on the devices of a process, and computes their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._placement import Placement

__all__ = ["Base", "digest_of"]

_WORDS: Final = 8192  # of 8 bytes; a chunk of them stays in the cache of a processor
_THREADS: Final = 4


@dataclass(frozen=True)
class Base:
    """The values of the frozen leaves of a `TreeSpec`, in their order.

    Attributes:
        arrays: the values, on all devices of the process.
        digests: see `digest_of`; empty if they were not requested.
    """

    arrays: Sequence[Any] = ()
    digests: tuple[str, ...] = ()

    @classmethod
    def placed(cls, values: Sequence[Any], placement: Placement, *, digests: bool) -> Base:
        """Place the values, in any memory, on the devices.

        Args:
            digests: whether their digests are needed. They take about as long as a copy of the values.
        """
        if not digests:
            return cls(placement.kept(values))
        with ThreadPoolExecutor(_THREADS, "backstay-digest") as pool:
            made = [pool.submit(digest_of, np.asarray(value)) for value in values]
            arrays = placement.kept(values)
            return cls(arrays, tuple(each.result() for each in made))


def digest_of(array: NDArray[np.generic]) -> str:
    """64 bits, in hex, that differ for arrays with other bits. Not for protection against a forger.

    It is several times as fast as SHA-256, because a worker waits for it. Each chunk of the array is a sum of its words
    with odd random weights modulo 2**64. SHA-256 reads these sums only. Another value of one word always changes such a
    sum.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    weights = _weights()
    whole = flat.size // 8 * 8
    words = flat[:whole].view(np.uint64)  # works at any address
    rest = np.zeros(8, np.uint8)
    rest[: flat.size - whole] = flat[whole:]
    sums = np.empty(-(-words.size // _WORDS) + 1, np.uint64)
    product = np.empty(_WORDS, np.uint64)
    for number, start in enumerate(range(0, words.size, _WORDS)):
        chunk = words[start : start + _WORDS]
        sums[number] = np.multiply(chunk, weights[: chunk.size], out=product[: chunk.size]).sum(dtype=np.uint64)
    sums[-1] = rest.view(np.uint64)[0]
    described = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(described + sums.astype("<u8").tobytes()).hexdigest()[:16]


def _weights() -> NDArray[np.uint64]:
    """Odd random numbers, which SplitMix64 makes from the seed 0. They stay the same in every version."""
    state = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
