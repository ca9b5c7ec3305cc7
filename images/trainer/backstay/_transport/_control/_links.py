"""The coordinator's ends of the links to the servers of the other shards.

A link is a data stream, because its messages are a part of every update. One thread receives a message and acts on it.
A message is sent by the thread that has it (docs/decisions/0068).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from typing import Final, Protocol

from backstay_rpc.control_pb2 import CoordinatorMessage, Frame, Hello, Peer
from backstay_rpc.refusals import RefusalCode

from ..._coordination import Message, ServerPosition
from ..._threaded import ThreadedCoordinator
from ..._timeouts import Timeouts
from ..._watchdog import at_most
from ...errors import PeerLost
from .._streams import Refusal, ServerStream, frames, kind_of
from ._envelopes import report_in, wrap_message
from ._peers import Peers, cannot_link

__all__ = ["LinkHost", "Links"]

_LOG = logging.getLogger(__name__)

ACCEPTED: Final = Frame(to_shard=CoordinatorMessage())
"""A message without content that is the coordinator's first message, and its answer to a ping."""


DEFECTS: Final = 5
"""The number of links of a shard in a row that may raise an exception; then the server ends with it."""

MOST: Final = (1 << 63) - 1
"""The largest term and version of a position, from which the coordinator must be able to count on."""


class LinkHost(Protocol):
    """Shard 0's server. Thread-safe."""

    shard: int
    incarnation: int

    @property
    def threaded(self) -> ThreadedCoordinator | None:
        """The coordinator; None on other shards than 0."""

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """Another shard's server sends its last spans: a serialized `Spans`."""


class _RemoteSink:
    """A `ShardSink` at the other end of a link."""

    def __init__(self, shard: int, stream: ServerStream) -> None:
        self.shard, self._stream = shard, stream

    def deliver(self, message: Message) -> None:
        """See `ShardSink`. A shard whose link breaks gets what it has missed when it links again."""
        try:
            self._stream.post(Frame(to_shard=wrap_message(message)))
        except PeerLost as lost:
            _LOG.debug("a message to shard %d was not sent: %s", self.shard, lost)

    def end(self) -> None:
        self._stream.cut()


class Links:
    """Serves the links, each in the thread of its data stream."""

    def __init__(self, host: LinkHost, peers: Peers, timeouts: Timeouts | None = None) -> None:
        """
        Args:
            host: the server of shard 0.
            peers: the incarnations known here.
            timeouts: None for the usual ones.
        """
        self._host, self._peers = host, peers
        self._times = timeouts or Timeouts()
        self._lock = threading.Lock()
        self._open: set[_RemoteSink] = set()
        self._attaching = threading.Lock()
        self._newest: dict[int, int] = {}  # numbers of links, by shard
        self._broken: dict[int, float] = {}  # by shard without a link: when it ended, unless the shard has the end
        self._defects: Counter[int] = Counter()  # by shard: links that raised, since one that lasted
        self.error: Exception | None = None
        """The defect that ended `DEFECTS` links of a shard in a row, so that training cannot continue in this process.
        """

    def awaited(self, now: float) -> bool:
        """Returns whether another shard may not have received the end of the job: its server is linked, or may link
        again.

        Args:
            now: the time in seconds of `time.monotonic`.
        """
        with self._lock:
            return bool(self._open) or any(now - ended < self._times.gone for ended in self._broken.values())

    def __len__(self) -> int:
        """Returns how many other shards are linked."""
        with self._lock:
            return len(self._open)

    def serve(self, hello: Hello, stream: ServerStream) -> None:
        """Serve a link until it ends. Exceptions but refusals and lost connections are defects: see `error`."""
        began = time.monotonic()
        try:
            self._serve(hello, stream)
        except Refusal as refusal:
            _refuse(stream, refusal)
        except (OSError, PeerLost):
            raise
        except Exception as error:  # noqa: BLE001  # the server's main thread raises it, if it does not pass
            self._defective(hello.peer.index, error, time.monotonic() - began)
            _refuse(stream, Refusal(RefusalCode.NOT_READY, f"the coordinator has a defect: {error!r}"))

    def _defective(self, shard: int, error: Exception, lasted: float) -> None:
        with self._lock:
            self._defects[shard] = number = 1 if lasted > self._times.silent else self._defects[shard] + 1
        if number == 1:  # the next links of the shard probably end with the same
            _LOG.error("the link of shard %d failed; the shard links again", shard, exc_info=error)
        elif number == DEFECTS:
            _LOG.error("the links of shard %d failed %d times in a row", shard, number)
            self.error = error

    def _serve(self, hello: Hello, stream: ServerStream) -> None:
        threaded = self._threaded_coordinator(hello)
        with at_most(self._times.link_answer, stream.cut):  # a caller that sends nothing must not keep this thread
            item = stream.read()
        if item is None:
            return
        first = item[0].to_coordinator
        if not first.HasField("position"):
            raise Refusal(RefusalCode.INVALID, "the first message of a link must be a position")
        position, peer, ended = first.position, hello.peer, False
        if max(position.term, position.begun, position.version) > MOST:
            raise Refusal(RefusalCode.INVALID, f"the numbers of a position must be at most {MOST}")
        if position.link > self._peers.newest_link:  # it would end each link that begins with a number of `Coordinate`
            raise Refusal(RefusalCode.INVALID, f"link {position.link} was not allowed by a call of Coordinate")
        sink = _RemoteSink(peer.index, stream)
        try:
            with self._attaching:
                if not self._begins(sink, position.link):
                    return
                stream.keep_alive()
                stream.write(ACCEPTED)
                threaded.attach(
                    sink,
                    ServerPosition(
                        peer.index,
                        position.term,
                        position.version,
                        incarnation=peer.incarnation,
                        last=position.last if position.HasField("last") else None,
                        prepared=tuple(position.prepared),
                        begun=position.begun,
                        saves=position.saves,
                    ),
                )
            while (item := stream.read()) is not None:
                frame, body = item
                message = frame.to_coordinator
                if kind_of(frame) != "to_coordinator" or body is not None:
                    why = f"a frame {kind_of(frame)!r} cannot arrive on a link: must be 'to_coordinator'"
                    raise Refusal(RefusalCode.INVALID, why)
                if message.HasField("spans"):
                    self._host.add_spans(peer, message.spans.SerializeToString())
                elif message.HasField("ended"):
                    ended = True
                elif (report := report_in(message)) is not None:
                    threaded.report(peer.index, report, sink)
                elif message.WhichOneof("kind") is None:
                    stream.post(ACCEPTED)  # a ping: the shard checks whether this process runs
        finally:
            with self._lock:
                if sink in self._open:  # else a later link has replaced it, or it did not begin
                    self._open.remove(sink)
                    if not ended:
                        self._broken[peer.index] = time.monotonic()
            threaded.detach(peer.index, sink)

    def _begins(self, sink: _RemoteSink, number: int) -> bool:
        """The previous link of the shard ends. Returns False if a later link began, whose thread was earlier than this
        one."""
        with self._lock:
            if number < self._newest.get(sink.shard, 0):
                return False  # its position and reports are out of date
            self._newest[sink.shard] = number
            for older in [other for other in self._open if other.shard == sink.shard]:
                older.end()
                self._open.remove(older)
            self._broken.pop(sink.shard, None)
            self._open.add(sink)
            return True

    def _threaded_coordinator(self, hello: Hello) -> ThreadedCoordinator:
        peer, host = hello.peer, self._host
        threaded = host.threaded
        if threaded is None or hello.shard != host.shard:
            raise Refusal(RefusalCode.MOVED, "shard 0's server has the coordinator")
        if why := cannot_link(peer, threaded.shards):
            raise Refusal(RefusalCode.INVALID, why)
        if hello.expected_incarnation != host.incarnation:
            raise Refusal(
                RefusalCode.MOVED,
                f"shard 0 has incarnation {host.incarnation}, not {hello.expected_incarnation}: link again",
            )
        self._peers.check(peer)
        return threaded


def _refuse(stream: ServerStream, refusal: Refusal) -> None:
    with contextlib.suppress(PeerLost):
        # Without waiting: a decision's thread may have this link in its list, and would wait for this thread.
        stream.post(frames.refused(refusal))
