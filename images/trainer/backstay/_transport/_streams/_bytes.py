"""Carries frames as bytes in both directions, on a plain socket or inside TLS.

`Frames` uses the few methods of `ByteStream`. A plain socket has the system calls that take several pieces of memory,
or wait for all bytes. TLS has neither, and allows one call at a time on its state (docs/decisions/0068).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections import deque
from itertools import islice
from typing import Final, Protocol

from ..._process import NO_LINGER

__all__ = ["ByteStream", "byte_stream", "cut"]

_TCP_INFO: Final = struct.Struct("@128xQ")
"""The position of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h)."""

KEEPALIVE_SECONDS: Final = 30

LINK_BYTES: Final = 4 << 20
"""The most bytes that may wait to be sent on a link; the system may allow fewer (``net.core.wmem_max``)."""

MAX_PIECES: Final = 512
"""The most pieces of memory that are sent in one system call; Linux allows 1024."""

RECORD_BYTES: Final = 16 << 10
"""The bytes of a record of TLS, which is what one call encrypts."""


class ByteStream(Protocol):
    """A connection. One thread receives at a time, and one sends; any thread calls the other methods.

    All methods but `ended` and `received` raise `OSError` when the connection is broken.
    """

    def send(self, pieces: deque[memoryview]) -> int:
        """Send the first bytes of the pieces, at least one; returns how many. Waits for room."""
        ...

    def send_now(self, data: memoryview) -> int:
        """Send the first bytes of `data` for which there is room; returns how many. Never waits.

        After 0, the next call has the same data.
        """
        ...

    def await_room(self, seconds: float) -> None:
        """Wait until `send_now` may send something, for this time at most."""
        ...

    def receive(self, target: memoryview, *, all_of_it: bool = False) -> int:
        """Receive at least one byte; returns how many, and 0 at the end of the connection.

        Args:
            all_of_it: waits for more calls of the system where one call can fill all of the target.
        """
        ...

    def ended(self) -> bool:
        """Returns whether the peer has closed the connection, as far as this end can see."""
        ...

    def received(self) -> int | None:
        """Returns the bytes that the kernel has received, encrypted ones with TLS, or None if it does not report
        them."""
        ...

    def keep_alive(self) -> None:
        """Notice within about 10 s that the peer's node is gone, and let many small frames wait for a slow peer."""
        ...

    def cut(self) -> None:
        """End the connection immediately; `send` and `receive` of other threads return."""
        ...

    def close(self) -> None:
        """Close the socket. No other thread may be in a call."""
        ...


def byte_stream(sock: socket.socket) -> ByteStream:
    """Returns the byte stream of a connected socket. Inside TLS, the handshake has ended."""
    return _Encrypted(sock) if isinstance(sock, ssl.SSLSocket) else _Plain(sock)


def cut(sock: socket.socket) -> None:
    """End the connection of a socket immediately."""
    with contextlib.suppress(OSError):
        # Closing then drops what is not sent. A paused peer would keep it in this node's memory.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        # `SSLSocket.shutdown` ends TLS first: another thread would then receive cipher text as if it were plain text.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Plain:
    """A connected socket. See `ByteStream`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer whose node is gone never closes its connection. Heartbeats see that earlier than keepalive.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)

    def send(self, pieces: deque[memoryview]) -> int:
        return self._socket.sendmsg(islice(pieces, MAX_PIECES))

    def send_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def await_room(self, seconds: float) -> None:
        self._wait(select.POLLOUT, 1e3 * seconds)

    def receive(self, target: memoryview, *, all_of_it: bool = False) -> int:
        return self._socket.recv_into(target, 0, socket.MSG_WAITALL if all_of_it else 0)

    def ended(self) -> bool:
        try:
            return not socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def received(self) -> int | None:
        info = getattr(socket, "TCP_INFO", None)  # not on every system
        data = b"" if info is None else self._socket.getsockopt(socket.IPPROTO_TCP, info, _TCP_INFO.size)
        return int(_TCP_INFO.unpack(data)[0]) if len(data) == _TCP_INFO.size else None

    def keep_alive(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)

    def cut(self) -> None:
        cut(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int, milliseconds: float | None = None) -> None:
        ready = select.poll()
        ready.register(self._socket, event)
        ready.poll(milliseconds)


class _Encrypted(_Plain):
    """A socket inside TLS. OpenSSL allows one call at a time, so the socket does not block, and no call waits."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self._tls = sock
        self._calling = threading.Lock()

    def send(self, pieces: deque[memoryview]) -> int:
        record = _record(pieces)
        while not (sent := self.send_now(record)):
            self._wait(select.POLLOUT)
        return sent

    def send_now(self, data: memoryview) -> int:
        try:
            with self._calling:
                return self._tls.send(data)
        except ssl.SSLWantWriteError:
            return 0

    def receive(self, target: memoryview, *, all_of_it: bool = False) -> int:
        got = 0
        while True:
            try:
                with self._calling:
                    more = self._tls.recv_into(target[got:])
            except ssl.SSLWantReadError:
                if got:
                    return got
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:  # an answer of TLS itself, such as for new keys
                self._wait(select.POLLOUT)
            else:
                got += more
                if not more or not all_of_it or got == target.nbytes:
                    return got


def _record(pieces: deque[memoryview]) -> memoryview:
    """Returns the first bytes of the pieces. A record costs the same for few bytes, so small pieces are joined."""
    if len(pieces) == 1 or pieces[0].nbytes >= RECORD_BYTES:
        return pieces[0]
    joined = bytearray()
    for piece in pieces:
        joined += piece[: RECORD_BYTES - len(joined)]
        if len(joined) == RECORD_BYTES:
            break
    return memoryview(joined)
