"""The server's side of data streams, which receives frames, gives gradients to the shard, and sends parameters.
Independent of the transport.

One thread serves one stream, so frames are handled strictly in order. It reads a push to its end before it answers.
When the shard cannot use a push any more, the server refuses the rest between two chunks, and drops bytes that still
arrive. So the two ends never both write parameters and gradients, which would deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backstay_rpc.control_pb2 import Frame, Hello, ParamsBegin, Part, PushBegin
from backstay_rpc.credentials import Credentials
from backstay_rpc.limits import MAX_CHUNK_BYTES
from backstay_rpc.refusals import RefusalCode
from backstay_spec import contract

from ... import _instrument
from ..._timeouts import Timeouts
from ..._update import ALL
from ...errors import PeerLost
from .._streams import frames
from .._streams._interfaces import Answer, Bytes, FrameStream, Incoming, Refusal, ServerStream, ShardPort, flow_of
from .._streams.frames import WHOLE_BYTES, WINDOW_BYTES, Cover, Outgoing, kind_of

if TYPE_CHECKING:
    from ..._update import Selection, ShardWire
    from .._streams._tcp import Listener

__all__ = ["QUIET_CHECKS", "DataServer", "QuietPushes", "StreamServer"]

_LOG = logging.getLogger(__name__)


QUIET_CHECKS: Final = 3
"""A push without a new byte during this number of checks is quiet."""


@dataclass(eq=False)
class _Receiving:
    """A push that has memory.

    Attributes:
        rank: the worker's rank.
        received: the bytes of its stream at the last check; None: unknown.
        quiet: the checks since then that found no further byte.
    """

    stream: ServerStream
    rank: int
    received: int | None = None
    quiet: int = 0


class QuietPushes:
    """Ends pushes that send nothing, while other pushes wait for their memory.

    Otherwise a few workers that were stopped in the middle of a push would stop all others until their heartbeats are
    missed. A worker that continues connects again and sends the same contribution. Checks are counted, and not seconds:
    a server that was paused sees after the first one whether there are further bytes.
    """

    def __init__(self, interval: float) -> None:
        """`interval` is the number of seconds between two checks."""
        self._interval = interval
        self._lock = threading.Lock()
        self._pushes: set[_Receiving] = set()
        self._waiting = 0
        self._next = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A push waits for memory."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @contextlib.contextmanager
    def receiving(self, stream: ServerStream, rank: int) -> Iterator[Callable[[], None]]:
        """A push of the worker of this rank has memory. Yields a function that checks this push alone."""
        push = _Receiving(stream, rank)

        def examine() -> None:
            with self._lock:
                if push in self._pushes:
                    _check(push)

        with self._lock:
            self._pushes.add(push)
        try:
            yield examine
        finally:
            with self._lock:
                self._pushes.remove(push)

    def check(self) -> None:
        """End pushes that were quiet for several checks. Does nothing if no push waits, or soon after a check."""
        with self._lock:
            now = time.monotonic()
            if not self._waiting or now < self._next:
                return
            self._next = now + self._interval
            for push in self._pushes:
                _check(push)


def _check(push: _Receiving) -> None:
    """End a push that was quiet for several checks."""
    received = push.stream.received()
    push.quiet = push.quiet + 1 if received is not None and received == push.received else 0
    push.received = received
    if push.quiet == QUIET_CHECKS:
        _LOG.info(
            "worker %d stopped in the middle of a contribution, and other workers wait for its memory. Its connection "
            "is closed, and it may send the contribution again",
            push.rank,
        )
        push.stream.cut()


@dataclass(frozen=True, slots=True)
class _IncomingPush:
    """A push that is being received.

    Attributes:
        incoming: its staging memory.
        cover: what has arrived.
        began: when it began, in seconds of `time.monotonic`.
    """

    incoming: Incoming
    cover: Cover
    began: float


class StreamServer:
    """Serves data streams of one shard, over any transport."""

    def __init__(self, shard: ShardPort, timeouts: Timeouts | None = None) -> None:
        self._shard = shard
        self._quiet = QuietPushes((timeouts or Timeouts()).peer_check)
        self._total = sum(block.nbytes for block in shard.wire.gradients)
        self._outgoing: dict[ShardWire, Outgoing] = {}
        self._most = max(sum(block.nbytes for block in wires) for wires in (shard.wire.gradients, shard.wire.exact))

    def serve(self, hello: Hello, stream: ServerStream) -> bool:
        """Serves one stream until it ends; returns in every case except a defect.

        Returns:
            Whether the shard has admitted the stream.
        """
        admitted = False
        try:
            self._shard.admit(hello)
            admitted = True
            while self._one(hello, stream):
                pass
        except Refusal as refusal:
            _LOG.debug("refused %s %d: %s", hello.peer.role, hello.peer.index, refusal)
            self._refuse(stream, refusal)
        except PeerLost as lost:
            _LOG.debug("%s", lost)
        return admitted

    def _one(self, hello: Hello, stream: ServerStream) -> bool:
        """Receives one request and answers it. Returns False if the stream ended."""
        with contextlib.ExitStack() as pushes:
            push: _IncomingPush | None = None

            def whole(frame: Frame, nbytes: int) -> Sequence[Bytes] | None:
                """A push in one frame is received into its staging memory."""
                nonlocal push
                if kind_of(frame) != "push_begin" or not frame.push_begin.HasField("whole"):
                    return None
                push = pushes.enter_context(self._begin(hello, stream, frame.push_begin))
                return push.cover.whole(nbytes, push.incoming.blocks)

            item = stream.read(whole)
            if item is None:
                return False
            frame, body = item
            kind = kind_of(frame)
            match kind:
                case "pull" if body is None:
                    selection = frames.wanted(frame.pull)
                    answer = self._shard.answer(None, frame.pull.min_version, stream.alive, hello.peer)
                case "push_begin":
                    if push is None:
                        push = pushes.enter_context(self._begin(hello, stream, frame.push_begin))
                    complete = self._receive(stream, frame.push_begin, body, push)
                    pushes.close()
                    if complete is None or (not complete and not self._skip_rest(stream)):
                        return False
                    pushed = frame.push_begin.part.contribution
                    _instrument.record(
                        "receive",
                        push.began,
                        time.monotonic(),
                        pushed.version,
                        rank=pushed.rank,
                        flow=flow_of(pushed),
                        complete=complete,
                    )
                    answer = self._shard.answer(push.incoming, 0, stream.alive)
                    selection = ALL if answer is None or answer.selection is None else answer.selection
                case _ if body is not None:
                    raise Refusal(
                        RefusalCode.INVALID, f"a frame {kind!r} outside a push has a body of {body.nbytes} bytes"
                    )
                case _:
                    raise Refusal(RefusalCode.INVALID, f"a frame {kind!r} cannot arrive here: a push or a pull begins")
        if answer is None:
            return False
        self._send(stream, answer, selection, self._shard.wire.of_member(hello.peer.member))
        return True

    @contextlib.contextmanager
    def _begin(self, hello: Hello, stream: ServerStream, begin: PushBegin) -> Iterator[_IncomingPush]:
        """Memory for a push. The shard loses it at the end, unless it is complete."""
        cover = Cover([block.nbytes for block in self._shard.wire.pushed(begin.part).gradients])
        cover.announce(begin.bytes)
        part = begin.part
        incoming = self._begin_when_granted(hello, stream, part) if begin.ask else self._shard.begin(hello, part)
        try:
            with self._quiet.receiving(stream, part.contribution.rank) as incoming.examine:
                yield _IncomingPush(incoming, cover, time.monotonic())
        finally:
            incoming.examine = None
            self._shard.lose(incoming)

    def _begin_when_granted(self, hello: Hello, stream: ServerStream, part: Part) -> Incoming:
        """`ShardPort.begin` of a push with `PushBegin.ask`."""

        def alive() -> bool:
            self._quiet.check()
            return stream.alive()

        self._quiet.check()
        with self._quiet.waiting():
            return self._shard.begin(hello, part, alive)

    def _receive(
        self, stream: FrameStream, begin: PushBegin, body: np.ndarray | None, push: _IncomingPush
    ) -> bool | None:
        """Receives a push. Returns True if it is complete, False if the shard cannot use it any more, and None if the
        stream ended."""
        incoming, cover = push.incoming, push.cover
        if begin.ask and not self._shard.moved_on(incoming):
            stream.write(frames.RECEIVED)
        if begin.HasField("whole"):
            if body is None:
                cover.whole(0, incoming.blocks)
            cover.end(begin.whole.bytes)
            incoming.check()
            self._shard.complete(incoming, begin.whole.info)
            return True
        if body is not None:
            raise Refusal(RefusalCode.INVALID, f"the beginning of a push has a body of {body.nbytes} bytes")

        place, reported = cover.place(incoming.blocks), 0
        while True:
            if self._shard.moved_on(incoming):
                stream.write(frames.MOVED_ON)
                return False
            item = stream.read(place)
            if item is None:
                return None
            frame, body = item
            kind = kind_of(frame)
            if kind == "chunk" and body is not None:
                while cover.received >= reported + WINDOW_BYTES:
                    reported += WINDOW_BYTES
                    stream.write(frames.RECEIVED)
            elif kind == "end" and body is None:
                cover.end(frame.end.bytes)
                incoming.check()
                self._shard.complete(incoming, frame.end.info)
                return True
            elif kind == "abandon" and body is None:
                raise Refusal(RefusalCode.INVALID, "the worker ended a push that this shard still accepts")
            else:
                raise Refusal(RefusalCode.INVALID, f"a frame {kind!r} cannot arrive inside a push")

    def _skip_rest(self, stream: FrameStream) -> bool:
        """Drops the rest of a refused push. Returns False if the stream ended."""
        remaining = self._total + MAX_CHUNK_BYTES
        while remaining > 0:
            item = stream.read()
            if item is None:
                return False
            frame, body = item
            if kind_of(frame) in ("abandon", "end"):
                return True
            remaining -= frames.BARE_BYTES if body is None else max(1, body.nbytes)
        raise Refusal(RefusalCode.INVALID, "a refused push continues beyond its end")

    def _send(self, stream: FrameStream, answer: Answer, selection: Selection, wire: ShardWire) -> None:
        """Send what an answer has of a selection. `wire`: how the blocks of the receiver travel."""
        block_of, out = answer.values(selection), self._frames(wire.select(selection))
        whole = out.total <= WHOLE_BYTES
        begin = frames.params_begin(
            ParamsBegin(
                term=answer.term,
                version=answer.version,
                world=answer.world,
                offset=answer.offset,
                bytes=out.total,
                outcome=answer.outcome,
                next_key_step=answer.next_key_step,
                done=answer.done,
                whole=whole,
                ask=answer.ask,
            )
        )
        if whole:
            stream.write(begin, *(section for b in out.blocks for section in frames.sections_of(block_of(b))))
            return
        stream.write(begin)
        at = -1
        data: Sequence[Bytes] = ()
        for frame, (block, section, start, stop) in out.chunks:
            if block != at:
                at, data = block, frames.sections_of(block_of(block))
            stream.write(frame, data[section][start:stop])
        stream.write(out.end)

    def _frames(self, some: ShardWire) -> Outgoing:
        if some not in self._outgoing:
            self._outgoing[some] = Outgoing(some.parameters)
        return self._outgoing[some]

    def _refuse(self, stream: FrameStream, refusal: Refusal) -> None:
        """Sends the refusal and lets the client read it: ending the stream immediately may drop the frame."""
        with contextlib.suppress(PeerLost, Refusal):
            stream.write(frames.refused(refusal))
            remaining = 2 * self._most + MAX_CHUNK_BYTES
            while remaining > 0 and (item := stream.read()) is not None:
                remaining -= frames.BARE_BYTES if item[1] is None else max(1, item[1].nbytes)


@dataclass(frozen=True)
class StreamHandlers:
    """Serve the streams of a `DataServer` that workers do not exchange with. With None, such streams are refused.

    Attributes:
        replicate: serves the streams of this shard's standbys.
        link: serves the links of the other shards' servers to the coordinator.
        ended: called when the stream of a worker, which the shard had admitted, has ended.
    """

    replicate: Callable[[Hello, ServerStream], None] | None = None
    link: Callable[[Hello, ServerStream], None] | None = None
    ended: Callable[[Hello], None] | None = None


class DataServer:
    """The data streams of a shard, over TCP."""

    def __init__(
        self,
        shard: ShardPort,
        *,
        host: str,
        port: int,
        credentials: Credentials,
        handlers: StreamHandlers | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Listens immediately.

        Args:
            shard: serves the streams of workers, from many threads.
            handlers: serve the other streams; None: there are none.
            host: address to bind, such as ``0.0.0.0``.
            port: 0 for any.
            credentials: the credentials of this pod, with a token that is not empty.
            timeouts: None for the usual ones.

        Raises:
            PortTaken: the address cannot be bound; the message names host and port.
        """
        from .._streams._tcp import Listener

        self._shard = shard
        workers, handlers = StreamServer(shard, timeouts).serve, handlers or StreamHandlers()

        def serve(hello: Hello, stream: ServerStream) -> None:
            if hello.peer.role == contract.ROLE_SERVER:
                handler = handlers.replicate if hello.peer.index == hello.shard else handlers.link
                if handler is not None:
                    handler(hello, stream)
                    return
            admitted = workers(hello, stream)
            if admitted and handlers.ended is not None and hello.peer.role == contract.ROLE_WORKER:
                handlers.ended(hello)

        self._listener: Listener = Listener(host, port, credentials, serve, timeouts)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.bound

    def fence(self, incarnations: Mapping[str, int]) -> int:
        """Take the newest known incarnations, such as ``{"worker-3": 2}``, refuse older ones, and cut their streams.

        Returns:
            How many connections were cut.
        """
        self._shard.fence(incarnations)
        return self.disconnect(
            lambda hello: hello.peer.incarnation < incarnations.get(f"{hello.peer.role}-{hello.peer.index}", 0)
        )

    def disconnect(self, wanted: Callable[[Hello], bool]) -> int:
        """Cuts the connections of streams by their hello, such as those of a fenced or silent worker."""
        return self._listener.disconnect(wanted)

    def close(self, timeout: float = 10.0) -> bool:
        """Stops listening and cuts all streams. Close the shard first, so that nothing waits in it.

        Returns:
            False when a stream's thread did not end within `timeout` seconds: leave the process by `os._exit` then.
        """
        return self._listener.close(timeout)
