"""The limits of everything that a pod receives from other processes, in one table.

Each port accepts connections of strangers, which are callers that have not proven yet that they belong to the job.
Deadlines that a test or a user may change are in `backstay._timeouts`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "CONNECT_SECONDS",
    "CONTROL_STRANGERS",
    "DATA_STRANGERS",
    "HANDSHAKE_SECONDS",
    "HEADER_BYTES",
    "HTTP_STRANGERS",
    "IDLE_SECONDS",
    "MAX_CALLS",
    "MAX_CALLS_PER_CONNECTION",
    "MAX_CHUNK_BYTES",
    "MAX_HEAD_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_REFUSED",
    "MAX_TOKEN_BYTES",
    "MAX_UNPROVEN_BYTES",
    "Strangers",
]


class Strangers(NamedTuple):
    """The most connections of strangers to a port.

    Attributes:
        in_all: the number from all hosts together. Beyond it, the oldest is closed.
        of_host: the number from one host.
    """

    in_all: int
    of_host: int


CONTROL_STRANGERS: Final = Strangers(in_all=512, of_host=64)
"""The guard closes those above the limit only when they are some seconds old."""

DATA_STRANGERS: Final = Strangers(in_all=1024, of_host=256)
HTTP_STRANGERS: Final = Strangers(in_all=256, of_host=64)

# ---- Control messages over gRPC ----

MAX_MESSAGE_BYTES: Final = 4 << 20
"""The largest control message. A join of 5,000 leaves has 0.3 MB, a list of 15,000 stored arrays 1 MB."""

MAX_METADATA_BYTES: Final = 8 << 10
"""The metadata of a call. A call with twice as much is always refused, and one between the two usually."""

MAX_CALLS_PER_CONNECTION: Final = 64
MAX_CALLS: Final = 4096
"""Calls that a server has open at the same time."""

HANDSHAKE_SECONDS: Final = 10
IDLE_SECONDS: Final = 60
"""A server closes a connection without a call after this time. Heartbeats and progress calls come every 2 s."""

MAX_UNPROVEN_BYTES: Final = 256 << 10
"""The most bytes that a connection may send before its first call with the token, which comes within the first kB."""

MAX_REFUSED: Final = 16
"""Calls without the token on one connection, which is then closed."""

# ---- Frames over TCP ----

CONNECT_SECONDS: Final = 5.0
MAX_TOKEN_BYTES: Final = 1024
HEADER_BYTES: Final = 4 << 20
"""The most that is accepted as the header of a frame. A standby gets the contributions of 10,000 ranks in one, each
with its metrics: about 0.1 kB for each of them."""

MAX_CHUNK_BYTES: Final = 16 << 20
"""The most that is accepted as the body of a frame."""

# ---- HTTP: health and metrics ----

MAX_HEAD_BYTES: Final = 8 << 10
"""The head of a request."""
