"""The active server's end of replication, with a standby that is a script: T3, T6, T8."""

from __future__ import annotations

import gc
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from between import LONG, until

from backstay._shard import _replication
from backstay._shard._follower import Follower, HeldState
from backstay._shard._operand import PreparedMean
from backstay._shard._replication import HELD, Replica, Replication
from backstay._transport._streams._interfaces import Place
from backstay._transport._streams._tcp import ClientStream, Listener
from backstay._transport._streams.frames import WHOLE_BYTES, kind_of
from backstay._update import ShardEngine, analyse, describe, partition
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import Commit, Contribution, Frame, GradientId, Hello, Peer, ReplicaState
from backstay_rpc.control_pb2 import Replica as ReplicaFrame
from backstay_rpc.credentials import Credentials

DIGEST = b"digest"


class Standby:
    """A `ServerStream` whose other end answers `held`; it takes frames only while it may."""

    def __init__(self) -> None:
        self.got: list[tuple[Frame, bytes | None]] = []
        self.may = threading.Semaphore(0)
        self._answers: queue.SimpleQueue[tuple[Frame, None] | None] = queue.SimpleQueue()

    def write(self, frame: Frame, *body: Any) -> None:
        self.may.acquire()
        self.got.append((frame, b"".join(map(bytes, body)) if body else None))
        kind = frame.replica.WhichOneof("kind") if kind_of(frame) == "replica" else ""
        if kind in ("whole", "commit", "alive") or (kind == "mean" and frame.replica.mean.whole):
            self._answers.put((HELD, None))

    def read(self, place: Place | None = None) -> tuple[Frame, None] | None:
        return self._answers.get()

    def end(self) -> None:
        self._answers.put(None)
        self.may.release(1000)

    cut = end


def replication(coordinator: Callable[[ReplicaState], bool] = lambda state: True) -> Replication:
    return Replication(
        DIGEST, incarnation=1, admitted=lambda: None, standby_lost=lambda when, closed: None, coordinator=coordinator
    )


def dial(replication: Replication, stream: Standby, incarnation: int = 2) -> threading.Thread:
    hello = Hello(peer=Peer(incarnation=incarnation), expected_incarnation=1, partition_digest=DIGEST)
    thread = threading.Thread(target=replication.serve, args=(hello, stream), daemon=True)
    thread.start()
    return thread


def joining(replication: Replication) -> Replica:
    found: list[Replica] = []
    until(lambda: found.extend(filter(None, [replication.joining()])) or found)
    return found[0]


def snapshot(*values: np.ndarray) -> Any:
    return types.SimpleNamespace(
        entries=[
            types.SimpleNamespace(key=f"k{index}", start=0, stop=value.size, value=value)
            for index, value in enumerate(values)
        ]
    )


@pytest.mark.parametrize("size", [4, WHOLE_BYTES], ids=["one frame", "chunks"])
def test_t3_a_standby_is_sent_the_mean_as_it_was_applied(size: int) -> None:
    """The mean of one gradient is that gradient's memory, which the next gradient uses. The standby must not get that
    later content, however long the state before it takes."""
    contributions = [Contribution(id=GradientId(version=3), weight=1.0)]
    memory = np.full(size, 7.0, np.float32)
    prepared = PreparedMean.of(None, 3, contributions, [[memory]], [], 1.0, copy=False)  # type: ignore[arg-type]
    active, stream = replication(), Standby()
    thread = dial(active, stream)
    active.fill(joining(active), ReplicaState(version=3), snapshot(np.zeros(1, np.float32)), prepared)
    memory[:] = 8.0  # applied, and used again
    stream.may.release(5)
    stream.may.release(5)

    def sent() -> bytes:
        bodies = [body for frame, body in stream.got if kind_of(frame) == "chunk" or frame.replica.HasField("mean")]
        return b"".join(body for body in bodies if body)

    until(lambda: len(sent()) == memory.nbytes)
    assert set(np.frombuffer(sent(), np.float32)) == {7.0}
    active.stop()
    stream.end()
    thread.join()


def test_t3_a_standby_that_was_given_up_never_gets_the_end_of_a_mean() -> None:
    """It was stopped in the middle. When it continues, the next gradient may be in the memory that is still sent."""
    contributions = [Contribution(id=GradientId(version=3), weight=1.0)]
    memory = np.full(WHOLE_BYTES, 7.0, np.float32)
    active, stream = replication(), Standby()
    thread = dial(active, stream)
    active.fill(joining(active), ReplicaState(version=3), snapshot(np.zeros(1, np.float32)), None)
    stream.may.release(3)
    until(lambda: active.standby)
    hold = active.send_prepared(PreparedMean.of(None, 3, contributions, [[memory]], [], 1.0, copy=False))  # type: ignore[arg-type]
    stream.may.release(2)
    until(lambda: len(stream.got) == 5)  # the beginning, and the first of four chunks
    active.end()
    hold()
    memory[:] = 8.0
    stream.may.release(1000)
    stream._answers.put(None)
    thread.join()
    assert not any(frame.replica.whole for frame, _ in stream.got[3:])


class Server:
    """An active server that does nothing on its own: one stream of a standby."""

    def __init__(self) -> None:
        self.streams: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.over = threading.Event()
        self.listener = Listener("127.0.0.1", 0, Credentials("token"), self._serve)

    def _serve(self, hello: Hello, stream: Any) -> None:
        self.streams.put(stream)
        self.over.wait(LONG)


def test_t6_the_stream_of_a_promoted_standby_stays_open() -> None:
    """A server whose standby closes its stream waits less long for the operator, because that standby is dead."""
    tree = describe({"w": np.zeros(4, np.float32)})
    rule = analyse(optax.sgd(1.0), tree)
    follower, server = Follower(partition(tree, rule, 1), 0, rule), Server()
    thread = threading.Thread(
        target=lambda: follower.follow(
            ClientStream(f"127.0.0.1:{server.listener.bound}", Hello(), Credentials("token"))
        )
    )
    thread.start()
    stream = server.streams.get()
    follower.take()
    stream.write(Frame(replica=ReplicaFrame(alive=True)))
    thread.join()
    gc.collect()
    assert stream.alive()
    assert follower._kept is not None
    follower._kept.close()
    server.over.set()
    assert server.listener.close()


class Commits:
    """A `ClientStream` with one commit; `answered` runs once the standby has answered that it holds the commit."""

    def __init__(self, commit: Commit, answered: Callable[[], None]) -> None:
        self._frames = [Frame(replica=ReplicaFrame(commit=commit))]
        self._answered = answered

    def read(self, place: Place | None = None) -> tuple[Frame, None]:
        if not self._frames:
            raise PeerLost("the stream ended")
        return self._frames.pop(), None

    def write(self, frame: Frame) -> None:
        assert frame == HELD
        self._answered()


@pytest.mark.parametrize("promoted", [False, True])
def test_t3_a_commit_that_a_standby_holds_is_applied_once_even_if_it_is_promoted_immediately(promoted: bool) -> None:
    """The standby answers before it applies the commit."""
    tree = describe({"w": np.zeros(4, np.float32)})
    rule = analyse(optax.sgd(1.0), tree)
    layout = partition(tree, rule, 1)
    engine = ShardEngine(layout, 0, rule, {"w": np.zeros(4, np.float32)})
    shown: list[int] = []
    follower = Follower(layout, 0, rule, shown.append)
    contributions = [Contribution(id=GradientId(term=1), weight=1.0)]
    mean = PreparedMean(0, contributions, [np.full(4, 2.0, np.float32)], [])
    follower._held = HeldState(term=1, world=1, offset=0, engine=engine, last=None, prepared=mean)
    commit = Commit(term=1, version=0, contributions=contributions, world=1, clip_factor=1.0)
    stream = Commits(commit, follower.take if promoted else lambda: None)  # type: ignore[arg-type]
    with pytest.raises(PeerLost):
        follower.follow(stream)  # type: ignore[arg-type]
    held = follower.take()
    assert held is not None
    assert (held.engine.version, held.last) == (1, commit)
    assert held.engine.block(0).tolist() == [-2.0] * 4
    assert shown == ([] if promoted else [1]), "the metric backstay_step of a standby"


def test_a_standby_refuses_a_commit_whose_mean_it_does_not_hold() -> None:
    tree = describe({"w": np.zeros(4, np.float32)})
    rule = analyse(optax.sgd(1.0), tree)
    layout = partition(tree, rule, 1)
    follower = Follower(layout, 0, rule)
    engine = ShardEngine(layout, 0, rule, {"w": np.zeros(4, np.float32)})
    follower._held = HeldState(term=1, world=1, offset=0, engine=engine, last=None)
    commit = Commit(term=1, version=0, contributions=[Contribution(id=GradientId(term=1), weight=1.0)], world=1)
    answers: list[None] = []
    with pytest.raises(PeerLost, match="whose mean did not arrive"):
        follower.follow(Commits(commit, lambda: answers.append(None)))  # type: ignore[arg-type]
    assert not answers


@pytest.mark.parametrize("in_sync", [False, True])
def test_t8_a_standby_that_receives_slowly_is_kept_and_a_stopped_one_is_dropped(
    kit: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, in_sync: bool
) -> None:
    """A state, or a mean, may take any time while bytes move; a standby that receives nothing is lost."""
    waits: list[float] = []
    active, stream = replication(), Standby()
    thread = dial(active, stream)
    replica = joining(active)
    active.fill(replica, ReplicaState(version=3), snapshot(*[np.zeros(1, np.float32)] * 5), None)

    replica.in_sync = in_sync

    def moves(patience: float) -> bool:
        """Returns a deadline in place of the clock, which passes after the standby has taken one more frame, while it
        may."""
        waits.append(patience)
        if len(waits) > 4:
            return False
        stream.may.release()
        return real(30.0)

    real = replica._moves
    monkeypatch.setattr(replica, "_moves", moves)
    for _ in range(_replication.BACKLOG):
        number = replica.put(lambda: iter(()))
    assert not replica.wait(number + 1)
    assert waits == [kit.Timeouts().held] * 5, "four frames of the state came, and then none"
    assert replica.ended_at is not None
    stream.end()
    thread.join()


@pytest.mark.parametrize(
    ("filled", "answers", "patience"),
    [
        (0.1, [], 10.0),  # nothing is known yet
        (0.1, [0.001, 0.002], 1.0),
        (0.1, [0.3, 0.001], 3.0),  # a loaded machine
        (0.1, [5.0], 10.0),
        (7.0, [0.001], 7.0),  # to fill a large shard again takes longer
        (70.0, [0.001], 10.0),
    ],
)
def test_t8_a_standby_that_is_quickly_filled_again_is_not_waited_for_long(
    kit: types.SimpleNamespace, filled: float, answers: list[float], patience: float
) -> None:
    replica = Replica(2, kit.Timeouts())
    assert replica.patience() == 10.0
    replica.in_sync, replica._filled = True, filled
    replica._answers.extend(answers)
    assert replica.patience() == patience


def test_t8_a_server_that_was_paused_does_not_blame_its_standby(
    kit: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of the standby may wait in the socket of the server."""
    replica, now = Replica(2, kit.Timeouts()), [0.0]
    gaps = iter([100.0, *[_replication.GLANCE] * 100])
    looks: list[float] = []

    def wait_for(what: Callable[[], bool], seconds: float) -> bool:
        looks.append(seconds)
        now[0] += next(gaps)
        return what()

    monkeypatch.setattr(_replication, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(replica._changed, "wait_for", wait_for)
    assert not replica._moves(1.0)
    assert looks == [_replication.GLANCE] * 3, "the pause counts for two of four looks"


def test_t8_a_standby_that_stops_answering_is_disconnected_without_an_update(
    kit: types.SimpleNamespace,
) -> None:
    """Only an update noticed it, and the thread and the connection stayed until then."""

    class Stopped(Standby):
        """A standby whose process was stopped: its socket takes messages, and nothing answers them."""

        def read(self, place: Place | None = None) -> tuple[Frame, None] | None:
            while (answer := super().read()) is not None:
                del answer
            return None

    stream = Stopped()
    stream.may.release(1000)
    replica = Replica(2, kit.Timeouts(replica_beat=0.01, held=0.01))
    serving = threading.Thread(target=replica.run, args=(stream,), daemon=True)
    serving.start()
    serving.join(LONG)
    assert not serving.is_alive()
    assert replica.ended_at is not None
    assert not replica.closed_by_peer, "it may only be paused, and the operator may promote it"


@pytest.mark.parametrize("frames", [1, 2, 1000], ids=["at the first array", "in the arrays", "before its answer"])
def test_t8_a_standby_that_stops_while_it_is_filled_is_disconnected_without_an_update(
    kit: types.SimpleNamespace, frames: int
) -> None:
    """Only an update noticed it, and a slow job makes few of them."""

    class Stopped(Standby):
        """A standby whose process was stopped: its socket takes some frames, and nothing answers them."""

        def read(self, place: Place | None = None) -> tuple[Frame, None] | None:
            while (answer := super().read()) is not None:
                del answer
            return None

    stream = Stopped()
    stream.may.release(frames)
    replica = Replica(2, kit.Timeouts(held=0.01))
    state, entries = ReplicaState(term=1), snapshot(np.ones(4), np.ones(4)).entries
    replica.put(lambda: _replication._state_frames(state, entries))
    serving = threading.Thread(target=replica.run, args=(stream,), daemon=True)
    serving.start()
    serving.join(LONG)
    assert not serving.is_alive()
    assert not replica.in_sync
    assert not replica.closed_by_peer, "it may only be paused, and connects again"


def test_t8_an_answer_that_waits_in_the_socket_counts(kit: types.SimpleNamespace) -> None:
    """This process was paused for longer than a standby may take: the answer had arrived in time."""
    replica = Replica(2, kit.Timeouts())
    late = threading.Thread(target=replica._overdue, args=(0,))
    late.start()
    with replica._changed:
        replica._pinged = 1
        replica._changed.notify_all()
    late.join(LONG)
    assert replica.ended_at is None


def test_t6_a_standby_that_was_replaced_is_refused() -> None:
    """The standby was paused and abandoned; its successor is filled; then it connects again."""
    active, newer, older = replication(), Standby(), Standby()
    newer.may.release(1000)
    older.may.release(1000)
    threads = [dial(active, newer, 3)]
    active.fill(joining(active), ReplicaState(), snapshot(), None)
    threads.append(dial(active, older, 2))
    threads[1].join()
    assert [frame.refused.code for frame, _ in older.got] == ["PERMISSION_DENIED"]
    active.stop()
    newer.end()
    threads[0].join()


def test_t8_a_standby_that_comes_while_the_job_goes_back_is_filled_afterwards() -> None:
    """The coordinator is in the next term already, and this shard is not: there is no state to send."""
    active, stream = replication(lambda state: False), Standby()
    stream.may.release(1000)
    thread = dial(active, stream)
    active.fill(joining(active), ReplicaState(term=1, version=8), snapshot(), None)
    thread.join()
    assert not stream.got, "it ends, and connects again"
    assert active.standby == 0
