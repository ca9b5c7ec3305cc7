"""The coordinator's messages that a shard has received and not carried out yet, by version.

Not thread-safe: `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import Commit, Gather, GradientId, NormRequest, Save

if TYPE_CHECKING:
    from ._applier import Applier, Term

__all__ = ["Orders"]


class Orders:
    """The orders for each version. `Save` stores the version as it is; then `Gather`s, `NormRequest`
    and `Commit` follow."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._saves: set[int] = set()
        self._gathers: dict[int, list[Gather]] = {}
        self._requests: dict[int, NormRequest] = {}
        self._commits: dict[int, tuple[Commit, float]] = {}  # and when it arrived

    def save(self, order: Save) -> None:
        self._saves.add(order.version)

    def gather(self, order: Gather) -> None:
        self._gathers.setdefault(order.version, []).append(order)

    def prepare(self, order: NormRequest) -> None:
        """The newest request of a version counts, because a withdrawn decision is made again."""
        self._requests[order.version] = order

    def commit(self, order: Commit) -> None:
        """The first commit of a version counts, as all of them are the same."""
        self._commits.setdefault(order.version, (order, time.monotonic()))

    def take(self, term: Term) -> Callable[[], None] | None:
        """Returns the next work of a shard at `term.version`."""
        version = term.version
        if version in self._saves:
            self._saves.remove(version)
            return partial(self._applier.save, term)
        if gathers := self._gathers.get(version):
            return partial(self._applier.gather, term, gathers.pop(0))
        self._gathers.pop(version, None)
        if (request := self._requests.pop(version, None)) is not None:
            return partial(self._applier.prepare, term, request)
        if (commit := self._commits.pop(version, None)) is not None:
            return partial(self._applier.apply, term, *commit)
        return None

    def withdraw(self, gradient: GradientId) -> None:
        """A gradient was rejected: a decision that names it was withdrawn."""
        for gathers in self._gathers.values():
            gathers[:] = [gather for gather in gathers if all(one.id != gradient for one in gather.contributions)]
        for version, request in list(self._requests.items()):
            if any(contribution.id == gradient for contribution in request.contributions):
                del self._requests[version]

    def clear(self) -> None:
        """A new term begins."""
        self._commits.clear()
        self._gathers.clear()
        self._requests.clear()
        self._saves.clear()
