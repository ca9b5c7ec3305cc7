"""Data streams over TCP that are refused: callers without the token, older pods, and peers that send invalid frames."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest
from between import LONG

from backstay._transport import frames
from backstay._transport._streams._tcp import PortTaken
from backstay._transport._tensors._client import Push
from backstay._transport._tensors._server import DataServer
from backstay._update import Wire, analyse, coded_leaves, describe, partition, shard_wires
from backstay.errors import PeerLost, Refused, Superseded
from backstay_rpc.control_pb2 import (
    Chunk,
    End,
    Frame,
    GradientInfo,
    ParamsBegin,
    Part,
    PushBegin,
)
from backstay_rpc.credentials import Credentials
from backstay_rpc.limits import HEADER_BYTES

from .pushes import BIG, SMALL, Make, commit_alone, push_of


@pytest.mark.parametrize("token", ["b" * 64, "", "a" * 63])
def test_a_wrong_token_is_refused(make_shard: Make, dial: Make, token: str) -> None:
    """O7."""
    shard = make_shard((SMALL,), serve=True)
    with pytest.raises(PeerLost, match="belongs to another job: the call does not carry this job's token"):
        dial(shard, token=token).exchange_all(None, 0, [shard.buffers()])


def opening(token: bytes, hello: bytes = b"", magic: bytes = b"backsty1", announced: int | None = None) -> bytes:
    """Returns the first bytes of a connection. `announced`: the length of the hello, where it is false."""
    return struct.pack("<8sHI", magic, len(token), len(hello) if announced is None else announced) + token + hello


STRANGE: dict[str, bytes] = {
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "another version": opening(b"token", magic=b"backsty0"),
    "without a token": opening(b""),
    "another token": opening(b"b" * 64),
    "a longer token": opening(b"b" * 60_000),
    "a huge hello": opening(b"b" * 64, announced=0xFFFFFFFF),
}


@pytest.mark.parametrize("case", STRANGE)
def test_nothing_is_served_without_the_token(kit: SimpleNamespace, make_shard: Make, dial: Make, case: str) -> None:
    """O7: at most a refusal is sent, and the connection is closed."""
    shard = make_shard((SMALL,), serve=True)
    assert len(STRANGE[case]) < 100_000
    answer = said(kit, shard, STRANGE[case])
    if "token" in case and "longer" not in case:
        assert b"does not carry this job's token" in answer
        assert len(answer) < 200
    else:
        assert not answer
    dial(shard).exchange_all(None, 0, [shard.buffers()])


def connected(kit: SimpleNamespace, shard: Any) -> socket.socket:
    """Returns a connection on which bytes are sent that no client sends."""
    sock = socket.create_connection(("127.0.0.1", shard.server.port), LONG)
    tls = kit.credentials.connects
    return sock if tls is None else tls.wrap_socket(sock, server_hostname="127.0.0.1")


def said(kit: SimpleNamespace, shard: Any, data: bytes) -> bytes:
    """Returns the bytes that the server answers before it closes the connection."""
    answer = b""
    with connected(kit, shard) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while some := sock.recv(4096):
                answer += some
    return answer


def test_a_server_without_a_token_does_not_start(make_shard: Make) -> None:
    shard = make_shard((SMALL,))
    with pytest.raises(ValueError, match="token is empty"):
        DataServer(shard.runtime, host="127.0.0.1", port=0, credentials=Credentials(""))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"expected_incarnation": 9}, "FAILED_PRECONDITION"),
        ({"partition_digest": b"other"}, "INVALID_ARGUMENT"),
        ({"term": 5}, "FAILED_PRECONDITION"),
    ],
)
def test_a_refusal_arrives_with_its_words(make_shard: Make, dial: Make, change: Any, code: str) -> None:
    """Even when the refused peer writes a large push meanwhile."""
    shard = make_shard((BIG,), serve=True)
    for push in (None, Push(gid_of(0), [shard.gradient(1.0)], GradientInfo)):
        with pytest.raises(Refused, match="shard 0: ") as refused:
            dial(shard, **change).exchange_all(push, 0, [shard.buffers()])
        assert refused.value.code == code
    assert shard.coordination.events == []


def gid_of(rank: int) -> Any:
    from backstay_rpc.control_pb2 import GradientId

    return GradientId(term=1, version=0, rank=rank, incarnation=1)


def test_an_older_incarnation_gets_superseded(kit: SimpleNamespace, make_shard: Make, dial: Make) -> None:
    """T6."""
    shard = make_shard((SMALL,), serve=True)
    old = dial(shard, incarnation=1)
    old.exchange_all(None, 0, [shard.buffers()])
    shard.runtime.fence({"worker-0": 2})
    dial(shard, incarnation=2).exchange_all(None, 0, [shard.buffers()])
    with pytest.raises(Superseded, match="replaced by incarnation 2"):
        old.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()])


def test_fencing_cuts_the_streams_of_older_incarnations(make_shard: Make, dial: Make) -> None:
    """T6: and of no other peer."""
    shard = make_shard((SMALL,), serve=True)
    old, other = dial(shard, rank=0), dial(shard, rank=1)
    for client in (old, other):
        client.exchange_all(None, 0, [shard.buffers()])
    assert shard.server.fence({"worker-0": 2, "worker-1": 1}) == 1
    with pytest.raises(PeerLost):
        old.exchange_all(None, 0, [shard.buffers()])
    other.exchange_all(None, 0, [shard.buffers()])
    with pytest.raises(Superseded):
        dial(shard, rank=0).exchange_all(None, 0, [shard.buffers()])


def test_a_taken_port_is_named(make_shard: Make) -> None:
    shard = make_shard((SMALL,), serve=True)
    with pytest.raises(PortTaken, match=f"127.0.0.1 port {shard.server.port}: it is taken"):
        DataServer(shard.runtime, host="127.0.0.1", port=shard.server.port, credentials=Credentials("t"))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match="is taken"):
        DataServer(shard.runtime, host="127.0.0.1", port=other.getsockname()[1], credentials=Credentials("t"))


def ones(nbytes: int) -> np.ndarray:
    return np.ones(nbytes, np.uint8)


def begin(nbytes: int, *, shard: int = 0, member: int = 0, **more: Any) -> Frame:
    """A push of `nbytes` bytes begins."""
    part = Part(contribution=gid_of(0), shard=shard, member=member)
    return Frame(push_begin=PushBegin(part=part, bytes=nbytes, **more))


def chunk(nbytes: int, block: int = 0, offset: int = 0) -> tuple[Frame, np.ndarray]:
    return Frame(chunk=Chunk(block=block, offset=offset)), ones(nbytes)


END = Frame(end=End(bytes=40))
WHOLE = begin(40, whole=End(bytes=40))
BEGIN = (begin(40), None)
# They are refused before memory is allocated, so nothing is reported as lost.
ADDRESSES: dict[str, tuple[list[tuple[Frame, np.ndarray | None]], str]] = {
    "another size": ([(begin(1 << 60), None)], "are announced"),
    "another shard": ([(begin(40, shard=1), None)], "is addressed to shard 1: this is 0"),
    "another member": ([(begin(40, member=1), None)], "comes from member 1: ranks of this job have one member, 0"),
}
GARBAGE: dict[str, tuple[list[tuple[Frame, np.ndarray | None]], str]] = {
    **ADDRESSES,
    "an end without a push": ([(END, None)], "cannot arrive here"),
    "a chunk without a push": ([chunk(4)], "outside a push has a body"),
    "an answer": ([(Frame(params_begin=ParamsBegin(version=3)), None)], "cannot arrive here"),
    "a push in a push": ([BEGIN, BEGIN], "inside a push"),
    "a block too many": ([BEGIN, chunk(4, block=7)], "of block 7: this shard has 1 blocks"),
    "beyond the end": ([BEGIN, chunk(44)], "which has 40 bytes"),
    "far beyond the end": ([BEGIN, chunk(4, offset=(1 << 64) - 4)], "which has 40 bytes"),
    "a gap": ([BEGIN, chunk(4, offset=8)], "byte 0 must be next"),
    "twice the same": ([BEGIN, chunk(8), chunk(8, offset=4)], "up to byte 8 arrived already"),
    "an early end": ([BEGIN, (END, None)], "40 of 40 bytes missing"),
    "a whole that is too long": ([(WHOLE, ones(44))], "has 44 bytes: must be 40"),
    "a whole without a body": ([(WHOLE, None)], "has 0 bytes: must be 40"),
    "a whole that counts otherwise": ([(begin(40, whole=End(bytes=36)), ones(40))], "the end mark counts 36 bytes"),
    "a body at the beginning": ([(begin(40), ones(40))], "the beginning of a push has a body"),
    "a chunk without a body": ([BEGIN, (Frame(chunk=Chunk(block=0)), None)], "cannot arrive inside a push"),
}


@pytest.mark.parametrize("elements", [1 << 12, 1 << 18])
def test_codec_data_that_no_codec_makes_is_refused(
    kit: SimpleNamespace, make_shard: Make, stream: Make, elements: int
) -> None:
    """O7, T10: in one frame and in several; the contribution never counts."""
    tree, int8 = describe({"w": np.zeros(elements, np.float32)}), Wire("Int8")
    coded = coded_leaves(tree, int8)
    [wire] = shard_wires(partition(tree, analyse(optax.sgd(0.1), tree), 1, coded=coded), int8, coded)
    [block] = wire.gradients
    shard = make_shard((elements,), serve=True, wire=wire)
    codes, scales, _ = block.sections
    data = np.zeros(block.nbytes, np.uint8)
    data[codes : codes + scales].view(np.float32)[1] = np.nan
    end = stream(shard)
    end.write(frames.pull(0))
    while frames.kind_of((received := end.read())[0]) != "end" and not received[0].params_begin.whole:
        pass
    whole = End(bytes=data.nbytes)
    if data.nbytes <= frames.WHOLE_BYTES:
        end.write(begin(data.nbytes, whole=whole), data)
    else:
        end.write(begin(data.nbytes))
        for frame, (_, _, start, stop) in frames.section_chunks([[data.nbytes]]):
            end.write(frame, data[start:stop])
        end.write(Frame(end=whole))
    while frames.kind_of((answer := end.read())[0]) == "received":
        pass
    assert answer[0].refused.code == "INVALID_ARGUMENT"
    assert "the scale of group 1 is nan" in answer[0].refused.message
    assert shard.coordination.wait_for("lost") == [kit.gid(0)]
    assert shard.coordination.of("staged") == []


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_ends_only_its_senders_stream(
    kit: SimpleNamespace, make_shard: Make, dial: Make, stream: Make, case: str
) -> None:
    """T1, O7."""
    shard = make_shard((SMALL,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    good, into = dial(shard, rank=1), shard.buffers()
    good.exchange_all(None, 0, [into])
    end = stream(shard)
    sent, why = GARBAGE[case]
    for frame, body in sent:
        end.write(frame, *(() if body is None else (body,)))
    answer, body = end.read()
    assert body is None
    assert answer.refused.code == "INVALID_ARGUMENT"
    assert why in answer.refused.message
    assert shard.coordination.of("staged") == []
    assert len(shard.coordination.of("lost")) == (
        sent[0][0].WhichOneof("kind") == "push_begin" and case not in ADDRESSES
    )
    assert good.exchange_all(push_of(kit, shard, 1.0, rank=1), 0, [into]).version == 1


MESSAGES: dict[str, bytes] = {
    "not a frame": struct.pack("<II", 10, 0) + b"\xff" * 10,
    "an empty frame": struct.pack("<II", 0, 0),
    "a long header": struct.pack("<II", HEADER_BYTES + 1, 0),
    "a huge body": struct.pack("<II", 2, 0xFFFFFFFF),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_that_are_not_frames(kit: SimpleNamespace, make_shard: Make, dial: Make, case: str) -> None:
    """O7: a peer with the token that sends other messages. Nothing of a body is awaited."""
    shard = make_shard((SMALL,), serve=True)
    begin = opening(kit.token.encode(), kit.hello(0).SerializeToString())
    with connected(kit, shard) as sock, sock.makefile("rb") as answers:
        sock.sendall(begin + MESSAGES[case])
        header, body = struct.unpack("<II", answers.read(8))
        answer = Frame.FromString(answers.read(header))
        assert (answer.refused.code, body) == ("INVALID_ARGUMENT", 0)
    dial(shard, rank=1).exchange_all(None, 0, [shard.buffers()])


def test_a_hello_that_is_not_a_hello(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((SMALL,), serve=True)
    assert b"not a Hello" in said(kit, shard, opening(kit.token.encode(), b"\xff" * 20))


def test_random_bytes(make_shard: Make, dial: Make) -> None:
    shard = make_shard((SMALL,), serve=True)
    with socket.create_connection(("127.0.0.1", shard.server.port)) as sock:
        sock.sendall(os.urandom(10_000))
        sock.settimeout(LONG)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    dial(shard).exchange_all(None, 0, [shard.buffers()])
