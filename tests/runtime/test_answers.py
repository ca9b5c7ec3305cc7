"""Most answers mean that a connection is in transition (T8), and few are final. One table has all."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from between import LONG, until

from backstay._timeouts import Timeouts
from backstay._transport import Agreement, ClientStream, ControlClient, Heartbeats, Link
from backstay._transport._control._auth import is_final
from backstay.errors import PeerLost, Refused, Superseded
from backstay_rpc.channels import REFUSAL
from backstay_rpc.control_pb2 import TRAINING, Hello, JoinReply, Leaf, Peer
from backstay_rpc.credentials import Credentials

TOKEN = "0123456789abcdef"
AGREEMENT = Agreement((Leaf(path="w", shape=[2], dtype="float32"),), {"steps": "1"})
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
FINAL = {"UNAUTHENTICATED", "INVALID_ARGUMENT", "PERMISSION_DENIED"}
SECONDS = LONG
TIMES = Timeouts(call=SECONDS, link_pauses=(0.001,), join_pauses=(0.001,))


class Answers(grpc.GenericRpcHandler):
    """A server that answers each call with the status that a test sets."""

    def __init__(self) -> None:
        self.code, self.marked, self.calls = grpc.StatusCode.UNAVAILABLE, False, 0

    def service(self, handler_call_details: Any) -> Any:
        def answer(_: Any, context: Any) -> Iterator[bytes]:
            self.calls += 1
            if self.marked:
                context.set_trailing_metadata(((REFUSAL, "1"),))
            context.abort(self.code, "as set")
            yield b""

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture(scope="module")
def answers() -> Iterator[tuple[Answers, str]]:
    handler = Answers()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(0).wait(SECONDS)


def client_of(address: str) -> ControlClient:
    return ControlClient([address], Credentials(TOKEN), Peer(role="worker"), TIMES)


def joins(address: str) -> None:
    client = client_of(address)
    try:
        client.join(0, AGREEMENT)
    finally:
        client.close()


def beats(address: str) -> None:
    client = client_of(address)
    try:
        client.beat(0, 1, TRAINING, 0.0)
    finally:
        client.close()


def evaluates(address: str) -> None:
    client = client_of(address)
    try:
        client.evaluated(1, {})
    finally:
        client.close()


@pytest.mark.parametrize("marked", [True, False], ids=["backstay", "another program"])
@pytest.mark.parametrize("phase", [joins, beats, evaluates])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_t8_each_status_of_each_call_is_retried_or_final(
    answers: tuple[Answers, str], code: grpc.StatusCode, phase: Callable[[str], None], marked: bool
) -> None:
    """Only a Backstay server's own refusals are final; its other answers, and all of others, are retried."""
    handler, address = answers
    handler.code, handler.marked = code, marked
    final = marked and code.name in FINAL
    with pytest.raises((PeerLost, Refused)) as raised:
        phase(address)
    assert isinstance(raised.value, Refused) is final
    assert isinstance(raised.value, Superseded) is (final and code is grpc.StatusCode.PERMISSION_DENIED)
    assert is_final(code, ((REFUSAL, "1"),) if marked else ()) is final


@pytest.mark.parametrize("marked", [True, False], ids=["backstay", "another program"])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_t8_each_status_of_a_link_is_retried_or_final(
    answers: tuple[Answers, str], code: grpc.StatusCode, marked: bool
) -> None:
    handler, address = answers
    handler.code, handler.marked = code, marked
    before = handler.calls
    link = Link(address, Credentials(TOKEN), Peer(role="parameter-server", index=1), AGREEMENT, "Sync", TIMES)
    link.start(lambda _: None)  # type: ignore[arg-type]
    try:
        if marked and code.name in FINAL:
            until(lambda: link.error is not None)
            assert isinstance(link.error, Refused)
            assert link.error.code == code.name
        else:
            until(lambda: handler.calls >= before + 3)
            assert link.error is None
    finally:
        link.close()


# ---- What is not gRPC ----

_PREFACE = 24
_SETTINGS = struct.pack(">I", 0)[1:] + bytes((4, 0)) + struct.pack(">I", 0)


def _headers(status: int) -> bytes:
    block = b"\0\x07:status\x03" + str(status).encode() + b"\0\x0ccontent-type\x0atext/plain"
    return struct.pack(">I", len(block))[1:] + bytes((1, 5)) + struct.pack(">I", 1) + block


RESET = struct.pack(">I", 4)[1:] + bytes((3, 0)) + struct.pack(">II", 1, 7)  # REFUSED_STREAM
GOAWAY = struct.pack(">I", 8)[1:] + bytes((7, 0)) + struct.pack(">III", 0, 0, 0)
STRANGE = {
    **{
        f"status {status}": _SETTINGS + _headers(status)
        for status in (301, 400, 401, 403, 404, 405, 429, 500, 502, 503)
    },
    "reset": _SETTINGS + RESET,
    "goaway": _SETTINGS + GOAWAY,
    "http 1": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "noise": bytes(range(256)) * 4,
    "nothing": b"",
}


@pytest.fixture
def strange(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a program that answers each connection, once the caller has begun a call, with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SECONDS)
            seen = b""
            # Frames of the caller, until its HEADERS (kind 1) have arrived: an answer to no call would be an error.
            connection.sendall(_SETTINGS if STRANGE[request.param].startswith(_SETTINGS) else b"")
            while True:
                data = connection.recv(1 << 16)
                if not data:
                    return
                seen += data
                at, begun = _PREFACE, False
                while len(seen) >= at + 9:
                    begun = begun or seen[at + 3] == 1
                    at += 9 + int.from_bytes(seen[at : at + 3], "big")
                if begun or not STRANGE[request.param].startswith(_SETTINGS):
                    connection.sendall(STRANGE[request.param].removeprefix(_SETTINGS))
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def streams(address: str) -> None:
    stream = ClientStream(address, Hello(), Credentials(TOKEN))
    try:
        stream.read()
    finally:
        stream.close()


@pytest.mark.parametrize("phase", [joins, beats, streams])
@pytest.mark.parametrize("strange", STRANGE, indirect=True)
def test_t8_what_another_program_at_the_address_answers_is_retried(phase: Callable[[str], None], strange: str) -> None:
    """A worker died of ``Received http2 header with status: 404`` while a server was being replaced."""
    with pytest.raises(PeerLost):
        phase(strange)


def test_t8_heartbeats_continue_after_a_strange_answer(answers: tuple[Answers, str]) -> None:
    handler, address = answers
    handler.code, handler.marked = grpc.StatusCode.UNIMPLEMENTED, False
    before = handler.calls
    client = ControlClient([address], Credentials(TOKEN), Peer(role="worker"), Timeouts(heartbeat=0.001))
    heart = Heartbeats(client, lambda shard, why: None)
    heart.start()
    until(lambda: handler.calls >= before + 3)
    assert heart.superseded is None
    heart.close()
    client.close()


class Shard:
    """A server whose `join` fails `fails` times."""

    def __init__(self, fails: int, terms: tuple[int, ...] = (1,)) -> None:
        self.fails, self.terms, self.asked = fails, terms, 0

    def answer(self) -> JoinReply:
        self.asked += 1
        if self.asked <= self.fails:
            raise PeerLost("away")
        return JoinReply(incarnation=1, term=self.terms[min(self.asked - self.fails, len(self.terms)) - 1])


def joined(monkeypatch: pytest.MonkeyPatch, *shards: Shard, **times: float) -> list[JoinReply]:
    limits: dict[str, Any] = {"join_pauses": (0.0,), "join_stale": 3600.0, "silent": 3600.0}
    addresses = ["127.0.0.1:1"] * len(shards)
    client = ControlClient(addresses, Credentials(TOKEN), Peer(), Timeouts(**limits | times))
    monkeypatch.setattr(client, "join", lambda shard, *_: shards[shard].answer())
    return client.join_all(AGREEMENT, lambda: False)


def test_a_server_that_has_answered_is_not_asked_again_while_others_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T8: a shard that takes long to start must not be paid for by those that serve."""
    shards = [Shard(0), Shard(200), Shard(0)]
    assert [reply.term for reply in joined(monkeypatch, *shards)] == [1, 1, 1]
    assert [shard.asked for shard in shards] == [1, 201, 1]


def test_an_old_answer_is_requested_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that gave it may be gone."""
    shards = [Shard(0), Shard(5), Shard(0)]
    joined(monkeypatch, *shards, join_stale=0.0)
    assert [shard.asked for shard in shards] == [2, 6, 1]


def test_t8_a_pod_that_waits_for_one_server_calls_the_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator reports a pod that is silent for 10 s as stalled; one that joins sends no heartbeats yet."""
    shards = [Shard(0), Shard(5)]
    joined(monkeypatch, *shards, silent=0.0)
    assert [shard.asked for shard in shards] == [6, 6]


def test_shards_that_are_in_an_older_term_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard(0, (2,)), Shard(0, (1, 1, 2)), Shard(0, (2,))]
    assert [reply.term for reply in joined(monkeypatch, *shards)] == [2, 2, 2]
    assert [shard.asked for shard in shards] == [1, 3, 1]
