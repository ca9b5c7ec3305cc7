"""Runs one shard in its server, which stages gradients, applies commits in order, and sends versions to waiting
streams.

A `ShardRuntime` does this for an active server, with a `Replication` to its standby. A `Follower` is the other end: it
receives the state (`HeldState`) in the standby.
"""

from __future__ import annotations

from ._admission import Admission
from ._credits import Credits, Turn
from ._follower import Follower, HeldState
from ._orders import Orders
from ._publisher import has_ended
from ._replication import Replication
from ._runtime import ShardEvents, ShardRuntime

__all__ = [
    "Admission",
    "Credits",
    "Follower",
    "HeldState",
    "Orders",
    "Replication",
    "ShardEvents",
    "ShardRuntime",
    "Turn",
    "has_ended",
]
