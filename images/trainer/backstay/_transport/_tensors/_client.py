"""The worker's side of data streams, which sends contributions and receives parameters on all shards at the same time.
No transport here.

One thread uses a stream. It writes a push and then reads the answer. On the way it reads, window by window, whether the
server still accepts the rest.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from backstay_rpc.control_pb2 import Frame, GradientId, GradientInfo, Hello, Part, PushBegin, RejectReason
from backstay_rpc.credentials import Credentials
from backstay_rpc.refusals import RefusalCode

from ... import _instrument
from ..._coordination import MODES, Answering, Mode
from ..._update import ALL
from ...errors import JobFailed, PeerLost, Refused, Superseded
from .._streams import frames
from .._streams._interfaces import (
    PLACED,
    Bytes,
    DataClient,
    FrameStream,
    LayoutLike,
    PartPush,
    Place,
    Pulled,
    Refusal,
    flow_of,
)
from .._streams.frames import WHOLE_BYTES, WINDOW_BYTES, Cover, Outgoing, kind_of

if TYPE_CHECKING:
    from ..._update import BlockWire, Selection, ShardWire

__all__ = ["CancellableStream", "Push", "ShardedClient", "StreamClient", "connect", "record_exchange"]


Carried: TypeAlias = Callable[[int, int], object]
"""Called with the bytes of tensors that were sent and received since the previous call, by any thread."""

_IGNORED: Final[Carried] = lambda sent, received: None  # noqa: E731


class CancellableStream(FrameStream, Protocol):
    """A client's end of a stream."""

    def cancel(self, why: str) -> None: ...
    def close(self) -> None: ...


class _Thread:
    """A thread that runs one task at a time for its owner; starting one for each exchange would cost more."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        self._work.put((work, future))
        return future

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # it belongs to the thread that waits for the future
                future.set_exception(error)
            del work, future, item  # so that their objects do not live until the next exchange


class StreamClient:
    """A `DataClient` over any stream."""

    def __init__(
        self, stream: CancellableStream, shard: int, wire: ShardWire, mode: Mode = "Sync", carried: Carried = _IGNORED
    ) -> None:
        """
        Args:
            stream: open, without another user.
            shard: its number, for messages.
            wire: how its blocks travel.
            mode: the job's update mode.
            carried: see `connect`.
        """
        self._stream = stream
        self._shard = shard
        self._wire = wire
        self._sizes = [block.nbytes for block in wire.exact]
        self._answering: Answering = MODES[mode]
        self._carried = carried
        self._outgoing: dict[ShardWire, Outgoing] = {}

    @property
    def shard(self) -> int:
        return self._shard

    def exchange(
        self, push: PartPush | None, min_version: int, into: Sequence[Bytes], wanted: Selection = ALL
    ) -> Pulled:
        """See `DataClient.exchange`."""
        if [block.nbytes for block in into] != self._sizes:
            raise ValueError(f"shard {self._shard}: the blocks to receive into do not have the partition's sizes")
        pushed_at = 0.0
        try:
            if push is None:
                self._stream.write(frames.pull(min_version, wanted))
            else:
                self._push(push)
                pushed_at = time.monotonic()
            pulled = replace(self._receive(into, push, wanted), pushed_at=pushed_at)
        except BaseException:
            self._stream.cancel("an exchange failed")  # so that no answer stays half read
            raise
        finally:
            if push is not None and push.turn is not None and self._shard == 0:
                push.turn.set()
        if push is None and pulled.version < min_version and not pulled.done:
            raise self._nonsense(f"version {pulled.version} for a pull of at least {min_version}")
        return pulled

    def splits(self, part: Part) -> bool:
        """See `DataClient.splits`."""
        return self._frames(part).total > WHOLE_BYTES

    def cancel(self, why: str) -> None:
        self._stream.cancel(f"shard {self._shard}: {why}")

    def close(self) -> None:
        self._stream.close()

    def _push(self, push: PartPush) -> None:
        if len(push.blocks) != len(self._sizes):
            raise ValueError(
                f"shard {self._shard}: a push has {len(push.blocks)} blocks: the partition has {len(self._sizes)}"
            )
        out = self._frames(push.part)
        begin = PushBegin(part=push.part, bytes=out.total)
        asks = push.turn is not None and self._shard == 0
        if out.total <= WHOLE_BYTES and not asks:
            body = [data for index in out.blocks for data in self._data(push, index)]
            begin.whole.CopyFrom(frames.end_of(out.total, push.info()).end)
            self._stream.write(frames.push_begin(begin), *body)
            self._carried(out.total, 0)
            return
        if not out.chunks and not self._begin(push, begin):  # other shards have all of it
            return
        at, sent, reported = -1, 0, 0
        data: Sequence[Bytes] = ()
        for frame, (block, section, start, stop) in out.chunks:
            if block != at:
                began = time.monotonic()
                at, data = block, self._data(push, block)
                if not sent and self._wire.gradients[block].codec is not None:  # later ones are encoded meanwhile
                    step = push.part.contribution.key_step
                    _instrument.record("encode", began, time.monotonic(), step, shard=self._shard)
            # Not earlier: from the beginning on, the server holds memory.
            if not sent and not self._begin(push, begin):
                return
            if sent + stop - start > reported + 2 * WINDOW_BYTES:
                reported += WINDOW_BYTES
                if not self._wanted():
                    self._stream.write(frames.ABANDON)
                    return
            self._stream.write(frame, data[section][start:stop])
            self._carried(stop - start, 0)
            sent += stop - start
        self._stream.write(frames.end_of(out.total, push.info()))

    def _begin(self, push: PartPush, begin: PushBegin) -> bool:
        """Send the beginning of a push, when it is its turn. Returns False if the shard does not want the rest."""
        if push.turn is not None and self._shard > 0:
            push.turn.wait()
        begin.ask = push.turn is not None and self._shard == 0
        self._stream.write(frames.push_begin(begin))
        if not begin.ask:
            return True
        assert push.turn is not None
        wanted = self._wanted()
        push.turn.set()
        if not wanted:
            self._stream.write(frames.ABANDON)
        return wanted

    def _frames(self, part: Part) -> Outgoing:
        some = self._wire.pushed(part)
        if some not in self._outgoing:
            self._outgoing[some] = Outgoing(some.gradients)
        return self._outgoing[some]

    def _data(self, push: PartPush, index: int) -> Sequence[Bytes]:
        """Returns the bytes of each section of a block; waits until it is computed."""
        data = frames.sections_of(push.blocks[index])
        sizes, wanted = tuple(section.nbytes for section in data), self._wire.gradients[index].sections
        if sizes != wanted:
            raise ValueError(f"shard {self._shard}: block {index} of a push has {sizes} bytes: must be {wanted}")
        return data

    def _wanted(self) -> bool:
        """Returns whether the server accepts the rest of the push; waits until it has received another window of it."""
        frame, _ = self._read()
        kind = kind_of(frame)
        if kind == "refused":
            raise self._refused(frame)
        if kind != "received":
            raise self._nonsense(f"a frame {kind!r} inside a push")
        return not frame.received.moved_on

    def _receive(self, into: Sequence[Bytes], push: PartPush | None, wanted: Selection) -> Pulled:
        def whole(frame: Frame, nbytes: int) -> Sequence[Bytes] | None:
            """Receive parameters that come in one frame into their places, unless they must be decoded."""
            if kind_of(frame) != "params_begin" or not frame.params_begin.whole:
                return None
            wires = self._travelling(frame.params_begin.version, push, wanted)[1]
            if any(wire.codec is not None for wire in wires):
                return None
            return Cover([wire.nbytes for wire in wires]).whole(nbytes, into)

        # Small parameters come in one frame and larger ones in chunks, and both may be refused or have other bytes.
        frame, body = self._read(whole)
        while (kind := kind_of(frame)) == "received":  # acknowledgements of the last windows
            frame, body = self._read(whole)
        answered_at = time.monotonic()
        if kind == "refused":
            raise self._refused(frame)
        if kind != "params_begin" or (body is not None and not frame.params_begin.whole):
            raise self._nonsense(f"a frame {kind!r} instead of parameters")
        begin = frame.params_begin
        selection, wires = self._travelling(begin.version, push, wanted)
        cover = Cover([wire.nbytes for wire in wires])

        try:
            cover.announce(begin.bytes)
            if begin.whole:
                cover.whole(begin.bytes, into)
                if body is not PLACED:
                    _decode(wires, into, body)
            else:
                own = [memory if wire.codec is None else None for memory, wire in zip(into, wires, strict=True)]
                place = cover.place(own)
            while not begin.whole:
                frame, body = self._read(place)
                kind = kind_of(frame)
                if kind == "chunk" and body is not None:
                    wire = wires[frame.chunk.block]
                    if wire.codec is None:
                        continue  # in its place
                    if (why := wire.receive(into[frame.chunk.block], frame.chunk.offset, body)) is not None:
                        raise self._nonsense(why)
                elif kind == "end":
                    cover.end(frame.end.bytes)
                    break
                elif kind == "refused":
                    raise self._refused(frame)
                else:
                    raise self._nonsense(f"a frame {kind!r} inside parameters")
        except Refusal as refusal:
            raise self._nonsense(refusal.message) from refusal
        finally:
            self._carried(0, cover.received)
        return Pulled(
            term=begin.term,
            version=begin.version,
            world=begin.world,
            offset=begin.offset,
            outcome=begin.outcome,
            next_key_step=begin.next_key_step,
            done=begin.done,
            answered_at=answered_at,
            selection=selection,
            ask=begin.ask,
        )

    def _travelling(
        self, version: int, push: PartPush | None, wanted: Selection
    ) -> tuple[Selection | None, Sequence[BlockWire]]:
        """Returns the selection in an answer with the parameters of `version`, and how each block travels in it."""
        if push is None:
            return None, self._wire.select(wanted).parameters
        gradient = push.part.contribution
        selection = self._wire.selection(self._answering.exchanged(gradient.key_step, gradient.version, version))
        return selection, self._wire.select(selection).parameters

    def _read(self, place: Place | None = None) -> tuple[Frame, Bytes | None]:
        item = self._stream.read(place)
        if item is None:
            raise PeerLost(f"shard {self._shard} ended the stream")
        return item

    def _refused(self, frame: Frame) -> Refused | PeerLost | JobFailed:
        code, message = frame.refused.code, f"shard {self._shard}: {frame.refused.message}"
        if code == RefusalCode.JOB_FAILED:  # final: a server that was paused may end before its next answer
            return JobFailed.from_text(frame.refused.message)
        if code == RefusalCode.NOT_READY:
            return PeerLost(message)
        return Superseded(code, message) if code == RefusalCode.REPLACED else Refused(code, message)

    def _nonsense(self, what: str) -> PeerLost:
        return PeerLost(f"shard {self._shard} violated the protocol of the stream: {what}")


def _decode(wires: Sequence[BlockWire], into: Sequence[Bytes], body: Bytes | None) -> None:
    """Put all parameters, which came in one frame, into `into`. Raises `Refusal`."""
    Cover([wire.nbytes for wire in wires]).whole(0 if body is None else body.nbytes, into)
    at = 0
    for wire, memory in zip(wires, into, strict=True):
        offset = 0
        for size in wire.sections:
            assert body is not None
            if (why := wire.receive(memory, offset, body[at : at + size])) is not None:
                raise Refusal(RefusalCode.INVALID, why)
            offset += size
            at += size


@dataclass(frozen=True, slots=True)
class Push:
    """One contribution of a worker, for all shards.

    Attributes:
        id: the contribution's id.
        blocks: ``blocks[s][b]`` is block `b` of shard `s`, as in `PartPush`.
        info: as in `PartPush`; called by several threads.
        member: the index of this pod inside its rank.
    """

    id: GradientId
    blocks: Sequence[Sequence[np.ndarray]]
    info: Callable[[], GradientInfo]
    member: int = 0


class ShardedClient:
    """A worker's streams to all shards, used at the same time."""

    def __init__(self, clients: Sequence[DataClient], mode: Mode) -> None:
        """
        Args:
            clients: the clients of shards 0 .. n-1, in order, at least one.
            mode: the job's update mode.
        """
        if [client.shard for client in clients] != list(range(len(clients))) or not clients:
            raise ValueError("there must be one client for each shard, in order")
        self._clients = tuple(clients)
        self._answering: Answering = MODES[mode]
        # The caller serves shard 0. Each other stream has its own thread, so that a slow one does not delay others.
        self._threads = [_Thread(f"backstay-shard-{client.shard}") for client in clients[1:]]
        self._closed = False
        self._asks = False  # as shard 0 answered last

    def exchange_all(
        self, push: Push | None, min_version: int, into: Sequence[Sequence[Bytes]], wanted: Selection = ALL
    ) -> Pulled:
        """Push a contribution to every shard (or nothing) and wait for the newest parameters of all of them.

        Args:
            push: the contribution, or None to pull only.
            min_version: the lowest version to wait for; only for a pull without a push.
            into: ``into[s][b]``, where block `b` of shard `s` goes.
            wanted: see `DataClient.exchange`.

        Returns:
            Sync: the parameters of every shard are of the one version that is named, the highest that any shard had
            answered with. Async: `version` is the lowest of them. `world` is that of the newest answer, `outcome` the
            first that is not `REJECT_UNSPECIFIED`, `done` when all shards set it, `pushed_at` and `answered_at` the
            latest.

        Raises:
            errors.Refused, errors.PeerLost: the error of the first shard that failed; the streams to all others are
                cancelled.
            errors.JobFailed: a shard answered that the job has failed.
        """
        every = range(len(self._clients))
        pushes = None
        if push is not None:
            parts = [Part(contribution=push.id, member=push.member, shard=s) for s in every]
            asks = self._asks and any(client.splits(part) for client, part in zip(self._clients, parts, strict=True))
            turn = threading.Event() if asks else None
            pushes = [PartPush(part, push.blocks[part.shard], push.info, turn) for part in parts]
        answers = dict(self._parallel(every, pushes, min_version, into, wanted))
        self._asks = answers[0].ask
        first = dict(answers)
        pushed_at = max(a.pushed_at for a in answers.values())
        answered_at = max(a.answered_at for a in answers.values())
        while behind := self._answering.behind({s: a.version for s, a in answers.items()}):
            newest = max(a.version for a in answers.values())
            answers.update(self._parallel(behind, None, newest, into, wanted))
        terms = {a.term for a in answers.values()}
        if len(terms) > 1:
            self.cancel("the shards are in different terms")
            raise PeerLost(f"the shards are in the terms {sorted(terms)}: one of them started again")
        newest_answer = max(answers.values(), key=lambda a: a.version)
        # Without a push, older answers are about older updates.
        about = answers if push is None else first
        outcome = next((a.outcome for _, a in sorted(about.items()) if a.outcome), RejectReason.REJECT_UNSPECIFIED)
        # A shard that was requested again has sent all that it holds.
        received = [a.selection for a in answers.values() if a.selection is not None]
        return replace(
            newest_answer,
            version=min(a.version for a in answers.values()),
            outcome=outcome,
            next_key_step=max(a.next_key_step for a in about.values()),
            done=all(a.done for a in answers.values()),
            pushed_at=pushed_at,
            answered_at=answered_at,
            selection=received[0] if received else None,
        )

    def cancel(self, why: str) -> None:
        """Ends `exchange_all` with `PeerLost`, from any thread."""
        for client in self._clients:
            client.cancel(why)

    def close(self) -> None:
        """Ends all streams. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.stop()

    def _parallel(
        self,
        shards: Sequence[int],
        pushes: Sequence[PartPush] | None,
        min_version: int,
        into: Sequence[Sequence[Bytes]],
        wanted: Selection,
    ) -> list[tuple[int, Pulled]]:
        first: list[BaseException] = []

        def run(shard: int) -> Pulled:
            try:
                return self._clients[shard].exchange(
                    None if pushes is None else pushes[shard], min_version, into[shard], wanted
                )
            except BaseException as error:
                first.append(error)
                # The other shards may wait for this gradient's update, which may never arrive.
                for other in self._clients:
                    if other.shard != shard:
                        other.cancel(f"the stream to shard {shard} failed")
                raise

        futures = [(s, self._threads[s - 1].submit(partial(run, s))) for s in shards if s > 0]
        result: list[tuple[int, Pulled]] = []
        if 0 in shards:
            with contextlib.suppress(BaseException):
                result.append((0, run(0)))
        for _, future in futures:
            future.exception()
        if first:
            raise first[0]
        return [*result, *((s, future.result()) for s, future in futures)]  # type: ignore[list-item]


def connect(
    addresses: Sequence[str],
    layouts: Sequence[LayoutLike],
    hellos: Sequence[Hello],
    *,
    credentials: Credentials,
    mode: Mode,
    wires: Sequence[ShardWire] | None = None,
    carried: Carried = _IGNORED,
) -> ShardedClient:
    """Opens a stream to every shard, over TCP.

    Args:
        addresses: ``host:port`` of each shard's data server (`JoinReply.data_address`).
        layouts: the layout of each shard in the partition whose digest the hellos carry.
        hellos: the names of both peers, for each shard.
        credentials: the credentials of this pod.
        mode: the job's update mode.
        wires: how the blocks of each shard travel; None: exactly.
        carried: is called with the bytes of tensors that travel, also of exchanges that fail.

    Raises:
        errors.PeerLost, errors.Refused: a stream could not be opened; none stays open. Most refusals are seen
            by the first exchange only.
    """
    from ..._update import ShardWire
    from .._streams._tcp import ClientStream

    clients: list[StreamClient] = []
    wires = wires or [ShardWire.exactly(layout.blocks) for layout in layouts]
    try:
        for address, layout, hello, wire in zip(addresses, layouts, hellos, wires, strict=True):
            clients.append(StreamClient(ClientStream(address, hello, credentials), layout.shard, wire, mode, carried))
    except BaseException:
        for client in clients:
            client.close()
        raise
    return ShardedClient(clients, mode)


def record_exchange(pulled: Pulled, gradient: GradientId, began: float, ended: float) -> None:
    """Keep the parts of an exchange as spans.

    `backstay trace` computes clocks from these times. The contribution is sent after `began`, and the server has
    received it before `Pulled.answered_at`, even where threads run late.
    """
    step, flow = gradient.key_step, flow_of(gradient)
    outcome = RejectReason.Name(pulled.outcome) if pulled.outcome else "applied"
    _instrument.record("push", began, pulled.pushed_at, step, flow=flow)
    _instrument.record("update_wait", pulled.pushed_at, pulled.answered_at, step, outcome=outcome, flow=flow)
    _instrument.record("pull", pulled.answered_at, ended, step, version=pulled.version)
