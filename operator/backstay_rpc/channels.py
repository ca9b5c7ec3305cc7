"""The one place where gRPC channels and servers of Backstay are configured: options, limits, and who may call.

Control messages travel on grpcio. Tensors travel on other TCP connections (`backstay._transport`), whose callers are
checked by the same `Credentials`.
"""

from __future__ import annotations

import contextlib
from typing import Final

import grpc

from .limits import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    MAX_CALLS,
    MAX_CALLS_PER_CONNECTION,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
)

__all__ = [
    "REFUSAL",
    "Options",
    "listen",
    "open_aio_channel",
    "open_channel",
]

Options = list[tuple[str, int]]

REFUSAL: Final = "backstay-refusal"
"""Trailing metadata of an answer that a Backstay server gave on purpose. Without it, a status may come from another
program at the same address, or from gRPC itself (a proxy's HTTP status 401 reads as UNAUTHENTICATED)."""

_COMMON: Final[Options] = [
    # Callers retry with a pause and an end. gRPC's own retries of a call that never left the client have neither:
    # docs/decisions/0068, tests/runtime/test_going_away.py.
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
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def open_channel(address: str) -> grpc.Channel:
    """Returns a channel to a control service. It connects at the first call, and again after its connection broke.

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
    """Returns a server that is bound, for the running event loop. It is not started, and has no handlers.

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
