"""Every division into packets gives the same frames on a socket, and a dropped body does not move the next."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from between import LONG
from hypothesis import example, given
from hypothesis import strategies as st

from backstay._transport._streams import _frame_stream as sockets
from backstay._transport._streams._bytes import byte_stream
from backstay._transport._streams._frame_stream import Frames
from backstay._transport._streams._interfaces import PLACED, Bytes, Refusal
from backstay._transport._streams._tcp import ClientStream, Listener
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import (
    Chunk,
    Contribution,
    Frame,
    GradientId,
    GradientInfo,
    Hello,
    Refused,
    Replica,
    ReplicaMean,
)
from backstay_rpc.credentials import Credentials
from backstay_rpc.limits import MAX_CHUNK_BYTES
from backstay_rpc.refusals import RefusalCode

SIZES = st.integers(0, 200_000) | st.integers(0, 300) | st.integers(0, 9)
BODIES = st.lists(st.tuples(SIZES, st.sampled_from(["place", "own", "refuse"])), max_size=6)
PACKETS = 1000
"""The most packets of one example, and the rest is one more. All of several small frames arrive so byte by byte."""


@contextmanager
def ends(credentials: Credentials) -> Iterator[tuple[socket.socket, Frames]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    if credentials.accepts is not None and credentials.connects is not None:
        receiver = credentials.accepts.wrap_socket(receiver, server_side=True, do_handshake_on_connect=False)
        shaking = threading.Thread(target=receiver.do_handshake)
        shaking.start()
        sender = credentials.connects.wrap_socket(sender, server_hostname="127.0.0.1")
        shaking.join()
    with sender, receiver:
        yield sender, Frames(byte_stream(receiver))


@given(BODIES, st.integers(0, 60_000) | st.integers(0, 300), st.lists(st.integers(1, 300_000), min_size=1, max_size=5))
@example([], 60_000, [300_000])
@example([(9, "place"), (0, "own"), (7, "refuse"), (5, "own")], 20, [1])  # byte by byte
def test_frames_are_the_same_however_their_bytes_arrive(
    credentials: Credentials, bodies: list[tuple[int, str]], message: int, cuts: list[int]
) -> None:
    """T1: a body is received once, in its place, even after a body that was refused."""
    sent = [
        (Frame(chunk=Chunk(block=number)), np.random.default_rng(number).bytes(size))
        for number, (size, _) in enumerate(bodies)
    ]
    # Two long ones do not fit together into the memory for headers, which then moves what has arrived of the second.
    sent += [(Frame(refused=Refused(code="ABORTED", message=letter * message)), b"") for letter in "xy"]
    data = b"".join(
        len(frame.SerializeToString()).to_bytes(4, "little")
        + len(body).to_bytes(4, "little")
        + frame.SerializeToString()
        + body
        for frame, body in sent
    )
    with ends(credentials) as (sender, frames):

        def send() -> None:
            at, number = 0, 0
            while at < len(data):
                size = cuts[number % len(cuts)] if number < PACKETS else len(data)
                sender.sendall(data[at : at + size])
                at, number = at + size, number + 1
            sender.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        for (frame, body), (_, how) in zip(sent, [*bodies, (0, "own"), (0, "own")], strict=True):
            memory = np.zeros(len(body), np.uint8)

            def place(_: Frame, nbytes: int, how: str = how, memory: Bytes = memory) -> Sequence[Bytes] | None:
                assert nbytes == memory.nbytes
                if how == "refuse":
                    raise Refusal(RefusalCode.INVALID, "not here")
                return (memory[: nbytes // 3], memory[nbytes // 3 :]) if how == "place" else None

            if how == "refuse" and body:
                with pytest.raises(Refusal):
                    frames.read(place)
                continue
            found = frames.read(place)
            assert found is not None
            assert found[0] == frame
            assert (found[1] is PLACED) == (how == "place" and bool(body))
            assert (b"" if found[1] is None else memory.tobytes() if how == "place" else found[1].tobytes()) == body
        assert frames.read() is None
        thread.join()


def test_a_header_of_ten_thousand_ranks_passes(credentials: Credentials) -> None:
    """T3: a standby gets all contributions of an update in one header. The body behind it is still in its place."""
    ranks = range(10_000)
    mean = ReplicaMean(
        version=1 << 40,
        contributions=[
            Contribution(id=GradientId(term=9, version=1 << 40, rank=rank, attempt=1 << 40), weight=1.0)
            for rank in ranks
        ],
        infos=[GradientInfo(finite=True, loss=1.5, metrics={"accuracy": 0.5, "entropy": 0.5}) for _ in ranks],
    )
    first, body = Frame(replica=Replica(mean=mean)), np.arange(200_000).astype(np.uint8)
    with ends(credentials) as (sender, frames):

        def send() -> None:
            writing = Frames(byte_stream(sender))
            for _ in range(2):
                writing.write(first)
                writing.write(Frame(chunk=Chunk(block=3)), body)

        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(2):
            assert frames.read() == (first, None)
            memory = np.zeros_like(body)
            found = frames.read(lambda _, nbytes, memory=memory: (memory,))
            assert found is not None
            assert found[1] is PLACED
            np.testing.assert_array_equal(memory, body)
        thread.join()


@pytest.mark.parametrize("cut", [1, 8, 9, 40])
def test_a_stream_that_ends_inside_a_frame_is_an_error(credentials: Credentials, cut: int) -> None:
    """T1: never part of a contribution."""
    with ends(credentials) as (sender, frames):
        frame = Frame(chunk=Chunk(block=1, offset=5)).SerializeToString()
        data = len(frame).to_bytes(4, "little") + (100).to_bytes(4, "little") + frame + bytes(100)
        sender.sendall(data[:cut])
        sender.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="inside a frame"):
            frames.read()


def test_a_frame_is_written_whole_to_a_slow_reader(credentials: Credentials) -> None:
    body = np.random.default_rng(0).integers(0, 256, MAX_CHUNK_BYTES, dtype=np.uint8)
    with ends(credentials) as (sender, frames):
        thread = threading.Thread(target=lambda: Frames(byte_stream(sender)).write(Frame(chunk=Chunk(block=3)), body))
        thread.start()
        found = frames.read()
        thread.join()
    assert found is not None
    assert found[1] is not None
    np.testing.assert_array_equal(found[1], body)


def test_t8_a_write_to_a_peer_that_does_not_read_ends_with_cancel(credentials: Credentials) -> None:
    entered = threading.Event()
    done = threading.Event()
    state = SimpleNamespace(error=None)

    def idle(hello: Hello, stream: object) -> None:
        done.wait(LONG)

    listener = Listener("127.0.0.1", 0, credentials, idle)
    stream = ClientStream(f"127.0.0.1:{listener.bound}", Hello(), credentials)

    def write() -> None:
        entered.set()
        try:
            while True:
                stream.write(Frame(chunk=Chunk()), np.zeros(1 << 20, np.uint8))
        except PeerLost as error:
            state.error = error

    thread = threading.Thread(target=write)
    thread.start()
    entered.wait()
    stream.cancel("it takes too long")
    thread.join(LONG)
    assert "it takes too long" in str(state.error)
    done.set()
    stream.close()
    assert listener.close()


def test_t8_a_stream_that_cannot_be_opened_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reset(socket.socket):
        def sendmsg(self, *_: object) -> int:
            raise ConnectionResetError

    made = Reset()
    monkeypatch.setattr(socket, "create_connection", lambda *_: made)
    with pytest.raises(PeerLost, match="broke"):
        ClientStream("127.0.0.1:7078", Hello(), Credentials("token"))
    assert made.fileno() == -1


def test_a_link_ends_if_a_frame_cannot_be_sent() -> None:
    """The sender's reader must not wait for an answer to that frame, for example without memory in the kernel."""

    class Fails(socket.socket):
        def send(self, *_: object) -> int:
            raise OSError(errno.ENOBUFS, "No buffer space available")

    with ends(Credentials("token")) as (sender, _), Fails(fileno=sender.detach()) as sock:
        stream = Frames(byte_stream(sock))
        with pytest.raises(ConnectionError):
            stream.post(Frame())
        assert stream.read() is None


def test_a_link_carries_a_frame_that_is_larger_than_the_systems_buffer(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of 8,000 ranks is: without waiting for room, the link would break on it again and again (T8)."""
    monkeypatch.setattr(sockets, "POST_SECONDS", 60.0)
    sent = Frame(refused=Refused(code="ABORTED", message="x" * 1_000_000))
    with ends(credentials) as (sender, frames):
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        received: list[object] = []
        thread = threading.Thread(target=lambda: received.extend([frames.read(), frames.read()]))
        thread.start()
        stream = Frames(byte_stream(sender))
        stream.post(sent)
        stream.post(sent)
        thread.join()
    assert received == [(sent, None), (sent, None)]


def test_a_link_whose_peer_does_not_read_ends_in_time(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "POST_SECONDS", 0.01)
    # The buffers of both ends have less room. The sizes are valid, so that the other end reads what has arrived.
    frame = Frame(refused=Refused(code="ABORTED", message="x" * (3 << 20)))
    with ends(credentials) as (sender, frames):
        stream = Frames(byte_stream(sender))

        def fill() -> None:
            for _ in range(30):
                stream.post(frame)

        def drain() -> None:
            while frames.read() is not None:
                pass

        with pytest.raises(ConnectionError, match="does not read"):
            fill()
        assert stream.read() is None
        with pytest.raises(ConnectionError):
            stream.post(Frame())
        with pytest.raises(ConnectionError, match="inside a frame"):  # nothing follows the part of a frame
            drain()


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "[::1]:-1", "a\0b:1", "é" * 99 + ":1"]
)
def test_an_address_that_is_none_is_an_error_of_the_connection(address: str) -> None:
    """T8: the thread that connects must survive it."""
    with pytest.raises(PeerLost):
        ClientStream(address, Hello(), Credentials("token"))
