"""Frames over a byte stream, in both directions.

A frame is the length of its header, the length of its body, the header (a `Frame`), and the body. A body is sent from
the caller's memory, and it is received into the memory where it belongs (docs/decisions/0068).
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from typing import Final

import numpy as np

from backstay_rpc.control_pb2 import Frame
from backstay_rpc.limits import HEADER_BYTES, MAX_CHUNK_BYTES
from backstay_rpc.refusals import RefusalCode

from ._bytes import ByteStream
from ._interfaces import PLACED, Bytes, Place, Refusal
from .frames import decode

__all__ = ["Frames", "encoded"]

_HEAD: Final = struct.Struct("<II")
"""The first bytes of a frame, which are the lengths of its header and of its body."""

POST_SECONDS: Final = 1.0
"""So long `Frames.post` waits for room. A commit of 8,000 ranks is larger than the usual ``net.core.wmem_max``."""

AHEAD_BYTES: Final = _HEAD.size + (64 << 10)
"""The most bytes that are received before the frame that they belong to is known. Longer headers are received
exactly."""


def encoded(frame: Frame) -> bytes:
    """Returns the bytes of a frame without a body."""
    header = frame.SerializeToString()
    return _HEAD.pack(len(header), 0) + header


class Frames:
    """Frames over a byte stream. One thread reads at a time; any thread writes."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._ahead = memoryview(bytearray())  # a caller without the token has none
        self._start = self._stop = 0
        self._body = np.empty(0, np.uint8)
        self._skip = 0

    def begin(self, opening: bytes) -> None:
        """Send the first bytes of a connection, before any frame."""
        self._send(memoryview(opening))

    def write(self, frame: Frame, *body: np.ndarray) -> None:
        header = frame.SerializeToString()
        pieces = [piece.reshape(-1).view(np.uint8).data for piece in body if piece.nbytes]
        self._send(memoryview(_HEAD.pack(len(header), sum(map(len, pieces))) + header), *pieces)

    def _send(self, *pieces: memoryview) -> None:
        unsent = deque(pieces)
        with self._writing:
            while unsent:
                sent = self._stream.send(unsent)
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
                unsent = unsent[self._stream.send_now(unsent) :]
                if not unsent:
                    return True
                now = time.monotonic()
                until = now + POST_SECONDS if until is None else until
                if now >= until:
                    break
                self._stream.await_room(until - now)
        return False

    def keep_alive(self) -> None:
        """See `ByteStream`."""
        self._stream.keep_alive()

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None] | None:
        """Returns the next frame with its body; None at the end of the stream.

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
                RefusalCode.INVALID,
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
        """Returns memory of this object, which the next body uses again."""
        if self._body.nbytes < nbytes:
            self._body = np.empty(nbytes, np.uint8)
        return self._body[:nbytes]

    def _have(self, nbytes: int, *, may_end: bool = False) -> bool:
        """Receive until this many bytes are buffered in advance. Returns False if the stream ended before the first."""
        while (there := self._stop - self._start) < nbytes:
            if self._start + nbytes > len(self._ahead) or not there:
                came = bytes(self._ahead[self._start : self._stop])
                if nbytes > len(self._ahead):
                    self._ahead = memoryview(bytearray(max(AHEAD_BYTES, nbytes)))
                self._ahead[:there] = came
                self._start, self._stop = 0, there
            got = self._stream.receive(self._ahead[self._stop : max(AHEAD_BYTES, self._start + nbytes)])
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
        got = self._stream.receive(target, all_of_it=True)
        if not got:
            raise ConnectionError("the connection was closed inside a frame")
        return got

    def ended(self) -> bool:
        """See `ByteStream`."""
        return self._stream.ended()

    def received(self) -> int | None:
        """See `ByteStream`."""
        return self._stream.received()

    def cut(self) -> None:
        """See `ByteStream`."""
        self._stream.cut()

    def close(self) -> None:
        """Close the socket; call after `cut`. Another thread never reads from the next socket with the same number."""
        with self._reading, self._writing:
            self._stream.close()
