"""The control plane: who is there, who leads, what was decided; gRPC, small messages, never a tensor.

`_service` answers workers, evaluators and the operator; `_driving` is the pure coordinator with a clock, a lock and
links to the shards; `_link` is a shard's end of such a link; `_client` is what workers and evaluators call.
"""

from __future__ import annotations

from ._agreement import Agreement, first_difference
from ._client import ControlClient, Heartbeats, News
from ._driving import Driving, Observer, Storage
from ._link import Link
from ._service import ControlServer, Host, Peers
from ._spans import Outbox

__all__ = [
    "Agreement",
    "ControlClient",
    "ControlServer",
    "Driving",
    "Heartbeats",
    "Host",
    "Link",
    "News",
    "Observer",
    "Outbox",
    "Peers",
    "Storage",
    "first_difference",
]
