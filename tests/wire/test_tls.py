"""Streams inside TLS meet peers that do not begin with it or never finish it, and carry both directions at the same
time."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from between import LONG

from backstay._timeouts import Timeouts
from backstay._transport import ServerStream
from backstay._transport._streams import _tcp as tcp
from backstay._transport._streams._tcp import ClientStream, Listener
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import Chunk, Frame, Hello
from backstay_rpc.credentials import Credentials

from .certificates import credentials_of, write_certificate

BODY = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)
FRAME = Frame(chunk=Chunk(block=3))


@pytest.fixture
def both(tmp_path: Path) -> Credentials:
    write_certificate(tmp_path)
    return credentials_of("token", str(tmp_path))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exits:
        yield exits


def listening(
    stack: ExitStack, credentials: Credentials, handler: Callable[[Hello, ServerStream], None], **timeouts: float
) -> str:
    listener = Listener("127.0.0.1", 0, credentials, handler, Timeouts(**timeouts))  # type: ignore[arg-type]
    stack.callback(listener.close)
    return f"127.0.0.1:{listener.bound}"


def echo(_: Hello, stream: ServerStream) -> None:
    while (item := stream.read()) is not None:
        frame, body = item
        stream.write(frame, *(() if body is None else (body,)))


def test_both_ends_write_and_read_at_the_same_time(stack: ExitStack, both: Credentials) -> None:
    """OpenSSL allows one call at a time for a connection: a thread that waits for bytes must not delay the other."""
    sender_done = threading.Event()

    def serve(_: Hello, stream: ServerStream) -> None:
        def send() -> None:
            for _ in range(4):
                stream.write(FRAME, BODY)
            sender_done.set()

        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(4):
            item = stream.read()
            assert item is not None
            assert np.array_equal(item[1], BODY)
        thread.join()
        stream.write(Frame(chunk=Chunk(block=4)))

    client = ClientStream(listening(stack, both, serve), Hello(), both)
    stack.callback(client.close)

    def push() -> None:
        for _ in range(4):
            client.write(FRAME, BODY)

    thread = threading.Thread(target=push)
    thread.start()
    for _ in range(4):
        memory = np.zeros_like(BODY)
        frame, _ = client.read(lambda _, __, memory=memory: (memory,))
        assert frame == FRAME
        assert np.array_equal(memory, BODY)
    assert client.read()[0].chunk.block == 4
    thread.join()
    assert sender_done.is_set()


def test_t8_a_server_that_never_finishes_the_handshake_is_a_lost_peer(
    both: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerLost, match="broke"):
        ClientStream(f"127.0.0.1:{silent.getsockname()[1]}", Hello(), both)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "half of a greeting"])
def test_t8_a_caller_that_never_finishes_the_handshake_is_closed(
    stack: ExitStack, both: Credentials, sent: bytes
) -> None:
    address = listening(stack, both, echo, unproven=0.2)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), LONG) as caller:
        caller.sendall(sent)
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
    client = ClientStream(address, Hello(), both)
    stack.callback(client.close)
    client.write(FRAME, BODY)
    found = client.read()
    assert np.array_equal(found[1], BODY)


def test_o7_a_stream_that_is_not_encrypted_is_refused(stack: ExitStack, both: Credentials) -> None:
    address = listening(stack, both, echo)
    client = ClientStream(address, Hello(), Credentials("token"))
    stack.callback(client.close)
    with pytest.raises(PeerLost):
        client.read()


def test_o7_an_encrypted_stream_to_a_plain_port_is_refused(stack: ExitStack, both: Credentials) -> None:
    address = listening(stack, Credentials("token"), echo)
    with pytest.raises(PeerLost):
        ClientStream(address, Hello(), both)


def test_o7_a_server_with_another_certificate_gets_no_token(stack: ExitStack, both: Credentials) -> None:
    address = listening(stack, both, echo)
    with pytest.raises(PeerLost, match="certificate"):
        ClientStream(address, Hello(), replace(both, connects=ssl.create_default_context()))


def test_t8_a_cut_ends_a_read_and_a_write_that_wait(stack: ExitStack, both: Credentials) -> None:
    done = threading.Event()
    client = ClientStream(listening(stack, both, lambda _, __: done.wait(LONG) and None), Hello(), both)
    stack.callback(client.close)
    stack.callback(done.set)  # first, because the listener's end waits for its handlers
    ended: list[str] = []

    def until_lost(call: Callable[[], object]) -> None:
        try:
            while True:
                call()
        except PeerLost as lost:
            ended.append(str(lost))

    threads = [
        threading.Thread(target=until_lost, args=(call,)) for call in (client.read, lambda: client.write(FRAME, BODY))
    ]
    for thread in threads:
        thread.start()
    client.cancel("it takes too long")
    for thread in threads:
        thread.join()
    assert len(ended) == 2
    assert all("it takes too long" in text for text in ended)
