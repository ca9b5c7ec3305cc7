"""Data streams over TCP: valid streams, refused streams, and peers that misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest

from backstay import _instrument
from backstay._process import listening_socket
from backstay._update import Wire, analyse, coded_leaves, describe, partition, shard_wires
from backstay._wire import frames
from backstay._wire.client import Push, record_exchange
from backstay._wire.seam import flow_of
from backstay._wire.server import DataServer
from backstay._wire.tcp import ClientStream, PortTaken
from backstay.errors import JobFailed, PeerLost, Refused, Superseded
from backstay_rpc.control_pb2 import (
    Chunk,
    Done,
    End,
    Frame,
    GradientInfo,
    ParamsBegin,
    Part,
    PushBegin,
    Reject,
)

Make = Callable[..., Any]
BIG = 1_000_000  # elements: a push that takes several frames
SMALL = 10


def commit_alone(kit: SimpleNamespace, shard: Any) -> Callable[[int, Any], None]:
    """A coordinator that commits each gradient by itself."""
    return lambda staged: shard.runtime.deliver(kit.commit(staged.id.version, [staged.id]))


def push_of(kit: SimpleNamespace, shard: Any, value: float, **more: Any) -> Push:
    return Push(kit.gid(**more), [shard.gradient(value)], lambda: GradientInfo(finite=True, examples=3))


def pulled(client: Any, shard: Any) -> Any:
    """The client once it has pulled, as a worker does before it pushes."""
    client.exchange_all(None, 0, [shard.buffers()])
    return client


def values(shard: Any, buffers: Any) -> list[float]:
    """The elements of received parameters, each of which must be the same within a block."""
    result = []
    for buffer, block in zip(buffers, shard.layout.blocks, strict=True):
        array = buffer.view(block.dtype)
        assert (array == array[0]).all()
        result.append(float(array[0]))
    return result


@pytest.mark.parametrize("sizes", [(SMALL,), (BIG, 3), (1,), ()])
def test_a_gradient_there_and_the_parameters_back(
    kit: SimpleNamespace, make_shard: Make, dial: Make, sizes: tuple[int, ...]
) -> None:
    """T1: several updates, pushes that fit into one frame and pushes that do not, and a shard that holds nothing."""
    shard = make_shard(sizes, serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    client, into = dial(shard), shard.buffers()
    pulled = client.exchange_all(None, 0, [into])
    assert (pulled.version, pulled.term, pulled.world, pulled.done) == (0, 1, 1, False)
    assert pulled.pushed_at == 0.0
    for version in range(3):
        began = time.monotonic()
        pulled = client.exchange_all(push_of(kit, shard, 2.0, version=version), 0, [into])
        assert (pulled.version, pulled.outcome) == (version + 1, kit.reasons.REJECT_UNSPECIFIED)
        assert values(shard, into) == [2.0 * (version + 1)] * len(sizes)
        assert began < pulled.pushed_at < pulled.answered_at < time.monotonic(), "the answer comes after the push"
    assert shard.coordination.of("lost") == []


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_a_server_has_received_a_contribution_between_the_workers_times_of_it(
    kit: SimpleNamespace, make_shard: Make, dial: Make, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """`backstay trace` computes clocks from this. The thread of the exchange runs late, as on a busy machine."""
    shard = make_shard((size,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    client, push = pulled(dial(shard), shard), push_of(kit, shard, 1.0, attempt=77)
    (stream,) = client._clients
    exchange = stream.exchange
    monkeypatch.setattr(stream, "exchange", lambda *args, **options: time.sleep(0.05) or exchange(*args, **options))
    began = time.monotonic()
    answer = client.exchange_all(push, 0, [shard.buffers()])
    record_exchange(answer, push.id, began, time.monotonic())
    spans = {span.point: span for span in _instrument.spans() if (span.notes or {}).get("flow") == flow_of(push.id)}
    assert spans["push"].began <= spans["receive"].began
    assert spans["receive"].ended <= spans["update_wait"].ended


def test_what_was_received_does_not_change_with_the_next_update(
    kit: SimpleNamespace, make_shard: Make, dial: Make
) -> None:
    shard = make_shard((BIG,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    client, first, second = pulled(dial(shard), shard), shard.buffers(), shard.buffers()
    client.exchange_all(push_of(kit, shard, 1.0), 0, [first])
    client.exchange_all(push_of(kit, shard, 1.0, version=1), 0, [second])
    assert (values(shard, first), values(shard, second)) == ([1.0], [2.0])


# ---- Refused peers ----


@pytest.mark.parametrize("token", ["b" * 64, "", "a" * 63])
def test_a_wrong_token_is_refused(make_shard: Make, dial: Make, token: str) -> None:
    """O7."""
    shard = make_shard((SMALL,), serve=True)
    with pytest.raises(Refused, match="does not carry this job's token") as refused:
        dial(shard, token=token).exchange_all(None, 0, [shard.buffers()])
    assert refused.value.code == "UNAUTHENTICATED"


def opening(token: bytes, hello: bytes = b"", magic: bytes = b"backsty1", announced: int | None = None) -> bytes:
    """The first bytes of a connection. `announced`: the length of the hello, where it is false."""
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
def test_nothing_is_served_without_the_token(make_shard: Make, dial: Make, case: str) -> None:
    """O7: at most a refusal is sent, and the connection is closed."""
    shard = make_shard((SMALL,), serve=True)
    assert len(STRANGE[case]) < 100_000
    answer = said(shard, STRANGE[case])
    if "token" in case and "longer" not in case:
        assert b"does not carry this job's token" in answer
        assert len(answer) < 200
    else:
        assert not answer
    dial(shard).exchange_all(None, 0, [shard.buffers()])


def said(shard: Any, data: bytes) -> bytes:
    """The bytes that the server answers before it closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", shard.server.port), 20) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while some := sock.recv(4096):
                answer += some
    return answer


def test_a_server_without_a_token_does_not_start(make_shard: Make) -> None:
    shard = make_shard((SMALL,))
    with pytest.raises(ValueError, match="token is empty"):
        DataServer(shard.runtime, host="127.0.0.1", port=0, token="")


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
        DataServer(shard.runtime, host="127.0.0.1", port=shard.server.port, token="t")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match="is taken"):
        DataServer(shard.runtime, host="127.0.0.1", port=other.getsockname()[1], token="t")


# ---- Never part of a gradient (T1) ----


def test_a_killed_worker_leaves_nothing_behind(kit: SimpleNamespace, make_shard: Make, dial: Make) -> None:
    """T1: a process killed in the middle of its push; its replacement's gradient counts, and only that."""
    shard = make_shard((BIG,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("half_a_push.py")),
            shard.address,
            kit.token,
            kit.hello(0).SerializeToString().hex(),
            kit.gid(0).SerializeToString().hex(),
            str(shard.layout.nbytes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        os.kill(process.pid, signal.SIGKILL)
        assert shard.coordination.wait_for("lost") == [kit.gid(0)]
    finally:
        process.kill()
        process.communicate()
    into = shard.buffers()
    replacement = pulled(dial(shard, incarnation=2), shard)
    assert replacement.exchange_all(push_of(kit, shard, 5.0, incarnation=2), 0, [into]).version == 1
    assert values(shard, into) == [5.0]
    assert shard.engine.applied == [[5.0]]


@pytest.fixture
def stream(kit: SimpleNamespace, stack: ExitStack) -> Callable[..., ClientStream]:
    """A bare stream, to send frames that no client sends."""

    def open_(shard: Any, rank: int = 0) -> ClientStream:
        end = ClientStream(shard.address, kit.hello(rank), kit.token)
        stack.callback(end.close)
        return end

    return open_


def test_a_stream_that_ends_without_the_mark_counts_for_nothing(
    kit: SimpleNamespace, make_shard: Make, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1: even when every byte is there."""
    shard = make_shard((BIG,), serve=True)
    begun, begin = threading.Event(), shard.runtime.begin
    monkeypatch.setattr(shard.runtime, "begin", lambda *a: (begin(*a), begun.set())[0])
    end = stream(shard)
    end.write(frames.pull(0))
    while frames.kind_of(end.read()[0]) != "end":
        pass
    end.write(Frame(push_begin=PushBegin(part=Part(contribution=kit.gid(0)), bytes=shard.layout.nbytes)))
    data = np.zeros(shard.layout.nbytes, np.uint8)
    for frame, (_, start, stop) in frames.first_chunks([data.nbytes]):
        end.write(frame, data[start:stop])
    assert begun.wait(kit.wait)  # else cancelling may drop even the beginning
    end.close()
    assert shard.coordination.wait_for("lost") == [kit.gid(0)]
    assert shard.coordination.of("staged") == []


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
    "a gap": ([BEGIN, chunk(4, offset=8)], "byte 0 is next, and missing"),
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


@pytest.mark.parametrize("elements", [SMALL, BIG])
def test_what_is_known_at_the_end_travels_with_the_end_mark(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any, elements: int
) -> None:
    """T1: a push is sent before it is known what its end mark says, and is staged with it."""
    shard = make_shard((elements,), serve=True)
    staged: list[Any] = []

    def decide(report: Any) -> None:
        staged.append(report)
        shard.runtime.deliver(kit.commit(0, [report.id]))

    shard.coordination.decide = decide
    sent, known = threading.Event(), threading.Event()

    def info() -> GradientInfo:
        sent.set()
        assert known.wait(kit.wait)
        return GradientInfo(finite=True, examples=7, loss=0.5, metrics={"accuracy": 0.25})

    push = Push(kit.gid(0), [shard.gradient(1.0)], info)
    client = pulled(dial(shard), shard)
    pulling = background(lambda: client.exchange_all(push, 0, [shard.buffers()]))
    assert sent.wait(kit.wait)
    assert staged == []
    known.set()
    assert pulling.result(kit.wait).version == 1
    assert [(r.info.finite, r.info.examples, r.info.loss, dict(r.info.metrics)) for r in staged] == [
        (True, 7, 0.5, {"accuracy": 0.25})
    ]


@pytest.mark.parametrize("where", ["a block", "the end mark"])
def test_a_computation_that_fails_while_it_is_sent_counts_for_nothing(
    kit: SimpleNamespace, make_shard: Make, dial: Make, where: str
) -> None:
    """T1: the worker gets its own error, and the server gets no end mark."""
    shard = make_shard((BIG, BIG), serve=True)

    class Blocks(list[np.ndarray]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1 and where == "a block":
                raise ZeroDivisionError
            return super().__getitem__(index)

    def info() -> GradientInfo:
        raise ZeroDivisionError

    client = pulled(dial(shard), shard)
    with pytest.raises(ZeroDivisionError):
        client.exchange_all(Push(kit.gid(0), [Blocks(shard.gradient(1.0))], info), 0, [shard.buffers()])
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
    "a long header": struct.pack("<II", frames.HEADER_BYTES + 1, 0),
    "a huge body": struct.pack("<II", 2, 0xFFFFFFFF),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_that_are_not_frames(kit: SimpleNamespace, make_shard: Make, dial: Make, case: str) -> None:
    """O7: a peer with the token that sends other messages. Nothing of a body is awaited."""
    shard = make_shard((SMALL,), serve=True)
    begin = opening(kit.token.encode(), kit.hello(0).SerializeToString())
    with socket.create_connection(("127.0.0.1", shard.server.port), 20) as sock:
        sock.sendall(begin + MESSAGES[case])
        header, body = struct.unpack("<II", sock.recv(8, socket.MSG_WAITALL))
        answer = Frame.FromString(sock.recv(header, socket.MSG_WAITALL))
        assert (answer.refused.code, body) == ("INVALID_ARGUMENT", 0)
    dial(shard, rank=1).exchange_all(None, 0, [shard.buffers()])


def test_a_hello_that_is_not_a_hello(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((SMALL,), serve=True)
    assert b"not a Hello" in said(shard, opening(kit.token.encode(), b"\xff" * 20))


def test_random_bytes(make_shard: Make, dial: Make) -> None:
    shard = make_shard((SMALL,), serve=True)
    with socket.create_connection(("127.0.0.1", shard.server.port)) as sock:
        sock.sendall(os.urandom(10_000))
        sock.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    dial(shard).exchange_all(None, 0, [shard.buffers()])


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_the_same_attempt_twice_is_refused(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any, size: int
) -> None:
    """T3."""
    shard = make_shard((size,), serve=True)
    first = dial(shard)
    waiting = background(lambda: first.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    with pytest.raises(Refused, match="is here already") as refused:
        dial(shard).exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()])
    assert refused.value.code == "ALREADY_EXISTS"
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    assert waiting.result(kit.wait).version == 1
    assert shard.engine.applied == [[1.0]]


def test_another_attempt_of_a_rank_counts_once(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T3: the coordinator refuses the second; its worker gets the version all the same."""
    shard = make_shard((SMALL,), serve=True)
    first, again = dial(shard), dial(shard)
    one = background(lambda: first.exchange_all(push_of(kit, shard, 1.0, attempt=1), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    two = background(lambda: again.exchange_all(push_of(kit, shard, 1.0, attempt=2), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged", 2)
    shard.runtime.deliver(Reject(id=kit.gid(0, attempt=2), reason=kit.reasons.DUPLICATE))
    shard.runtime.deliver(kit.commit(0, [kit.gid(0, attempt=1)]))
    assert one.result(kit.wait).outcome == kit.reasons.REJECT_UNSPECIFIED
    assert (two.result(kit.wait).version, two.result().outcome) == (1, kit.reasons.DUPLICATE)
    assert shard.engine.applied == [[1.0]]


# ---- Late pushes ----


@pytest.mark.parametrize("size", [SMALL, BIG, 5 * BIG])
def test_a_late_push_is_answered_early(kit: SimpleNamespace, make_shard: Make, dial: Make, size: int) -> None:
    """T2: a worker behind the quorum gets the new version without sending the whole contribution."""
    shard = make_shard((size,), serve=True)
    shard.fill(kit.gid(1), 3.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(1)]))
    shard.coordination.wait_for("applied")
    client, into = dial(shard), shard.buffers()
    for attempt in range(2):
        pulled = client.exchange_all(push_of(kit, shard, 1.0, attempt=attempt), 0, [into])
        assert (pulled.version, pulled.outcome) == (1, kit.reasons.LATE)
        assert values(shard, into) == [3.0]
    shard.coordination.decide = commit_alone(kit, shard)
    assert client.exchange_all(push_of(kit, shard, 1.0, version=1), 0, [into]).version == 2
    assert len(shard.coordination.of("lost")) == 2


def test_a_worker_is_answered_that_its_update_was_skipped(kit: SimpleNamespace, make_shard: Make, dial: Make) -> None:
    """T9: its contribution is finite, and is not applied, because another one is not."""
    shard = make_shard((SMALL,), serve=True)
    client, into = dial(shard), shard.buffers()

    def skip(staged: Any) -> None:
        shard.runtime.deliver(kit.commit(staged.id.version, [staged.id], skip=True))

    shard.coordination.decide = skip
    pulled = client.exchange_all(push_of(kit, shard, 1.0), 0, [into])
    assert (pulled.version, pulled.outcome) == (1, kit.reasons.SKIPPED)


def test_the_server_moves_on_in_the_middle_of_a_push(kit: SimpleNamespace, make_shard: Make, stream: Make) -> None:
    """T1, T2: the server refuses between two chunks, drops what follows until `Abandon`, and then answers."""
    shard = make_shard((BIG,), serve=True)
    end = stream(shard)
    data = np.zeros(shard.layout.nbytes, np.uint8)
    spans = frames.first_chunks([data.nbytes], 1 << 18)
    end.write(Frame(push_begin=PushBegin(part=Part(contribution=kit.gid(0)), bytes=data.nbytes)))
    end.write(spans[0][0], data[: 1 << 18])
    shard.fill(kit.gid(1), 3.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(1)]))
    shard.coordination.wait_for("applied")
    frame, (_, start, stop) = spans[1]
    end.write(frame, data[start:stop])
    assert end.read()[0].received.moved_on
    frame, (_, start, stop) = spans[2]
    end.write(frame, data[start:stop])
    end.write(frames.ABANDON)
    answer, _ = end.read()
    assert (answer.params_begin.version, answer.params_begin.outcome) == (1, kit.reasons.LATE)
    while end.read()[0].WhichOneof("kind") == "chunk":
        pass
    end.write(frames.pull(1))
    assert end.read()[0].params_begin.version == 1
    assert shard.coordination.of("lost") == [kit.gid(0)]


# ---- Nothing hangs forever (T8) ----


def test_cancel_ends_a_wait(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    """T8: the error contains the watchdog's message."""
    shard = make_shard((BIG,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    client.cancel("no heartbeat for 10 s")
    with pytest.raises(PeerLost, match="shard 0: no heartbeat for 10 s"):
        waiting.result(kit.wait)
    with pytest.raises(PeerLost, match="no heartbeat"):
        client.exchange_all(None, 0, [shard.buffers()])


def test_cancel_ends_a_push_to_a_server_that_is_stopped(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T8: a client does not notice that its peer was paused; its write must end when the watchdog cancels it."""
    shard = make_shard((5 * BIG,))
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("stopping_server.py")), kit.token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        shard.server = SimpleNamespace(port=int(process.stdout.readline()))
        client = dial(shard)
        waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        client.cancel("no heartbeat for 10 s")
        with pytest.raises(PeerLost, match="no heartbeat"):
            waiting.result(kit.wait)
    finally:
        process.kill()
        process.communicate()


def test_closing_the_server_ends_idle_waiting_and_stuck_streams(
    kit: SimpleNamespace, make_shard: Make, dial: Make, stream: Make, background: Any
) -> None:
    """T8: one between two exchanges, one that waits for a version, one that is written to and does not read."""
    shard = make_shard((20 * BIG,), serve=True)
    idle, waits, stuck = dial(shard), dial(shard, rank=1), stream(shard, 2)
    idle.exchange_all(None, 0, [shard.buffers()])
    waiting = background(lambda: waits.exchange_all(push_of(kit, shard, 1.0, rank=1), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    stuck.write(frames.pull(0))
    assert stuck.read()[0].WhichOneof("kind") == "params_begin"
    shard.runtime.close()
    assert shard.server.close(kit.wait)
    with pytest.raises(PeerLost):
        waiting.result(kit.wait)
    with pytest.raises(PeerLost):
        idle.exchange_all(None, 0, [shard.buffers()])
    with pytest.raises(PeerLost):
        dial(shard).exchange_all(None, 0, [shard.buffers()])


def test_a_cut_connection_is_a_lost_peer(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    """T1, T8: the complete gradient stays; only the worker's stream ends."""
    shard = make_shard((BIG,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    assert shard.server.disconnect(lambda hello: hello.peer.index == 0) == 1
    with pytest.raises(PeerLost):
        waiting.result(kit.wait)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    shard.coordination.wait_for("applied")
    assert shard.coordination.of("lost") == []


def test_cut_anywhere_a_gradient_counts_whole_or_not_at_all(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T1, T3: connections are cut at any point of an exchange. A staged gradient is applied once, others are lost."""
    shard = make_shard((3 * BIG,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    for attempt in range(12):
        client, into = dial(shard), shard.buffers()
        push = push_of(kit, shard, 1.0, version=shard.runtime.version, attempt=attempt)
        running = background(lambda c=client, p=push, i=into: c.exchange_all(p, 0, [i]))
        if attempt % 2:
            shard.coordination.wait_reported(push.id, running.done)
        shard.server.disconnect(lambda hello: True)
        client.cancel("cut")
        # Refused: two before it are not decided yet.
        with contextlib.suppress(PeerLost, Refused):
            assert running.result(kit.wait).version > push.id.version
    into = shard.buffers()
    pulled = dial(shard).exchange_all(None, 1, [into])
    assert values(shard, into) == [float(pulled.version)]
    assert shard.engine.applied[: pulled.version] == [[1.0]] * pulled.version
    assert not shard.coordination.of("failed")


def test_a_server_that_is_not_there(kit: SimpleNamespace, stack: ExitStack) -> None:
    """T8."""
    with socket.socket() as sock:  # bound and not listening: no other process gets the port
        sock.bind(("127.0.0.1", 0))

        def read() -> None:
            end = ClientStream(f"127.0.0.1:{sock.getsockname()[1]}", kit.hello(0), kit.token)
            stack.callback(end.close)
            end.read()

        with pytest.raises(PeerLost, match=r"127\.0\.0\.1:\d+"):
            read()


def test_a_process_that_fails_ends_while_a_client_is_connected(kit: SimpleNamespace, stack: ExitStack) -> None:
    """T8: a server that raises without closing anything, with an idle client."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forgetful_server.py")), kit.token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        end = ClientStream(f"127.0.0.1:{int(process.stdout.readline())}", kit.hello(0), kit.token)
        stack.callback(end.close)
        assert end.read()[0].WhichOneof("kind") == "abandon"
        process.communicate("go on", timeout=kit.wait)
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()


def test_ipv6(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((SMALL,))
    try:
        server = DataServer(shard.runtime, host="::1", port=0, token=kit.token)
    except PortTaken:
        pytest.skip("this machine has no IPv6 on its loopback interface")
    try:
        end = ClientStream(f"[::1]:{server.port}", kit.hello(0), kit.token)
        end.write(frames.pull(0))
        assert end.read()[0].params_begin.version == 0
        assert server.disconnect(lambda hello: True) == 1
        end.close()
    finally:
        server.close()


def test_all_addresses_are_those_of_ipv4_and_of_ipv6(kit: SimpleNamespace, make_shard: Make) -> None:
    """A pod binds ``0.0.0.0``, even where pods have addresses of IPv6 only."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 on its loopback interface")
    server = DataServer(make_shard((SMALL,)).runtime, host="0.0.0.0", port=0, token=kit.token)
    try:
        for host in ("127.0.0.1", "[::1]"):
            end = ClientStream(f"{host}:{server.port}", kit.hello(0), kit.token)
            end.write(frames.pull(0))
            assert end.read()[0].params_begin.version == 0
            end.close()
    finally:
        server.close()


def test_a_port_does_not_have_the_timeout_that_a_script_has_set() -> None:
    socket.setdefaulttimeout(0.01)
    try:
        with listening_socket("127.0.0.1", 0) as listening:
            assert listening.gettimeout() is None
    finally:
        socket.setdefaulttimeout(None)


def test_a_failed_job_states_the_reason(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    shard = make_shard((SMALL,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    shard.runtime.deliver(Done(failed="three updates in a row were not finite", reason="NonFiniteGradients"))
    with pytest.raises(JobFailed, match="three updates in a row") as failed:
        waiting.result(kit.wait)
    assert failed.value.reason == "NonFiniteGradients"
