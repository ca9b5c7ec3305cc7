"""A contribution goes there and the parameters come back over TCP, and never a part of a contribution (T1, T2, T3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backstay import _instrument
from backstay._transport import frames
from backstay._transport._streams._interfaces import flow_of
from backstay._transport._tensors._client import Push, record_exchange
from backstay.errors import Refused
from backstay_rpc.control_pb2 import (
    Frame,
    GradientInfo,
    Part,
    PushBegin,
    Reject,
)

from .pushes import BIG, SMALL, Make, commit_alone, pulled, push_of, values


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


@pytest.mark.parametrize("sizes", [(SMALL,), (BIG, 3), ()])
def test_the_bytes_of_tensors_are_counted_of_every_exchange(
    kit: SimpleNamespace, make_shard: Make, dial: Make, sizes: tuple[int, ...]
) -> None:
    """This includes pulls without a push, and a push that the server refuses."""
    shard, carried = make_shard(sizes, serve=True), []
    shard.coordination.decide = commit_alone(kit, shard)
    client = pulled(dial(shard, carried=lambda *counts: carried.append(counts)), shard)
    total = [sum(counts) for counts in zip((0, 0), *carried, strict=True)]
    assert total == [0, shard.layout.nbytes]
    client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()])
    total = [sum(counts) for counts in zip((0, 0), *carried, strict=True)]
    assert total == [shard.layout.nbytes, 2 * shard.layout.nbytes]
    with pytest.raises(Refused):
        client.exchange_all(push_of(kit, shard, 1.0, term=9), 0, [shard.buffers()])
    sent, received = (sum(counts) for counts in zip((0, 0), *carried, strict=True))
    assert shard.layout.nbytes <= sent <= 2 * shard.layout.nbytes
    assert received == 2 * shard.layout.nbytes


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
            kit.certificates,
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
    shard.runtime.fence({"worker-0": 2})
    replacement = pulled(dial(shard, incarnation=2), shard)
    assert replacement.exchange_all(push_of(kit, shard, 5.0, incarnation=2), 0, [into]).version == 1
    assert values(shard, into) == [5.0]
    assert shard.engine.applied == [[5.0]]


def test_a_stream_that_ends_without_the_mark_counts_for_nothing(
    kit: SimpleNamespace, make_shard: Make, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1: even when every byte has arrived."""
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
    """T3: the coordinator refuses the second. Its worker gets the version, and that its contribution was applied."""
    shard = make_shard((SMALL,), serve=True)
    first, again = dial(shard), dial(shard)
    one = background(lambda: first.exchange_all(push_of(kit, shard, 1.0, attempt=1), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    two = background(lambda: again.exchange_all(push_of(kit, shard, 1.0, attempt=2), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged", 2)
    shard.runtime.deliver(Reject(id=kit.gid(0, attempt=2), reason=kit.reasons.DUPLICATE))
    shard.runtime.deliver(kit.commit(0, [kit.gid(0, attempt=1)]))
    assert one.result(kit.wait).outcome == kit.reasons.REJECT_UNSPECIFIED
    assert (two.result(kit.wait).version, two.result().outcome) == (1, kit.reasons.REJECT_UNSPECIFIED)
    assert shard.engine.applied == [[1.0]]


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
