"""Lets the members of a rank decide together. Member 0, the leader, receives the values of all others, and decides.

All members run the same program and reach the same points in the same order. At a point, a member waits for the
leader's answer. Nothing there has a time limit: the connection itself shows whether a member is lost. It breaks within
milliseconds when a process ends, and its pings show a process that was stopped and a node that is gone. A lost member
ends the rank. The others may wait for it in a collective of XLA, and only the end of their processes ends that.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from backstay_rpc.control_pb2 import Frame, Hello, MemberMessage, Peer
from backstay_rpc.credentials import Credentials
from backstay_rpc.refusals import RefusalCode

from ..._timeouts import Timeouts
from ...errors import BackstayError, PeerLost
from .._streams import ClientStream, Listener, Refusal, ServerStream, frames, kind_of
from ._forms import Form, error_in, travels, with_error

__all__ = ["SILENT_PINGS", "FollowingMember", "LeadingMember", "MemberLost", "Members"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

SILENT_PINGS: Final = 5
"""A member that has not answered so many pings in a row is lost. Pings are counted and not seconds, because the process
that counts may have been stopped too."""

_SETTLE: Final = 2.0
_END: Final = "end"
_BROKEN: Final = "broken"  # number: a point at which a member has an error, so that the others must not wait there
_NOTHING: Final[Form[None]] = Form(lambda value: b"", lambda data: None)
_Stream = ClientStream | ServerStream


class Members(Protocol):
    """The pods of a rank as one of them sees them.

    A value of `share` and `agree` is the same in all of them, and so is an error, if it is one of Backstay's. Any other
    exception is only raised here; its process is then to end.

    Attributes:
        member: the index of this pod; 0 is the leader.
        count: the number of pods.
    """

    @property
    def member(self) -> int: ...
    @property
    def count(self) -> int: ...

    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        """The result of `make` in the leader.

        Args:
            point: the name of the point, which must be the same in all members.
            form: how the value travels.
            make: called in the leader only.
        """
        ...

    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        """The value that the leader makes of the results of `make` in all members.

        Args:
            point, form: see `share`.
            make: called in each member. An error of one is raised in all, that of the lowest member first.
            merge: called in the leader with the results in the order of members.
            cancel: ends `make` from another thread, when another member has an error; None: `make` does not wait.
        """
        ...

    def has_raised(self, error: BaseException) -> bool:
        """Whether all members have this error, because `share` or `agree` has raised it."""
        ...

    def settle(self) -> None:
        """Waits some seconds for the loss of a member, which an error of a collective may follow from."""
        ...

    def close(self) -> None:
        """Leave. All members call it, and their connections may then end."""
        ...


class MemberLost(BackstayError):  # noqa: N818
    """Another member of the rank is lost, so this one must end."""


class _MemberLine:
    """One end of a connection between two members. One thread reads it, and another one sends pings."""

    def __init__(
        self, stream: _Stream, interval: float, lost: Callable[[str], None], broken: Callable[[int], None]
    ) -> None:
        """
        Args:
            interval: the seconds between two pings.
            lost: called once, when the other end is lost.
            broken: called with the number of a point at which another member has an error.
        """
        self._stream, self._interval, self._lost, self._broken = stream, interval, lost, broken
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[MemberMessage | None] = queue.SimpleQueue()
        self._unanswered = 0
        self._over = threading.Event()
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
                if frame.member.point == _END:
                    self._over.set()  # the connection may end now
                if frame.member.point == _BROKEN:
                    self._broken(frame.member.number)
                elif frame.member.number:
                    self._received.put(frame.member)
                elif not frame.member.answer:
                    self._post(MemberMessage(answer=True))
        except (PeerLost, Refusal) as error:
            why = str(error)
        self._end(why)

    def send(self, message: MemberMessage) -> None:
        """Raises `MemberLost`."""
        try:
            self._post(message)
        except PeerLost as error:
            self._end(str(error))
            raise MemberLost(self._why) from error

    def receive(self) -> MemberMessage:
        """The next message that is not a ping. Raises `MemberLost`."""
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
            self._lost(self._why)  # which usually ends the process
        self._received.put(None)

    def _ping(self) -> None:
        try:
            self._stream.keep_alive()
            while not self._over.wait(self._interval):
                self._unanswered += 1
                if self._unanswered > SILENT_PINGS:
                    self._end(f"it has not answered {SILENT_PINGS} pings")
                    return
                self._post(MemberMessage())
        except PeerLost as error:
            self._end(str(error))


class _Points:
    """Numbers the points of one member, and ends what it does at one that is broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = self._is_broken = 0
        self.raised: BaseException | None = None  # the last error of all members
        self._cancel: Callable[[], object] | None = None

    def next(self, point: str) -> MemberMessage:
        self._number += 1
        return MemberMessage(number=self._number, point=point)

    def made(self, make: Callable[[], _T], cancel: Callable[[], object] | None) -> _T:
        """The result of `make`, which ends early if another member has an error at this point. Raises as `make`."""
        if cancel is None:
            return make()
        with self._lock:
            if self._is_broken >= self._number:
                raise PeerLost("another member of the rank has an error")
            self._cancel = cancel
        try:
            return make()
        finally:
            with self._lock:
                self._cancel = None

    def broken(self, number: int) -> None:
        """Another member has an error at a point. From any thread."""
        with self._lock:
            self._is_broken = max(self._is_broken, number)
            cancel = self._cancel if number == self._number else None
        if cancel is not None:
            cancel()


def _check(own: MemberMessage, other: MemberMessage, who: str) -> None:
    """Raises `RuntimeError` unless both are of one point: a defect, after which members could only wait."""
    if (own.number, own.point) != (other.number, other.point):
        raise RuntimeError(
            f"{who} of this rank is at point {other.number}, {other.point!r}, and this member at point {own.number}, "
            f"{own.point!r}: members must reach the same points in the same order"
        )


class LeadingMember:
    """Member 0 of a rank of several pods; see `Members`. It listens for the others.

    Attributes:
        port: the port on which it listens.
    """

    member: Final = 0

    def __init__(
        self,
        peer: Peer,
        count: int,
        *,
        host: str,
        credentials: Credentials,
        lost: Callable[[int, str], None],
        interval: float | None = None,
    ) -> None:
        """
        Args:
            peer: this pod.
            count: the number of members.
            host: the address to bind.
            credentials: the credentials of this pod.
            lost: called from another thread with the index of a member that is lost, and why.
            interval: the seconds between two pings; None: the usual ones.
        """
        self.count = count
        self._peer, self._lost_member = peer, lost
        self._interval = Timeouts().heartbeat if interval is None else interval
        self._lines: dict[int, _MemberLine] = {}
        self._changed = threading.Condition()
        self._points = _Points()
        self._listener = Listener(host, 0, credentials, self._serve)
        self.port = self._listener.bound

    def linked(self, timeout: float) -> list[int]:
        """Waits until all members are connected, for `timeout` seconds at most. Returns the members that are not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) == self.count - 1, timeout)
            return [member for member in range(1, self.count) if member not in self._lines]

    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        """See `Members`."""
        own = self._points.next(point)
        return self._answer(own, form, make)

    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        """See `Members`."""
        own = self._points.next(point)
        error: BackstayError | None = None
        values = []
        try:
            values.append(self._points.made(make, cancel))
        except BackstayError as raised:
            if not travels(raised):
                raise
            error = raised
            if cancel is not None:
                self._break(own.number)
        for member in range(1, self.count):
            message = self._line(member).receive()
            try:
                _check(own, message, f"member {member}")
            except RuntimeError as defect:
                self._give_up(str(defect))
                raise
            other = error_in(message)
            error = error or other
            if other is None:
                values.append(form.decode(message.value))

        def merged() -> _T:
            if error is not None:
                raise error
            return merge(values)

        return self._answer(own, form, merged)

    def has_raised(self, error: BaseException) -> bool:
        """See `Members`."""
        return error is self._points.raised

    def settle(self) -> None:
        """See `Members`."""
        time.sleep(_SETTLE)

    def close(self) -> None:
        """See `Members`."""
        try:
            self.agree(_END, _NOTHING, lambda: None, lambda values: None)
        except MemberLost:
            _LOG.debug("a member ended before the others")
        finally:
            for line in self._lines.values():
                line.leave()
            self._listener.close()

    def _answer(self, own: MemberMessage, form: Form[_T], make: Callable[[], _T]) -> _T:
        try:
            value = make()
        except BackstayError as error:
            if travels(error):
                self._send(with_error(own, error))
                self._points.raised = error
            raise
        own.value = form.encode(value)
        self._send(own)
        return value

    def _send(self, message: MemberMessage) -> None:
        if message.point == _END:
            for line in self._lines.values():
                line.leave()
        for member in range(1, self.count):
            self._line(member).send(message)

    def _line(self, member: int) -> _MemberLine:
        found = self._lines.get(member)
        if found is None:
            raise RuntimeError(f"member {member} is not connected")
        return found

    def _break(self, number: int, by: int = 0) -> None:
        """Report to all members but one that a point is broken."""
        self._points.broken(number)
        for member, line in list(self._lines.items()):
            if member != by:
                with contextlib.suppress(MemberLost):  # which the line has reported
                    line.send(MemberMessage(number=number, point=_BROKEN))

    def _lose(self, member: int, why: str) -> None:
        self._lost_member(member, why)
        self._give_up(f"member {member} is lost: {why}")

    def _give_up(self, why: str) -> None:
        for line in list(self._lines.values()):
            line.give_up(why)

    def _serve(self, hello: Hello, stream: ServerStream) -> None:
        peer, member = hello.peer, hello.peer.member
        own = self._peer.role, self._peer.index, self._peer.incarnation
        line = _MemberLine(
            stream, self._interval, lambda why: self._lose(member, why), lambda number: self._break(number, member)
        )
        with self._changed:
            if (peer.role, peer.index, peer.incarnation) != own or not 0 < member < self.count:
                refusal = f"{peer.role} {peer.index}, member {member}, of incarnation {peer.incarnation} is not of this"
                why = f"{refusal} rank, which is {own[0]} {own[1]} of incarnation {own[2]} with {self.count} members"
            elif member in self._lines:
                why = f"member {member} of {own[0]} {own[1]} is connected already"
            else:
                why = ""
                self._lines[member] = line
                self._changed.notify_all()
        if why:
            stream.write(frames.refused(Refusal(RefusalCode.INVALID, why)))
            return
        line.serve()


class FollowingMember:
    """Any other member of a rank; see `Members`. It connects to member 0."""

    def __init__(
        self,
        address: str,
        peer: Peer,
        count: int,
        *,
        credentials: Credentials,
        lost: Callable[[int, str], None],
        interval: float | None = None,
    ) -> None:
        """
        Args:
            address: ``host:port`` of member 0.
            peer: this pod.
            count, credentials, lost, interval: see `LeadingMember`.

        Raises:
            errors.PeerLost: nothing listens there.
        """
        self.member, self.count = peer.member, count
        stream = ClientStream(address, Hello(peer=peer), credentials)
        self._points = _Points()
        self._line = _MemberLine(
            stream,
            Timeouts().heartbeat if interval is None else interval,
            lambda why: lost(0, why),
            self._points.broken,
        )
        threading.Thread(target=self._line.serve, name="backstay-member", daemon=True).start()

    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        """See `Members`."""
        del make
        return self._answer(self._points.next(point), form)

    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        """See `Members`."""
        del merge
        own = self._points.next(point)
        try:
            own.value = form.encode(self._points.made(make, cancel))
        except BackstayError as error:
            if not travels(error):
                raise
            if cancel is not None:
                self._line.send(MemberMessage(number=own.number, point=_BROKEN))
            with_error(own, error)
        self._line.send(own)
        return self._answer(own, form)

    def has_raised(self, error: BaseException) -> bool:
        """See `Members`."""
        return error is self._points.raised

    def settle(self) -> None:
        """See `Members`."""
        time.sleep(_SETTLE)

    def close(self) -> None:
        """See `Members`."""
        try:
            self.agree(_END, _NOTHING, lambda: None, lambda values: None)
        except MemberLost:
            _LOG.debug("member 0 ended before this one")
        finally:
            self._line.close()

    def _answer(self, own: MemberMessage, form: Form[_T]) -> _T:
        message = self._line.receive()
        _check(own, message, "member 0")
        if (error := error_in(message)) is not None:
            self._points.raised = error
            raise error
        return form.decode(message.value)
