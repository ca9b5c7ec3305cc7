"""Lets the members of a rank decide together. Member 0, the leader, receives the values of all others, and decides.

All members run the same program and reach the same points in the same order. At a point, a member waits for the
leader's answer. Nothing there has a time limit: the connection itself shows whether a member is lost. It breaks within
milliseconds when a process ends, and its pings show a process that was stopped and a node that is gone. A lost member
ends the rank. The others may wait for it in a collective of XLA, and only the end of their processes ends that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from backstay_rpc.control_pb2 import Hello, MemberMessage, Peer
from backstay_rpc.credentials import Credentials
from backstay_rpc.refusals import RefusalCode

from ... import _instrument
from ..._instrument import Doing
from ..._timeouts import Timeouts
from ...errors import BackstayError, PeerLost
from .._streams import ClientStream, Listener, Refusal, ServerStream, frames
from ._forms import FOLLOWS, Form, error_in, follows, travels, with_error
from ._line import BROKEN, END, LineEnd, MemberLine, MemberLost
from ._progress import LONG, SCRIPT, MemberActivity, MemberProgress

__all__ = ["FollowingMember", "LeadingMember", "Members", "OwnMember"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_SETTLE: Final = 2.0
_NOTHING: Final[Form[None]] = Form(lambda value: b"", lambda data: None)


class _Points:
    """Numbers the points of one member, and ends what it does at one that is broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = self._is_broken = 0
        self._cancel: Callable[[], object] | None = None

    def next(self, point: str) -> MemberMessage:
        self._number += 1
        return MemberMessage(number=self._number, point=point)

    def made(self, make: Callable[[], _T], cancel: Callable[[], object] | None) -> _T:
        """Returns the result of `make`, which ends early if another member has an error at this point. Raises as
        `make`."""
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

    def is_broken(self) -> bool:
        """Returns whether another member has reported an error at the current point."""
        with self._lock:
            return self._is_broken >= self._number

    def broken(self, number: int) -> None:
        """Another member has an error at a point. From any thread."""
        with self._lock:
            self._is_broken = max(self._is_broken, number)
            cancel = self._cancel if number == self._number else None
        if cancel is not None:
            cancel()


@dataclass(frozen=True)
class OwnMember:
    """This pod as a member of its rank.

    Attributes:
        peer: this pod.
        count: the number of members.
        credentials: the credentials of this pod.
        lost: called from another thread with the index of a member that is lost, and why.
        interval: the seconds between two pings.
        where: returns the stacks of the threads that run code of the script.
    """

    peer: Peer
    count: int
    credentials: Credentials
    lost: Callable[[int, str], None]
    interval: float = Timeouts().heartbeat
    where: Callable[[], str] = str


class Members(ABC):
    """The pods of a rank as one of them sees them.

    A value of `share` and `agree` is the same in all of them, and so is an error, if it is one of Backstay's. Any other
    exception is only raised here; its process is then to end.

    Attributes:
        member: the index of this pod; 0 is the leader.
        count: the number of pods.
    """

    def __init__(self, member: int, count: int) -> None:
        self.member, self.count = member, count

    @abstractmethod
    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        """Returns the result of `make` in the leader.

        Args:
            point: the name of the point, which must be the same in all members.
            form: how the value travels.
            make: called in the leader only.
        """

    @abstractmethod
    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        """Returns the value that the leader makes of the results of `make` in all members.

        Args:
            point, form: see `share`.
            make: called in each member. An error of one is raised in all; of several the one that decides, such as a
                refusal before a connection that was cut because of it.
            merge: called in the leader with the results in the order of members.
            cancel: ends `make` from another thread, when another member has an error; None: `make` does not wait.
        """

    @abstractmethod
    def has_raised(self, error: BaseException) -> bool:
        """Returns whether all members have this error, because `share` or `agree` has raised it."""

    def doing(self) -> Doing | None:
        """Returns the activity of this process; in the leader, that of the member that the others wait for.
        Thread-safe."""
        return _instrument.doing()

    def stacks(self) -> str:
        """In the leader, the stacks of the other members that have done the same thing for long. Thread-safe."""
        return ""

    @abstractmethod
    def settle(self, error: BaseException) -> None:
        """Wait some seconds for the loss of a member, which the error may follow from.

        A broken collective raises errors of several types, and a script may raise others from them. An error that all
        members have agreed on, and an interrupt, do not follow from a loss.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. All members call it, and their connections may then end."""


class _LinkedMember(Members):
    """A member of a rank of several pods."""

    def __init__(self, own: OwnMember) -> None:
        super().__init__(own.peer.member, own.count)
        self._own, self._points = own, _Points()
        self._waits: MemberActivity | None = None  # for other members
        self._idle: tuple[int, float] | None = None  # without an open span since then; the newest span that had ended
        self._raised: BaseException | None = None  # the last error of all members

    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        own = self._points.next(point)
        if self.member == 0:
            _fill(own, form, make)
        with self._waiting(point):
            answer = self._shared(own)
        return self._outcome(answer, form)

    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        own = self._points.next(point)
        _fill(own, form, lambda: self._points.made(make, cancel))
        if own.error and cancel is not None:
            if own.error == PeerLost.__name__ and self._points.is_broken():
                own.code = FOLLOWS
            self._break(own.number)

        def merged(every: Sequence[MemberMessage]) -> bytes:
            return form.encode(merge([form.decode(message.value) for message in every]))

        with self._waiting(point):
            answer = self._agreed(own, merged)
        return self._outcome(answer, form)

    @contextlib.contextmanager
    def _waiting(self, point: str) -> Iterator[None]:
        self._waits = MemberActivity(point, None, time.monotonic(), waits=True)
        try:
            yield
        finally:
            self._waits = None

    def _activity(self) -> MemberActivity:
        """Returns the activity of this member."""
        if (waits := self._waits) is not None:
            return waits
        doing, now = _instrument.doing(), time.monotonic()
        if doing is None:
            newest = next((span.number for span in _instrument.spans(most=1)), -1)
            if self._idle is None or self._idle[0] != newest:
                self._idle = newest, now
            doing = Doing(SCRIPT, None, self._idle[1])
        lasts = now - doing.began >= (LONG - 1) * self._own.interval
        return MemberActivity(doing.point, doing.step, doing.began, stacks=self._own.where() if lasts else "")

    def has_raised(self, error: BaseException) -> bool:
        return error is self._raised

    def settle(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not self.has_raised(error):
            name = type(error).__name__
            _LOG.info("%s may follow from the loss of another pod of this rank: waiting for the news of one", name)
            time.sleep(_SETTLE)

    def close(self) -> None:
        try:
            self.agree(END, _NOTHING, lambda: None, lambda values: None)
        except MemberLost:
            _LOG.debug("another member of the rank ended before this one")
        finally:
            self._leave()

    def _outcome(self, answer: MemberMessage, form: Form[_T]) -> _T:
        if (error := error_in(answer)) is not None:
            self._raised = error
            raise error
        return form.decode(answer.value)

    @abstractmethod
    def _shared(self, own: MemberMessage) -> MemberMessage:
        """Returns the leader's message of a point. `own`: the message of this member."""

    @abstractmethod
    def _agreed(self, own: MemberMessage, merged: Callable[[Sequence[MemberMessage]], bytes]) -> MemberMessage:
        """Returns the leader's answer to the messages of all members. `merged` makes one value of all of theirs."""

    @abstractmethod
    def _break(self, number: int) -> None:
        """Report that this member has an error at a point."""

    @abstractmethod
    def _leave(self) -> None:
        """End the connections."""


def _fill(own: MemberMessage, form: Form[_T], make: Callable[[], _T]) -> None:
    """Put the result of `make` into a message, or its error, if the error counts for all members."""
    try:
        own.value = form.encode(make())
    except BackstayError as error:
        if not travels(error):
            raise
        with_error(own, error)


def _check(own: MemberMessage, other: MemberMessage, who: str) -> None:
    """Raises `RuntimeError` unless both are of one point: a defect, after which members could only wait."""
    if (own.number, own.point) != (other.number, other.point):
        raise RuntimeError(
            f"{who} of this rank is at point {other.number}, {other.point!r}, and this member at point {own.number}, "
            f"{own.point!r}: members must reach the same points in the same order"
        )


class LeadingMember(_LinkedMember):
    """Member 0 of a rank of several pods. It listens for the others.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(self, own: OwnMember, host: str) -> None:
        """
        Args:
            host: the address to bind.
        """
        super().__init__(own)
        self._progress = MemberProgress(own.count, own.interval, _longest)
        self._lines: dict[int, MemberLine] = {}
        self._changed = threading.Condition()
        self._listener = Listener(host, 0, own.credentials, self._serve)
        self.port = self._listener.bound

    def linked(self, timeout: float) -> list[int]:
        """Waits until all members are connected, for `timeout` seconds at most. Returns the members that are not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) == self.count - 1, timeout)
            return [member for member in range(1, self.count) if member not in self._lines]

    def doing(self) -> Doing | None:
        own = self._activity()
        self._progress.reports(0, own, time.monotonic())
        found = self._progress.held_up_by(own.began)
        return _instrument.doing() if found is None or found.point == SCRIPT else found

    def stacks(self) -> str:
        return self._progress.stacks(but=0)

    def _shared(self, own: MemberMessage) -> MemberMessage:
        if own.point == END:
            self._let_end()
        for line in self._lines.values():
            line.send(own)
        return own

    def _let_end(self) -> None:
        for line in self._lines.values():
            line.leave()

    def _agreed(self, own: MemberMessage, merged: Callable[[Sequence[MemberMessage]], bytes]) -> MemberMessage:
        every = [own]
        for member, line in sorted(self._lines.items()):
            every.append(line.receive())
            try:
                _check(own, every[-1], f"member {member}")
            except RuntimeError as defect:
                self._give_up(str(defect))
                raise
        failed = min((message for message in every if message.error), key=follows, default=None)
        if failed is None:
            own.value = merged(every)
        return self._shared(own if failed is None else failed)

    def _leave(self) -> None:
        self._let_end()
        self._listener.close()

    def _break(self, number: int, by: int = 0) -> None:
        """Report to all members but one, which has reported it, that there is an error at a point."""
        self._points.broken(number)
        for member, line in list(self._lines.items()):
            if member != by:
                with contextlib.suppress(MemberLost):  # which the line has reported
                    line.send(MemberMessage(number=number, point=BROKEN))

    def _lose(self, member: int, why: str) -> None:
        self._own.lost(member, why)
        self._give_up(f"member {member} is lost: {why}")

    def _pinged(self, member: int, ping: MemberMessage) -> None:
        now = time.monotonic()
        self._progress.reports(member, _received(ping, now), now)
        self._progress.reports(0, self._activity(), now)
        if complaint := self._progress.complaint(now):
            _LOG.warning("%s", complaint)
        if deadlock := self._progress.deadlock(now):
            self._lose(member, deadlock)

    def _give_up(self, why: str) -> None:
        for line in list(self._lines.values()):
            line.give_up(why)

    def _serve(self, hello: Hello, stream: ServerStream) -> None:
        peer, member = hello.peer, hello.peer.member
        own = self._own.peer.role, self._own.peer.index, self._own.peer.incarnation
        end = LineEnd(
            lambda why: self._lose(member, why),
            lambda number: self._break(number, member),
            pinged=lambda ping: self._pinged(member, ping),
        )
        line = MemberLine(stream, self._own.interval, end)
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


class FollowingMember(_LinkedMember):
    """Any other member of a rank. It connects to member 0."""

    def __init__(self, own: OwnMember, address: str) -> None:
        """
        Args:
            address: ``host:port`` of member 0.

        Raises:
            errors.PeerLost: nothing listens there.
        """
        super().__init__(own)
        stream = ClientStream(address, Hello(peer=own.peer), own.credentials)
        end = LineEnd(lambda why: own.lost(0, why), self._points.broken, ping=self._ping)
        self._line = MemberLine(stream, own.interval, end)
        threading.Thread(target=self._line.serve, name="backstay-member", daemon=True).start()

    def _shared(self, own: MemberMessage) -> MemberMessage:
        answer = self._line.receive()
        _check(own, answer, "member 0")
        return answer

    def _agreed(self, own: MemberMessage, merged: Callable[[Sequence[MemberMessage]], bytes]) -> MemberMessage:
        del merged
        self._line.send(own)
        return self._shared(own)

    def _ping(self) -> MemberMessage:
        own = self._activity()
        ping = MemberMessage(waits=own.waits, stacks=own.stacks)
        Doing(own.point, own.step, own.began).write(ping.doing, time.monotonic())
        return ping

    def _break(self, number: int) -> None:
        self._line.send(MemberMessage(number=number, point=BROKEN))

    def _leave(self) -> None:
        self._line.close()


def _received(ping: MemberMessage, now: float) -> MemberActivity:
    """Returns the content of a ping that has arrived now."""
    doing = Doing.read(ping.doing, now)
    return MemberActivity(doing.point, doing.step, doing.began, ping.waits, ping.stacks)


def _longest(point: str) -> float:
    """Returns the seconds of the longest span at `point` that this process still has."""
    return max((span.ended - span.began for span in _instrument.spans() if span.point == point), default=0.0)
