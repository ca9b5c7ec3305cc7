"""One shard in its server: gradients are staged, commits applied in order, and versions sent to waiting streams.

A `ShardRuntime` does this for an active server, with a `Replication` to its standby. A `Follower` is the other end: it
receives the state (`Held`) in the standby.
"""

from __future__ import annotations

from ._follower import Follower, Held
from ._replication import Replication
from ._runtime import ShardRuntime

__all__ = [
    "Follower",
    "Held",
    "Replication",
    "ShardRuntime",
]
