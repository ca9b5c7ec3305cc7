"""The control service of a server: joining, heartbeats, the coordinator's links, and what the operator asks (O8)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from backstay_rpc.control_pb2 import (
    Commit,
    CoordinatorMessage,
    Done,
    EvaluatedReply,
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    NormRequest,
    Peer,
    ProgressReply,
    ProgressRequest,
    Reject,
    Rollback,
    Save,
    ShardMessage,
)
from backstay_rpc.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from .._coordination import Message
from ._agreement import Agreement
from ._auth import SERVER_OPTIONS, TokenInterceptor
from ._driving import Driving
from ._sinks import pack

__all__ = ["ControlServer", "Host", "Peers"]

_THREADS = 32
_SECOND_LOOK_SECONDS = 0.1


class Host(Protocol):
    """The server that the service speaks for. Thread-safe."""

    shard: int
    incarnation: int

    @property
    def agreement(self) -> Agreement: ...
    @property
    def driving(self) -> Driving | None:
        """The coordinator; None on other shards than 0."""

    def not_ready(self) -> str:
        """Why nobody can join yet; empty when they can."""

    def joined(self, peer: Peer) -> JoinReply: ...
    def beat(self, request: HeartbeatRequest) -> HeartbeatReply: ...
    def left(self, peer: Peer) -> None: ...
    def evaluated(self, request: EvaluatedRequest) -> bool: ...
    def progress(self, request: ProgressRequest) -> ProgressReply: ...
    def asks(self) -> bool:
        """Whether it waits for the operator's word on who serves: what was said long ago must not be taken for it."""

    def superseded(self, by: int) -> None:
        """Another shard knows a newer incarnation of this server."""

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Refuse older incarnations from now on, on every channel."""


class Peers:
    """The newest incarnation of every pod that this server heard of. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}

    def see(self, role: str, index: int, incarnation: int) -> tuple[int, bool]:
        """The newest incarnation known, this one included; and whether it is news."""
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


class _RemoteSink:
    """A shard at the other end of a `Coordinate` stream."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[CoordinatorMessage | None] = queue.SimpleQueue()

    def _put(self, message: Message) -> None:
        self._queue.put(pack(message))

    def on_commit(self, commit: Commit) -> None:
        self._put(commit)

    def on_reject(self, reject: Reject) -> None:
        self._put(reject)

    def on_norm_request(self, request: NormRequest) -> None:
        self._put(request)

    def on_save(self, save: Save) -> None:
        self._put(save)

    def on_rollback(self, rollback: Rollback) -> None:
        self._put(rollback)

    def on_done(self, done: Done) -> None:
        self._put(done)

    def end(self) -> None:
        self._queue.put(None)

    def messages(self) -> Iterator[CoordinatorMessage]:
        while (message := self._queue.get()) is not None:
            yield message


class _Service(ControlServicer):
    def __init__(self, host: Host, peers: Peers) -> None:
        self._host = host
        self._peers = peers
        self.links: dict[_RemoteSink, int] = {}  # and their shards
        self.links_lock = threading.Lock()

    def become(self, host: Host) -> None:
        self._host = host

    # ---- Checks ----

    def _check(self, context: Any, shard: int, expected: int) -> None:
        host = self._host
        if shard != host.shard:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is shard {host.shard}, not shard {shard}")
        if expected and expected != host.incarnation:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"shard {shard} has incarnation {host.incarnation}, not {expected}: join again",
            )

    def _see(self, context: Any, peer: Peer) -> None:
        newest, news = self._peers.see(peer.role, peer.index, peer.incarnation)
        name = f"{peer.role}-{peer.index}"
        if newest > peer.incarnation:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} of incarnation {peer.incarnation} was replaced by incarnation {newest}: it must stop",
            )
        if news and peer.incarnation > 0:
            self._host.fence({name: newest})

    # ---- Methods ----

    def Join(self, request: JoinRequest, context: Any) -> JoinReply:  # noqa: N802
        host = self._host
        self._check(context, request.shard, request.expected_incarnation)
        difference = host.agreement.difference(
            request.leaves, request.settings, f"{request.peer.role} {request.peer.index}", f"shard {host.shard}"
        )
        if difference:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, difference)
        why = host.not_ready()
        if why:
            # Before the peer is looked at: who does not serve has no say in who was replaced. A standby that is being
            # promoted may find its own Service leading to itself, and the next standby may have found it first.
            context.abort(grpc.StatusCode.UNAVAILABLE, why)
        self._see(context, request.peer)
        if host.driving is not None and request.peer.role == "worker":
            host.driving.told(request.term, request.version)
        return host.joined(request.peer)

    def Heartbeat(self, request: HeartbeatRequest, context: Any) -> HeartbeatReply:  # noqa: N802
        self._check(context, request.shard, request.expected_incarnation)
        self._see(context, request.peer)
        reply = self._host.beat(request)
        for name, newest in self._peers.known().items():
            reply.incarnations[name] = newest
        return reply

    def Evaluated(self, request: EvaluatedRequest, context: Any) -> EvaluatedReply:  # noqa: N802
        self._check(context, 0, 0)
        self._see(context, request.peer)
        return EvaluatedReply(done=self._host.evaluated(request))

    def Leave(self, request: LeaveRequest, context: Any) -> LeaveReply:  # noqa: N802
        self._see(context, request.peer)
        self._host.left(request.peer)
        return LeaveReply()

    def Progress(self, request: ProgressRequest, context: Any) -> ProgressReply:  # noqa: N802
        self._check(context, request.shard, request.expected_incarnation)
        if self._host.asks():
            # A server that was stopped or cut off finds calls of before, and that they were given up, both at once.
            time.sleep(_SECOND_LOOK_SECONDS)
            left = context.time_remaining()
            if not context.is_active() or (left is not None and left <= 0):
                context.abort(grpc.StatusCode.CANCELLED, "this was said too long ago")
        news = {}
        for name, incarnation in request.incarnations.items():
            role, _, index = name.rpartition("-")
            if index.isdigit() and self._peers.see(role, int(index), incarnation)[1]:
                news[name] = incarnation
        if news:
            self._host.fence(news)
        return self._host.progress(request)

    def Coordinate(  # noqa: N802
        self, request_iterator: Iterator[ShardMessage], context: Any
    ) -> Iterator[CoordinatorMessage]:
        driving = self._host.driving
        if driving is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the coordinator is on shard 0")
            return
        first, second = next(request_iterator, None), next(request_iterator, None)
        if first is None or second is None or not first.HasField("hello") or not second.HasField("position"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link begins with a hello and a position")
            return
        peer, position = first.hello, second.position
        if peer.role != "parameter-server" or peer.index == self._host.shard:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{peer.role} {peer.index} is no other shard")
        here = f"{peer.role} {self._host.shard}"
        difference = self._host.agreement.difference(
            position.leaves, position.settings, f"{peer.role} {peer.index}", here
        )
        if difference:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, difference)
        self._see(context, peer)
        if position.coordinator > self._host.incarnation:
            self._host.superseded(position.coordinator)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"incarnation {position.coordinator} leads now")
        context.send_initial_metadata(())  # the shard waits for it: there may be nothing to say yet
        sink = _RemoteSink()
        with self.links_lock:
            for older, shard in self.links.items():
                if shard == peer.index:
                    older.end()
            self.links[sink] = peer.index
        context.add_callback(sink.end)
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
        reader = threading.Thread(
            target=self._listen, args=(driving, peer.index, request_iterator, sink), name="backstay-link", daemon=True
        )
        reader.start()
        try:
            yield from sink.messages()
        finally:
            driving.detach(peer.index, sink)
            with self.links_lock:
                self.links.pop(sink, None)

    @staticmethod
    def _listen(driving: Driving, shard: int, messages: Iterator[ShardMessage], sink: _RemoteSink) -> None:
        try:
            for message in messages:
                driving.hear(shard, sink, message)
        except grpc.RpcError:
            pass  # the link broke: its shard links again
        finally:
            sink.end()


class ControlServer:
    """Listens at once, until `close`."""

    def __init__(self, host: Host, peers: Peers, *, bind: str, port: int, token: str) -> None:
        """
        Args:
            host: who answers.
            peers: the incarnations known here.
            bind: an address.
            port: 0 for any.
            token: the job's.

        Raises:
            OSError: the port cannot be bound; the message names it.
        """
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="backstay-control")
        self._service = _Service(host, peers)
        self._server = grpc.server(self._pool, interceptors=[TokenInterceptor(token)], options=SERVER_OPTIONS)
        add: Callable[[Any, Any], None] = add_ControlServicer_to_server
        add(self._service, self._server)
        address = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise OSError(
                f"the control service cannot listen on {bind} port {port}: it is taken, or it is not this pod's address"
            )
        self._server.start()

    def serve(self, host: Host) -> None:
        """Speak for `host` from now on."""
        self._service.become(host)

    def linked(self) -> int:
        """How many other shards are linked to the coordinator here."""
        with self._service.links_lock:
            return len(self._service.links)

    def close(self) -> None:
        """End all calls."""
        with self._service.links_lock:
            for link in self._service.links:
                link.end()
        self._server.stop(grace=0.5).wait(2.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
