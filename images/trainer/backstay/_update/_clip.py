"""Clipping by the norm of the mean gradient. Pure."""

from __future__ import annotations

import math

__all__ = ["clip_factor"]


def clip_factor(clip_norm: float, sum_of_squares: float) -> float:
    """Returns the factor that makes a gradient's norm at most `clip_norm`; exactly 1 if it is small enough.

    Args:
        clip_norm: upper bound of the norm.
        sum_of_squares: the sum of the squares of all elements of the gradient, over all shards.
    """
    norm = math.sqrt(sum_of_squares)
    return 1.0 if norm <= clip_norm else clip_norm / norm
