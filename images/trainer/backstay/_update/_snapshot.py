"""The state of a shard at one version, as a checkpoint or a standby gets it. Needs no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Entry", "Snapshot"]

Array = np.ndarray[Any, np.dtype[Any]]


class Entry(NamedTuple):
    """Elements ``start:stop`` of the flattened array `key`, whose `value` is 1-D, read-only, and never changes."""

    key: str
    start: int
    stop: int
    value: Array


@dataclass(frozen=True)
class Snapshot:
    """The state of a shard at one version. The entries of all shards cover every array of `array_specs` once."""

    version: int
    entries: tuple[Entry, ...]
