"""The one place where gRPC channels and servers of Backstay are configured: options, limits, and who may call.

Control messages travel on grpcio. Tensors travel on other TCP connections (`backstay._wire.tcp`), whose callers are
checked by the same `Credentials`. Neither is encrypted now.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc

from . import AUTHORIZATION, bearer

__all__ = [
    "MAX_MESSAGE_BYTES",
    "NOT_AUTHENTICATED",
    "REFUSAL",
    "Credentials",
    "Options",
    "listen",
    "open_aio_channel",
    "open_channel",
]

Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES: Final = 4 << 20
"""The largest control message. A join of 5,000 leaves has 0.3 MB, a list of 15,000 stored arrays 1 MB."""

MAX_CALLS_PER_CONNECTION: Final = 64
MAX_CALLS: Final = 4096
"""Calls that a server has open at the same time. Each other shard holds one for as long as it lives."""

HANDSHAKE_SECONDS: Final = 10
IDLE_SECONDS: Final = 60
"""A server closes a connection without a call after this time. Heartbeats and progress calls come every 2 s."""

NOT_AUTHENTICATED: Final = "the call does not carry this job's token"

REFUSAL: Final = "backstay-refusal"
"""Trailing metadata of an answer that a Backstay server gave on purpose. Without it, a status may come from another
program at the same address, or from gRPC itself (a proxy's HTTP status 401 reads as UNAUTHENTICATED)."""

_COMMON: Final[Options] = [
    # Callers retry with a pause and an end. gRPC's own retries of a call that never left the client have neither:
    # docs/decisions/0019, tests/runtime/test_going_away.py.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]

_SIZES: Final[Options] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

# https://grpc.io/docs/guides/keepalive/: a stopped process or a lost node does not close its connections.
_CLIENT: Final[Options] = [
    *_COMMON,
    *_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Not a back-off, but how long one attempt may take; a busy machine needs longer than the back-off for its answer.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels to one address must not share a connection: another incarnation may have taken the address.
    ("grpc.use_local_subchannel_pool", 1),
]

_SERVER: Final[Options] = [
    *_SIZES,
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1_000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1_000),
    # The core buffers what a peer may send ahead of a read. Control messages need no more than the first window.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(frozen=True)
class Credentials:
    """The proof that a call belongs to this job.

    Attributes:
        token: the job's secret. With an empty one, every call is refused.
    """

    token: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a caller adds to a gRPC call."""
        return bearer(self.token)

    def admits(self, given: Iterable[str | bytes]) -> bool:
        """Whether a call belongs to this job; compares in constant time.

        Args:
            given: the call's values of the header ``authorization``.
        """
        values = list(given)
        if len(values) != 1 or not self.token:
            return False
        value = values[0] if isinstance(values[0], bytes) else values[0].encode()
        return hmac.compare_digest(value, f"Bearer {self.token}".encode())

    def proven(self, given: bytes) -> bool:
        """Whether `given` is the token; compares in constant time."""
        return bool(self.token) and hmac.compare_digest(given, self.token.encode())

    def admits_call(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the metadata of a gRPC call carry the token, and no second one."""
        return self.admits(value for key, value in metadata if key == AUTHORIZATION)


def open_channel(address: str) -> grpc.Channel:
    """A channel to a control service. It connects at the first call, and again after its connection broke.

    Args:
        address: ``host:port``.
    """
    return grpc.insecure_channel(address, options=_CLIENT)


def open_aio_channel(address: str, *, reconnect_within: float | None = None) -> grpc.aio.Channel:
    """Like `open_channel`, for the running event loop.

    Args:
        address: as in `open_channel`.
        reconnect_within: the longest pause in seconds between two attempts to connect; None: as in `open_channel`.
    """
    options = dict(_CLIENT)
    if reconnect_within is not None:
        options["grpc.max_reconnect_backoff_ms"] = round(reconnect_within * 1e3)
    return grpc.aio.insecure_channel(address, options=list(options.items()))


def listen(bind: str, port: int) -> tuple[grpc.aio.Server, int]:
    """A server that is bound, for the running event loop. It is not started, and has no handlers.

    Args:
        bind: an address of this machine.
        port: 0 for any.

    Returns:
        The server, and its port.

    Raises:
        OSError: the port cannot be bound; the message names it.
    """
    server = grpc.aio.server(options=_SERVER, maximum_concurrent_rpcs=MAX_CALLS)
    bound = 0
    with contextlib.suppress(RuntimeError):
        bound = server.add_insecure_port(f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}")
    if bound == 0:
        raise OSError(
            f"the control service cannot listen on {bind} port {port}: it is taken, or it is not this pod's address"
        )
    return server, bound
