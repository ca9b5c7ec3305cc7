"""Frames over a connected socket, in both directions.

A frame is the length of its header, the length of its body, the header (a `Frame`), and the body. A body is sent from
the caller's memory, and it is received into the memory where it belongs (docs/decisions/0056).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from itertools import islice
from typing import Final

import numpy as np

from backstay_rpc.control_pb2 import Frame

from .._process import NO_LINGER
from .frames import HEADER_BYTES, MAX_CHUNK_BYTES, decode
from .seam import PLACED, Bytes, Place, Refusal

__all__ = ["Frames", "cut", "encoded"]

_HEAD: Final = struct.Struct("<II")
"""The first bytes of a frame: the lengths of its header and of its body."""

_TCP_INFO: Final = struct.Struct("@128xQ")
"""The position of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h)."""

KEEPALIVE_SECONDS: Final = 30

LINK_BYTES: Final = 4 << 20
"""The most bytes that may wait to be sent on a link; the system may allow fewer (``net.core.wmem_max``)."""

POST_SECONDS: Final = 1.0
"""So long `Frames.post` waits for room. A commit of 8,000 ranks is larger than the usual ``net.core.wmem_max``."""

AHEAD_BYTES: Final = _HEAD.size + (64 << 10)
"""The most bytes that are received before the frame that they belong to is known. Longer headers are received
exactly."""

MAX_PIECES: Final = 512
"""The most pieces of memory that are sent in one system call; Linux allows 1024."""


def encoded(frame: Frame) -> bytes:
    """The bytes of a frame without a body."""
    header = frame.SerializeToString()
    return _HEAD.pack(len(header), 0) + header


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
        """Send a frame without a body. Waits at most `POST_SECONDS`: a frame may be larger than the system's buffer.

        Raises:
            OSError: the connection broke, or its peer does not read. Then nothing more can be sent on it.
        """
        with self._writing:
            if self._sent(memoryview(encoded(frame))):
                return
            # Before another thread sends: its frame would be read as the end of this one. And the reader must not wait
            # for an answer to a frame that was not sent.
            self.cut()
        raise ConnectionError("the connection broke, or the other end does not read")

    def _sent(self, unsent: memoryview) -> bool:
        """Send all of this within `POST_SECONDS`, or return False."""
        until: float | None = None
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(BlockingIOError):
                    unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
                if not unsent:
                    return True
                now = time.monotonic()
                until = now + POST_SECONDS if until is None else until
                if now >= until:
                    break
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                writable.poll(1e3 * (until - now))
        return False

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
        cut(self._socket)

    def close(self) -> None:
        """Close the socket; call after `cut`. Another thread never reads from the next socket with the same number."""
        with self._reading, self._writing:
            self._socket.close()


def cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Closing then drops what is not sent. A paused peer would keep it in this node's memory.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        sock.shutdown(socket.SHUT_RDWR)
