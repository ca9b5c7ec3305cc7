"""What a shard says to the coordinator, overheard by its server on the way."""

from __future__ import annotations

import threading
from typing import Protocol

from backstay_rpc.control_pb2 import Norm, Written

from . import _faults
from ._coordination.seam import Coordination

__all__ = ["Applies", "Timed", "Watched"]


class Applies(Protocol):
    """A server that wants to know when its shard has applied an update."""

    def applied(self, version: int) -> None: ...


class Timed:
    """Passes on what the shard says, and notes when updates were applied. Where a fault can strike before the
    coordinator hears of it."""

    def __init__(self, coordination: Coordination, server: Applies) -> None:
        self._server = server
        self.staged = coordination.staged
        self.lost = coordination.lost
        self.written = coordination.written
        self.failed = coordination.failed
        self._norm = coordination.norm
        self._applied = coordination.applied

    def norm(self, shard: int, norm: Norm) -> None:
        _faults.reach("norm", norm.version)
        self._norm(shard, norm)

    def applied(self, shard: int, version: int) -> None:
        self._server.applied(version)
        self._applied(shard, version)


class Watched:
    """Passes on what was written, and sets an event then."""

    def __init__(self, coordination: Coordination, event: threading.Event) -> None:
        self._event = event
        self.staged = coordination.staged
        self.lost = coordination.lost
        self.norm = coordination.norm
        self.applied = coordination.applied
        self.failed = coordination.failed
        self._written = coordination.written

    def written(self, shard: int, written: Written) -> None:
        self._written(shard, written)
        self._event.set()
