"""The versions of a shard's parameters, sent to streams block by block while later blocks are still computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from backstay_rpc.control_pb2 import Commit, Done

from .._coordination import Answering
from .._transport import Refusal
from ._staging import StagedGradient

__all__ = ["Published", "Publisher", "Waiter", "has_ended"]


def has_ended(done: Done | None, last: Commit | None, version: int) -> bool:
    """Returns whether training has ended for a worker that receives this version. It may end before the last version.

    Args:
        done: the end of the job, if the coordinator has reported it.
        last: the last commit that the shard has applied.
    """
    return done is not None or (last is not None and last.final and version > last.version)


class Published:
    """The blocks of one version. Each is set once by the apply thread and read by any number of streams.

    Its views prevent that the next update uses the memory of the parameters. So the shard drops a version before it
    computes the next, and only streams that are still sending keep it.
    """

    def __init__(self, version: int, world: int, blocks: int, offset: int = 0) -> None:
        self.version = version
        self.world = world
        self.offset = offset
        self._blocks: list[tuple[np.ndarray, Any] | None] = [None] * blocks
        self._changed = threading.Condition()
        self._stopped: Refusal | None = None

    def put(self, b: int, data: np.ndarray, encoded: Any = None) -> None:
        """Block `b` is computed. `encoded`: the block as it is sent; None where that is `data`."""
        with self._changed:
            self._blocks[b] = data, data if encoded is None else encoded
            self._changed.notify_all()

    def stop(self, why: Refusal) -> None:
        """The missing blocks will not arrive."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def block(self, b: int) -> np.ndarray:
        """Waits for block `b`. Raises `Refusal` when it will not arrive."""
        return self._wait(b)[0]

    def encoded(self, b: int) -> Any:
        """Waits for block `b`, as it is sent. Raises as `block`."""
        return self._wait(b)[1]

    def _wait(self, b: int) -> tuple[np.ndarray, Any]:
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

    def __init__(self, gradient: StagedGradient | None, min_version: int) -> None:
        self.gradient = gradient
        self.min_version = min_version
        self.published: Published | None = None


class Publisher:
    """The version that streams get now, and the streams that wait for one.

    Not thread-safe: `ShardRuntime` calls it under its own lock, and wakes the streams.

    Attributes:
        done: the end of the job, once it is decided.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._published: Published | None = None
        self._waiting: set[Waiter] = set()
        self.done: Done | None = None

    def begin(self) -> None:
        """A new term begins."""
        self._published = self.done = None

    def withdraw(self) -> None:
        """The next update begins: no stream gets the old version any more, as its memory may be used again."""
        self._published = None

    def publish(self, published: Published) -> None:
        """Give this version to the streams that it answers, even if the next update begins before they wake."""
        self._published = published
        for waiter in self._waiting:
            if waiter.published is None and self._answers(published, waiter):
                waiter.published = published

    @contextmanager
    def waiting(self, gradient: StagedGradient | None, min_version: int) -> Iterator[Waiter]:
        """Register a stream that waits for the answer to a push, or (None) for a version of at least `min_version`."""
        waiter = Waiter(gradient, min_version)
        self._waiting.add(waiter)
        try:
            yield waiter
        finally:
            self._waiting.discard(waiter)

    def answer_to(self, waiter: Waiter) -> Published | None:
        """Returns the version that answers a waiting stream; None while there is none."""
        for published in (waiter.published, self._published):
            if published is not None and self._answers(published, waiter):
                return published
        return None

    def _answers(self, published: Published, waiter: Waiter) -> bool:
        gradient = waiter.gradient
        if self.done is not None:  # the last version may still be computed: a worker must not return an older one
            return published.version >= self.done.version
        if gradient is None:
            return published.version >= waiter.min_version
        if gradient.applied is not None:
            return published.version >= gradient.applied
        return self._answering.answered_by(gradient.outcome, gradient.id.version, published.version)
