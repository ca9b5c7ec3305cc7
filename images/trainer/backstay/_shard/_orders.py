"""The coordinator's messages that a shard has received and not carried out yet, by version.

Not thread-safe: `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

from typing import TypeAlias

from backstay_rpc.control_pb2 import Commit, Gather, GradientId, NormRequest, Save

__all__ = ["Order", "Orders"]

Order: TypeAlias = Commit | Gather | NormRequest | Save


class Orders:
    """The orders for each version. `Save` stores the version as it is; then `Gather`s, `NormRequest`
    and `Commit` follow."""

    def __init__(self) -> None:
        self._commits: dict[int, Commit] = {}
        self._norms: dict[int, NormRequest] = {}
        self._saves: dict[int, Save] = {}
        self._gathers: dict[int, list[Gather]] = {}

    def add(self, order: Order, version: int) -> None:
        """Keep an order, unless it is for a version before `version`, the shard's version.

        Of commits of a version the first counts, as all are the same. Of `NormRequest` the newest counts, because a
        withdrawn decision is made again.
        """
        match order:
            case Save():
                self._saves[order.version] = order
            case Gather() if order.version >= version:
                self._gathers.setdefault(order.version, []).append(order)
            case Commit() if order.version >= version:
                self._commits.setdefault(order.version, order)
            case NormRequest() if order.version >= version:
                self._norms[order.version] = order

    def take(self, version: int) -> Order | None:
        """The next order of a shard at `version`."""
        if version in self._saves:
            return self._saves.pop(version)
        if gathers := self._gathers.get(version):
            return gathers.pop(0)
        for kind in (self._norms, self._commits):
            if version in kind:
                order: Order = kind.pop(version)
                self._gathers.pop(version, None)
                return order
        return None

    def withdraw(self, gradient: GradientId) -> None:
        """A gradient was rejected: a decision that names it was withdrawn."""
        for gathers in self._gathers.values():
            gathers[:] = [gather for gather in gathers if all(one.id != gradient for one in gather.contributions)]
        for version, request in list(self._norms.items()):
            if any(contribution.id == gradient for contribution in request.contributions):
                del self._norms[version]

    def clear(self) -> None:
        """A new term begins."""
        self._commits.clear()
        self._gathers.clear()
        self._norms.clear()
        self._saves.clear()
