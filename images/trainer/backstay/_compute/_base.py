"""Places the frozen arrays of a model on the devices of a process, one after the other, and computes their digests."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Self

import numpy as np

from .._update import aligned_empty, digest_of
from ._placement import Placement

__all__ = ["Base"]

_THREADS: Final = 4


class Base:
    """The values of the frozen leaves of a `TreeSpec`. A context manager, in which they are placed.

    Memory of the host holds a few of them at a time, unless it is the memory of the devices.
    """

    def __init__(self, placement: Placement, *, digests: bool) -> None:
        """
        Args:
            digests: whether their digests are needed. They take about as long as a copy of the values.
        """
        self._placement, self._digests = placement, digests
        self._pool = ThreadPoolExecutor(_THREADS, "backstay-digest")
        self._pending: deque[Future[str]] = deque()
        self._arrays: dict[int, Any] = {}
        self._made: dict[int, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def place(self, number: int, value: Any) -> Any:
        """Place a value, in any memory, on the devices. Returns the array.

        Args:
            number: the index of the leaf. A second value replaces the first one.
        """
        if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
            # JAX and each digest would copy it, and keep the original in memory until then.
            copy = np.frombuffer(aligned_empty(value.nbytes).data, value.dtype).reshape(value.shape)
            np.copyto(copy, value)
            value = copy
        if self._digests:
            while len(self._pending) >= _THREADS:
                self._pending.popleft().exception()  # `digests` raises it
            self._made[number] = self._pool.submit(digest_of, np.asarray(value))
            self._pending.append(self._made[number])
        placed: Any = self._placement.frozen(number, value)
        placed.block_until_ready()  # it holds the value until then
        self._arrays[number] = placed
        return placed

    @property
    def arrays(self) -> list[Any]:
        """The values, on the devices, in the order of the leaves."""
        return [self._arrays[number] for number in sorted(self._arrays)]

    @property
    def digests(self) -> tuple[str, ...]:
        """See `digest_of`; empty if they were not requested."""
        return tuple(self._made[number].result() for number in sorted(self._made))
