"""T8: both ends of the links between shards, while links break and begin again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backstay._control import Driving, Link, Links, Peers, _link
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay._wire import ClientStream
from backstay_rpc.control_pb2 import Frame, Hello, Peer, Position, Pull

from .linked import AGREEMENT, TOKEN, Coordinating, FakeHost, MemoryStream, Quiet

SECONDS = 60.0
HELLO = Hello(peer=Peer(role="parameter-server", index=1), expected_incarnation=1)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def driving() -> Iterator[Driving]:
    rules = Rules(mode="Sync", shards=2, steps=10)
    made = Driving(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    made.start()
    yield made
    made.close()


def serve(links: Links, stream: MemoryStream) -> threading.Thread:
    thread = threading.Thread(target=links.serve, args=(HELLO, stream), daemon=True)
    thread.start()
    return thread


def test_a_link_whose_thread_is_late_does_not_end_a_later_link(driving: Driving) -> None:
    """The link's position and reports are out of date: the coordinator would count the shard's later state as lost."""
    links = Links(FakeHost(driving), Peers())  # type: ignore[arg-type]
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


def test_a_link_with_a_wrong_frame_is_refused_without_waiting_for_its_peer(driving: Driving) -> None:
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

    links, stream = Links(FakeHost(driving), Peers()), Full()  # type: ignore[arg-type]
    stream.say(position=Position(link=1))
    stream.incoming.put(Frame(pull=Pull()))
    serve(links, stream).join(SECONDS)
    assert stream.refusals == ["INVALID_ARGUMENT"]
    assert not links


def test_t6_a_shard_does_not_stay_linked_to_a_replaced_coordinator(
    driving: Driving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard receives the newer incarnation after the coordinator's answer, and before the link begins."""
    superseded: list[int] = []

    class Host(FakeHost):
        def superseded(self, by: int) -> None:
            superseded.append(by)

    class Sink:
        def deliver(self, _: Any) -> None: ...

    server = Coordinating(Host(driving), TOKEN)
    link = Link(f"127.0.0.1:{server.port}", TOKEN, HELLO.peer, AGREEMENT, "Sync")

    def connect(address: str, hello: Hello, token: str) -> ClientStream:
        link.expect(2)
        return ClientStream(address, hello, token)

    monkeypatch.setattr(_link, "ClientStream", connect)
    link.start(Sink())
    try:
        until(lambda: superseded)
        assert superseded[0] == 2
        assert not link.up
    finally:
        link.close()
        server.close()
