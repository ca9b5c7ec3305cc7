"""Holds the frozen arrays of a model on the devices of a process, and computes their digests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .._update import digest_of
from ._placement import Placement

__all__ = ["Base"]

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
            return cls(placement.frozen(values))
        with ThreadPoolExecutor(_THREADS, "backstay-digest") as pool:
            made = [pool.submit(digest_of, np.asarray(value)) for value in values]
            arrays = placement.frozen(values)
            return cls(arrays, tuple(each.result() for each in made))
