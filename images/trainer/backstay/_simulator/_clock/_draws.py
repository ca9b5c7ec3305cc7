"""Random numbers that depend on a seed and on what they are for, and on nothing else. Pure.

Each purpose has its own stream, such as the steps of rank 3. So another number of servers, or one more failure, changes
no other draw, and two simulations with one seed differ by the changed input only.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

__all__ = ["DrawStream"]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class DrawStream:
    """One stream of random numbers, by SplitMix64 (https://prng.di.unimi.it/splitmix64.c).

    Args:
        seed: the seed of the simulation.
        purpose: names that distinguish this stream from all others.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, *purpose: str | int) -> None:
        text = "/".join(str(word) for word in (seed, *purpose))
        self._state = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def uniform(self) -> float:
        """Returns a number above 0 and below 1."""
        self._state = state = (self._state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((state ^ (state >> 31)) >> 11) * 2.0**-53 + 2.0**-54

    def normal(self) -> float:
        """Returns a number of the standard normal distribution."""
        radius = math.sqrt(-2.0 * math.log(self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def around(self, median: float, sigma: float) -> float:
        """Returns a number of the log-normal distribution with this median; `sigma` is that of its logarithm."""
        # It draws also for zeros, so that these change no later number of the stream.
        return median * math.exp(sigma * self.normal())

    def exponential(self, mean: float) -> float:
        """Returns a number of the exponential distribution with this mean."""
        return -mean * math.log(self.uniform())

    def index(self, count: int) -> int:
        """Returns an integer from 0 to `count` - 1."""
        return min(count - 1, int(self.uniform() * count))
