"""A shard's side of its link to the coordinator. The link is opened again after each break, and no report is lost.

After a break, the shard reports again what it holds, and the coordinator sends again what the shard has missed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import grpc

from backstay_rpc.channels import Credentials, open_channel
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    CoordinateRequest,
    Frame,
    GradientId,
    Hello,
    Lost,
    Norm,
    NormRequest,
    Peer,
    Position,
    Reject,
    Rollback,
    ShardFailed,
    ShardMessage,
    Spans,
    Staged,
    Written,
)
from backstay_rpc.control_pb2_grpc import ControlStub

from .._coordination import MODES, Mode, Report, ShardSink
from .._timeouts import Timeouts
from .._wire import ClientStream, kind_of
from ..errors import PeerLost, Refused
from ._agreement import Agreement
from ._auth import final_error, refusal_of
from ._envelopes import message_in, wrap_report

__all__ = ["Link"]

_LOG = logging.getLogger(__name__)

_WRITTEN_KEPT = 8
_Key = tuple[int, int, int, int]


def _key(gradient: GradientId) -> _Key:
    return gradient.term, gradient.rank, gradient.incarnation, gradient.attempt


class Link:
    """A `Coordination` for one shard, over a data stream to shard 0's server."""

    def __init__(
        self,
        address: str,
        token: str,
        peer: Peer,
        agreement: Agreement,
        mode: Mode,
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            address: the address of shard 0's control service.
            token: the job's token.
            peer: this server.
            agreement: the settings that it must share with the coordinator.
            mode: the job's update mode.
            timeouts: None for the usual ones.
        """
        self._address, self._peer, self._mode = address, peer, MODES[mode]
        self._token, self._metadata = token, Credentials(token).metadata
        self._timeouts = timeouts or Timeouts()
        self._agreement = agreement
        self._lock = threading.Lock()
        self._stream: ClientStream | None = None  # once it carries what the coordinator must know first
        self._held: dict[_Key, Staged] = {}
        self._written: deque[Written] = deque(maxlen=_WRITTEN_KEPT)
        self._term = 0
        self._version = 0
        # With standbys: the state for the next coordinator, if there is one.
        self._last: Commit | None = None
        self._requests: dict[int, NormRequest] = {}  # by round, not answered yet
        self._prepared: tuple[Contribution, ...] = ()
        self._coordinator = 0
        self._opened = 0  # how often the link was opened
        self._number = 0  # of this link, from the coordinator
        self._begun = 0  # the newest term that it received
        self._cancel: Callable[[], object] = lambda: None  # ends the attempt to link, or the link
        self._closed = threading.Event()
        self.refused: Refused | None = None
        self.up = False
        """Whether the coordinator has accepted the link, and the link has not broken since."""

    def start(self, sink: ShardSink) -> None:
        """Connect, and connect again after each break. `sink` receives the messages, one call at a time. Call once."""
        threading.Thread(target=self._run, args=(sink,), name="backstay-link", daemon=True).start()

    def inherit(self, term: int, version: int, last: Commit | None, prepared: Sequence[Contribution]) -> None:
        """Set the position of this server, which was its shard's standby. Call before `start`."""
        self._term, self._version, self._last, self._prepared = term, version, last, tuple(prepared)

    def expect(self, coordinator: int) -> None:
        """Another incarnation of the coordinator's server is active: the link to the previous one ends."""
        with self._lock:
            if coordinator <= self._coordinator:
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
            match report:
                case Staged():
                    if report.id.term == self._term:
                        self._held[_key(report.id)] = report
                case Lost():
                    self._held.pop(_key(report.id), None)
                case Norm():
                    requested = self._requests.pop(report.round, None)
                    if requested is not None:
                        self._prepared = tuple(requested.contributions)
                case Written():
                    self._written.append(report)
                case Applied():
                    self._version = max(self._version, report.version)
                case ShardFailed():
                    pass
            self._put(wrap_report(report))

    def send_spans(self, take: Callable[[int], Spans | None]) -> None:
        """Send what `take` returns, if the link is up; its argument is another one for each link. See `Outbox`."""
        with self._lock:
            if self._stream is not None and self.up and (found := take(self._opened)) is not None:
                self._put(ShardMessage(spans=found))

    def started(self, term: int, version: int) -> None:
        """The shard is at the beginning of a term."""
        with self._lock:
            self._term, self._version = term, version
            self._put(wrap_report(Applied(version=version)))

    # ---- The stream ----

    def _put(self, message: ShardMessage) -> None:
        """Send a message if there is a link. The next link begins with what the coordinator did not get."""
        if self._stream is not None:
            try:
                self._stream.post(Frame(to_coordinator=message))
            except PeerLost as lost:
                _LOG.debug("a report to the coordinator was not sent: %s", lost)
                self._stream = None

    def _run(self, sink: ShardSink) -> None:
        attempt = 0
        while not self._closed.is_set():
            received = False
            stream: ClientStream | None = None
            try:
                stream = self._dial()
                self._open(stream)
                received = True
                while True:
                    frame, _ = stream.read()
                    self._receive(frame, sink)
            except PeerLost as lost:
                _LOG.debug("the link to the coordinator broke: %s", lost)
            except Refused as refusal:
                self.refused = refusal
                return
            finally:
                self.up = False
                with self._lock:
                    self._stream, self._cancel = None, lambda: None
                if stream is not None:
                    stream.close()
            pauses = self._timeouts.link_pauses
            attempt = 0 if received else min(attempt + 1, len(pauses) - 1)
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
            call = stub.Coordinate.future(request, self._timeouts.link_answer, self._metadata)
            self._cancels(call.cancel, request.coordinator)
            try:
                reply = call.result()
            except grpc.FutureCancelledError:
                raise PeerLost("the call was cancelled") from None
            except grpc.RpcError as error:
                raise refusal_of(error) or PeerLost(f"shard 0's server does not coordinate: {error}") from None
        hello = Hello(peer=self._peer, expected_incarnation=reply.incarnation)
        stream = ClientStream(reply.data_address, hello, self._token)
        self._cancels(lambda: stream.cancel("the link is not used any more"), request.coordinator)
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
        watchdog = threading.Timer(self._timeouts.link_answer, stream.cancel, ["the coordinator did not answer"])
        watchdog.daemon = True
        watchdog.start()
        try:
            with self._lock:
                self._opened += 1
                position = Position(
                    term=self._term,
                    version=self._version,
                    last=self._last,
                    prepared=self._prepared,
                    begun=self._begun,
                    link=self._number,
                )
                stream.write(Frame(to_coordinator=ShardMessage(position=position)))
                held: list[Report] = [*self._held.values(), Applied(version=self._version), *self._written]
                for report in held:
                    stream.write(Frame(to_coordinator=wrap_report(report)))
                self._stream = stream
            frame, _ = stream.read()
        finally:
            watchdog.cancel()
        if kind_of(frame) == "refused":
            code, why = frame.refused.code, frame.refused.message
            raise final_error(code, why) or PeerLost(f"the coordinator refuses the link: {why}")
        self.up = True

    def _receive(self, frame: Frame, sink: ShardSink) -> None:
        message = message_in(frame.to_shard)
        if message is None:
            return
        with self._lock:
            match message:
                case NormRequest():
                    if message.replicate:
                        self._requests[message.round] = message
                case Commit():
                    if self._last is None or message.version > self._last.version:
                        self._last = message
                    # A request from before it was answered or withdrawn.
                    for number, request in list(self._requests.items()):
                        if request.version <= message.version:
                            del self._requests[number]
                    for contribution in message.contributions:
                        self._held.pop(_key(contribution.id), None)
                    for key, staged in list(self._held.items()):
                        if self._mode.used_up(staged.id.version, message.version + 1):
                            del self._held[key]
                case Reject():
                    self._held.pop(_key(message.id), None)
                case Rollback():
                    self._begun = max(self._begun, message.term)
                    self._held.clear()
                    self._written.clear()
                    # No term is recorded until the shard has `started`: after a break meanwhile, it comes again.
                    self._term = self._version = 0
                    self._last, self._requests, self._prepared = None, {}, ()
        sink.deliver(message)
