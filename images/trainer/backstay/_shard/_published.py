"""One version of a shard's parameters, handed to streams block by block while later blocks are still computed."""

from __future__ import annotations

import threading

import numpy as np

from .._wire.seam import Refusal
from ._staging import Gradient

__all__ = ["Published", "Waiter"]


class Published:
    """The blocks of one version. Each is set once by the apply thread and read by any number of streams.

    The views in it keep the memory of the parameters from being used again by the next update; so the shard drops a
    version before it computes the next, and only streams that are still sending hold on to it.
    """

    def __init__(self, version: int, world: int, blocks: int, offset: int = 0) -> None:
        self.version = version
        self.world = world
        self.offset = offset
        self._blocks: list[np.ndarray | None] = [None] * blocks
        self._changed = threading.Condition()
        self._stopped: Refusal | None = None

    def put(self, b: int, data: np.ndarray) -> None:
        """Block `b` is computed."""
        with self._changed:
            self._blocks[b] = data
            self._changed.notify_all()

    def stop(self, why: Refusal) -> None:
        """The blocks that are not there will not come."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def block(self, b: int) -> np.ndarray:
        """Waits for block `b`. Raises `Refusal` when it will not come."""
        data = self._blocks[b]
        if data is not None:
            return data
        with self._changed:
            self._changed.wait_for(lambda: self._blocks[b] is not None or self._stopped is not None)
            data = self._blocks[b]
            if data is None:
                assert self._stopped is not None
                raise self._stopped
            return data


class Waiter:
    """A stream that waits for a version."""

    __slots__ = ("gradient", "min_version", "published")

    def __init__(self, gradient: Gradient | None, min_version: int) -> None:
        self.gradient = gradient
        self.min_version = min_version
        self.published: Published | None = None
