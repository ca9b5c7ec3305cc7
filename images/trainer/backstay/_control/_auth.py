"""Every call carries the job's token (O7); without it nothing of the call is looked at."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import grpc

from backstay_rpc import AUTHORIZATION, bearer

from ..errors import Refused, Superseded

__all__ = ["CHANNEL_OPTIONS", "SERVER_OPTIONS", "TokenInterceptor", "open_channel", "refusal_of"]

# Control messages are small: more than this is a mistake or an attack. A join carries every leaf's name and shape.
MAX_MESSAGE_BYTES = 16 << 20

# A process that was stopped, or a node that vanished, does not close its connections: pings of HTTP/2 notice it.
# https://grpc.io/docs/guides/keepalive/
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Not a back-off, but how long one attempt may take; a busy machine needs longer than the back-off for its answer.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Callers try again themselves, with a pause. gRPC's own retries have none where a call never left the client: a
    # server that ends takes up a connection and says at once that it is going away, and the caller then begins the call
    # anew on it for ever, until the process has all the memory there is (tests/runtime/test_going_away.py).
    # https://github.com/grpc/proposal/blob/master/A6-client-retries.md#transparent-retries
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_PERMANENT = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
]


def open_channel(address: str) -> grpc.Channel:
    """A channel to a control service; it connects when it is used, and again after it broke."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def refusal_of(error: grpc.RpcError) -> Refused | None:
    """The error that a failed call means, if trying again cannot help; else None."""
    code = getattr(error, "code", lambda: None)()
    details = str(getattr(error, "details", lambda: "")())
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Superseded(code.name, details)
    return Refused(code.name, details) if code in _PERMANENT else None


class TokenInterceptor(grpc.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without the token, in constant time."""

    def __init__(self, token: str) -> None:
        (_, self._wanted), *_ = bearer(token)

        def refuse(request: Any, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")

        self._refuse_unary: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = dict(handler_call_details.invocation_metadata).get(AUTHORIZATION, "")
        if isinstance(given, bytes):
            given = given.decode("latin-1")
        if hmac.compare_digest(given.encode(), self._wanted.encode()):
            return continuation(handler_call_details)
        if handler_call_details.method.endswith("/Coordinate"):
            return self._refuse_stream
        return self._refuse_unary
