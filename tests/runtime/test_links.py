"""T8: both ends of the links between shards, while links break and begin again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from between import LONG, until

from backstay._coordination import Coordinator, CoordinatorState, Rules, ServerPosition
from backstay._roles._ending import LastSave
from backstay._threaded import ThreadedCoordinator
from backstay._timeouts import Timeouts
from backstay._transport import ClientStream, Link, Links, Peers
from backstay._transport._control import _link, _links
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    CoordinatorMessage,
    Done,
    Ended,
    Frame,
    GradientId,
    Hello,
    Peer,
    Position,
    Pull,
    Refused,
    Rollback,
    Save,
    ShardMessage,
    Spans,
    Staged,
    Written,
)
from backstay_rpc.credentials import Credentials

from .linked import AGREEMENT, TOKEN, Coordinating, FakeHost, MemoryStream, Quiet

SECONDS = LONG
HELLO = Hello(peer=Peer(role="parameter-server", index=1), expected_incarnation=1)


class Nothing:
    """A `ShardSink` that ignores its messages."""

    def deliver(self, _: Any) -> None: ...


@pytest.fixture
def threaded() -> Iterator[ThreadedCoordinator]:
    rules = Rules(mode="Sync", shards=2, steps=10)
    made = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    made.start()
    yield made
    made.close()


def serve(links: Links, stream: MemoryStream) -> threading.Thread:
    thread = threading.Thread(target=links.serve, args=(HELLO, stream), daemon=True)
    thread.start()
    return thread


def allowing(links: int) -> Peers:
    """Peers whose shards have called `Coordinate` so often."""
    peers = Peers()
    for _ in range(links):
        peers.allow_link()
    return peers


def test_a_link_whose_thread_is_late_does_not_end_a_later_link(threaded: ThreadedCoordinator) -> None:
    """The link's position and reports are out of date: the coordinator would count the shard's later state as lost."""
    links = Links(FakeHost(threaded), allowing(3))  # type: ignore[arg-type]
    earlier, later, newest = MemoryStream(), MemoryStream(), MemoryStream()
    for number, stream in enumerate((earlier, later, newest), start=1):
        stream.say(position=Position(link=number))
    serving = serve(links, later)
    until(lambda: later.received[1:])  # accepted, and its term begins
    late = serve(links, earlier)
    late.join(SECONDS)
    assert not late.is_alive()
    assert earlier.received == []
    assert len(links) == 1
    assert serving.is_alive()
    last = serve(links, newest)
    serving.join(SECONDS)
    assert not serving.is_alive()
    until(lambda: newest.received[1:])
    newest.cut()
    last.join(SECONDS)
    assert not links


def test_t6_a_link_without_a_call_of_coordinate_replaces_no_server(threaded: ThreadedCoordinator) -> None:
    """`Coordinate` compares the settings; the first bytes of a stream do not."""
    peers = allowing(1)
    peers.claim("parameter-server", 1, 0)
    links, real, other = Links(FakeHost(threaded), peers), MemoryStream(), MemoryStream()  # type: ignore[arg-type]
    real.say(position=Position(link=1))
    serving = serve(links, real)
    until(lambda: len(links) == 1)
    refused: list[str] = []
    other.post = lambda frame: refused.append(frame.refused.code)  # type: ignore[method-assign]
    other.say(position=Position(link=1))
    hello = Hello(peer=Peer(role="parameter-server", index=1, incarnation=2**31), expected_incarnation=1)
    links.serve(hello, other)
    assert refused == ["FAILED_PRECONDITION"]
    assert len(links) == 1
    real.cut()
    serving.join(SECONDS)
    assert not serving.is_alive()


def test_a_link_with_a_wrong_frame_is_refused_without_waiting_for_its_peer(threaded: ThreadedCoordinator) -> None:
    """The thread that carries out decisions may send on the same link, and must not wait behind a send."""

    class Full(MemoryStream):
        """A stream whose peer does not read: after the first frame, sending with a wait would not return."""

        def write(self, frame: Frame, *body: object) -> None:
            assert not self.received
            super().write(frame)

        def post(self, frame: Frame) -> None:
            super().write(frame)
            if frame.HasField("refused"):
                self.refusals.append(frame.refused.code)

        def __init__(self) -> None:
            super().__init__()
            self.refusals: list[str] = []

    links, stream = Links(FakeHost(threaded), allowing(1)), Full()  # type: ignore[arg-type]
    stream.say(position=Position(link=1))
    stream.incoming.put(Frame(pull=Pull()))
    serve(links, stream).join(SECONDS)
    assert stream.refusals == ["INVALID_ARGUMENT"]
    assert not links


class SupersededHost(FakeHost):
    """Keeps the incarnations by which the coordinator was reported to be replaced, in `by`."""

    def __init__(self, threaded: ThreadedCoordinator) -> None:
        super().__init__(threaded)
        self.by: list[int] = []

    def superseded(self, by: int) -> None:
        self.by.append(by)


def test_t6_a_shard_does_not_stay_linked_to_a_replaced_coordinator(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard receives the newer incarnation after the coordinator's answer, and before the link begins."""
    host = SupersededHost(threaded)
    server = Coordinating(host, TOKEN)
    link = Link(f"127.0.0.1:{server.port}", Credentials(TOKEN), HELLO.peer, AGREEMENT, "Sync")

    def connect(address: str, hello: Hello, credentials: Credentials) -> ClientStream:
        link.expect(2)
        return ClientStream(address, hello, credentials)

    monkeypatch.setattr(_link, "ClientStream", connect)
    link.start(Nothing())
    try:
        until(lambda: host.by)
        assert host.by[0] == 2
        assert not link.up
    finally:
        link.close()
        server.close()


@pytest.mark.parametrize("index", [0, 2, 1 << 31])
def test_a_shard_that_the_job_does_not_have_cannot_link(threaded: ThreadedCoordinator, index: int) -> None:
    """The answers would count as those of another shard, and a strange position begins a new term."""
    links, stream = Links(FakeHost(threaded), Peers()), MemoryStream()  # type: ignore[arg-type]
    stream.say(position=Position(term=7, version=9))
    refused: list[str] = []
    stream.post = lambda frame: refused.append(frame.refused.code)  # type: ignore[method-assign]
    links.serve(Hello(peer=Peer(role="parameter-server", index=index), expected_incarnation=1), stream)
    assert refused == ["INVALID_ARGUMENT"]
    assert threaded.state().term == 1
    server = Coordinating(FakeHost(threaded), TOKEN)
    peer = Peer(role="parameter-server", index=index)
    link = Link(f"127.0.0.1:{server.port}", Credentials(TOKEN), peer, AGREEMENT, "Sync")
    link.start(Nothing())
    try:
        until(lambda: link.error)
        assert "is not another shard: the job has 2 shards" in str(link.error)
    finally:
        link.close()
        server.close()


def test_a_link_that_sends_nothing_ends(threaded: ThreadedCoordinator) -> None:
    """It would keep a thread of shard 0's server."""
    links = Links(FakeHost(threaded), Peers(), Timeouts(link_answer=0.01))  # type: ignore[arg-type]
    serving = serve(links, MemoryStream())
    serving.join(SECONDS)
    assert not serving.is_alive()
    assert not links


def test_a_link_to_a_coordinator_that_does_not_run_is_opened_again(threaded: ThreadedCoordinator) -> None:
    """A stopped process keeps its connections, and its successor waits for this shard."""
    runs = threading.Event()
    runs.set()
    pings: list[float] = []

    class Host(FakeHost):
        def add_spans(self, *_: object) -> None:
            pings.append(time.monotonic())
            assert runs.wait(SECONDS)

    server = Coordinating(Host(threaded), TOKEN)
    link = Link(f"127.0.0.1:{server.port}", Credentials(TOKEN), HELLO.peer, AGREEMENT, "Sync")
    link.start(Nothing())
    try:
        until(lambda: link.up)
        first = link._number
        for second in range(100):
            link.tick(float(second))
            until(lambda: link._unanswered == 0)  # each ping is answered
        assert link._number == first
        runs.clear()
        link.send_spans(lambda _: Spans(lost=1))
        until(lambda: pings)
        link.tick(100.0)
        for _ in range(20):
            link.tick(101.9)  # early: it does not count
        assert link.up
        for second in range(102, 112, 2):
            link.tick(float(second))
        until(lambda: link.up and link._number > first)
        assert link._unanswered == 0
    finally:
        runs.set()
        link.close()
        server.close()


class FakeEnd:
    """The shard's end of a link, instead of a `ClientStream`."""

    def __init__(self, *_: object) -> None:
        self.incoming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.sent: list[ShardMessage] = []
        self.room = threading.Event()
        self.room.set()
        self.writes = threading.Event()

    def keep_alive(self) -> None: ...

    def write(self, frame: Frame) -> None:
        self.writes.set()
        assert self.room.wait(SECONDS)
        self.post(frame)

    def post(self, frame: Frame) -> None:
        self.sent.append(frame.to_coordinator)

    def read(self) -> tuple[Frame, None]:
        frame = self.incoming.get()
        if frame is None:
            raise PeerLost("cut")
        return frame, None

    def say(self, **kind: Any) -> None:
        self.incoming.put(Frame(to_shard=CoordinatorMessage(**kind)))

    def cancel(self, why: str) -> None:
        del why
        self.incoming.put(None)

    def close(self) -> None: ...


class Ends:
    """A link that gets prepared ends, one after another."""

    def __init__(self, threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch, *ends: FakeEnd) -> None:
        remaining = list(ends)

        def connect(*_: object) -> FakeEnd:
            if not remaining:
                raise PeerLost("no other end")
            return remaining.pop(0)

        monkeypatch.setattr(_link, "ClientStream", connect)
        self._server = Coordinating(FakeHost(threaded), TOKEN)
        self.link = Link(f"127.0.0.1:{self._server.port}", Credentials(TOKEN), HELLO.peer, AGREEMENT, "Sync")

    def __enter__(self) -> Link:
        return self.link

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self._server.close()


def staged(version: int, term: int = 1) -> Staged:
    return Staged(id=GradientId(term=term, version=version, key_step=version, attempt=version + 1))


def test_nothing_waits_for_a_link_that_is_being_opened(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped coordinator does not read what is sent first. Streams, calls and updates of the shard continue."""
    end = FakeEnd()
    end.room.clear()
    with Ends(threaded, monkeypatch, end) as link:
        link.inherit(1, 0, None, ())
        link.report(staged(0))
        link.start(Nothing())
        assert end.writes.wait(SECONDS)
        link.report(staged(1))
        link.report(Applied(version=1))
        link.expect(0)
        assert end.sent == []
        end.say()
        end.room.set()
        until(lambda: link.up)
        link.report(Applied(version=2))
        kinds = [(message.WhichOneof("kind"), message.staged.id.version) for message in end.sent]
        assert kinds == [("position", 0), ("staged", 0), ("applied", 0), ("staged", 1), ("applied", 0), ("applied", 0)]
        assert [message.applied.version for message in end.sent if message.HasField("applied")] == [0, 1, 2]


def test_t8_a_term_that_is_announced_twice_loses_no_report(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first link broke before the shard's report. A contribution that came meanwhile is not reported twice."""
    first, second = FakeEnd(), FakeEnd()
    with Ends(threaded, monkeypatch, first, second) as link:
        link.start(Nothing())
        first.say()
        first.say(rollback=Rollback(term=3, version=5))
        until(lambda: link.position.begun == 3)
        link.started(3, 5)
        link.report(staged(5, term=3))
        first.say(rollback=Rollback(term=3, version=5))
        first.say(commit=Commit(term=3, version=4))  # when this is received, so is the other
        until(lambda: link.position.HasField("last"))
        first.cancel("")
        second.say()
        until(lambda: link.up and second.sent)
        position, held, *_ = second.sent
        assert (position.position.term, position.position.version) == (3, 5)
        assert held.staged.id.version == 5


def test_t8_a_server_whose_link_has_a_defect_ends(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def deliver(self, _: Any) -> None:
            raise ZeroDivisionError

    end = FakeEnd()
    with Ends(threaded, monkeypatch, end) as link:
        link.start(Broken())
        end.say()
        end.say(rollback=Rollback(term=3, version=5))
        until(lambda: isinstance(link.error, ZeroDivisionError))


@pytest.mark.parametrize(("code", "final"), [("INVALID_ARGUMENT", True), ("FAILED_PRECONDITION", False)])
def test_t8_a_refusal_of_an_open_link_counts(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch, code: str, final: bool
) -> None:
    """Otherwise a shard whose message is too long would link again forever."""
    end, second = FakeEnd(), FakeEnd()
    with Ends(threaded, monkeypatch, end, second) as link:
        link.start(Nothing())
        end.say()
        end.incoming.put(Frame(refused=Refused(code=code, message="too long")))
        second.say()
        until(lambda: link.error if final else second.sent)
        assert (link.error is not None) is final


def test_t8_a_shard_leaves_a_replaced_coordinator_that_still_runs(threaded: ThreadedCoordinator) -> None:
    """Without standbys, the old server may store its last checkpoint later, but its node may not end it at all. But its
    node may not end it at all."""
    host = SupersededHost(threaded)
    server = Coordinating(host, TOKEN)
    link = Link(f"127.0.0.1:{server.port}", Credentials(TOKEN), HELLO.peer, AGREEMENT, "Sync")
    link.start(Nothing())
    try:
        until(lambda: link.up)
        link.expect(1, after=60.0)  # the one that it has
        link.expect(2, after=60.0)
        for second in range(0, 58, 2):
            link.tick(float(second))
            until(lambda: link._unanswered == 0)
        assert link.up
        assert not host.by
        link.tick(58.0)
        until(lambda: host.by)
        assert host.by[0] == 2
    finally:
        link.close()
        server.close()


def test_t8_the_coordinator_stays_for_a_shard_whose_link_broke_at_the_end(threaded: ThreadedCoordinator) -> None:
    """Otherwise that shard's server would try forever to link again."""
    links = Links(FakeHost(threaded), allowing(2), Timeouts(gone=1e6))  # type: ignore[arg-type]
    now = time.monotonic()

    def linked(number: int) -> MemoryStream:
        stream = MemoryStream()
        stream.say(position=Position(link=number))
        threads.append(serve(links, stream))
        until(lambda: stream.received[1:])
        return stream

    threads: list[threading.Thread] = []
    assert not links.awaited(now)
    first = linked(1)
    assert links.awaited(now)
    threaded.do(Coordinator.fail, "Tired", "enough")
    first.cut()
    threads[0].join(SECONDS)
    assert links.awaited(now)
    assert not links.awaited(now + 2e6)
    second = linked(2)
    until(lambda: second.received[-1].HasField("done"))
    second.say(ended=Ended())
    until(second.incoming.empty)
    assert links.awaited(now + 2e6)
    second.cut()
    threads[1].join(SECONDS)
    assert not links.awaited(now)


def test_a_shard_confirms_the_end(threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    end = FakeEnd()
    with Ends(threaded, monkeypatch, end) as link:
        link.start(Nothing())
        end.say()
        until(lambda: link.up)
        assert not any(message.HasField("ended") for message in end.sent)
        end.say(done=Done(version=3))
        until(lambda: any(message.HasField("ended") for message in end.sent))


def test_t8_a_shard_that_did_not_receive_the_request_for_a_checkpoint_gets_it_again() -> None:
    """Otherwise the checkpoint of a server that stops is never complete, and the next ones wait for it."""
    received: list[Any] = []

    class Sink:
        def deliver(self, message: Any) -> None:
            received.append(message)

    rules = Rules(mode="Sync", shards=2, steps=100, stores=True)
    threaded = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    threaded.start()
    threaded.attach(Nothing(), ServerPosition(0, 1, 0))
    threaded.attach(broken := Nothing(), ServerPosition(1, 1, 0))
    for shard in (0, 1):
        threaded.report(shard, staged(0))
        threaded.report(shard, Applied(version=1))
    threaded.detach(1, broken)
    threaded.do(Coordinator.save)
    for saves, times in ((1, 0), (0, 1), (1, 1)):
        threaded.attach(Sink(), ServerPosition(1, 1, 1, saves=saves))
        until(lambda: received.count(Save(term=1, version=1)) == times)  # noqa: B023  another thread may deliver it
    threaded.report(1, Written(term=1, version=1))
    threaded.attach(Sink(), ServerPosition(1, 1, 1, saves=0))
    assert received.count(Save(term=1, version=1)) == 1
    threaded.close()


def test_a_link_begins_with_the_newest_version_that_is_to_be_stored(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [FakeEnd() for _ in range(4)]
    messages: list[dict[str, Any]] = [
        {"save": Save(term=1, version=3)},
        {"commit": Commit(term=1, version=6, checkpoint=True)},
        {"rollback": Rollback(term=2, version=5)},
    ]
    with Ends(threaded, monkeypatch, *ends) as link:
        link.inherit(1, 3, None, ())
        link.start(Nothing())
        for number, message in enumerate(messages):
            ends[number].say()
            ends[number].say(**message)
            ends[number].incoming.put(None)
        until(lambda: ends[3].sent)
    assert [end.sent[0].position.saves for end in ends] == [0, 3, 7, 0]


@pytest.mark.parametrize("field", ["term", "begun", "version"])
def test_a_position_that_the_coordinator_cannot_count_on_from_is_refused(
    threaded: ThreadedCoordinator, field: str
) -> None:
    links, stream = Links(FakeHost(threaded), Peers()), MemoryStream()  # type: ignore[arg-type]
    stream.say(position=Position(**{field: 1 << 63}))
    refused: list[str] = []
    stream.post = lambda frame: refused.append(frame.refused.code)  # type: ignore[method-assign]
    links.serve(HELLO, stream)
    assert refused == ["INVALID_ARGUMENT"]


@pytest.mark.parametrize("number", [2, (1 << 63) - 1, (1 << 64) - 1])
def test_a_number_of_a_link_that_was_not_allowed_is_refused(threaded: ThreadedCoordinator, number: int) -> None:
    """It would end the shard's link, and no link with an allowed number could begin."""
    links, real, wrong = Links(FakeHost(threaded), allowing(1)), MemoryStream(), MemoryStream()  # type: ignore[arg-type]
    real.say(position=Position(link=1))
    serving = serve(links, real)
    until(lambda: real.received[1:])
    refused: list[str] = []
    wrong.post = lambda frame: refused.append(frame.refused.code)  # type: ignore[method-assign]
    wrong.say(position=Position(link=number))
    links.serve(HELLO, wrong)
    assert refused == ["INVALID_ARGUMENT"]
    assert len(links) == 1
    real.cut()
    serving.join(SECONDS)


def failing(links: Links) -> list[str]:
    """Link once, and return the reasons of refusals."""
    stream, refused = MemoryStream(), list[str]()
    stream.post = lambda frame: refused.append(frame.refused.message)  # type: ignore[method-assign]
    stream.say(position=Position())
    links.serve(HELLO, stream)
    return refused


def test_a_defect_of_the_coordinator_is_logged_once_and_ends_its_server(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged for each link, 50 times a second, and the job never ended."""

    def attach(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(threaded, "attach", attach)
    links = Links(FakeHost(threaded), Peers())  # type: ignore[arg-type]
    for _ in range(_links.DEFECTS - 1):
        assert failing(links) == ["the coordinator has a defect: ZeroDivisionError('a defect')"]
        assert links.error is None
    failing(links)
    assert isinstance(links.error, ZeroDivisionError)
    assert sum("a defect" in record.getMessage() or bool(record.exc_info) for record in caplog.records) == 1


def test_defects_of_links_that_lasted_do_not_add_up(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = Links(FakeHost(threaded), Peers(), Timeouts(silent=-1.0))  # type: ignore[arg-type]
    monkeypatch.setattr(threaded, "attach", Mock(side_effect=ZeroDivisionError))
    for _ in range(2 * _links.DEFECTS):
        failing(links)
    assert links.error is None


def test_losing_a_shard_is_not_a_defect(threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(FakeHost(threaded), Peers())  # type: ignore[arg-type]
    for error in (PeerLost("gone"), OSError("gone")):
        monkeypatch.setattr(threaded, "attach", Mock(side_effect=error))
        for _ in range(2 * _links.DEFECTS):
            with pytest.raises(type(error)):
                failing(links)
    assert links.error is None


def test_t8_a_job_fails_if_a_term_cannot_begin() -> None:
    """The thread that begins it stays, and no shard waits forever."""

    class Storage(Quiet):
        def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
            return CoordinatorState(term=above_term, version=0, world=1), ""  # it is not above

    received: list[Any] = []

    class Sink:
        def deliver(self, message: Any) -> None:
            received.append(message)

    rules = Rules(mode="Sync", shards=1, steps=10)
    threaded = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Storage(), Quiet())
    threaded.start()
    threaded.attach(Sink(), ServerPosition(0, 1, 7))  # it lives on after a coordinator that is gone
    until(lambda: received)
    assert received[0].reason == "RestoreFailed"
    assert "could not carry out a decision: term 1 is not above" in received[0].failed
    threaded.close()


def test_t7_a_shard_that_stops_waits_until_it_has_stored_its_part(
    threaded: ThreadedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier checkpoint that ends meanwhile is not the one that it requested."""
    end = FakeEnd()
    with Ends(threaded, monkeypatch, end) as link:
        last = LastSave(link, Timeouts(last_save=60.0), lambda: end.say(save=Save(term=1, version=5)))

        def report(written: Written) -> None:
            link.report(written)
            last.reported(written)

        link.start(Nothing())
        end.say()
        end.say(commit=Commit(term=1, version=1, checkpoint=True))
        until(lambda: link.up and link.storing)
        stopping = threading.Thread(target=last.wait)
        stopping.start()
        until(lambda: link.position.saves == 5)
        report(Written(term=1, version=2))
        stopping.join(1.0)
        assert stopping.is_alive()
        report(Written(term=1, version=5, error="the disk is full"))
        until(lambda: end.sent[-1].WhichOneof("kind") is None)
        assert end.sent[-2].written.version == 5
        assert stopping.is_alive(), "the coordinator may not have processed the report yet"
        end.say()
        stopping.join(SECONDS)
        assert not stopping.is_alive()
