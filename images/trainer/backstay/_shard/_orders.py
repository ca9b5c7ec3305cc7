"""The coordinator's messages that a shard has received and not carried out, by version.

Not thread-safe: `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

from typing import TypeAlias

from backstay_rpc.control_pb2 import Commit, GradientId, NormRequest, Save

__all__ = ["Order", "Orders"]

Order: TypeAlias = Commit | NormRequest | Save


class Orders:
    """What to do at each version: `Save` belongs to the version as it is, then its `NormRequest`, then its `Commit`."""

    def __init__(self) -> None:
        self._commits: dict[int, Commit] = {}
        self._norms: dict[int, NormRequest] = {}
        self._saves: dict[int, Save] = {}

    def add(self, order: Order, version: int) -> None:
        """Keep an order, unless it is for a version before `version`, where the shard stands.

        The first commit of a version counts, as all are the same; the newest `NormRequest` does, because a decision
        that was taken back is made again.
        """
        match order:
            case Save():
                self._saves[order.version] = order
            case Commit() if order.version >= version:
                self._commits.setdefault(order.version, order)
            case NormRequest() if order.version >= version:
                self._norms[order.version] = order

    def take(self, version: int) -> Order | None:
        """The next order of a shard at `version`."""
        for kind in (self._saves, self._norms, self._commits):
            if version in kind:
                order: Order = kind.pop(version)
                return order
        return None

    def taken_back(self, gradient: GradientId) -> None:
        """A gradient was rejected: a decision that names it was taken back."""
        for version, request in list(self._norms.items()):
            if any(contribution.id == gradient for contribution in request.contributions):
                del self._norms[version]

    def clear(self) -> None:
        """A new term begins."""
        self._commits.clear()
        self._norms.clear()
        self._saves.clear()
