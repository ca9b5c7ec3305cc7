"""The control service of a server: joins, heartbeats, the coordinator's links, and calls of the operator (O8).

The service runs on the process's event loop for gRPC, so an open call never holds a thread. A call is accepted or
refused by its headers, before its messages are read (O7). The host's work for a call may take a lock, so it runs in a
few threads. Only calls that are authenticated and complete get there. Messages on the coordinator's links are a part of
every update, so the loop passes them on itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from backstay_rpc.channels import NOT_AUTHENTICATED, REFUSAL, Credentials, listen
from backstay_rpc.control_pb2 import (
    DESCRIPTOR,
    CoordinatorMessage,
    EvaluatedReply,
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    Peer,
    Position,
    ProgressReply,
    ProgressRequest,
    ShardMessage,
)
from backstay_rpc.loop import call, rpc_loop

from .._coordination.seam import Message
from .._process._guard import ConnectionGuard
from .._process._sockets import peer_address
from .._timeouts import Timeouts
from ._agreement import Agreement
from ._driving import Driving
from ._envelopes import report_in, wrap_message

__all__ = ["ControlServer", "Host", "Peers"]

_LOG = logging.getLogger(__name__)

_THREADS: Final = 8
_MAX_WAITING: Final = 100_000
"""Messages that wait to be sent on one link. A shard that is so far behind is disconnected, and links again."""

_SERVICE: Final = DESCRIPTOR.services_by_name["Control"].full_name
_MARK: Final = ((REFUSAL, "1"),)
_M = TypeVar("_M", bound=ProtoMessage)
_T = TypeVar("_T")


class Host(Protocol):
    """The server for which the service answers. Thread-safe."""

    shard: int
    incarnation: int

    @property
    def agreement(self) -> Agreement: ...
    @property
    def driving(self) -> Driving | None:
        """The coordinator; None on other shards than 0."""

    def not_ready(self) -> str:
        """Why pods cannot join yet; empty when they can."""

    def joined(self, peer: Peer) -> JoinReply: ...
    def beat(self, request: HeartbeatRequest) -> HeartbeatReply: ...
    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        """A peer leaves; `trained`: `train` returns in it. False: too late to be counted, because this server ends."""

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """Another shard's server sends its last spans: a serialized `Spans`."""

    def evaluated(self, request: EvaluatedRequest) -> None: ...
    def progress(self, request: ProgressRequest) -> ProgressReply: ...
    def awaits_operator(self) -> bool:
        """Whether it waits for the operator's report of the active server; older reports must not count then."""

    def superseded(self, by: int) -> None:
        """Another shard reported a newer incarnation of this server."""

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Refuse older incarnations from now on, on every channel."""


class Peers:
    """The newest incarnation of every pod that this server has received. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}

    def see(self, role: str, index: int, incarnation: int) -> tuple[int, bool]:
        """The newest incarnation known, this one included; and whether it is new."""
        name = f"{role}-{index}"
        with self._lock:
            before = self._newest.get(name, -1)
            if incarnation > before:
                self._newest[name] = incarnation
            return max(before, incarnation), incarnation > before

    def known(self) -> dict[str, int]:
        """By name, such as ``worker-3``."""
        with self._lock:
            return dict(self._newest)


class _Refused(Exception):  # noqa: N818  # it is what happened
    """The answer to a call is an error. Backstay's own refusals are marked, so that a peer can recognize them."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class _RemoteSink:
    """A shard at the other end of a `Coordinate` stream. Any thread calls `deliver`; the rest runs on the loop."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._waiting: deque[CoordinatorMessage] = deque()
        self._some = asyncio.Event()
        self._ended = False

    def deliver(self, message: Message) -> None:
        """See `ShardSink`."""
        self._waiting.append(wrap_message(message))
        if len(self._waiting) > _MAX_WAITING:
            self.end()
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._some.is_set():
            return
        if threading.get_ident() == self._thread:  # most messages answer one that the loop has received
            self._some.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._some.set)

    async def send(self, context: Any) -> None:
        """Write what is put, in order, until `end`."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting and not self._ended:
                await context.write(self._waiting.popleft().SerializeToString())
            if self._ended:
                return


class ControlService(grpc.GenericRpcHandler):
    """Chooses the handler of a call by its headers."""

    def __init__(
        self, host: Host, peers: Peers, credentials: Credentials, pool: ThreadPoolExecutor, timeouts: Timeouts
    ) -> None:
        self.host = host
        self.guard: ConnectionGuard | None = None  # once the port is known
        self.links: dict[_RemoteSink, int] = {}  # and their shards
        self._peers = peers
        self._credentials = credentials
        self._pool = pool
        self._timeouts = timeouts
        unary: dict[str, tuple[type[Any], Callable[[Any, Any], Awaitable[ProtoMessage]]]] = {
            "Join": (JoinRequest, self._join),
            "Heartbeat": (HeartbeatRequest, self._heartbeat),
            "Evaluated": (EvaluatedRequest, self._evaluated),
            "Leave": (LeaveRequest, self._leave),
            "Progress": (ProgressRequest, self._progress),
        }
        # All are stream methods: only then a handler of ours reads the message, and can bound how long that takes.
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            f"/{_SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(self._one(kind, answer))
            for name, (kind, answer) in unary.items()
        }
        self._handlers[f"/{_SERVICE}/Coordinate"] = grpc.stream_stream_rpc_method_handler(
            self._guarded(self._coordinate)
        )
        self._refuse: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._not_authenticated
        )

    def service(self, handler_call_details: Any) -> Any:
        """Called with the headers of each call; None: there is no such method."""
        if not self._credentials.admits_call(handler_call_details.invocation_metadata or ()):
            return self._refuse
        return self._handlers.get(handler_call_details.method)

    async def _not_authenticated(self, _: Any, context: Any) -> None:
        if self.guard is not None:
            self.guard.refuse(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, NOT_AUTHENTICATED, _MARK)

    # ---- How a call is served ----

    def _guarded(self, serve: Callable[[Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
        async def run(_: Any, context: Any) -> None:
            if self.guard is not None:
                self.guard.prove(context.peer())
            try:
                await serve(context)
            except _Refused as refused:
                await context.abort(refused.code, refused.details, _MARK)

        return run

    def _one(
        self, kind: type[_M], answer: Callable[[_M, Any], Awaitable[ProtoMessage]]
    ) -> Callable[[Any, Any], Awaitable[None]]:
        """A method with one message each way."""

        async def serve(context: Any) -> None:
            request = await self._read(context, kind)
            if request is None:
                raise _Refused(grpc.StatusCode.INTERNAL, "the call ended before its message")
            reply = await answer(request, context)
            await context.write(reply.SerializeToString())

        return self._guarded(serve)

    async def _read(self, context: Any, kind: type[_M]) -> _M | None:
        """The next message of a call; None: its peer sends no more."""
        try:
            data = await asyncio.wait_for(context.read(), self._timeouts.message)
        except TimeoutError:
            if self.guard is not None:
                self.guard.warnings.add(peer_address(context.peer())[0], "a call ended: its message did not come")
            raise _Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no message came within {self._timeouts.message:.0f} s after the headers of the call",
            ) from None
        return None if data is grpc.aio.EOF else _parsed(kind, data)

    async def _do(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """In a thread: `work` may take a lock."""
        return await rpc_loop().run_in_executor(self._pool, work, *arguments)

    # ---- Checks ----

    def _check(self, shard: int, expected: int) -> None:
        host = self.host
        if shard != host.shard:
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, f"this is shard {host.shard}, not shard {shard}")
        if expected and expected != host.incarnation:
            raise _Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"shard {shard} has incarnation {host.incarnation}, not {expected}: join again",
            )

    def _see(self, peer: Peer) -> None:
        newest, news = self._peers.see(peer.role, peer.index, peer.incarnation)
        name = f"{peer.role}-{peer.index}"
        if newest > peer.incarnation:
            raise _Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} of incarnation {peer.incarnation} was replaced by incarnation {newest}: it must stop",
            )
        if news and peer.incarnation > 0:
            self.host.fence({name: newest})

    def _agree(self, peer: Peer, position: Position) -> None:
        here, there = f"{peer.role} {self.host.shard}", f"{peer.role} {peer.index}"
        difference = self.host.agreement.difference(position.leaves, position.settings, there, here)
        if difference:
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, difference)

    # ---- Methods ----

    async def _join(self, request: JoinRequest, _: Any) -> JoinReply:
        return await self._do(self._joined, request)

    def _joined(self, request: JoinRequest) -> JoinReply:
        host = self.host
        self._check(request.shard, request.expected_incarnation)
        difference = host.agreement.difference(
            request.leaves, request.settings, f"{request.peer.role} {request.peer.index}", f"shard {host.shard}"
        )
        if difference:
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, difference)
        why = host.not_ready()
        if why:
            # Before the peer's incarnation is recorded: a standby does not decide which pods are replaced. During its
            # promotion, its Service may already lead to it, and the next standby may call it first.
            raise _Refused(grpc.StatusCode.UNAVAILABLE, why)
        self._see(request.peer)
        if host.driving is not None and request.peer.role == "worker":
            host.driving.worker_at(request.term, request.version)
        return host.joined(request.peer)

    async def _heartbeat(self, request: HeartbeatRequest, _: Any) -> HeartbeatReply:
        return await self._do(self._beat, request)

    def _beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self._check(request.shard, request.expected_incarnation)
        self._see(request.peer)
        reply = self.host.beat(request)
        for name, newest in self._peers.known().items():
            reply.incarnations[name] = newest
        return reply

    async def _evaluated(self, request: EvaluatedRequest, _: Any) -> EvaluatedReply:
        def report() -> EvaluatedReply:
            self._check(0, 0)
            self._see(request.peer)
            self.host.evaluated(request)
            return EvaluatedReply()

        return await self._do(report)

    async def _leave(self, request: LeaveRequest, _: Any) -> LeaveReply:
        def leave() -> LeaveReply:
            self._see(request.peer)
            if not self.host.left(request.peer, trained=request.trained):
                raise _Refused(grpc.StatusCode.UNAVAILABLE, "this server ends")
            return LeaveReply()

        return await self._do(leave)

    async def _progress(self, request: ProgressRequest, _: Any) -> ProgressReply:
        self._check(request.shard, request.expected_incarnation)
        if self.host.awaits_operator():
            # A server that was paused or cut off finds old calls and their cancellations at the same time. The
            # cancellation ends this coroutine here.
            await asyncio.sleep(self._timeouts.second_look)
        return await self._do(self._reported_progress, request)

    def _reported_progress(self, request: ProgressRequest) -> ProgressReply:
        news = {}
        for name, incarnation in request.incarnations.items():
            role, _, index = name.rpartition("-")
            if index.isdigit() and self._peers.see(role, int(index), incarnation)[1]:
                news[name] = incarnation
        if news:
            self.host.fence(news)
        return self.host.progress(request)

    # ---- Links ----

    async def _coordinate(self, context: Any) -> None:
        driving = self.host.driving
        if driving is None:
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, "the coordinator is on shard 0")
        first, second = await self._read(context, ShardMessage), await self._read(context, ShardMessage)
        if first is None or second is None or not first.HasField("hello") or not second.HasField("position"):
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "a link begins with a hello and a position")
        peer, position = first.hello, second.position
        if peer.role != "parameter-server" or peer.index == self.host.shard:
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{peer.role} {peer.index} is not another shard")
        await self._do(self._agree, peer, position)
        await self._do(self._see, peer)
        if position.coordinator > self.host.incarnation:
            self.host.superseded(position.coordinator)
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, f"incarnation {position.coordinator} leads now")
        await context.send_initial_metadata(())  # the shard waits for it, and there may be no message yet
        sink = _RemoteSink()
        for older, shard in self.links.items():
            if shard == peer.index:
                older.end()
        self.links[sink] = peer.index
        sending = asyncio.ensure_future(sink.send(context))
        listening = asyncio.ensure_future(self._listen(context, driving, peer, sink))
        try:
            driving.attach(
                peer.index,
                sink,
                position.term,
                position.version,
                incarnation=peer.incarnation,
                last=position.last if position.HasField("last") else None,
                prepared=position.prepared,
                begun=position.begun,
            )
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.links.pop(sink, None)
            driving.detach(peer.index, sink)
            for task in (sending, listening):
                task.cancel()
            await asyncio.gather(sending, listening, return_exceptions=True)

    async def _listen(self, context: Any, driving: Driving, peer: Peer, sink: _RemoteSink) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            message = _parsed(ShardMessage, data)
            if message.HasField("spans"):
                self.host.add_spans(peer, message.spans.SerializeToString())
            elif (report := report_in(message)) is not None:
                driving.receive(peer.index, sink, report)


def _parsed(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _Refused(grpc.StatusCode.INTERNAL, f"{len(data)} bytes are not a {kind.DESCRIPTOR.name}") from None


class ControlServer:
    """Serves from its creation until `close`."""

    def __init__(
        self, host: Host, peers: Peers, *, bind: str, port: int, token: str, timeouts: Timeouts | None = None
    ) -> None:
        """
        Args:
            host: answers the calls.
            peers: the incarnations known here.
            bind: an address.
            port: 0 for any.
            token: the job's.
            timeouts: None for the usual ones.

        Raises:
            OSError: the port cannot be bound; the message names it.
        """
        timeouts = timeouts or Timeouts()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="backstay-control")
        self._service = ControlService(host, peers, Credentials(token), self._pool, timeouts)
        self._server, self.port = call(self._listen(bind, port), timeouts.call)
        self._guard = ConnectionGuard(self.port, "the control port", grace=timeouts.unproven)
        self._service.guard = self._guard
        self._guard.start()

    async def _listen(self, bind: str, port: int) -> tuple[grpc.aio.Server, int]:
        server, bound = listen(self._service, bind, port)
        await server.start()
        return server, bound

    def serve(self, host: Host) -> None:
        """Answer calls with `host` from now on."""
        self._service.host = host

    def linked(self) -> int:
        """How many other shards are linked to the coordinator here."""
        return len(self._service.links)

    def close(self) -> None:
        """End all calls."""
        self._guard.close()
        call(self._stop(), 5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _stop(self) -> None:
        for link in self._service.links:
            link.end()
        await self._server.stop(0.5)
