"""Data streams over Arrow Flight (gRPC): `DoExchange`, one for each worker and shard, kept open.

A frame's header is Flight's `app_metadata`. Its body is the one buffer of a record batch with one column of uint8.
Arrow sends the body from its memory and receives it without a further copy. A column of bytes has no offsets that a
peer could forge. Of a received batch, only the buffer itself is used, with the length that Arrow reports.

Flight cannot bound a message before it has received it. For a stream such as `DoExchange`, the token is checked before
that. But gRPC receives the one message of a method such as `GetFlightInfo`, of any size, before Flight gets the call.
So the port has a `ConnectionGuard`: a connection without a call with the token is closed after a few bytes. Sizes of
frames are checked before they are copied.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from google.protobuf.message import DecodeError

from backstay_rpc import AUTHORIZATION
from backstay_rpc.channels import NOT_AUTHENTICATED, Credentials, flight_client_options, flight_headers, flight_uri
from backstay_rpc.control_pb2 import Frame, Hello

from .. import _instrument
from .._process._guard import ConnectionGuard
from .._process._sockets import Address, Connection, connections, peer_address, reset, reset_peers
from .._timeouts import Timeouts
from ..errors import PeerLost, Refused
from .frames import decode
from .seam import Bytes, FrameStream, Refusal

__all__ = ["ClientStream", "Listener", "PortTaken"]

_NOT_SERVED: Final = "only DoExchange is served here"
_SCHEMA: Final = pa.schema([("body", pa.uint8())])
_LOG = logging.getLogger(__name__)

_CONNECTING: Final = threading.Lock()


class PortTaken(OSError):  # noqa: N818  # it is what happened
    """Another process listens on the address."""


def _batch(body: np.ndarray) -> Any:
    data = pa.Array.from_buffers(pa.uint8(), body.nbytes, [None, pa.py_buffer(body)])
    return pa.RecordBatch.from_arrays([data], schema=_SCHEMA)


def _received(chunk: Any) -> tuple[Frame, Bytes | None]:
    metadata = chunk.app_metadata
    frame = decode(b"" if metadata is None else metadata.to_pybytes())
    if chunk.data is None:
        return frame, None
    buffer = chunk.data.column(0).buffers()[1] if chunk.data.num_columns == 1 else None
    if buffer is None:
        raise Refusal("INVALID_ARGUMENT", "a frame's body is not a single column of bytes")
    return frame, np.frombuffer(buffer, np.uint8)


def _why(error: BaseException) -> str:
    """The first line of an error of gRPC, without the debug context behind it."""
    text = str(error).strip().split("\n", 1)[0].split(". gRPC client debug context", 1)[0]
    return text.split(" Detail:", 1)[0] or type(error).__name__


_ARROW_ERRORS: Final = (pa.ArrowException, fl.FlightError, OSError, ValueError, TypeError)


# ---- Client ----


class ClientStream:
    """The client's end of a data stream. `cancel` may be called from any thread."""

    def __init__(self, address: str, hello: Hello, token: str) -> None:
        """Begins to connect; whether that works is seen by the first `read` or `write`.

        Args:
            address: ``host:port``.
            hello: sent as the descriptor of the call.
            token: the job's.
        """
        self._address = address
        self._why: str | None = None
        self._lock = threading.Lock()
        # Held to read, write and close: Arrow waits forever when one thread reads the end of the stream while another
        # one writes.
        self._busy = threading.Lock()
        try:
            self._client = fl.FlightClient(flight_uri(address), generic_options=flight_client_options())
            options = fl.FlightCallOptions(headers=flight_headers(Credentials(token)))
            with _CONNECTING:  # so that the connection that appears meanwhile is this one's
                before = connections()
                self._writer, self._reader = self._client.do_exchange(
                    fl.FlightDescriptor.for_command(hello.SerializeToString()), options
                )
                self._writer.begin(_SCHEMA)
                port = int(address.rpartition(":")[2])
                self._own: set[Connection] = {c for c in connections() - before if c[1][1] == port}
        except _ARROW_ERRORS as error:
            raise self._lost(error) from error

    def read(self) -> tuple[Frame, Bytes | None]:
        """As `FrameStream.read`, but never None: the end of a stream that the client did not end is `PeerLost`."""
        try:
            with self._busy:
                chunk = self._reader.read_chunk()
            return _received(chunk)
        except StopIteration:
            raise self._lost(None) from None
        except Refusal as refusal:
            raise PeerLost(f"{self._address} sent something else than frames: {refusal.message}") from refusal
        except _ARROW_ERRORS as error:
            raise self._lost(error) from error

    def write(self, frame: Frame, body: np.ndarray | None = None) -> None:
        frame = _instrument.alter("frame", frame)
        try:
            with self._busy:
                if body is None:
                    self._writer.write_metadata(frame.SerializeToString())
                else:
                    self._writer.write_with_metadata(_batch(body), frame.SerializeToString())
        except _ARROW_ERRORS as error:
            raise self._lost(error) from error

    def alive(self) -> bool:
        return self._why is None

    def cancel(self, why: str) -> None:
        with self._lock:
            if self._why is not None:
                return
            self._why = why
        self._reader.cancel()
        # A write to a paused peer, or to a node that is gone, outlives its call.
        reset(self._own.__contains__)

    def close(self) -> None:
        self.cancel("the stream was closed")
        # Cancelled, so neither waits for the server.
        with self._busy:
            for end in (self._writer, self._client):
                with contextlib.suppress(*_ARROW_ERRORS):
                    end.close()

    def _lost(self, error: BaseException | None) -> PeerLost | Refused:
        if self._why is not None:
            return PeerLost(f"{self._address}: {self._why}")
        # Only this text is from a Backstay server: a proxy's HTTP status 401 or 403 gives the same type of error.
        if isinstance(error, fl.FlightUnauthenticatedError) and NOT_AUTHENTICATED in str(error):
            return Refused("UNAUTHENTICATED", f"{self._address} does not know this job's token")
        if isinstance(error, fl.FlightUnauthorizedError) and _NOT_SERVED in str(error):
            return Refused("PERMISSION_DENIED", f"{self._address}: {_why(error)}")
        if error is None:
            return PeerLost(f"{self._address} ended the stream")
        return PeerLost(f"the stream to {self._address} broke: {_why(error)}")


# ---- Server ----


class _ServerStream:
    """The server's end of a data stream; lives as long as its call."""

    def __init__(self, context: Any, reader: Any, writer: Any) -> None:
        self._context = context
        self._reader = reader
        self._writer = writer

    def read(self) -> tuple[Frame, Bytes | None] | None:
        try:
            return _received(self._reader.read_chunk())
        except StopIteration:
            return None
        except _ARROW_ERRORS as error:
            if self._context.is_cancelled():
                return None
            raise Refusal("INVALID_ARGUMENT", f"the message is not a frame: {_why(error)}") from error

    def write(self, frame: Frame, body: np.ndarray | None = None) -> None:
        frame = _instrument.alter("frame", frame)
        try:
            if body is None:
                self._writer.write_metadata(frame.SerializeToString())
            else:
                self._writer.write_with_metadata(_batch(body), frame.SerializeToString())
        except _ARROW_ERRORS as error:
            raise PeerLost(f"{self._context.peer()} is gone: {_why(error)}") from error

    def alive(self) -> bool:
        return not self._context.is_cancelled()


class _Authenticate(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Runs before a call is read: a call without the token, or of another method than `DoExchange`, ends."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__()
        self._credentials = credentials

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> None:
        if not self._credentials.admits(headers.get(AUTHORIZATION, [])):
            raise fl.FlightUnauthenticatedError(NOT_AUTHENTICATED)
        if info.method != fl.FlightMethod.DO_EXCHANGE:
            raise fl.FlightUnauthorizedError(_NOT_SERVED)


class Listener(fl.FlightServerBase):  # type: ignore[misc]
    """Listens for data streams, and calls `handler(hello, stream)` in a thread for each; the stream ends with it."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        handler: Callable[[Hello, FrameStream], None],
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            host: address to bind.
            port: 0 for any; then `port` has the number.
            token: of the job, not empty.
            handler: an exception in it ends the stream.
            timeouts: None for the usual ones.

        Raises:
            PortTaken: the address cannot be bound.
        """
        if not token:
            raise ValueError("the job's token is empty: a data server without one would accept no caller")
        credentials = Credentials(token)
        self._handler = handler
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._streams: dict[int, tuple[Hello, Address]] = {}
        self._closing = False
        try:
            where = fl.Location.for_grpc_tcp(f"[{host}]" if ":" in host else host, port)
            super().__init__(where, middleware={"token": _Authenticate(credentials)})
        except (pa.ArrowException, OSError) as error:
            raise PortTaken(
                f"the data server cannot listen on {host} port {port}: it is taken, or the address is not this pod's"
            ) from error
        self.bound: int = super().port
        grace = (timeouts or Timeouts()).unproven
        self._guard = ConnectionGuard(self.bound, "the data port", grace=grace)
        self._guard.start()
        # At exit, Arrow waits for all calls, and an idle client would delay it forever (T8). This runs
        # before that, and a process that fails ends.
        atexit.register(self.close)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self._guard.prove(context.peer())
        try:
            hello = Hello.FromString(descriptor.command or b"")
        except (DecodeError, TypeError):
            raise fl.FlightServerError("the descriptor of the call is not a Hello") from None
        stream = _ServerStream(context, reader, writer)
        address = peer_address(context.peer())
        with self._lock:
            if self._closing:
                raise fl.FlightUnavailableError("the server is going away")
            self._streams[id(stream)] = (hello, address)
        try:
            writer.begin(_SCHEMA)
            if reader.schema != _SCHEMA:
                raise fl.FlightServerError(f"the stream's schema must be {_SCHEMA}")
            self._handler(hello, stream)
        except _ARROW_ERRORS as error:
            _LOG.debug("data stream of %s ended: %s", context.peer(), error)
            if isinstance(error, fl.FlightError):
                raise
            raise fl.FlightServerError(_why(error)) from None
        except PeerLost as error:
            _LOG.debug("%s", error)
        finally:
            with self._idle:
                del self._streams[id(stream)]
                self._idle.notify_all()

    def disconnect(self, wanted: Callable[[Hello], bool]) -> int:
        """Cuts the connections of the streams whose hello is `wanted`; returns how many there were."""
        with self._lock:
            addresses = {address for hello, address in self._streams.values() if wanted(hello)}
        return reset_peers(self.bound, addresses.__contains__) if addresses else 0

    def close(self, timeout: float = 10.0) -> bool:
        """Stops listening, cuts every connection, and waits for the streams' threads.

        Returns:
            False when after `timeout` seconds some handler still runs; the process must then be left by `os._exit`, as
            Arrow waits for the handler at exit.
        """
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            return True
        atexit.unregister(self.close)
        self._guard.close()
        # `shutdown` refuses new calls at once, and returns when the last one ended.
        stopping = threading.Thread(target=self.shutdown, name="backstay-data-shutdown", daemon=True)
        stopping.start()
        with self._idle:
            for _ in range(max(1, int(timeout / 0.05))):
                reset_peers(self.bound, lambda _: True)
                if self._idle.wait_for(lambda: not self._streams, 0.05):
                    break
        stopping.join(timeout)
        return not stopping.is_alive()
