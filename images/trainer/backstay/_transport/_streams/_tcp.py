"""Data streams over TCP with one connection for each worker and shard, kept open.

The caller begins with the job's token and its `Hello`. Then both ends send `Frames`. Lengths are checked before
anything is received (docs/decisions/0068).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from backstay_rpc.control_pb2 import Frame, Hello
from backstay_rpc.credentials import NOT_AUTHENTICATED, Credentials
from backstay_rpc.limits import CONNECT_SECONDS, DATA_STRANGERS, HEADER_BYTES, MAX_TOKEN_BYTES
from backstay_rpc.refusals import RefusalCode

from ... import _instrument
from ..._process import Address, Bounds, Caller, Callers, Unwelcome, listening_socket
from ..._timeouts import Timeouts
from ...errors import PeerLost
from ._bytes import byte_stream, cut
from ._frame_stream import Frames, encoded
from ._interfaces import Bytes, Place, Refusal, ServerStream
from .frames import refused

__all__ = ["ClientStream", "Listener", "PortTaken"]

_LOG = logging.getLogger(__name__)

_MAGIC: Final = b"backsty1"
_OPENING: Final = struct.Struct("<8sHI")
"""The first bytes of a connection, which are the magic and the lengths of the token and of the hello. Both follow."""


class PortTaken(OSError):  # noqa: N818  # it is what happened
    """Another process listens on the address."""


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---- Client ----


class ClientStream:
    """The client's end of a data stream. `cancel` may be called from any thread."""

    def __init__(self, address: str, hello: Hello, credentials: Credentials) -> None:
        """Connects. Whether the server accepts the token and the hello is seen by the first `read`.

        Args:
            address: ``host:port``.
            hello: the names of both peers.
            credentials: the credentials of this pod.

        Raises:
            errors.PeerLost: nothing listens there, or it did not answer within 5 s, or its certificate is not valid.
        """
        self._address = address
        self._why: str | None = None
        self._lock = threading.Lock()
        secret, who = credentials.token.encode(), hello.SerializeToString()
        with contextlib.ExitStack() as opened:
            try:
                host, port = _host_port(address)
                sock = opened.enter_context(socket.create_connection((host, port), CONNECT_SECONDS))
                if (tls := credentials.connects) is not None:
                    sock = opened.enter_context(tls.wrap_socket(sock, server_hostname=host))
                sock.settimeout(None)
                self._frames = Frames(byte_stream(sock))
                self._frames.begin(_OPENING.pack(_MAGIC, len(secret), len(who)) + secret + who)
            except (OSError, ValueError, OverflowError) as error:  # the latter: it is not an address
                raise self._lost(error) from error
            opened.pop_all()  # the stream is open: `close` closes the socket

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None]:
        """Read like `FrameStream.read`, but raise `PeerLost` at the end of a stream that the client did not end."""
        try:
            item = self._frames.read(place)
        except Refusal as refusal:
            raise PeerLost(f"{self._address} sent something else than frames: {refusal.message}") from refusal
        except OSError as error:
            raise self._lost(error) from error
        if item is None:
            raise self._lost(None)
        if (frame := item[0]).HasField("refused") and frame.refused.code == RefusalCode.NOT_AUTHENTICATED:
            # The server that gave the address has accepted the token: another job has the address since.
            raise PeerLost(f"{self._address} belongs to another job: {frame.refused.message}")
        return item

    def write(self, frame: Frame, *body: np.ndarray) -> None:
        frame = _instrument.alter("frame", frame)
        try:
            self._frames.write(frame, *body)
        except OSError as error:
            raise self._lost(error) from error

    def post(self, frame: Frame) -> None:
        """See `ServerStream`."""
        try:
            self._frames.post(frame)
        except OSError as error:
            raise self._lost(error) from error

    def keep_alive(self) -> None:
        """See `ServerStream`."""
        try:
            self._frames.keep_alive()
        except OSError as error:
            raise self._lost(error) from error

    def alive(self) -> bool:
        return self._why is None

    def cancel(self, why: str) -> None:
        with self._lock:
            if self._why is not None:
                return
            self._why = why
        self._frames.cut()

    def close(self) -> None:
        self.cancel("the stream was closed")
        self._frames.close()

    def _lost(self, error: Exception | None) -> PeerLost:
        if self._why is not None:
            return PeerLost(f"{self._address}: {self._why}")
        if error is None:
            return PeerLost(f"{self._address} ended the stream")
        return PeerLost(f"the stream to {self._address} broke: {_why(error)}")


# ---- Server ----


class _TcpServerStream:
    """The server's end of a data stream; lives as long as its handler."""

    def __init__(self, frames: Frames, peer: Address) -> None:
        self._frames = frames
        self._peer = f"{peer[0]} port {peer[1]}"

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None] | None:
        try:
            return self._frames.read(place)
        except OSError:  # the peer is gone
            return None

    def write(self, frame: Frame, *body: np.ndarray) -> None:
        frame = _instrument.alter("frame", frame)
        try:
            self._frames.write(frame, *body)
        except OSError as error:
            raise PeerLost(f"the stream of {self._peer} broke: {_why(error)}") from error

    def post(self, frame: Frame) -> None:
        try:
            self._frames.post(frame)
        except OSError as error:
            raise PeerLost(f"the stream of {self._peer} broke: {_why(error)}") from error

    def keep_alive(self) -> None:
        try:
            self._frames.keep_alive()
        except OSError as error:
            raise PeerLost(f"{self._peer} is gone: {_why(error)}") from error

    def alive(self) -> bool:
        return not self._frames.ended()

    def received(self) -> int | None:
        return self._frames.received()

    def cut(self) -> None:
        self._frames.cut()


@dataclass(eq=False)
class _Proven:
    """A connection whose caller has sent the token."""

    socket: socket.socket
    hello: Hello


def _opening(data: bytearray) -> tuple[bytes, int, int]:
    magic, token, hello = _OPENING.unpack_from(data)
    return magic, token, hello


def _hello(opening: bytearray) -> Hello:
    """Returns the hello of a whole opening. Raises `Unwelcome`."""
    _, token, _ = _opening(opening)
    try:
        return Hello.FromString(bytes(opening[_OPENING.size + token :]))
    except DecodeError:
        refusal = Refusal(RefusalCode.INVALID, "the first bytes of the stream are not a Hello")
        raise Unwelcome(
            "a data stream was refused: its first bytes are not a Hello", encoded(refused(refusal))
        ) from None


class Listener:
    """Listens for data streams, and calls `handler(hello, stream)` in a thread for each; the stream ends with it.

    A caller without the token is refused before anything else is received from it, and has no thread. The number of
    such connections, the bytes that they send and their time are bounded (`Callers`).
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        handler: Callable[[Hello, ServerStream], None],
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            host: address to bind.
            port: 0 for any; then `bound` has the number.
            credentials: the credentials of this pod, with a token that is not empty.
            handler: an exception in it ends the stream.
            timeouts: None for the usual ones.

        Raises:
            PortTaken: the address cannot be bound.
        """
        if not credentials.token:
            raise ValueError("the job's token is empty: a data server without one would accept no caller")
        self._credentials = credentials
        self._handler = handler
        times = timeouts or Timeouts()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._streams: list[_Proven] = []
        self._closing = False
        try:
            listening = listening_socket(host, port)
        except OSError as error:
            raise PortTaken(
                f"the data server cannot listen on {host} port {port}: it is taken, or the address is not this pod's"
            ) from error
        self.bound: int = listening.getsockname()[1]
        bounds = Bounds(*DATA_STRANGERS, times.unproven, times.refused)
        self.callers = Callers(
            listening, "the data port", self._missing, self._begin, bounds, passes_on=True, tls=credentials.accepts
        )
        self.callers.start()

    def disconnect(self, wanted: Callable[[Hello], bool]) -> int:
        """Cuts the connections of the streams whose hello is `wanted`; returns how many there were."""
        with self._lock:
            found = [each for each in self._streams if wanted(each.hello)]
        for each in found:
            cut(each.socket)
        return len(found)

    def close(self, timeout: float = 10.0) -> bool:
        """Stops listening, cuts every connection, and waits for the streams' threads.

        Returns:
            False when after `timeout` seconds some handler still runs.
        """
        with self._lock:
            self._closing = True
        self.callers.close(timeout)
        with self._lock:
            streams = list(self._streams)
        for each in streams:
            cut(each.socket)
        with self._idle:
            return self._idle.wait_for(lambda: not self._streams, timeout)

    # ---- In the thread that accepts ----

    def _missing(self, caller: Caller) -> int:
        """See `Callers`. Each part of the opening is checked before the next part is received."""
        data = caller.opening
        if len(data) < _OPENING.size:
            return _OPENING.size - len(data)
        magic, token, hello = _opening(data)
        if magic != _MAGIC or token > MAX_TOKEN_BYTES or hello > HEADER_BYTES:
            raise Unwelcome("a connection was closed: it did not begin as a data stream")
        proof = _OPENING.size + token
        if len(data) < proof:
            return proof - len(data)
        if len(data) == proof and not self._credentials.proven(bytes(data[_OPENING.size :])):
            refusal = Refusal(RefusalCode.NOT_AUTHENTICATED, NOT_AUTHENTICATED)
            raise Unwelcome("a data stream without this job's token was refused", encoded(refused(refusal)))
        left = proof + hello - len(data)
        if not left:
            _hello(data)
        return left

    def _begin(self, caller: Caller) -> None:
        hello = _hello(caller.opening)
        try:
            threading.Thread(target=self._serve, args=(caller, hello), name="backstay-data", daemon=True).start()
        except RuntimeError as error:  # the process can start no further thread
            self.callers.warnings.add(caller.address[0], f"a connection was closed: {error}")
            caller.socket.close()

    # ---- In the thread of a connection ----

    def _serve(self, caller: Caller, hello: Hello) -> None:
        with caller.socket:
            stream = _Proven(caller.socket, hello)
            with self._lock:
                if self._closing:
                    return
                self._streams.append(stream)
            try:
                self._handler(hello, _TcpServerStream(Frames(byte_stream(caller.socket)), caller.address))
            except (OSError, PeerLost) as error:
                _LOG.debug("the data stream of %s ended: %s", caller.address, error)
            except Exception:  # noqa: BLE001  # it ends this stream and no other
                _LOG.exception("a data stream of %s failed", caller.address[0])
            finally:
                caller.socket.close()
                with self._idle:
                    self._streams.remove(stream)
                    self._idle.notify_all()
