"""The control plane: joining, heartbeats, decisions and progress, in small messages without tensors.

`_service` answers workers, evaluators and the operator over gRPC. `_driving` runs the pure coordinator with a clock, a
lock and links to the shards. `_links` has the coordinator's ends of the links, and `_link` a shard's end. Workers and
evaluators call through `_client`.
"""

from __future__ import annotations

from ._agreement import CONSTANTS, LAYOUT, PROGRAM, SOFTWARE, STRUCTURE, VERSION, Agreement, first_difference
from ._auth import FINAL
from ._client import ControlClient, Heartbeats, JobState
from ._driving import Driving, Observer, Storage
from ._link import Link
from ._links import Links
from ._peers import Peers
from ._service import ControlServer, Host
from ._spans import Kept, Outbox

__all__ = [
    "CONSTANTS",
    "FINAL",
    "LAYOUT",
    "PROGRAM",
    "SOFTWARE",
    "STRUCTURE",
    "VERSION",
    "Agreement",
    "ControlClient",
    "ControlServer",
    "Driving",
    "Heartbeats",
    "Host",
    "JobState",
    "Kept",
    "Link",
    "Links",
    "Observer",
    "Outbox",
    "Peers",
    "Storage",
    "first_difference",
]
