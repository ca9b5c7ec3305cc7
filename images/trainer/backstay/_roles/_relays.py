"""What a shard says to the coordinator, overheard by its server on the way."""

from __future__ import annotations

import threading
from typing import Protocol

from backstay_rpc.control_pb2 import Norm, Written

from .. import _faults
from .._coordination.seam import Coordination

__all__ = ["Applies", "Timed", "Watched"]


class Applies(Protocol):
    """A server that wants to know when its shard has applied an update."""

    def applied(self, version: int) -> None: ...


class _Relay:
    """Passes on all that the shard says."""

    def __init__(self, coordination: Coordination) -> None:
        self.staged = coordination.staged
        self.lost = coordination.lost
        self.norm = coordination.norm
        self.applied = coordination.applied
        self.written = coordination.written
        self.failed = coordination.failed


class Timed(_Relay):
    """Notes when updates were applied. Where a fault can strike before the coordinator hears of it."""

    def __init__(self, coordination: Coordination, server: Applies) -> None:
        super().__init__(coordination)

        def norm(shard: int, norm: Norm) -> None:
            _faults.reach("norm", norm.version)
            coordination.norm(shard, norm)

        def applied(shard: int, version: int) -> None:
            server.applied(version)
            coordination.applied(shard, version)

        self.norm, self.applied = norm, applied


class Watched(_Relay):
    """Sets an event when something was written."""

    def __init__(self, coordination: Coordination, event: threading.Event) -> None:
        super().__init__(coordination)

        def written(shard: int, written: Written) -> None:
            coordination.written(shard, written)
            event.set()

        self.written = written
