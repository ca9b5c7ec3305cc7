"""Data streams over TCP: one connection for each worker and shard, kept open.

The caller begins with the job's token and its `Hello`. Then both ends send frames: the length of the header, the length
of the body, the header (a `Frame`), and the body. A body is sent from the caller's memory, and it is received into the
memory where it belongs. Lengths are checked before anything is received (docs/decisions/0056).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from backstay_rpc.channels import NOT_AUTHENTICATED, Credentials
from backstay_rpc.control_pb2 import Frame, Hello

from .. import _instrument
from .._process import NO_LINGER, Address, Warnings, listening_socket, socket_address
from .._timeouts import Timeouts
from ..errors import PeerLost
from .frames import HEADER_BYTES, MAX_CHUNK_BYTES, decode, refused
from .seam import PLACED, Bytes, Place, Refusal, ServerStream

__all__ = ["ClientStream", "Frames", "Listener", "PortTaken"]

_LOG = logging.getLogger(__name__)

_MAGIC: Final = b"backsty1"
_OPENING: Final = struct.Struct("<8sHI")
"""The first bytes of a connection: magic, the length of the token, the length of the hello. Both follow."""

_HEAD: Final = struct.Struct("<II")
"""The first bytes of a frame: the lengths of its header and of its body."""

_TCP_INFO: Final = struct.Struct("@128xQ")
"""Of `struct tcp_info` in linux/tcp.h: `tcpi_bytes_received`."""

MAX_TOKEN_BYTES: Final = 1024
CONNECT_SECONDS: Final = 5.0
MAX_UNPROVEN: Final = 1024
"""Connections without the token yet. Beyond that, and beyond `MAX_UNPROVEN_OF_HOST`, the oldest is closed."""

MAX_UNPROVEN_OF_HOST: Final = 256

MAX_LATE: Final = 8
"""So often a caller's first bytes are received after their time: this process may have been paused meanwhile."""

KEEPALIVE_SECONDS: Final = 30

LINK_BYTES: Final = 4 << 20
"""So much may wait to be sent on a link; the system allows less (``net.core.wmem_max``)."""

LINGER_BYTES: Final = 256 << 10
"""So much of what a refused caller still sends is received, so that the caller can read the refusal."""

AHEAD_BYTES: Final = _HEAD.size + (64 << 10)
"""At most so many bytes are received before the frame that they belong to is known. Longer headers are received
exactly."""


MAX_PIECES: Final = 512
"""So many pieces of memory are sent in one call of the system; Linux allows 1024."""


class PortTaken(OSError):  # noqa: N818  # it is what happened
    """Another process listens on the address."""


class Frames:
    """Frames over a connected socket. One thread reads at a time; any thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._ahead = memoryview(bytearray())  # a caller without the token has none
        self._start = self._stop = 0
        self._body = np.empty(0, np.uint8)
        self._skip = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer whose node is gone never closes its connection. Heartbeats see that earlier than keepalive.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)

    def write(self, frame: Frame, *body: np.ndarray) -> None:
        header = frame.SerializeToString()
        pieces = [piece.reshape(-1).view(np.uint8).data for piece in body if piece.nbytes]
        first = _HEAD.pack(len(header), sum(map(len, pieces))) + header
        unsent = deque((memoryview(first), *pieces))
        with self._writing:
            while unsent:
                sent = self._socket.sendmsg(islice(unsent, MAX_PIECES))
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]

    def post(self, frame: Frame) -> None:
        """Send a frame without a body, and without waiting.

        Raises:
            OSError: the connection broke, or its peer reads too slowly. Then nothing more can be sent on it.
        """
        header = frame.SerializeToString()
        data = _HEAD.pack(len(header), 0) + header
        with self._writing, contextlib.suppress(OSError):  # even if its buffer is full
            if self._socket.send(data, socket.MSG_DONTWAIT) == len(data):
                return
        self.cut()  # the reader must not wait for an answer to a frame that was not sent
        raise ConnectionError("the connection broke, or the other end reads too slowly")

    def keep_alive(self) -> None:
        """Notice within about 10 s that the peer's node is gone, and let many small frames wait for a slow peer."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None] | None:
        """The next frame with its body; None at the end of the stream.

        See `FrameStream.read`.

        Raises:
            Refusal: the bytes are not a frame.
            OSError: the connection broke.
        """
        with self._reading:
            return self._read(place)

    def _read(self, place: Place | None) -> tuple[Frame, Bytes | None] | None:
        self._fill(self._own(self._skip).data)
        if not self._have(_HEAD.size, may_end=True):
            return None
        header, body = _HEAD.unpack_from(self._ahead, self._start)
        if header > HEADER_BYTES or body > MAX_CHUNK_BYTES:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"a frame has a header of {header} bytes and a body of {body}: at most {HEADER_BYTES} and "
                f"{MAX_CHUNK_BYTES} are allowed",
            )
        self._have(_HEAD.size + header)
        begin = self._start + _HEAD.size
        self._start = begin + header
        self._skip = body  # until it is received
        frame = decode(bytes(self._ahead[begin : self._start]))
        if not body:
            return frame, None
        targets = place(frame, body) if place is not None else None
        if targets is None:
            own = self._own(body)
            self._fill(own.data)
            return frame, own
        if (there := sum(target.nbytes for target in targets)) != body:
            raise ValueError(f"a body of {body} bytes cannot be received into {there} bytes")
        for target in targets:
            self._fill(target.data)
        return frame, PLACED

    def _fill(self, view: memoryview) -> None:
        """Receive the next bytes of a body."""
        while view:
            got = self._some(view)
            self._skip -= got
            view = view[got:]

    def _own(self, nbytes: int) -> Bytes:
        """Memory of this object, which the next body uses again."""
        if self._body.nbytes < nbytes:
            self._body = np.empty(nbytes, np.uint8)
        return self._body[:nbytes]

    def _have(self, nbytes: int, *, may_end: bool = False) -> bool:
        """Receive until this many bytes are buffered in advance. False: the stream ended before the first of them."""
        while (there := self._stop - self._start) < nbytes:
            if self._start + nbytes > len(self._ahead) or not there:
                came = bytes(self._ahead[self._start : self._stop])
                if nbytes > len(self._ahead):
                    self._ahead = memoryview(bytearray(max(AHEAD_BYTES, nbytes)))
                self._ahead[:there] = came
                self._start, self._stop = 0, there
            got = self._socket.recv_into(self._ahead[self._stop : max(AHEAD_BYTES, self._start + nbytes)])
            if not got:
                if may_end and not there:
                    return False
                raise ConnectionError("the connection was closed inside a frame")
            self._stop += got
        return True

    def _some(self, target: memoryview) -> int:
        """Receive the next bytes of a body, at least one; returns how many."""
        there = min(self._stop - self._start, target.nbytes)
        if there:
            target[:there] = self._ahead[self._start : self._start + there]
            self._start += there
            return there
        got = self._socket.recv_into(target, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("the connection was closed inside a frame")
        return got

    def ended(self) -> bool:
        """Whether the peer has closed the connection, as far as this end can see."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def received(self) -> int | None:
        """The bytes that the kernel has received; None: it does not report them."""
        info = getattr(socket, "TCP_INFO", None)  # not on every system
        data = b"" if info is None else self._socket.getsockopt(socket.IPPROTO_TCP, info, _TCP_INFO.size)
        return int(_TCP_INFO.unpack(data)[0]) if len(data) == _TCP_INFO.size else None

    def cut(self) -> None:
        """End the connection immediately; `read` and `write` of other threads return."""
        _cut(self._socket)

    def close(self) -> None:
        """After `cut`. Another thread never reads from the next socket with the same number."""
        with self._reading, self._writing:
            self._socket.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Closing then drops what is not sent. A paused peer would keep it in this node's memory.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        sock.shutdown(socket.SHUT_RDWR)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


# ---- Client ----


class ClientStream:
    """The client's end of a data stream. `cancel` may be called from any thread."""

    def __init__(self, address: str, hello: Hello, token: str) -> None:
        """Connects. Whether the server accepts the token and the hello is seen by the first `read`.

        Args:
            address: ``host:port``.
            hello: the names of both peers.
            token: the job's.

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
            except OSError as error:
                raise self._lost(error) from error
            opened.pop_all()  # the stream is open: `close` closes the socket

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None]:
        """As `FrameStream.read`, but never None: the end of a stream that the client did not end is `PeerLost`."""
        try:
            item = self._frames.read(place)
        except Refusal as refusal:
            raise PeerLost(f"{self._address} sent something else than frames: {refusal.message}") from refusal
        except OSError as error:
            raise self._lost(error) from error
        if item is None:
            raise self._lost(None)
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
        self._frames.keep_alive()

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

    def _lost(self, error: OSError | None) -> PeerLost:
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
            raise PeerLost(f"{self._peer} is gone: {_why(error)}") from error

    def post(self, frame: Frame) -> None:
        try:
            self._frames.post(frame)
        except OSError as error:
            raise PeerLost(f"{self._peer} is gone: {_why(error)}") from error

    def keep_alive(self) -> None:
        self._frames.keep_alive()

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
        cut: it is being closed.
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
            token: of the job, not empty.
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
            _cut(each.socket)
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
            _cut(self._socket)  # ends `accept`
            self._thread.join(timeout)
            self._socket.close()
        for each in callers:
            _cut(each.socket)
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
        self._warnings.add(oldest.address[0], "a connection was closed: too many came without this job's token")
        _cut(oldest.socket)

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
