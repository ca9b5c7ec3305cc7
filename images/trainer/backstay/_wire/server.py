"""The server's side of data streams: frames in, gradients to the shard, parameters out. Independent of the transport.

One thread serves one stream, so frames are handled strictly in order. It reads a push to its end before it answers.
When the shard cannot use a push any more, the server refuses the rest between two chunks, and drops bytes that still
arrive. So the two ends never both write parameters and gradients, which would deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backstay_rpc.control_pb2 import Frame, Hello, ParamsBegin, PushBegin
from backstay_spec import contract

from .. import _instrument
from .._timeouts import Timeouts
from ..errors import PeerLost
from . import frames
from .frames import WHOLE_BYTES, WINDOW_BYTES, Cover, Outgoing, kind_of
from .seam import Answer, Bytes, FrameStream, Incoming, Refusal, ShardPort, flow_of

if TYPE_CHECKING:
    from .._update import ShardWire
    from .tcp import Listener

__all__ = ["DataServer", "StreamServer"]

_LOG = logging.getLogger(__name__)


class StreamServer:
    """Serves data streams of one shard, over any transport."""

    def __init__(self, shard: ShardPort) -> None:
        self._shard = shard
        self._total = sum(block.nbytes for block in shard.wire.gradients)
        self._outgoing: dict[tuple[ShardWire, bool], Outgoing] = {}
        self._most = max(sum(block.nbytes for block in wires) for wires in (shard.wire.gradients, shard.wire.exact))

    def serve(self, hello: Hello, stream: FrameStream) -> None:
        """Serves one stream until it ends; returns in every case except a defect."""
        try:
            self._shard.admit(hello)
            while (item := stream.read()) is not None:
                if not self._one(hello, stream, *item):
                    return
        except Refusal as refusal:
            _LOG.debug("refused %s %d: %s", hello.peer.role, hello.peer.index, refusal)
            self._refuse(stream, refusal)
        except PeerLost as lost:
            _LOG.debug("%s", lost)

    def _one(self, hello: Hello, stream: FrameStream, frame: Frame, body: np.ndarray | None) -> bool:
        """One request and its answer. False: the stream ended."""
        kind = kind_of(frame)
        if body is not None and kind != "push_begin":
            raise Refusal("INVALID_ARGUMENT", f"a frame {kind!r} outside a push has a body of {body.nbytes} bytes")
        match kind:
            case "pull":
                answer = self._shard.answer(None, frame.pull.min_version, stream.alive)
                exact = frame.pull.exact
            case "push_begin":
                step = frame.push_begin.part.contribution.key_step
                cover = Cover([block.nbytes for block in self._shard.wire.of(step).gradients])
                cover.announce(frame.push_begin.bytes)
                asks = frame.push_begin.ask
                incoming = self._shard.begin(hello, frame.push_begin.part, stream.alive if asks else None)
                began = time.monotonic()
                try:
                    if asks and not self._shard.moved_on(incoming):
                        stream.write(frames.RECEIVED)
                    complete = self._receive(stream, frame.push_begin, body, incoming, cover)
                finally:
                    self._shard.lose(incoming)  # unless it is complete
                if complete is None or (not complete and not self._skip_rest(stream)):
                    return False
                pushed = frame.push_begin.part.contribution
                _instrument.record(
                    "receive",
                    began,
                    time.monotonic(),
                    pushed.version,
                    rank=pushed.rank,
                    flow=flow_of(pushed),
                    complete=complete,
                )
                answer = self._shard.answer(incoming, 0, stream.alive)
                exact = False
            case _:
                raise Refusal("INVALID_ARGUMENT", f"a frame {kind!r} cannot come here: a push or a pull begins")
        if answer is None:
            return False
        self._send(stream, answer, exact)
        return True

    def _receive(
        self, stream: FrameStream, begin: PushBegin, body: np.ndarray | None, incoming: Incoming, cover: Cover
    ) -> bool | None:
        """Receives a push. True: it is complete. False: the shard cannot use it any more. None: the stream ended."""
        blocks = incoming.blocks
        if begin.HasField("whole"):
            for block, data in cover.whole(body):
                np.copyto(blocks[block], data)
            cover.end(begin.whole.bytes)
            incoming.check()
            self._shard.complete(incoming, begin.whole.info)
            return True
        if body is not None:
            raise Refusal("INVALID_ARGUMENT", f"the beginning of a push has a body of {body.nbytes} bytes")

        place, reported = cover.place(blocks), 0
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
                raise Refusal("INVALID_ARGUMENT", "a push was abandoned that is still wanted")
            else:
                raise Refusal("INVALID_ARGUMENT", f"a frame {kind!r} cannot come inside a push")

    def _skip_rest(self, stream: FrameStream) -> bool:
        """Drops the rest of a refused push. False: the stream ended."""
        remaining = self._total + frames.MAX_CHUNK_BYTES
        while remaining > 0:
            item = stream.read()
            if item is None:
                return False
            frame, body = item
            if kind_of(frame) in ("abandon", "end"):
                return True
            remaining -= frames.BARE_BYTES if body is None else max(1, body.nbytes)
        raise Refusal("INVALID_ARGUMENT", "a refused push continues beyond its end")

    def _send(self, stream: FrameStream, answer: Answer, exact: bool) -> None:
        out, block_of = self._frames(answer.fragments, exact), answer.block if exact else answer.encoded
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
            blocks = [frames.sections_of(block_of(b)) for b in out.blocks]
            stream.write(begin, frames.joined([section for block in blocks for section in block]))
            return
        stream.write(begin)
        at = -1
        data: Sequence[Bytes] = ()
        for frame, (block, section, start, stop) in out.chunks:
            if block != at:
                at, data = block, frames.sections_of(block_of(block))
            stream.write(frame, data[section][start:stop])
        stream.write(out.end)

    def _frames(self, fragments: frozenset[int] | None, exact: bool) -> Outgoing:
        some = self._shard.wire.only(fragments)
        if (some, exact) not in self._outgoing:
            self._outgoing[some, exact] = Outgoing(some.exact if exact else some.parameters)
        return self._outgoing[some, exact]

    def _refuse(self, stream: FrameStream, refusal: Refusal) -> None:
        """Sends the refusal and lets the client read it: ending the stream at once may drop the frame."""
        with contextlib.suppress(PeerLost, Refusal):
            stream.write(frames.refused(refusal))
            remaining = 2 * self._most + frames.MAX_CHUNK_BYTES
            while remaining > 0 and (item := stream.read()) is not None:
                remaining -= frames.BARE_BYTES if item[1] is None else max(1, item[1].nbytes)


class DataServer:
    """The data streams of a shard, over TCP."""

    def __init__(
        self,
        shard: ShardPort,
        *,
        host: str,
        port: int,
        token: str,
        replicate: Callable[[Hello, FrameStream], None] | None = None,
        ended: Callable[[Hello], None] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Listens at once.

        Args:
            shard: serves the streams, from many threads.
            replicate: serves the streams of servers: standbys.
            ended: called when the stream of a worker has ended.
            host: address to bind, such as ``0.0.0.0``.
            port: 0 for any.
            token: the job's, not empty.
            timeouts: None for the usual ones.

        Raises:
            PortTaken: the address cannot be bound; the message names host and port.
        """
        from .tcp import Listener

        self._shard = shard
        workers = StreamServer(shard).serve

        def serve(hello: Hello, stream: FrameStream) -> None:
            if replicate is not None and hello.peer.role == contract.ROLE_SERVER:
                replicate(hello, stream)
                return
            try:
                workers(hello, stream)
            finally:
                if ended is not None:
                    ended(hello)

        self._listener: Listener = Listener(host, port, token, serve, timeouts)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.bound

    def fence(self, incarnations: Mapping[str, int]) -> int:
        """The newest incarnations known, such as ``{"worker-3": 2}``: older ones are refused, and their streams cut.

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
