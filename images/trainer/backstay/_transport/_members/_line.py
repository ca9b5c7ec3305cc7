"""Connects two members of a rank, and shows that the other one is lost."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from backstay_rpc.control_pb2 import Frame, MemberMessage

from ...errors import BackstayError, PeerLost
from .._streams import ClientStream, Refusal, ServerStream, kind_of

__all__ = ["BROKEN", "END", "SILENT_PINGS", "LineEnd", "MemberLine", "MemberLost"]

SILENT_PINGS: Final = 5
"""A member that has not answered so many pings in a row is lost. Pings are counted and not seconds, because the process
that counts may have been stopped too."""

END: Final = "end"
"""The last point. The connection may end when a message of it has arrived."""

BROKEN: Final = "broken"
"""The name of a message whose number is that of a point at which a member has an error."""

_Stream: TypeAlias = ClientStream | ServerStream


class MemberLost(BackstayError):  # noqa: N818
    """Another member of the rank is lost, so this one must end."""


def _ignored(ping: MemberMessage) -> None:
    """A ping that reports nothing."""


@dataclass(frozen=True)
class LineEnd:
    """The functions that one end of a connection calls, in its threads.

    Attributes:
        lost: called once, when the other end is lost.
        broken: called with the number of a point at which another member has an error.
        ping: returns the next ping.
        pinged: called with each ping of the other end.
    """

    lost: Callable[[str], None]
    broken: Callable[[int], None]
    ping: Callable[[], MemberMessage] = MemberMessage
    pinged: Callable[[MemberMessage], None] = _ignored


class MemberLine:
    """One end of a connection between two members. One thread reads it, and another one sends pings."""

    def __init__(self, stream: _Stream, interval: float, end: LineEnd) -> None:
        """
        Args:
            interval: the seconds between two pings.
        """
        self._stream, self._interval, self._owner = stream, interval, end
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[MemberMessage | None] = queue.SimpleQueue()
        self._unanswered = 0
        self._over = threading.Event()
        self._drained = threading.Event()  # all that has arrived is read
        self._why = ""

    def serve(self) -> None:
        """Read until the connection ends."""
        threading.Thread(target=self._ping, name="backstay-member-pings", daemon=True).start()
        why = "the connection was closed"
        try:
            while (item := self._stream.read()) is not None:
                frame, _ = item
                if kind_of(frame) == "refused":
                    why = frame.refused.message
                    break
                if kind_of(frame) != "member":
                    why = f"a frame {kind_of(frame)!r} arrived"
                    break
                self._unanswered = 0
                if frame.member.point == END:
                    self._over.set()  # the connection may end now
                if frame.member.point == BROKEN:
                    self._owner.broken(frame.member.number)
                elif frame.member.number:
                    self._received.put(frame.member)
                elif not frame.member.answer:
                    with contextlib.suppress(PeerLost):  # a last message may have arrived
                        self._post(MemberMessage(answer=True))
                    self._owner.pinged(frame.member)
        except (PeerLost, Refusal) as error:
            why = str(error)
        self._end(why)
        self._drained.set()

    def send(self, message: MemberMessage) -> None:
        """Raises `MemberLost`."""
        try:
            self._post(message)
        except PeerLost as error:
            self._cannot_send(error)
            raise MemberLost(self._why) from error

    def receive(self) -> MemberMessage:
        """Returns the next message that is not a ping. Raises `MemberLost`."""
        message = self._received.get()
        if message is None:
            self._received.put(None)  # for the next call
            raise MemberLost(self._why)
        return message

    def leave(self) -> None:
        """The connection may end from now on."""
        self._over.set()

    def give_up(self, why: str) -> None:
        """Nothing travels any more, because another member is lost. The other end sees it."""
        self._over.set()
        self._end(why)
        self.close()

    def close(self) -> None:
        self._over.set()
        (self._stream.close if isinstance(self._stream, ClientStream) else self._stream.cut)()

    def _post(self, message: MemberMessage) -> None:
        with self._lock:
            self._stream.post(Frame(member=message))

    def _end(self, why: str) -> None:
        with self._lock:
            first, self._why = not self._why, self._why or why
        if first and not self._over.is_set():
            self._over.set()
            self._owner.lost(self._why)  # which usually ends the process
        self._received.put(None)

    def _ping(self) -> None:
        try:
            self._stream.keep_alive()
            while not self._over.wait(self._interval):
                self._unanswered += 1
                if self._unanswered > SILENT_PINGS:
                    self._end(f"it has not answered {SILENT_PINGS} pings")
                    return
                self._post(self._owner.ping())
        except PeerLost as error:
            self._cannot_send(error)

    def _cannot_send(self, error: PeerLost) -> None:
        """The other end does not take what is sent. It may have left in order, and its last message may wait here."""
        self._drained.wait(SILENT_PINGS * self._interval)
        self._end(str(error))
