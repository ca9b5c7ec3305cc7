"""Keeps the history so far as plain data, with the settings of the job and the account of samples. Pure."""

from __future__ import annotations

from ._coordinator_state import HELD, CoordinatorState, Mode, Rules, World, after, apply, count_samples
from ._samples import EpochEnded, Samples

__all__ = [
    "HELD",
    "CoordinatorState",
    "EpochEnded",
    "Mode",
    "Rules",
    "Samples",
    "World",
    "after",
    "apply",
    "count_samples",
]
