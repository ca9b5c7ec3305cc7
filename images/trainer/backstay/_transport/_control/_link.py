"""A shard's side of its link to the coordinator. The link is opened again after each break, and no report is lost.

After a break, the shard reports again what it holds, and the coordinator sends again what the shard has missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from backstay_rpc.channels import open_channel
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    CoordinateRequest,
    Done,
    Ended,
    Frame,
    Hello,
    Peer,
    Position,
    ShardMessage,
    Spans,
)
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_rpc.credentials import Credentials

from ..._coordination import Mode, Report, ShardSink
from ..._timeouts import Timeouts
from ..._watchdog import at_most
from ...errors import PeerLost
from .._streams import ClientStream, kind_of
from ._agreement import Agreement
from ._auth import final_error, refusal_of
from ._envelopes import message_in, wrap_report
from ._position import ShardPosition

__all__ = ["Link"]

_LOG = logging.getLogger(__name__)


class Link:
    """A `Coordination` for one shard, over a data stream to shard 0's server."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        peer: Peer,
        agreement: Agreement,
        mode: Mode,
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            address: the address of shard 0's control service.
            credentials: the credentials of this pod.
            peer: this server.
            agreement: the settings that it must share with the coordinator.
            mode: the job's update mode.
            timeouts: None for the usual ones.
        """
        self._address, self._peer = address, peer
        self._credentials = credentials
        self._timeouts = timeouts or Timeouts()
        self._agreement = agreement
        self._lock = threading.Lock()
        self._stream: ClientStream | None = None  # once it carries what the coordinator must know first
        self._unsent: list[ShardMessage] | None = None  # what it must know first, and the reports made meanwhile
        self._position = ShardPosition(mode)
        self._coordinator = 0  # the newest incarnation that is active, or accepted a link
        self._successor, self._patience = 0, 0.0  # an incarnation that replaces it when `tick` has counted so long
        self._opened = 0  # how often the link was opened
        self._number = 0  # of this link, from the coordinator
        self._cancel: Callable[[], object] = lambda: None  # ends the attempt to link, or the link
        self._closed = threading.Event()
        self._unanswered, self._ping_at = 0, 0.0
        self._pings, self._answers = 0, 0  # of this link
        self.error: Exception | None = None
        """Why no further link is opened: a refusal that each would get, or a defect; or None if links are opened."""
        self.up = False
        """Whether the coordinator has accepted the link, and the link has not broken since."""

    def start(self, sink: ShardSink) -> None:
        """Connect, and connect again after each break. `sink` receives the messages, one call at a time. Call once."""
        threading.Thread(target=self._run, args=(sink,), name="backstay-link", daemon=True).start()

    def inherit(self, term: int, version: int, last: Commit | None, prepared: Sequence[Contribution]) -> None:
        """Set the position of this server, which was its shard's standby. Call before `start`."""
        self._position.inherit(term, version, last, prepared)

    def expect(self, coordinator: int, after: float = 0.0) -> None:
        """Another incarnation of the coordinator's server is active: the link to the previous one ends.

        Args:
            after: only so many seconds later, as `tick` counts them. The previous one may store a checkpoint.
        """
        with self._lock:
            if coordinator <= self._coordinator:
                return
            if after > 0:
                self._successor, self._patience = coordinator, after
                return
            self._coordinator = coordinator
            cancel = self._cancel
        cancel()

    def close(self) -> None:
        """End the link."""
        self._closed.set()
        with self._lock:
            cancel = self._cancel
        cancel()

    def report(self, report: Report) -> None:
        """See `Coordination`. Reports that the coordinator may need again are kept."""
        with self._lock:
            self._position.reported(report)
            self._put(wrap_report(report))

    def tick(self, now: float) -> None:
        """Call it about once a second: ends a link whose coordinator does not run any more, or was replaced (T8).

        The thread of the link answers each ping there. Pings are counted instead of seconds, because this process may
        have been paused.

        Args:
            now: in seconds of any monotonic clock.
        """
        interval = self._timeouts.heartbeat
        lost, cancel, successor = False, self._cancel, 0
        with self._lock:
            if now < self._ping_at:
                return
            self._ping_at = now + interval
            if self._successor > self._coordinator:
                self._patience -= interval
                successor = self._successor if self._patience <= 0 else 0
            if self._stream is not None and self.up:
                self._unanswered += 1
                cancel, lost = self._cancel, self._unanswered * interval > self._timeouts.silent
                if not lost:
                    self._ping()
        self.expect(successor)
        if lost:
            _LOG.warning("the coordinator does not answer: its link is opened again")
            cancel()

    @property
    def position(self) -> Position:
        """The message that the next link would begin with."""
        with self._lock:
            return self._position.message(self._number)

    @property
    def storing(self) -> bool:
        """Whether the shard has not reported the newest version that it was requested to store."""
        with self._lock:
            return self._position.storing

    def flush(self) -> Callable[[], bool]:
        """Request an answer to all reports until now; the returned function is whether the coordinator has sent it.

        A link that is opened later begins with the reports that the coordinator has not processed: then call it again.
        """
        with self._lock:
            if self._stream is None or not self.up:
                return lambda: False
            self._ping()
            link, number = self._opened, self._pings
        return lambda: self._opened == link and self._answers >= number

    def send_spans(self, take: Callable[[int], Spans | None]) -> None:
        """Send what `take` returns, if the link is up; its argument is another one for each link. See `Outbox`."""
        with self._lock:
            if self._stream is not None and self.up and (found := take(self._opened)) is not None:
                self._put(ShardMessage(spans=found))

    def started(self, term: int, version: int) -> None:
        """The shard is at the beginning of a term."""
        with self._lock:
            self._position.started(term, version)
            self._put(wrap_report(Applied(version=version)))

    # ---- The stream ----

    def _ping(self) -> None:
        """Send a message without content; the coordinator answers it after all messages before it."""
        self._pings += 1
        self._put(ShardMessage())

    def _put(self, message: ShardMessage) -> None:
        """Send a message if there is a link. The next link begins with what the coordinator did not get."""
        if self._unsent is not None:
            self._unsent.append(message)
        elif self._stream is not None:
            try:
                self._stream.post(Frame(to_coordinator=message))
            except PeerLost as lost:
                _LOG.debug("a report to the coordinator was not sent: %s", lost)
                self._stream = None

    def _run(self, sink: ShardSink) -> None:
        attempt, ended = 0, time.monotonic()
        warned = ended
        while not self._closed.is_set():
            accepted = False
            began = time.monotonic()
            stream: ClientStream | None = None
            try:
                stream = self._dial()
                self._open(stream)
                accepted = True
                while True:
                    self._receive(self._read(stream), sink)
            except PeerLost as lost:
                _LOG.debug("the link to the coordinator broke: %s", lost)
                now = time.monotonic()
                ended = now if accepted else ended
                if now - max(ended, warned) >= self._timeouts.silent:
                    warned, shard = now, self._peer.index
                    _LOG.warning("shard %d has no link to the coordinator for %.0f s: %s", shard, now - ended, lost)
            except Exception as error:  # noqa: BLE001  # `check` raises it: no other thread opens a link (T8)
                self.error = error
                return
            finally:
                self.up = False
                with self._lock:
                    self._stream, self._unsent, self._cancel = None, None, lambda: None
                if stream is not None:
                    stream.close()
            pauses = self._timeouts.link_pauses
            # A link that lasted for a moment, such as with a defect of the coordinator, ends the next time too.
            lasted = accepted and time.monotonic() - began > pauses[-1]
            attempt = 0 if lasted else min(attempt + 1, len(pauses) - 1)
            self._closed.wait(pauses[attempt])

    def _dial(self) -> ClientStream:
        """Ask shard 0's server where the link begins, and connect.

        Raises:
            Refused: further attempts would get the same answer.
            PeerLost: no such server exists now, or it does not coordinate yet.
        """
        with self._lock:
            request = CoordinateRequest(
                peer=self._peer,
                coordinator=self._coordinator,
                leaves=self._agreement.leaves,
                settings=self._agreement.settings,
            )
        with open_channel(self._address) as channel:
            stub = ControlStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Coordinate.future(request, self._timeouts.link_answer, self._credentials.metadata)
            self._cancels(call.cancel, request.coordinator)
            try:
                reply = call.result()
            except grpc.FutureCancelledError:
                raise PeerLost("the call was cancelled") from None
            except grpc.RpcError as error:
                why = getattr(error, "details", lambda: "")()
                raise refusal_of(error) or PeerLost(f"shard 0's server does not coordinate: {why}") from None
        with self._lock:
            self._coordinator = max(self._coordinator, reply.incarnation)
        hello = Hello(peer=self._peer, expected_incarnation=reply.incarnation)
        stream = ClientStream(reply.data_address, hello, self._credentials)
        self._cancels(lambda: stream.cancel("the link is not used any more"), reply.incarnation)
        self._number = reply.link
        return stream

    def _cancels(self, cancel: Callable[[], object], coordinator: int) -> None:
        """How to end the attempt to link to `coordinator`, which ends now if another one was expected meanwhile."""
        with self._lock:
            self._cancel = cancel
            void = coordinator != self._coordinator
        if void or self._closed.is_set():
            cancel()

    def _open(self, stream: ClientStream) -> None:
        """Send what the coordinator must know first, and wait until it accepts the link. Raises as `_dial`."""
        stream.keep_alive()
        with at_most(self._timeouts.link_answer, lambda: stream.cancel("the coordinator did not answer")):
            with self._lock:
                self._opened += 1
                self._pings = self._answers = 0
                self._unanswered = 0
                first = ShardMessage(position=self._position.message(self._number))
                self._unsent = [first, *map(wrap_report, self._position.reports())]
            self._send_unsent(stream)
            self._read(stream)
        self.up = True

    def _send_unsent(self, stream: ClientStream) -> None:
        """Send what must arrive first, and then each report directly. Writing may wait, so it holds no lock."""
        while True:
            with self._lock:
                messages, self._unsent = self._unsent or [], []
                if not messages:
                    self._stream, self._unsent = stream, None
                    return
            for message in messages:
                stream.write(Frame(to_coordinator=message))

    def _read(self, stream: ClientStream) -> Frame:
        """Returns the next frame. Raises as `_dial`."""
        frame, _ = stream.read()
        if kind_of(frame) == "refused":
            code, why = frame.refused.code, frame.refused.message
            raise final_error(code, why) or PeerLost(f"the coordinator refuses the link: {why}")
        self._unanswered = 0
        return frame

    def _receive(self, frame: Frame, sink: ShardSink) -> None:
        message = message_in(frame.to_shard)
        if message is None:
            self._answers += 1
            return
        with self._lock:
            self._position.received(message)
            if isinstance(message, Done):
                self._put(ShardMessage(ended=Ended()))
        sink.deliver(message)
