"""Sends small control messages without tensors for joining, heartbeats, links and progress.

`_service` answers workers, evaluators and the operator over gRPC. `_links` has the coordinator's ends of the links, and
`_link` a shard's end. Workers and evaluators call through `_client`.
"""

from __future__ import annotations

from ._agreement import CONSTANTS, LAYOUT, OF_RANK, PROGRAM, SOFTWARE, STRUCTURE, VERSION, Agreement, first_difference
from ._client import ControlClient, Heartbeats, JobState
from ._link import Link
from ._links import Links
from ._peers import Peers
from ._service import ControlServer, Host
from ._spans import Kept, Outbox

__all__ = [
    "CONSTANTS",
    "LAYOUT",
    "OF_RANK",
    "PROGRAM",
    "SOFTWARE",
    "STRUCTURE",
    "VERSION",
    "Agreement",
    "ControlClient",
    "ControlServer",
    "Heartbeats",
    "Host",
    "JobState",
    "Kept",
    "Link",
    "Links",
    "Outbox",
    "Peers",
    "first_difference",
]
