"""The control service of a server for joins, heartbeats, and calls of the operator (O8).

The service runs on the process's event loop for gRPC, so an open call never holds a thread. A call is accepted or
refused by its headers, before its messages are read (O7). The host's work for a call may take a lock, so it runs in a
few threads. Only calls that are authenticated and complete get there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from backstay_rpc.channels import REFUSAL, listen
from backstay_rpc.control_pb2 import (
    DESCRIPTOR,
    CoordinateReply,
    CoordinateRequest,
    EvaluatedReply,
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    MeetReply,
    MeetRequest,
    Peer,
    PingReply,
    PingRequest,
    ProgressReply,
    ProgressRequest,
)
from backstay_rpc.credentials import NOT_AUTHENTICATED, Credentials
from backstay_rpc.loop import call, rpc_loop
from backstay_rpc.refusals import RefusalCode
from backstay_spec import contract

from ..._coordination import Coordinator
from ..._process import ConnectionGuard, peer_address
from ..._threaded import ThreadedCoordinator
from ..._timeouts import Timeouts
from .._streams import Refusal
from ._agreement import Agreement
from ._peers import Peers, cannot_link, replaced

if TYPE_CHECKING:
    from ..._process import Environment

__all__ = ["ControlServer", "Host"]

_LOG = logging.getLogger(__name__)

_THREADS: Final = 8
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
    def threaded(self) -> ThreadedCoordinator | None:
        """The coordinator; None on other shards than 0."""

    @property
    def data_address(self) -> str:
        """``host:port`` of this server's data streams."""

    def not_ready(self) -> str:
        """Returns why pods cannot join yet; empty when they can."""

    def joined(self, peer: Peer) -> JoinReply: ...
    def other_frozen(self, digests: Sequence[str], source: str, peer: str) -> str:
        """Returns the reason why a pod with these frozen arrays, read from `source`, cannot train. It is empty if it
        can."""

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply: ...
    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        """A peer leaves. `trained` is True if `train` returns in it. Returns False if it is too late to be counted,
        because this server ends."""

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """A peer that leaves sends its last spans: a serialized `Spans`."""

    def evaluated(self, request: EvaluatedRequest) -> str:
        """An evaluation begins or was made. Returns why the caller must not begin, or an empty text if it may."""

    def progress(self, request: ProgressRequest) -> ProgressReply: ...
    def awaits_operator(self) -> bool:
        """Returns whether it waits for the operator's report of the active server; older reports must not count
        then."""

    def superseded(self, by: int) -> None:
        """Another shard reported a newer incarnation of this server."""

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Refuse older incarnations from now on, on every channel."""


class ControlService(grpc.GenericRpcHandler):
    """Chooses the handler of a call by its headers."""

    def __init__(
        self,
        host: Host,
        peers: Peers,
        credentials: Credentials,
        pool: ThreadPoolExecutor,
        guard: ConnectionGuard,
        timeouts: Timeouts,
    ) -> None:
        self.host = host
        self._guard = guard
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
            "Coordinate": (CoordinateRequest, self._coordinate),
            "Ping": (PingRequest, self._ping),
            "Meet": (MeetRequest, self._meet),
        }
        # All are stream methods: only then a handler of ours reads the message, and can bound how long that takes.
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            f"/{_SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(self._one(kind, answer))
            for name, (kind, answer) in unary.items()
        }
        self._refuse: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._not_authenticated
        )

    def service(self, handler_call_details: Any) -> Any:
        """Called with the headers of each call. Returns None if there is no such method."""
        if not self._credentials.admits_call(handler_call_details.invocation_metadata or ()):
            return self._refuse
        return self._handlers.get(handler_call_details.method)

    async def _not_authenticated(self, _: Any, context: Any) -> None:
        self._guard.refuse(context.peer())
        await context.abort(grpc.StatusCode[RefusalCode.NOT_AUTHENTICATED], NOT_AUTHENTICATED, _MARK)

    # ---- How a call is served ----

    def _guarded(self, serve: Callable[[Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
        async def run(_: Any, context: Any) -> None:
            self._guard.prove(context.peer())
            try:
                await serve(context)
            except Refusal as refusal:
                await context.abort(grpc.StatusCode[refusal.code], refusal.message, _MARK)

        return run

    def _one(
        self, kind: type[_M], answer: Callable[[_M, Any], Awaitable[ProtoMessage]]
    ) -> Callable[[Any, Any], Awaitable[None]]:
        """Returns a method with one message each way."""

        async def serve(context: Any) -> None:
            request = await self._read(context, kind)
            if request is None:
                raise Refusal(RefusalCode.BROKEN, "the call ended before its message")
            reply = await answer(request, context)
            await context.write(reply.SerializeToString())

        return self._guarded(serve)

    async def _read(self, context: Any, kind: type[_M]) -> _M | None:
        """Returns the next message of a call, or None if its peer sends no more."""
        try:
            data = await asyncio.wait_for(context.read(), self._timeouts.message)
        except TimeoutError:
            self._guard.warnings.add(peer_address(context.peer())[0], "a call ended: its message did not arrive")
            raise Refusal(
                RefusalCode.LATE,
                f"no message arrived within {self._timeouts.message:.0f} s after the headers of the call",
            ) from None
        return None if data is grpc.aio.EOF else _parsed(kind, data)

    async def _do(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run `work` in a thread, because it may take a lock."""
        return await rpc_loop().run_in_executor(self._pool, work, *arguments)

    # ---- Checks ----

    def _check(self, shard: int, expected: int) -> None:
        host = self.host
        if shard != host.shard:
            raise Refusal(RefusalCode.MOVED, f"this is shard {host.shard}, not shard {shard}")
        if expected and expected != host.incarnation:
            raise Refusal(
                RefusalCode.MOVED,
                f"shard {shard} has incarnation {host.incarnation}, not {expected}: join again",
            )

    def _claim(self, peer: Peer) -> None:
        """The handshake of this pod is complete: it replaces older incarnations of its slot."""
        if peer.incarnation > contract.MAX_INCARNATION:
            raise Refusal(
                RefusalCode.INVALID,
                f"the incarnation of {peer.role} {peer.index} is {peer.incarnation}: must be at most "
                f"{contract.MAX_INCARNATION}",
            )
        newest, _ = self._peers.claim(peer.role, peer.index, peer.incarnation)
        if why := replaced(peer, newest):
            raise Refusal(RefusalCode.REPLACED, why)
        # Each time: a promoted standby has the number from the operator, and its data port does not have it yet.
        self.host.fence({f"{peer.role}-{peer.index}": newest})

    def _agree(self, request: JoinRequest | CoordinateRequest, here: str) -> None:
        peer = request.peer
        there = f"{peer.role} {peer.index}"
        difference = self.host.agreement.difference(request.leaves, request.settings, there, here)
        if difference:
            raise Refusal(RefusalCode.INVALID, difference)

    # ---- Methods ----

    async def _join(self, request: JoinRequest, _: Any) -> JoinReply:
        return await self._do(self._joined, request)

    def _joined(self, request: JoinRequest) -> JoinReply:
        host = self.host
        self._check(request.shard, request.expected_incarnation)
        self._agree(request, f"shard {host.shard}")
        why = host.not_ready()
        if why:
            # Before the peer's incarnation is recorded: a standby does not decide which pods are replaced. During its
            # promotion, its Service may already lead to it, and the next standby may call it first.
            raise Refusal(RefusalCode.NOT_READY, why)
        self._claim(request.peer)
        there = f"{request.peer.role} {request.peer.index}"
        if request.frozen and (why := host.other_frozen(request.frozen, request.frozen_from, there)):
            raise Refusal(RefusalCode.INVALID, why)
        if host.threaded is not None and request.peer.role == "worker":
            host.threaded.do(Coordinator.worker_at, request.term, request.version)
        return host.joined(request.peer)

    async def _heartbeat(self, request: HeartbeatRequest, _: Any) -> HeartbeatReply:
        return await self._do(self._beat, request)

    def _beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self._check(request.shard, request.expected_incarnation)
        self._peers.check(request.peer)
        reply = self.host.beat(request)
        for name, newest in self._peers.known().items():
            reply.incarnations[name] = newest
        return reply

    async def _evaluated(self, request: EvaluatedRequest, _: Any) -> EvaluatedReply:
        def report() -> EvaluatedReply:
            self._check(0, 0)
            self._peers.check(request.peer)
            return EvaluatedReply(give_up=self.host.evaluated(request))

        return await self._do(report)

    async def _leave(self, request: LeaveRequest, _: Any) -> LeaveReply:
        def leave() -> LeaveReply:
            self._peers.check(request.peer)
            if request.spans:
                self.host.add_spans(request.peer, request.spans)
            if not self.host.left(request.peer, trained=request.trained):
                raise Refusal(RefusalCode.NOT_READY, "this server is shutting down")
            return LeaveReply()

        return await self._do(leave)

    async def _coordinate(self, request: CoordinateRequest, _: Any) -> CoordinateReply:
        return await self._do(self._coordinates, request)

    def _coordinates(self, request: CoordinateRequest) -> CoordinateReply:
        host, peer = self.host, request.peer
        if host.threaded is None:
            raise Refusal(RefusalCode.MOVED, "shard 0's server has the coordinator")
        if why := cannot_link(peer, host.threaded.shards):
            raise Refusal(RefusalCode.INVALID, why)
        self._agree(request, f"{peer.role} {host.shard}")
        self._claim(peer)
        if request.coordinator > host.incarnation:
            host.superseded(request.coordinator)
            raise Refusal(RefusalCode.MOVED, f"incarnation {request.coordinator} coordinates now")
        return CoordinateReply(
            incarnation=host.incarnation, data_address=host.data_address, link=self._peers.allow_link()
        )

    async def _progress(self, request: ProgressRequest, _: Any) -> ProgressReply:
        self._check(request.shard, request.expected_incarnation)
        if self.host.awaits_operator():
            # A server that was paused or cut off finds old calls and their cancellations at the same time. The
            # cancellation ends this coroutine here.
            await asyncio.sleep(self._timeouts.second_look)
        return await self._do(self._reported_progress, request)

    async def _ping(self, _: PingRequest, __: Any) -> PingReply:
        return PingReply()

    async def _meet(self, request: MeetRequest, _: Any) -> MeetReply:
        def meet() -> MeetReply:
            self._check(0, 0)
            return MeetReply(address=self._peers.meet(request.peer, request.address))

        return await self._do(meet)

    def _reported_progress(self, request: ProgressRequest) -> ProgressReply:
        news = {}
        for name, incarnation in request.incarnations.items():
            role, _, index = name.rpartition("-")
            valid = index.isdigit() and incarnation <= contract.MAX_INCARNATION
            if valid and self._peers.claim(role, int(index), incarnation)[1]:
                news[name] = incarnation
        if news:
            self.host.fence(news)
        return self.host.progress(request)


def _parsed(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Refusal(RefusalCode.BROKEN, f"{len(data)} bytes are not a {kind.DESCRIPTOR.name}") from None


class ControlServer:
    """Serves from its creation until `close`."""

    @classmethod
    def of(cls, environment: Environment, host: Host, peers: Peers) -> ControlServer:
        """Returns the control service of a pod. Raises OSError, as the constructor does."""
        return cls(
            host,
            peers,
            bind=environment.bind,
            port=environment.port,
            credentials=environment.credentials,
            timeouts=environment.timeouts,
        )

    def __init__(
        self,
        host: Host,
        peers: Peers,
        *,
        bind: str,
        port: int,
        credentials: Credentials,
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            host: answers the calls.
            peers: the incarnations known here.
            bind: the address to listen on.
            port: 0 for any.
            credentials: the credentials of this pod.
            timeouts: None for the usual ones.

        Raises:
            OSError: the port cannot be bound; the message names it.
        """
        timeouts = timeouts or Timeouts()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="backstay-control")
        self._server, self.port = call(self._bind(bind, port), timeouts.call)
        self._guard = ConnectionGuard(self.port, "the control port", grace=timeouts.unproven)
        self._service = ControlService(host, peers, credentials, self._pool, self._guard, timeouts)
        self._server.add_generic_rpc_handlers((self._service,))
        call(self._server.start(), timeouts.call)
        self._guard.start()

    @staticmethod
    async def _bind(bind: str, port: int) -> tuple[grpc.aio.Server, int]:
        return listen(bind, port)  # in the event loop of the calls

    def serve(self, host: Host) -> None:
        """Answer calls with `host` from now on."""
        self._service.host = host

    def close(self) -> None:
        """End all calls."""
        self._guard.close()
        call(self._stop(), 5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _stop(self) -> None:
        await self._server.stop(0.5)
