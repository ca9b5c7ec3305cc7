"""O7, T8: peers of a server that have no token, or have a token and break the rules of HTTP/2.

The peers are sockets, because the clients of gRPC keep the rules. Training continues meanwhile. It consists of a link
and heartbeats here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from between import LONG, until

from backstay._coordination import Coordinator, CoordinatorState, Rules, ServerPosition
from backstay._process._guard import (
    LATE_SECONDS,
    MAX_LATE_LOOKS,
    SCAN_SECONDS,
    ConnectionGuard,
    Sockets,
    Warnings,
)
from backstay._process._sockets import peer_address, socket_address
from backstay._threaded import ThreadedCoordinator
from backstay._timeouts import Timeouts
from backstay._transport import Agreement, ClientStream, ControlClient, Link, Listener
from backstay.errors import PeerLost
from backstay_rpc import bearer
from backstay_rpc.control_pb2 import (
    TRAINING,
    Applied,
    Commit,
    Frame,
    GradientId,
    GradientInfo,
    HeartbeatReply,
    Hello,
    Leaf,
    Peer,
    Pull,
    Rollback,
    Staged,
)
from backstay_rpc.credentials import Credentials
from backstay_rpc.limits import (
    CONTROL_STRANGERS,
    MAX_CALLS_PER_CONNECTION,
    MAX_MESSAGE_BYTES,
    MAX_REFUSED,
    MAX_UNPROVEN_BYTES,
)

from .linked import Coordinating

# HTTP/2 by hand: RFC 9113, RFC 7541.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _length(size: int) -> bytes:
    """Returns an integer with a prefix of 7 bits."""
    if size < 127:
        return bytes((size,))
    out, size = bytearray((127,)), size - 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes((*out, size))


def block(headers: dict[str, str]) -> bytes:
    """Literal header fields without indexing, without Huffman codes."""
    out = b""
    for name, value in headers.items():
        out += b"\0" + _length(len(name)) + name.encode() + _length(len(value)) + value.encode()
    return out


def grpc_headers(method: str, token: str | None = None) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "caller",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token is not None:
        fields["authorization"] = f"Bearer {token}"
    return block(fields)


class Connection:
    """One TCP connection. `silent` ones do not even begin to speak HTTP/2."""

    def __init__(self, port: int, *, silent: bool = False, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LONG, source_address=(source, 0))
        self._buffer = b""
        if not silent:
            self.send(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))

    def send(self, data: bytes) -> bool:
        """Returns False when the peer has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def call(self, stream: int, method: str, token: str | None = None) -> None:
        """The headers of a call, and nothing more."""
        self.send(frame(HEADERS, END_HEADERS, stream, grpc_headers(method, token)))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Returns the received frames, at least one. The list is empty when the peer has closed the connection."""
        self.socket.settimeout(LONG)
        found: list[tuple[int, int, int, bytes]] = []
        while not found:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return []
            if not data:
                return []
            self._buffer += data
            while len(self._buffer) >= 9:
                size = int.from_bytes(self._buffer[:3], "big")
                if len(self._buffer) < 9 + size:
                    break
                kind, flags = self._buffer[3], self._buffer[4]
                stream = int.from_bytes(self._buffer[5:9], "big")
                found.append((kind, flags, stream, self._buffer[9 : 9 + size]))
                self._buffer = self._buffer[9 + size :]
        return found

    def answered(self, streams: set[int]) -> set[int]:
        """Read until all of these calls have ended; those that had, when the connection was closed before."""
        over: set[int] = set()
        while not streams <= over:
            came = self.frames()
            if not came:
                return over
            for kind, flags, stream, _ in came:
                if kind == PING and not flags & ACK:
                    self.send(frame(PING, ACK, 0, bytes(8)))
                if (kind == HEADERS and flags & END_STREAM) or kind == RST_STREAM:
                    over.add(stream)
        return over

    def closed(self) -> bool:
        """Read until the peer closes the connection. Raises `TimeoutError` when it does not."""
        while self.frames():
            pass
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


TOKEN = "0123456789abcdef"
AGREEMENT = Agreement((Leaf(path="w", dtype="float32"),), {"steps": "10"})
HEARTBEAT = "/backstay.v1.Control/Heartbeat"
JOIN = "/backstay.v1.Control/Join"
SECONDS = LONG
MIB = 1 << 20
ANSWERING = 8


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Training:
    """A job of two shards without parameters, in which each update needs the coordinator's link to shard 1, both
    ways."""

    def __init__(self, timeouts: Timeouts) -> None:
        rules = Rules(mode="Sync", shards=2, steps=10**9)
        quiet = SimpleNamespace(**dict.fromkeys(("staged", "counted", "updated", "finished"), lambda *_: None))
        self.threaded = ThreadedCoordinator(
            Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), quiet, quiet
        )  # type: ignore[arg-type]
        self.shard, self.incarnation, self.agreement = 0, 1, AGREEMENT
        self.server = Coordinating(self, TOKEN, timeouts=timeouts)
        self.threaded.start()
        self.version = 0
        self.threaded.attach(self._sink(0), ServerPosition(0, 0, 0))
        peer = Peer(role="parameter-server", index=1)
        self.link = Link(f"127.0.0.1:{self.server.port}", Credentials(TOKEN), peer, AGREEMENT, "Sync")
        self.link.start(self._sink(1))  # type: ignore[arg-type]
        self.client = ControlClient([f"127.0.0.1:{self.server.port}"], Credentials(TOKEN), Peer(role="worker"))

    def beat(self, _: object) -> HeartbeatReply:
        return HeartbeatReply()

    def fence(self, _: object) -> None: ...

    def _sink(self, shard: int) -> object:
        def deliver(message: object) -> None:
            match message:
                case Rollback():
                    if shard == 1:
                        self.link.started(1, 0)
                    self._stage(shard, 0)
                case Commit():
                    if shard == 1:
                        self.version = message.version + 1
                    self._report(shard, Applied(version=message.version + 1))
                    self._stage(shard, message.version + 1)

        return SimpleNamespace(deliver=deliver)

    def _report(self, shard: int, report: Any) -> None:
        if shard == 0:
            self.threaded.report(0, report)
        else:
            self.link.report(report)

    def _stage(self, shard: int, version: int) -> None:
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=version + 1)
        self._report(shard, Staged(id=gradient, info=GradientInfo(finite=True)))

    def continues(self) -> None:
        """Updates are made from now on, and heartbeats are answered."""
        start = self.version
        until(lambda: self.version > start + 10)
        until(self._answered)

    def _answered(self) -> bool:
        """Beat once. A worker repeats what is lost: on a busy machine, a short timeout may end its call too."""
        try:
            self.client.beat(0, 1, TRAINING, 0.0)
        except PeerLost:
            return False
        return True

    def close(self) -> None:
        self.client.close()
        self.link.close()
        self.threaded.close()
        self.server.close()


@pytest.fixture
def callers() -> Iterator[list[Connection]]:
    """Connections that are closed in the end."""
    made: list[Connection] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def training() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(**timeouts: float) -> Training:
        made.append(Training(Timeouts(**timeouts)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_o7_calls_without_a_token_are_refused_by_their_headers(
    training: Callable[..., Training], callers: list[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    """T8: 40 calls that never send a message hold nothing."""
    job = training(message=3600.0, unproven=3600.0)
    job.continues()
    with caplog.at_level(logging.WARNING):
        for first in range(0, 40, 10):
            callers.append(Connection(job.server.port))
            streams = {2 * number + 1 for number in range(10)}
            for stream in sorted(streams):
                callers[-1].call(stream, HEARTBEAT, None if first % 20 else "another token")
            assert callers[-1].answered(streams) == streams
        job.continues()
    said = [record.getMessage() for record in caplog.records if "without this job's token" in record.getMessage()]
    assert len(said) == 1
    assert "the control port" in said[0]
    assert "127.0.0.1" in said[0]


def test_t8_calls_with_the_token_that_never_send_a_message_hold_no_thread(
    training: Callable[..., Training], callers: list[Connection]
) -> None:
    job = training(message=3600.0)
    job.continues()
    threads = threading.active_count()
    streams = {2 * number + 1 for number in range(40)}
    callers.append(Connection(job.server.port))
    for stream in sorted(streams):
        callers[-1].call(stream, HEARTBEAT, TOKEN)
    job.continues()
    # A few threads answer the complete calls, and start when they are needed.
    assert threading.active_count() <= threads + ANSWERING


def test_t8_a_call_whose_message_does_not_arrive_ends(
    training: Callable[..., Training], callers: list[Connection]
) -> None:
    job = training(message=0.05)
    callers.append(Connection(job.server.port))
    callers[-1].call(1, HEARTBEAT, TOKEN)
    assert callers[-1].answered({1}) == {1}
    # Half a message: its length, and not all of the bytes.
    callers[-1].call(3, HEARTBEAT, TOKEN)
    callers[-1].send(frame(DATA, 0, 3, b"\0" + struct.pack(">I", 100) + b"half"))
    assert callers[-1].answered({3}) == {3}
    job.continues()


@pytest.mark.parametrize("method", [HEARTBEAT, "/backstay.v1.Control/Coordinate", "/backstay.v1.Control/None"])
def test_o7_large_messages_without_a_token_do_not_grow_a_server(
    training: Callable[..., Training], callers: list[Connection], method: str
) -> None:
    """Sends 40 messages of 15 MB without regard to HTTP/2's windows, as far as the server lets them."""
    job = training(unproven=3600.0)
    job.continues()
    before = memory()
    message = b"\0" + struct.pack(">I", 15 * MIB) + bytes(15 * MIB)
    chunk = 16 << 10
    for _ in range(40):
        callers.append(Connection(job.server.port))
        callers[-1].call(1, method)
        callers[-1].socket.settimeout(0.05)
        with contextlib.suppress(OSError):
            for at in range(0, len(message), chunk):
                callers[-1].socket.sendall(frame(DATA, 0, 1, message[at : at + chunk]))
    job.continues()
    assert memory() - before < 300 * MIB  # 600 MiB were sent


def test_o7_a_message_with_the_token_that_is_too_large_is_refused(training: Callable[..., Training]) -> None:
    job = training()
    with grpc.insecure_channel(f"127.0.0.1:{job.server.port}") as channel:
        raw = channel.unary_unary(HEARTBEAT)
        with pytest.raises(grpc.RpcError) as refused:
            raw(bytes(MAX_MESSAGE_BYTES + 1), metadata=bearer(TOKEN), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    job.continues()


def test_t8_an_unauthenticated_caller_that_continues_is_disconnected(
    training: Callable[..., Training], callers: list[Connection]
) -> None:
    job = training(unproven=3600.0)  # not because the connection is without a valid call for long
    callers.append(Connection(job.server.port))
    for number in range(4 * MAX_REFUSED):
        callers[-1].call(2 * number + 1, HEARTBEAT)
    assert callers[-1].closed()
    job.continues()


def test_o7_calls_above_the_limit_of_a_connection_are_refused(
    training: Callable[..., Training], callers: list[Connection]
) -> None:
    """Even with the token, the others stay open, and hold nothing that training needs."""
    job = training(message=3600.0)
    callers.append(Connection(job.server.port))
    streams = [2 * number + 1 for number in range(MAX_CALLS_PER_CONNECTION + 16)]
    for stream in streams:
        callers[-1].call(stream, HEARTBEAT, TOKEN)
    surplus = set(streams[MAX_CALLS_PER_CONNECTION:])
    assert callers[-1].answered(surplus) == surplus
    job.continues()


def test_t6_a_link_ends_when_a_newer_server_has_its_place(training: Callable[..., Training]) -> None:
    """The older server, which was only stopped, learns immediately that it was replaced."""
    job = training()
    job.continues()
    sink = SimpleNamespace(deliver=lambda _: None)
    newer = Peer(role="parameter-server", index=1, incarnation=1)
    link = Link(f"127.0.0.1:{job.server.port}", Credentials(TOKEN), newer, AGREEMENT, "Sync")
    link.start(sink)  # type: ignore[arg-type]
    try:
        until(lambda: job.link.error is not None)
        assert "replaced by incarnation 1" in str(job.link.error)
        until(lambda: len(job.server.links) == 1)
    finally:
        link.close()


def test_t8_idle_connections_are_closed(training: Callable[..., Training], callers: list[Connection]) -> None:
    """300 of them, half of which do not even begin to speak HTTP/2."""
    job = training(unproven=1.0)
    job.continues()
    callers.extend(Connection(job.server.port, silent=number % 2 == 0) for number in range(300))
    job.continues()
    assert all(caller.closed() for caller in callers)
    job.continues()


def test_t8_a_call_whose_headers_never_end_is_closed(
    training: Callable[..., Training], callers: list[Connection]
) -> None:
    """A slow loris begins a call, and keeps HTTP/2 alive, but the headers never end."""
    job = training(unproven=1.0)
    callers.append(Connection(job.server.port))
    headers = grpc_headers(HEARTBEAT)
    callers[-1].send(frame(HEADERS, 0, 1, headers[:20]))
    assert callers[-1].closed()
    callers.append(Connection(job.server.port))
    callers[-1].send(frame(HEADERS, END_HEADERS, 1, headers)[:12])  # not even one frame
    assert callers[-1].closed()
    job.continues()


# ---- The data port ----


class Exchange:
    """A data port whose streams answer each frame with itself, and a worker that uses one."""

    def __init__(self, **timeouts: float) -> None:
        def echo(hello: Hello, stream: object) -> None:
            while (item := stream.read()) is not None:  # type: ignore[attr-defined]
                frame, body = item
                stream.write(frame, *(() if body is None else (body,)))  # type: ignore[attr-defined]

        self.listener = Listener("127.0.0.1", 0, Credentials(TOKEN), echo, Timeouts(**timeouts))  # type: ignore[arg-type]
        self.port = self.listener.bound
        self._stream = ClientStream(f"127.0.0.1:{self.port}", Hello(peer=Peer(role="worker")), Credentials(TOKEN))

    def continues(self) -> None:
        body = np.arange(100_000, dtype=np.uint8)
        self._stream.write(Frame(pull=Pull(min_version=7)), body)
        frame, got = self._stream.read()
        assert frame.pull.min_version == 7
        assert got is not None
        np.testing.assert_array_equal(got, body)

    def close(self) -> None:
        self._stream.close()
        self.listener.close()


@pytest.fixture
def exchange() -> Iterator[Callable[..., Exchange]]:
    made: list[Exchange] = []

    def make(**timeouts: float) -> Exchange:
        made.append(Exchange(**timeouts))
        return made[-1]

    yield make
    for each in made:
        each.close()


WRONG = struct.pack("<8sHI", b"backsty1", 5, 0) + b"wrong"


def test_o7_data_streams_without_a_token_are_refused_by_their_first_bytes(
    exchange: Callable[..., Exchange], callers: list[Connection]
) -> None:
    data = exchange(unproven=3600.0)
    data.continues()
    for _ in range(40):
        caller = Connection(data.port, silent=True)
        callers.append(caller)
        caller.send(WRONG)
        assert b"does not carry this job's token" in caller.socket.recv(200)
    data.continues()


@pytest.mark.parametrize("opening", [WRONG, b"x" * 14, struct.pack("<8sHI", b"backsty1", 5, 1 << 31) + b"wrong"])
def test_o7_bytes_without_a_token_do_not_grow_the_data_port(
    exchange: Callable[..., Exchange], callers: list[Connection], opening: bytes
) -> None:
    data = exchange(unproven=3600.0)
    data.continues()
    before, sent = memory(), 0
    caller = Connection(data.port, silent=True)
    callers.append(caller)
    caller.send(opening)
    while sent < 256 * MIB and caller.send(bytes(MIB)):
        sent += MIB
    assert sent < 256 * MIB
    assert memory() - before < 64 * MIB
    data.continues()


def test_t8_a_caller_that_sends_a_byte_now_and_then_is_closed(
    exchange: Callable[..., Exchange], callers: list[Connection]
) -> None:
    """O7: the time of the first bytes is bounded, and not the time between two of them."""
    data = exchange(unproven=0.3)
    caller = Connection(data.port, silent=True)
    callers.append(caller)
    until(lambda: not caller.send(b"b"))
    data.continues()


def test_t8_a_refused_caller_that_sends_a_byte_now_and_then_is_closed(
    exchange: Callable[..., Exchange], callers: list[Connection]
) -> None:
    """O7: what it sends after the refusal is received for a moment only."""
    data = exchange(unproven=3600.0, refused=0.2)
    caller = Connection(data.port, silent=True)
    callers.append(caller)
    caller.send(WRONG)
    until(lambda: not caller.send(b"b"))
    data.continues()


def test_t8_unauthenticated_callers_hold_no_thread(
    exchange: Callable[..., Exchange], callers: list[Connection]
) -> None:
    """O7: a thousand strangers from many addresses would keep the last threads of a server."""
    data = exchange(unproven=3600.0)
    data.continues()
    threads = threading.active_count()
    for number in range(300):
        callers.append(Connection(data.port, silent=True, source=f"127.9.0.{1 + number % 250}"))
        callers[-1].send(WRONG[: number % len(WRONG)])
    until(lambda: len(data.listener.callers) == len(callers))
    assert threading.active_count() < threads + 10  # threads of other tests may end or begin
    data.continues()


def test_t8_a_process_that_can_start_no_thread_serves_the_streams_that_it_has(
    exchange: Callable[..., Exchange], callers: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = exchange(unproven=3600.0)
    data.continues()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        stream = ClientStream(f"127.0.0.1:{data.port}", Hello(peer=Peer(role="worker")), Credentials(TOKEN))
        with pytest.raises(PeerLost):
            stream.read()
        stream.close()
    data.continues()


def test_t8_the_oldest_of_too_many_silent_callers_is_closed(
    exchange: Callable[..., Exchange], callers: list[Connection]
) -> None:
    data = exchange(unproven=3600.0)
    callers.extend(Connection(data.port, silent=True) for _ in range(300))  # at most 256 of one host stay
    data.continues()
    assert all(caller.closed() for caller in callers[:20])
    data.continues()


def test_t8_idle_connections_to_the_data_port_are_closed(
    exchange: Callable[..., Exchange], callers: list[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    data = exchange(unproven=1.0)
    data.continues()
    with caplog.at_level(logging.WARNING):
        callers.extend(Connection(data.port, silent=number % 2 == 0) for number in range(300))
        data.continues()
        assert all(caller.closed() for caller in callers)
        data.continues()
    assert any("the data port" in record.getMessage() for record in caplog.records)


def test_t8_connections_that_use_up_all_descriptors_are_closed(callers: list[Connection]) -> None:
    """O7: the server can open no file then, and still looks at its sockets."""
    limit = 128
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("full_server.py")), TOKEN, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        # They begin HTTP/2, as gRPC itself closes those that do not. The last ones wait to be accepted.
        callers.extend(Connection(port) for _ in range(limit + 20))
        assert all(caller.closed() for caller in callers)
        stream = ClientStream(f"127.0.0.1:{port}", Hello(peer=Peer(role="worker")), Credentials(TOKEN))
        stream.write(Frame(pull=Pull()))
        stream.read()
        stream.close()
    finally:
        process.kill()
        process.communicate()


# ---- The guard itself ----


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        yield listening


def test_a_connection_with_a_valid_call_is_never_closed(listener: socket.socket) -> None:
    """T8: even when the guard has looked away for long, as a process that was stopped does."""
    port = listener.getsockname()[1]
    sockets, guard = Sockets(), ConnectionGuard(port, "the port", grace=2 * SCAN_SECONDS)
    good, bad = Connection(port, silent=True), Connection(port, silent=True)
    ends = [listener.accept()[0] for _ in range(2)]
    sockets.scan([guard])
    guard.prove(f"ipv4:127.0.0.1:{good.socket.getsockname()[1]}")
    sockets.scan([guard])
    assert bad.closed()
    for _ in range(10):
        sockets.scan([guard])
    ends[0].sendall(b"x")
    assert good.socket.recv(1) == b"x"
    # The address of a connection that ended proves nothing for the next connection from there.
    good.close()
    ends[0].close()
    sockets.scan([guard])
    assert not guard._proven
    assert not guard._names
    for each in (bad, *ends):
        each.close()


def test_o7_a_connection_that_is_seen_twice_is_still_closed(listener: socket.socket) -> None:
    """Another thread that looks at the sockets holds duplicates of their descriptors for a moment."""
    port = listener.getsockname()[1]
    sockets, guard = Sockets(), ConnectionGuard(port, "the port", grace=5 * SCAN_SECONDS)
    bad = Connection(port, silent=True)
    end = listener.accept()[0]
    sockets.scan([guard])
    with end.dup():
        sockets.scan([guard])
    for _ in range(5):
        sockets.scan([guard])
    assert bad.closed()
    for each in (bad, end):
        each.close()


def test_o7_what_a_peer_has_sent_counts_once_this_process_had_time_to_look(listener: socket.socket) -> None:
    """T8: on a starved server gRPC reads a gradient before Python sees its call. A caller is still closed."""
    port, now = listener.getsockname()[1], 0.0
    sockets, guard = Sockets(clock=lambda: now), ConnectionGuard(port, "the port", grace=3600.0)
    good, bad = Connection(port, silent=True), Connection(port, silent=True)
    ends = [listener.accept()[0] for _ in range(2)]
    for connection, end in zip((good, bad), ends, strict=True):
        sender = threading.Thread(target=connection.socket.sendall, args=(bytes(MAX_UNPROVEN_BYTES + 1),))
        sender.start()
        assert len(end.recv(MAX_UNPROVEN_BYTES + 1, socket.MSG_WAITALL)) == MAX_UNPROVEN_BYTES + 1
        sender.join()
    for _ in range(MAX_LATE_LOOKS):
        now += LATE_SECONDS
        sockets.scan([guard])
    guard.prove(f"ipv4:127.0.0.1:{good.socket.getsockname()[1]}")
    now += LATE_SECONDS
    sockets.scan([guard])
    assert bad.closed()
    ends[0].sendall(b"x")
    assert good.socket.recv(1) == b"x"
    for each in (good, bad, *ends):
        each.close()


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:127.0.0.1:4242", ("127.0.0.1", 4242)),
        ("ipv6:%5B::1%5D:4242", ("::1", 4242, 0, 0)),
        ("ipv6:[::ffff:10.0.0.7]:4242", ("::ffff:10.0.0.7", 4242, 0, 0)),
        ("ipv6:%5Bfe80::1%252%5D:4242", ("fe80::1%eth0", 4242, 0, 2)),
    ],
)
def test_a_peer_of_grpc_is_the_address_that_the_socket_has(peer: str, name: tuple[Any, ...]) -> None:
    """A link-local address has the number of its interface in gRPC, and the name of it in Python."""
    assert peer_address(peer) == socket_address(name)


def test_hosts_with_few_connections_do_not_pay_for_one_with_many(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    sockets, guard = Sockets(), ConnectionGuard(port, "the port", grace=3600.0)
    many = [Connection(port, silent=True) for _ in range(CONTROL_STRANGERS.of_host)]
    ends = [listener.accept()[0] for _ in range(CONTROL_STRANGERS.of_host)]
    for _ in range(100):
        sockets.scan([guard])
    ends[0].sendall(b"x")
    assert many[0].socket.recv(1) == b"x"  # as many as are allowed
    many.append(Connection(port, silent=True))
    ends.append(listener.accept()[0])
    sockets.scan([guard])
    assert all(each.closed() for each in many[:-1])
    for each in (*many, *ends):
        each.close()


def test_warnings_are_logged_immediately_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warnings = Warnings("the port", clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            warnings.add("10.0.0.7", "it was rude")
            now += 0.5
        warnings.add("10.0.0.8", "it was rude")
        now += 60
        warnings.add("10.0.0.7", "it was rude")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the port: it was rude, from 10.0.0.7 (1 times)",
        "the port: it was rude, from 10.0.0.8 (1 times)",
        "the port: it was rude, from 10.0.0.7 (100 times)",
    ]


def test_warnings_about_many_hosts_take_a_bounded_memory() -> None:
    """O7."""
    warnings = Warnings("the port", clock=lambda: 0.0)
    for number in range(5_000):
        warnings.add(f"10.0.{number >> 8}.{number & 255}", "it was rude")
    assert len(warnings._warned_at) < 2_000
    assert len(warnings._since) < 2_000
