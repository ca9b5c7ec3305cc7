"""Data streams over TCP: one connection for each worker and shard, kept open.

The caller begins with the job's token and its `Hello`. Then both ends send `Frames`. Lengths are checked before
anything is received (docs/decisions/0056).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from backstay_rpc.channels import NOT_AUTHENTICATED, Credentials
from backstay_rpc.control_pb2 import Frame, Hello

from .. import _instrument
from .._process import Address, Warnings, listening_socket, socket_address
from .._timeouts import Timeouts
from ..errors import PeerLost
from .frames import HEADER_BYTES, refused
from .seam import Bytes, Place, Refusal, ServerStream
from .sockets import Frames, cut

__all__ = ["ClientStream", "Listener", "PortTaken"]

_LOG = logging.getLogger(__name__)

_MAGIC: Final = b"backsty1"
_OPENING: Final = struct.Struct("<8sHI")
"""The first bytes of a connection: magic, the length of the token, the length of the hello. Both follow."""

MAX_TOKEN_BYTES: Final = 1024
CONNECT_SECONDS: Final = 5.0
MAX_UNPROVEN: Final = 1024
"""Connections without the token yet. Beyond that, and beyond `MAX_UNPROVEN_OF_HOST`, the oldest is closed."""

MAX_UNPROVEN_OF_HOST: Final = 256

MAX_LATE: Final = 8
"""How often the first bytes of a caller are received after their deadline: this process may have been paused."""

LINGER_BYTES: Final = 256 << 10
"""The most bytes that are received from a refused caller that still sends, so that it can read the refusal."""


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

    def __init__(self, address: str, hello: Hello, token: str) -> None:
        """Connects. Whether the server accepts the token and the hello is seen by the first `read`.

        Args:
            address: ``host:port``.
            hello: the names of both peers.
            token: the job's token.

        Raises:
            errors.PeerLost: nothing listens there, or it did not answer within 5 s.
        """
        self._address = address
        self._why: str | None = None
        self._lock = threading.Lock()
        secret, who = token.encode(), hello.SerializeToString()
        with contextlib.ExitStack() as opened:
            try:
                sock = opened.enter_context(socket.create_connection(_host_port(address), CONNECT_SECONDS))
                sock.settimeout(None)
                self._frames = Frames(sock)
                sock.sendall(_OPENING.pack(_MAGIC, len(secret), len(who)) + secret + who)
            except (OSError, ValueError, OverflowError) as error:  # the latter: it is not an address
                raise self._lost(error) from error
            opened.pop_all()  # the stream is open: `close` closes the socket

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None]:
        """Like `FrameStream.read`, but never None: the end of a stream that the client did not end is `PeerLost`."""
        try:
            item = self._frames.read(place)
        except Refusal as refusal:
            raise PeerLost(f"{self._address} sent something else than frames: {refusal.message}") from refusal
        except OSError as error:
            raise self._lost(error) from error
        if item is None:
            raise self._lost(None)
        if (frame := item[0]).HasField("refused") and frame.refused.code == "UNAUTHENTICATED":
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


class _ServerStream:
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
class _Caller:
    """A connection.

    Attributes:
        hello: None until the token was checked.
        cut: whether the connection is being closed.
    """

    socket: socket.socket
    address: Address
    hello: Hello | None = None
    cut: bool = False

    @property
    def unproven(self) -> bool:
        return self.hello is None and not self.cut


class Listener:
    """Listens for data streams, and calls `handler(hello, stream)` in a thread for each; the stream ends with it.

    A caller without the token is refused before anything else is received from it. The number of such connections, the
    bytes that they send and their time are bounded.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        handler: Callable[[Hello, ServerStream], None],
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            host: address to bind.
            port: 0 for any; then `bound` has the number.
            token: the job's token, not empty.
            handler: an exception in it ends the stream.
            timeouts: None for the usual ones.

        Raises:
            PortTaken: the address cannot be bound.
        """
        if not token:
            raise ValueError("the job's token is empty: a data server without one would accept no caller")
        self._credentials = Credentials(token)
        self._handler = handler
        times = timeouts or Timeouts()
        self._unproven_seconds, self._refused_seconds = times.unproven, times.refused
        self._warnings = Warnings("the data port")
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._callers: list[_Caller] = []  # in the order in which they came
        self._closing = False
        try:
            self._socket = listening_socket(host, port)
        except OSError as error:
            raise PortTaken(
                f"the data server cannot listen on {host} port {port}: it is taken, or the address is not this pod's"
            ) from error
        self.bound: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="backstay-data-accept", daemon=True)
        self._thread.start()

    def disconnect(self, wanted: Callable[[Hello], bool]) -> int:
        """Cuts the connections of the streams whose hello is `wanted`; returns how many there were."""
        with self._lock:
            found = [each for each in self._callers if each.hello is not None and wanted(each.hello)]
        for each in found:
            cut(each.socket)
        return len(found)

    def close(self, timeout: float = 10.0) -> bool:
        """Stops listening, cuts every connection, and waits for the streams' threads.

        Returns:
            False when after `timeout` seconds some handler still runs.
        """
        with self._lock:
            first, self._closing = not self._closing, True
            callers = list(self._callers)
        if first:
            cut(self._socket)  # ends `accept`
            self._thread.join(timeout)
            self._socket.close()
        for each in callers:
            cut(each.socket)
        with self._idle:
            return self._idle.wait_for(lambda: not self._callers, timeout)

    # ---- In the thread that accepts ----

    def _accept(self) -> None:
        while True:
            try:
                sock, name = self._socket.accept()
            except OSError as error:
                if self._closing:
                    return
                if error.errno not in (errno.ECONNABORTED, errno.EINTR):
                    _LOG.debug("the data port cannot accept a connection: %s", _why(error))
                    self._drop_oldest(None)  # such as too many open files
                    time.sleep(0.05)
                continue
            caller = _Caller(sock, socket_address(name))
            with self._lock:
                closing = self._closing
                if not closing:
                    self._callers.append(caller)
                unproven = [each.address[0] for each in self._callers if each.unproven]
            if closing:
                sock.close()
                continue
            if Counter(unproven)[caller.address[0]] > MAX_UNPROVEN_OF_HOST:
                self._drop_oldest(caller.address[0])
            elif len(unproven) > MAX_UNPROVEN:
                self._drop_oldest(None)
            try:
                threading.Thread(target=self._serve, args=(caller,), name="backstay-data", daemon=True).start()
            except RuntimeError as error:  # the process can start no further thread
                self._warnings.add(caller.address[0], f"a connection was closed: {error}")
                self._forget(caller)
                self._drop_oldest(None)  # its thread can serve the next one

    def _drop_oldest(self, host: str | None) -> None:
        """Close the oldest connection without the token, of a host or of any."""
        with self._lock:
            found = (each for each in self._callers if each.unproven and host in (None, each.address[0]))
            oldest = next(found, None)
            if oldest is None:
                return
            oldest.cut = True
        self._warnings.add(oldest.address[0], "a connection was closed: too many connections without this job's token")
        cut(oldest.socket)

    # ---- In the thread of a connection ----

    def _serve(self, caller: _Caller) -> None:
        try:
            frames = Frames(caller.socket)
            hello = self._opening(caller, frames)
            if hello is None:
                return
            with self._lock:
                if self._closing:
                    return
                caller.hello = hello
            self._handler(hello, _ServerStream(frames, caller.address))
        except (OSError, PeerLost) as error:
            _LOG.debug("the data stream of %s ended: %s", caller.address, error)
        except Exception:  # noqa: BLE001  # it ends this stream and no other
            _LOG.exception("a data stream of %s failed", caller.address[0])
        finally:
            self._forget(caller)

    def _forget(self, caller: _Caller) -> None:
        caller.socket.close()
        with self._idle:
            self._callers.remove(caller)
            self._idle.notify_all()

    def _opening(self, caller: _Caller, frames: Frames) -> Hello | None:
        """Receive and check the first bytes; None: the connection is refused."""
        deadline = time.monotonic() + self._unproven_seconds
        late = 0

        def received(nbytes: int) -> bytes:
            nonlocal late
            data = bytearray()
            while len(data) < nbytes:
                left = deadline - time.monotonic()
                late += left <= 0
                if late > MAX_LATE:
                    raise TimeoutError
                caller.socket.settimeout(max(0.1, left))
                some = caller.socket.recv(nbytes - len(data))
                if not some:
                    raise ConnectionError("the connection was closed before its hello")
                data += some
            return bytes(data)

        try:
            magic, token, hello = _OPENING.unpack(received(_OPENING.size))
            if magic != _MAGIC or token > MAX_TOKEN_BYTES or hello > HEADER_BYTES:
                self._warnings.add(caller.address[0], "a connection was closed: it did not begin as a data stream")
                return None
            if not self._credentials.proven(received(token)):
                self._warnings.add(caller.address[0], "a data stream without this job's token was refused")
                self._refuse(caller, frames, Refusal("UNAUTHENTICATED", NOT_AUTHENTICATED))
                return None
            sent = received(hello)
        except TimeoutError:
            why = f"no token of this job arrived within {self._unproven_seconds:g} s"
            self._warnings.add(caller.address[0], f"a connection was closed: {why}")
            return None
        caller.socket.settimeout(None)
        try:
            return Hello.FromString(sent)
        except DecodeError:
            self._refuse(caller, frames, Refusal("INVALID_ARGUMENT", "the first bytes of the stream are not a Hello"))
            return None

    def _refuse(self, caller: _Caller, frames: Frames, refusal: Refusal) -> None:
        """Send a refusal, and receive what the caller still sends: closing immediately could drop the refusal."""
        deadline = time.monotonic() + self._refused_seconds
        caller.socket.settimeout(self._refused_seconds)
        with contextlib.suppress(OSError):
            frames.write(refused(refusal))
            caller.socket.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            while left > 0 and (seconds := deadline - time.monotonic()) > 0:
                caller.socket.settimeout(seconds)
                some = caller.socket.recv(min(left, 64 << 10))
                if not some:
                    return
                left -= len(some)
