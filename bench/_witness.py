"""Counts the applied gradients in the parameters of bench/scripts/witness.py. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Applied:
    """How many gradients are missing in the parameters, and how many were applied more than once."""

    lost: int
    twice: int


COUNTS = "a_count", "z_count"
"""The parameters that count. Of two servers, each has one."""


def count_applied(counts: Sequence[np.ndarray], *, steps: int, quorum: int | None, grace: bool = False) -> Applied:
    """Find lost and repeated gradients in the last checkpoint of a job.

    Args:
        counts: the parameters `COUNTS`, each float32[rows, ranks]; a row is the step of a batch's key.
        steps: number of updates of the job, times its local steps.
        quorum: the quorum of a synchronous job; None for an asynchronous job.
        grace: whether updates may have more gradients than the quorum. An element is then ``quorum / gradients``.

    Raises:
        ValueError: an element is not a whole number, or servers applied different gradients: a gradient was applied in
            part (T1).
    """
    found = [_count(count, steps=steps, quorum=quorum, grace=grace) for count in counts]
    worst = Applied(max(each.lost for each in found), max(each.twice for each in found))
    if worst == Applied(0, 0) and any(not np.allclose(count, counts[0], atol=1e-3) for count in counts):
        raise ValueError("the servers applied different gradients: a gradient was applied in part")
    return worst


def _count(count: np.ndarray, *, steps: int, quorum: int | None, grace: bool) -> Applied:
    if grace and quorum is not None:
        count = count * np.maximum(quorum, (count > 0).sum(axis=1, keepdims=True)) / quorum
    times = np.rint(count).astype(int)
    if np.abs(count - times).max(initial=0.0) > 1e-3 or times.min(initial=0) < 0:
        raise ValueError("the witness counts in fractions: a gradient was applied in part, or with another weight")
    again = int(np.maximum(times - 1, 0).sum())
    ranks = np.minimum(times, 1)
    if quorum is not None:
        # T1: each update has exactly the quorum, or with grace at least the quorum.
        short = quorum - ranks[:steps].sum(axis=1)
        if grace:
            short = np.maximum(short, 0)
        return Applied(int(np.maximum(short, 0).sum()), again + int(np.maximum(-short, 0).sum()))
    # T3: each rank has all gradients up to its last one, and all ranks together have as many as there were updates.
    holes = sum(int(rows[-1]) + 1 - len(rows) for rows in map(np.flatnonzero, ranks.T) if len(rows))
    missing = steps - int(times.sum())
    return Applied(max(holes, missing, 0), max(again, -missing, 0))
