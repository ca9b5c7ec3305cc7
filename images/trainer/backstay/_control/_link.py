"""A shard's side of its link to the coordinator. The link is opened again after each break, and no report is lost.

After a break, the shard reports again what it holds, and the coordinator sends again what the shard has missed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import grpc

from backstay_rpc.channels import Credentials, open_channel
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    CoordinatorMessage,
    GradientId,
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

from .._coordination import MODES, Mode
from .._coordination.seam import Report, ShardSink
from .._timeouts import Timeouts
from ..errors import Refused
from ._agreement import Agreement
from ._auth import refusal_of
from ._envelopes import message_in, wrap_report

__all__ = ["Link"]

_LOG = logging.getLogger(__name__)

_WRITTEN_KEPT = 8
_Key = tuple[int, int, int, int]


def _key(gradient: GradientId) -> _Key:
    return gradient.term, gradient.rank, gradient.incarnation, gradient.attempt


class Link:
    """A `Coordination` for one shard, over a `Coordinate` stream."""

    def __init__(
        self,
        address: str,
        token: str,
        peer: Peer,
        agreement: Agreement,
        sink: ShardSink,
        mode: Mode,
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            address: of shard 0's control service.
            token: the job's.
            peer: this server.
            agreement: the settings that it must share with the coordinator.
            sink: receives the coordinator's messages, one call at a time.
            mode: the job's.
            timeouts: None for the usual ones.
        """
        self._address, self._peer, self._sink, self._mode = address, peer, sink, MODES[mode]
        self._metadata = Credentials(token).metadata
        self._timeouts = timeouts or Timeouts()
        self._agreement = agreement
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[ShardMessage | None] | None = None
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
        self._begun = 0  # the newest term that it received
        self._call: grpc.Call | None = None
        self._closed = threading.Event()
        self.refused: Refused | None = None
        self.up = False
        """Whether the coordinator has accepted the link, and the link has not broken since."""

        self._thread = threading.Thread(target=self._run, name="backstay-link", daemon=True)

    def start(self) -> None:
        """Connect, and connect again after each break."""
        self._thread.start()

    def inherit(self, term: int, version: int, last: Commit | None, prepared: Sequence[Contribution]) -> None:
        """Before `start`: set the position of this server, which was its shard's standby."""
        self._term, self._version, self._last, self._prepared = term, version, last, tuple(prepared)

    def expect(self, coordinator: int) -> None:
        """Another incarnation of the coordinator's server is active: the link to the previous one ends."""
        with self._lock:
            if coordinator <= self._coordinator:
                return
            self._coordinator = coordinator
            call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """End the link."""
        self._closed.set()
        with self._lock:
            if self._outgoing is not None:
                self._outgoing.put(None)
            call = self._call
        if call is not None:
            call.cancel()

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
            if self._outgoing is not None and self.up and (found := take(self._opened)) is not None:
                self._put(ShardMessage(spans=found))

    def started(self, term: int, version: int) -> None:
        """The shard is at the beginning of a term."""
        with self._lock:
            self._term, self._version = term, version
            self._put(wrap_report(Applied(version=version)))

    # ---- The stream ----

    def _put(self, message: ShardMessage) -> None:
        if self._outgoing is not None:
            self._outgoing.put(message)

    def _run(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            received = False
            channel = open_channel(self._address)
            try:
                for envelope in self._open(channel):
                    received = True
                    self._receive(envelope)
            except grpc.RpcError as error:
                refusal = refusal_of(error)
                if refusal is not None:
                    self.refused = refusal
                    return
                _LOG.debug("the link to the coordinator broke: %s", error)
            finally:
                with self._lock:
                    if self._outgoing is not None:
                        self._outgoing.put(None)
                    self._outgoing = None
                    self._call = None
                self.up = False
                channel.close()
            pauses = self._timeouts.link_pauses
            attempt = 0 if received else min(attempt + 1, len(pauses) - 1)
            self._closed.wait(pauses[attempt])

    def _open(self, channel: grpc.Channel) -> Iterator[CoordinatorMessage]:
        outgoing: queue.SimpleQueue[ShardMessage | None] = queue.SimpleQueue()
        with self._lock:
            self._opened += 1
            outgoing.put(ShardMessage(hello=self._peer))
            position = Position(
                term=self._term,
                version=self._version,
                last=self._last,
                prepared=self._prepared,
                coordinator=self._coordinator,
                begun=self._begun,
                leaves=self._agreement.leaves,
                settings=self._agreement.settings,
            )
            outgoing.put(ShardMessage(position=position))
            for staged in self._held.values():
                outgoing.put(wrap_report(staged))
            outgoing.put(wrap_report(Applied(version=self._version)))
            for written in self._written:
                outgoing.put(wrap_report(written))
            self._outgoing = outgoing
            stub = ControlStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Coordinate(iter(outgoing.get, None), metadata=self._metadata)
            self._call = call
        if self._closed.is_set():
            call.cancel()
        watchdog = threading.Timer(self._timeouts.link_answer, call.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            call.initial_metadata()
        finally:
            watchdog.cancel()
        self.up = call.is_active()
        return iter(call)

    def _receive(self, envelope: CoordinatorMessage) -> None:
        message = message_in(envelope)
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
        self._sink.deliver(message)
