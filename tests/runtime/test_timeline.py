"""Spans on their way to shard 0's server, and what it keeps of them."""

from __future__ import annotations

import gzip
import select
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from between import LONG, until
from hypothesis import given
from hypothesis import strategies as st

from backstay import _instrument
from backstay._checkpoint import CheckpointStore
from backstay._process import Caller
from backstay._process._environment import Environment
from backstay._report._http import MAX_TRACE_READERS, TRACE_REST, HttpPort, Pages
from backstay._report._metrics import PodMetrics
from backstay._report._timeline import SpanCollector, Tracing
from backstay._transport import Outbox
from backstay._transport._control._spans import Kept, columns
from backstay_client.reading.timeline import read
from backstay_rpc.control_pb2 import Peer, Spans, Timeline
from backstay_spec.runtime import RuntimeConfig

from .servers import server_environment

PEER = Peer(role="worker", index=3, incarnation=2, pod="w")
SERVER = Peer(role="parameter-server", index=0, incarnation=1, pod="s")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _instrument.keep(_instrument.CAPACITY)
    yield
    _instrument.keep(_instrument.CAPACITY)


def record(*names: str) -> None:
    for at, name in enumerate(names):
        _instrument.record(name, float(at), at + 0.5, at, rank=at)


def outbox(most: int = 100) -> Outbox:
    return Outbox(PEER, clock=lambda: 9.0, unix_clock=lambda: 1e9, most=most)


def environment(folder: Path, megabytes: int = 1, keep: Path | None = None) -> Environment:
    config = RuntimeConfig(shards=1, workers=1, trace_megabytes=megabytes)
    return server_environment(config=config, checkpoint_uri=str(folder), keep=keep)


# ---- Sending


def test_a_server_gets_each_span_once_and_a_new_server_what_the_ring_still_has() -> None:
    box = outbox()
    record("a", "b")
    first = box.take(1)
    assert first is not None
    assert [first.points[i] for i in first.point] == ["a", "b"]
    assert (first.peer, first.clock, first.unix_seconds, first.lost) == (PEER, 9.0, 1e9, 0)
    assert box.take(1) is None
    record("c")
    second = box.take(1)
    assert second is not None
    assert list(second.points) == ["c"]
    again = box.take(2)
    assert again is not None
    assert [again.points[i] for i in again.point] == ["a", "b", "c"]


def test_of_too_many_spans_the_newest_are_sent_and_the_others_are_counted() -> None:
    box = outbox(most=2)
    record("a", "b")
    assert box.take(1) is not None
    record("c", "d", "e", "f")
    found = box.take(1)
    assert found is not None
    assert ([found.points[i] for i in found.point], found.lost) == (["e", "f"], 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "push", "é"]),
            st.floats(0, 1e7),
            st.floats(0, 1e4),
            st.none() | st.integers(0, 2**40),
            st.none() | st.just({"rank": 1, "flow": "x"}),
        ),
        max_size=20,
    )
)
def test_columns_hold_what_the_spans_said(
    items: list[tuple[str, float, float, int | None, dict[str, object] | None]],
) -> None:
    spans = [
        _instrument.Span(number, point, began, began + lasted, step, f"t{number % 2}", notes)
        for number, (point, began, lasted, step, notes) in enumerate(items)
    ]
    message = columns(spans)
    message.peer.CopyFrom(SERVER)
    job = read(Timeline(server=SERVER, spans=[message.SerializeToString()]).SerializeToString())
    found = [] if not job.pods else job.pods[0].spans
    wanted = {(s.point, s.thread, round(s.began * 1e9), round(s.ended * 1e9)) for s in spans}
    assert {(s.point, s.thread, s.began, s.ended) for s in found} == wanted
    if len(wanted) == len(spans):
        steps = sorted((s.began, s.point, s.thread, s.ended, s.step or -1, len(s.notes)) for s in found)
        assert steps == sorted(
            (round(s.began * 1e9), s.point, s.thread, round(s.ended * 1e9), s.step or -1, len(s.notes or {}))
            for s in spans
        )


def test_a_switched_off_ring_sends_nothing() -> None:
    _instrument.keep(0)
    record("a")
    assert outbox().take(1) is None


# ---- Keeping


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), max_size=60))
def test_a_collector_never_holds_more_than_its_capacity_and_drops_the_oldest(sizes: list[tuple[int, int]]) -> None:
    collector = SpanCollector(SERVER, 100, job="j", namespace="n", uid="u", clock=lambda: 1.0, unix_clock=lambda: 2.0)
    sent = []
    for rank, size in sizes:
        sent.append((rank, bytes(size)))
        collector.add(Peer(role="worker", index=rank), sent[-1][1])
        held = Timeline.FromString(collector.timeline())
        total = sum(len(spans) for spans in held.spans)
        assert total <= 100
        assert list(held.spans) == [spans for _, spans in sent[len(sent) - len(held.spans) :]]
        assert held.dropped + total == sum(len(spans) for _, spans in sent)
    kept = len(Timeline.FromString(collector.timeline()).spans)
    assert collector.spans("worker-2") == [spans for rank, spans in sent[len(sent) - kept :] if rank == 2]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_timeline_is_stored_once_after_a_death_and_at_the_end_in_both_folders(tmp_path: Path) -> None:
    clock, ckpt, keep = Clock(), tmp_path / "ckpt", tmp_path / "keep"
    tracing = Tracing(
        environment(ckpt, keep=keep), SERVER, CheckpointStore(str(ckpt)), None, clock=clock, unix_clock=clock
    )
    record("apply")
    tracing.replaced({"worker-3": 1, "worker-4": 2})  # it may have died before this server began
    clock.now += 100
    tracing.tick()
    tracing.replaced({"worker-3": 2})
    tracing.add_spans(PEER, Spans(peer=PEER).SerializeToString())
    tracing.replaced({"worker-4": 3})
    tracing.tick()
    clock.now += 5
    tracing.tick()
    tracing.tick()
    clock.now += 1
    tracing.close()
    assert names(ckpt) == ["trace-000000001105-12345678-1.pb.gz", "trace-000000001106-12345678-1.pb.gz"]
    assert names(keep) == names(ckpt)
    job = read(gzip.decompress((ckpt / names(ckpt)[1]).read_bytes()))
    assert [span.point for pod in job.pods for span in pod.spans if pod.role != "worker"] == ["apply"]


def test_a_server_that_took_over_stores_what_the_workers_sent_again(tmp_path: Path) -> None:
    clock = Clock()
    peer = replace_incarnation(SERVER, 2)
    tracing = Tracing(environment(tmp_path), peer, CheckpointStore(str(tmp_path)), None, clock=clock, unix_clock=clock)
    tracing.replaced({"parameter-server-0": 2})
    clock.now += 5
    tracing.tick()
    tracing.records.close(10)
    assert names(tmp_path) == ["trace-000000001005-12345678-2.pb.gz"]


def test_a_worker_keeps_what_a_killed_server_did_for_its_successor(tmp_path: Path) -> None:
    clock = Clock()
    tracing = Tracing(environment(tmp_path), SERVER, None, None, clock=clock, unix_clock=clock)
    kept, other = Kept(), Kept()
    for name in ("a", "b", "c"):
        record(name)
        tracing.tick()
        assert kept.of_previous(1) == []
        kept.answered(1, tracing.copies(4))
        other.answered(1, tracing.copies(2))
        clock.now += 2
    assert other.of_previous(2) == [], "one worker keeps them"
    points = [list(Spans.FromString(message).points) for message in kept.of_previous(2)]
    assert points == [["a"], ["b"], ["c"]]
    assert kept.of_previous(2), "an answer that is lost loses nothing"
    kept.answered(2, [b"of the second server"])
    assert kept.of_previous(2) == []
    assert kept.of_previous(3) == [b"of the second server"]

    record("d")
    tracing.tick()
    assert tracing.copies(2) == []
    clock.now += 6
    assert len(tracing.copies(2)) == 1, "the worker that kept them is silent"


def test_a_worker_keeps_a_bounded_number_of_bytes_and_drops_the_oldest() -> None:
    kept = Kept(most=10)
    for number in range(5):
        kept.answered(1, [bytes([number]) * 4])
    assert kept.of_previous(2) == [b"\x03" * 4, b"\x04" * 4]
    kept.answered(1, [b"x" * 11])
    assert kept.of_previous(2) == []


def replace_incarnation(peer: Peer, incarnation: int) -> Peer:
    found = Peer()
    found.CopyFrom(peer)
    found.incarnation = incarnation
    return found


def test_with_zero_megabytes_nothing_is_kept_or_stored(tmp_path: Path) -> None:
    tracing = Tracing(environment(tmp_path, megabytes=0), SERVER, CheckpointStore(str(tmp_path)), None)
    tracing.add_spans(PEER, b"some")
    tracing.close()
    assert names(tmp_path) == []
    assert list(Timeline.FromString(tracing.timeline()).spans) == []


def test_after_the_folder_was_lost_nothing_is_written(tmp_path: Path) -> None:
    tracing = Tracing(environment(tmp_path), SERVER, CheckpointStore(str(tmp_path)), None)
    tracing.records.lost()
    tracing.close()
    assert names(tmp_path) == []


# ---- The page


def page(url: str) -> bytes:
    """Returns the page, once it is the client's turn: a previous client's lasts a moment longer than its reading."""

    def read() -> tuple[bytes] | None:
        try:
            with urllib.request.urlopen(url, timeout=LONG) as reply:
                return (reply.read(),)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    raise
        return None

    answer = until(read)
    assert answer is not None
    return answer[0]


def test_one_client_at_a_time_reads_the_page() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> bytes:
        entered.set()
        assert leave.wait(LONG)
        return b"timeline"

    port = HttpPort(PodMetrics("j", "ParameterServer", 0), lambda: True, bind="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{port.port}/trace"
    try:
        assert page(url) == b""
        port.trace = slow
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(page(url)))
        reader.start()
        assert entered.wait(LONG)
        waiting = [socket.create_connection(("127.0.0.1", port.port), LONG) for _ in range(MAX_TRACE_READERS + 1)]
        answers = []
        for each in waiting:
            each.sendall(b"GET /trace HTTP/1.1\r\n\r\n")
        readable, _, _ = select.select(waiting, [], [], LONG)  # one of them is refused, and the others wait
        answers = [each.recv(100) for each in readable]
        assert [answer.partition(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 503 Service Unavailable"]
        for each in waiting:
            each.close()
        leave.set()
        reader.join(LONG)
        assert found == [b"timeline"]
        assert page(url) == b"timeline"
    finally:
        leave.set()
        port.close()


def test_a_client_that_reads_without_a_pause_gets_a_page_every_two_seconds() -> None:
    reading: set[Caller] = set()
    pages = Pages(lambda _: b"", lambda *_: None, reading.__contains__)
    ends = socket.socketpair()
    with ends[0], ends[1]:
        now, began = 0.0, []
        for _ in range(4):
            caller = Caller(ends[0], ("10.0.0.7", 1))
            reading.add(caller)
            pages.add(caller, "/trace")
            while pages.choose(now) is None:
                now += 0.25
            began.append(now)
            now += 0.5  # the client reads the page
            assert pages.choose(now) is None
            reading.remove(caller)
            assert pages.choose(now) is None
        assert began == [0.0, 0.5 + TRACE_REST, 1.0 + 2 * TRACE_REST, 1.5 + 3 * TRACE_REST]
