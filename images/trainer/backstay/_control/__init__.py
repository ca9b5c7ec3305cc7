"""The control plane over gRPC: joining, heartbeats, decisions and progress, in small messages without tensors.

`_service` answers workers, evaluators and the operator. `_driving` runs the pure coordinator with a clock, a lock and
links to the shards. `_link` is a shard's side of such a link. Workers and evaluators call through `_client`.
"""

from __future__ import annotations

from ._agreement import Agreement, first_difference
from ._client import ControlClient, Heartbeats, JobState
from ._driving import Driving, Observer, Storage
from ._link import Link
from ._service import ControlServer, Host, Peers
from ._spans import Kept, Outbox

__all__ = [
    "Agreement",
    "ControlClient",
    "ControlServer",
    "Driving",
    "Heartbeats",
    "Host",
    "JobState",
    "Kept",
    "Link",
    "Observer",
    "Outbox",
    "Peers",
    "Storage",
    "first_difference",
]
