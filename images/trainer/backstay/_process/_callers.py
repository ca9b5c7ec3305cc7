"""Receives the first bytes of all connections to a port in one thread, with bounds (O7, T8).

Every process that reaches the port can connect. An opening is a head of HTTP, or the job's token with a hello. A caller
without a whole opening costs a socket and a few bytes, and no thread. The work for all callers together has a bounded
share of a processor. So thousands of them do not delay the other threads of this process (docs/decisions/0068).
"""

from __future__ import annotations

import collections
import contextlib
import enum
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ._guard import Warnings
from ._sockets import NO_LINGER, Address, socket_address

__all__ = ["Bounds", "Caller", "Callers", "Unwelcome"]

_LOG = logging.getLogger(__name__)

TICK: Final = 0.1
"""Seconds between two checks of the deadlines, while there are callers."""

MAX_REST: Final = 0.25
"""The longest pause of the thread in seconds."""

SLOWEST_BYTES: Final = 256 << 10
"""The bytes a second that a caller must receive of a long answer."""

_ACCEPTED_TOGETHER: Final = 64
_LINGER_BYTES: Final = 256 << 10
_NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError)
_FULL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Unwelcome(Exception):  # noqa: N818  # it is what happened
    """A caller is refused.

    Attributes:
        answer: is sent before the connection is closed.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


@dataclass(frozen=True)
class Bounds:
    """The most that callers may cost.

    Attributes:
        in_all: the number of callers. Beyond it, the one that has sent a part of its opening for longest is closed.
        of_host: the same, of one address.
        seconds: the time for a whole opening, and for an answer. A long answer has more (`SLOWEST_BYTES`).
        linger: how long a caller that has its answer may stay, so that it can read the answer.
        share: the share of a processor for their openings and answers.
    """

    in_all: int = 1024
    of_host: int = 256
    seconds: float = 10.0
    linger: float = 1.0
    share: float = 0.2


class _CallerState(enum.Enum):
    OPENING = 1
    WAITING = 2  # for its answer
    ANSWERED = 3  # the answer is being sent
    LEAVING = 4  # it has the answer


@dataclass(eq=False)
class Caller:
    """A connection whose opening is received, or that gets an answer.

    Attributes:
        socket: its socket, which does not block until it is passed on.
        address: the peer's address.
        opening: the bytes that it has sent.
    """

    socket: socket.socket
    address: Address
    opening: bytearray = field(default_factory=bytearray)
    state: _CallerState = _CallerState.OPENING
    deadline: float = 0.0
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    dropped: int = 0
    events: int = 0


class Callers:
    """Accepts connections, and receives the opening of each. Its own thread does all the work. Thread-safe."""

    def __init__(
        self,
        listening: socket.socket,
        what: str,
        missing: Callable[[Caller], int],
        welcome: Callable[[Caller], None],
        bounds: Bounds,
        *,
        passes_on: bool,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            listening: the socket, which `close` closes.
            what: the name of the port in warnings and of the thread, such as ``the data port``.
            missing: returns how many more bytes of a caller's opening to receive now; 0: the opening is whole. It
                raises `Unwelcome` to refuse the caller.
            welcome: called with each caller whose opening is whole; must not wait.
            bounds: what callers may cost.
            passes_on: whether the socket belongs to `welcome` from then on, and blocks. Otherwise `answer` is called
                for the caller.
            tls: callers begin with a handshake of TLS, which is a part of their opening; None: they do not.
        """
        self._listening, self._what, self._bounds = listening, what, bounds
        self._missing, self._welcome, self._passes_on, self._tls = missing, welcome, passes_on, tls
        self.warnings = Warnings(what)
        self._callers: dict[Caller, None] = {}  # in the order in which they came
        self._hosts: dict[str, dict[Caller, None]] = {}
        self._answers: collections.deque[tuple[Caller, bytes]] = collections.deque()
        self._closing = threading.Event()
        self._checked = 0.0
        self._spent = 0.0  # processor time of this turn that was not for strangers
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake, listening):
            end.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"backstay-{what.split()[-2]}-accept", daemon=True)

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def __len__(self) -> int:
        """Returns how many callers there are."""
        return len(self._callers)

    def holds(self, caller: Caller) -> bool:
        """Returns whether the connection of this caller is open, and is not passed on."""
        return caller in self._callers

    def answer(self, caller: Caller, data: bytes) -> None:
        """Send `data` to a caller that waits, and then close its connection. The caller may be gone."""
        self._answers.append((caller, data))
        self._notify()

    def close(self, timeout: float = 10.0) -> None:
        """Stop listening and close all callers."""
        self._closing.set()
        self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is notified already; closed: it has ended
            self._wake.send(b"x")

    # ---- In the thread ----

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                ready = self._selector.select(TICK if self._callers else None)
                began, self._spent = time.thread_time(), 0.0
                for key, events in ready:
                    if key.fileobj is self._listening:
                        self._accept()
                    elif key.fileobj is self._woken:
                        with contextlib.suppress(OSError):
                            self._woken.recv(4096)
                    elif isinstance(key.data, Caller) and key.data in self._callers:
                        self._serve(key.data, events)
                while self._answers:
                    self._begin_answer(*self._answers.popleft())
                self._expire()
                used = max(0.0, time.thread_time() - began - self._spent)
                self._closing.wait(min(MAX_REST, used * (1 / self._bounds.share - 1)))
        finally:
            for caller in list(self._callers):
                self._end(caller)
            self._selector.close()
            for end in (self._listening, self._woken, self._wake):
                end.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_TOGETHER):
            try:
                sock, name = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    _LOG.debug("%s cannot accept a connection: %s", self._what, error)
                    self._drop(self._callers, "this process can open no further connection")
                    self._closing.wait(0.05)
                    return
                continue
            sock.setblocking(False)
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:  # the caller is gone
                    sock.close()
                    continue
            caller = Caller(sock, socket_address(name), deadline=time.monotonic() + self._bounds.seconds)
            self._callers[caller] = None
            of_host = self._hosts.setdefault(caller.address[0], {})
            of_host[caller] = None
            self._watch(caller, selectors.EVENT_READ)
            crowd = of_host if len(of_host) > self._bounds.of_host else self._callers
            if crowd is of_host or len(crowd) > self._bounds.in_all:
                self._drop(crowd, "there are too many callers")
            if caller in self._callers:
                self._receive(caller)  # most send their opening together with the connection

    def _drop(self, crowd: dict[Caller, None], why: str) -> None:
        """Close the caller that has been sending its opening for longest; if none is, the one that came first."""
        if crowd:
            oldest = next((one for one in crowd if one.state is _CallerState.OPENING), next(iter(crowd)))
            self._refuse_silently(oldest, why)

    def _serve(self, caller: Caller, events: int) -> None:
        if caller.state is _CallerState.OPENING:
            self._receive(caller)
        elif events & selectors.EVENT_WRITE:
            self._send(caller)
        else:
            self._discard(caller)

    def _receive(self, caller: Caller) -> None:
        try:
            while missing := self._missing(caller):
                data = caller.socket.recv(missing)
                if not data:
                    self._end(caller)
                    return
                caller.opening += data
        except _NOT_YET:
            self._watch(caller, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:  # its handshake
            self._watch(caller, selectors.EVENT_WRITE)
            return
        except ssl.SSLError as error:
            self.warnings.add(caller.address[0], f"a connection was closed: it did not begin with TLS ({error.reason})")
            self._end(caller)
            return
        except OSError:
            self._end(caller)
            return
        except Unwelcome as unwelcome:
            self.warnings.add(caller.address[0], str(unwelcome))
            self._begin_answer(caller, unwelcome.answer)
            return
        caller.state = _CallerState.WAITING
        caller.deadline = float("inf")
        began = time.thread_time()
        if self._passes_on:
            self._watch(caller, 0)
            self._forget(caller)
            caller.socket.setblocking(True)
        self._welcome(caller)
        self._spent += time.thread_time() - began

    def _begin_answer(self, caller: Caller, data: bytes) -> None:
        if caller in self._callers:
            caller.state, caller.out = _CallerState.ANSWERED, memoryview(data)
            caller.deadline = time.monotonic() + self._bounds.seconds + len(data) / SLOWEST_BYTES
            self._send(caller)

    def _send(self, caller: Caller) -> None:
        try:
            while caller.out:
                caller.out = caller.out[caller.socket.send(caller.out[: 256 << 10]) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            self._watch(caller, selectors.EVENT_WRITE)
            return
        except OSError:
            self._end(caller)
            return
        # Closing immediately could drop the answer, if the caller still sends.
        caller.state = _CallerState.LEAVING
        caller.deadline = time.monotonic() + self._bounds.linger
        with contextlib.suppress(OSError):
            caller.socket.shutdown(socket.SHUT_WR)
        self._watch(caller, selectors.EVENT_READ)
        self._discard(caller)

    def _discard(self, caller: Caller) -> None:
        """Receive what a caller sends after its opening, to a limit."""
        try:
            while caller.dropped < _LINGER_BYTES:
                data = caller.socket.recv(64 << 10)
                if not data and caller.state is _CallerState.WAITING:
                    # It sends nothing more, and waits for its answer.
                    self._watch(caller, 0)
                    return
                if not data:
                    break
                caller.dropped += len(data)
        except _NOT_YET:
            return
        except OSError:
            pass
        self._end(caller)

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._checked + TICK:
            return
        self._checked = now
        for caller in [one for one in self._callers if one.deadline < now]:
            if caller.state is _CallerState.LEAVING:
                self._end(caller)
            else:
                self._refuse_silently(caller, self._late(caller))

    def _late(self, caller: Caller) -> str:
        what = (
            "its first bytes were not complete"
            if caller.state is _CallerState.OPENING
            else "it did not read its answer"
        )
        return f"{what} within {self._bounds.seconds:g} s"

    def _watch(self, caller: Caller, events: int) -> None:
        """Wait for these events of a caller's socket from now on, or for none if `events` is 0."""
        if caller.events == events:
            return
        if caller.events and events:
            self._selector.modify(caller.socket, events, caller)
        elif events:
            self._selector.register(caller.socket, events, caller)
        elif caller.events:
            self._selector.unregister(caller.socket)
        caller.events = events

    def _refuse_silently(self, caller: Caller, why: str) -> None:
        self.warnings.add(caller.address[0], f"a connection was closed: {why}")
        with contextlib.suppress(OSError):
            caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        self._watch(caller, 0)
        caller.socket.close()
        self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        del self._callers[caller]
        of_host = self._hosts[caller.address[0]]
        del of_host[caller]
        if not of_host:
            del self._hosts[caller.address[0]]
