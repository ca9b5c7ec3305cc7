"""Orders the samples of an epoch by a permutation of (seed, epoch), of any size."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SampleOrder"]

_Numbers = NDArray[np.int64]

LISTED: Final = 1 << 22
"""Larger permutations are computed place by place: a list of them would take more than 32 MiB an epoch."""

_ROUNDS: Final = 6


class SampleOrder:
    """The sample at each place of an epoch."""

    def __init__(self, size: int, *, shuffle: bool) -> None:
        self._size, self._shuffle = size, shuffle
        # At the border of an epoch, ranks and the threads that prepare batches are in two of them.
        self._list = lru_cache(maxsize=3)(self._listed)

    def __call__(self, seed: int, epoch: int, places: _Numbers) -> _Numbers:
        """Returns the samples at `places` of an epoch as int64, of the shape of `places`."""
        if not self._shuffle:
            return places
        if self._size <= LISTED:
            return self._list(seed, epoch)[places]
        keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
        return _walk(places, self._size, keys.astype(np.uint64))

    def _listed(self, seed: int, epoch: int) -> _Numbers:
        return np.random.default_rng([seed, epoch]).permutation(self._size)


def _walk(places: _Numbers, size: int, keys: NDArray[np.uint64]) -> _Numbers:
    """Returns a permutation of ``range(size)`` at `places`, in constant memory.

    A Feistel network permutes the next power of four; where it leaves the range it is applied again (cycle walking):
    https://en.wikipedia.org/wiki/Format-preserving_encryption
    """
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    found = _network(places.astype(np.uint64), half, keys)
    while (outside := found >= size).any():
        found[outside] = _network(found[outside], half, keys)
    return found.astype(np.int64)


def _network(numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << half) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of SplitMix64, https://prng.di.unimi.it/splitmix64.c."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
