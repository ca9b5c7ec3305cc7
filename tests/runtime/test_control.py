"""The control plane runs over real gRPC on loopback, with neither JAX nor data streams (O7, T3, T6)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from between import LONG, until

from backstay import _instrument
from backstay._coordination import Coordinator, CoordinatorState, Intervals, Rules, ServerPosition, WriteManifest
from backstay._report._http import HttpPort
from backstay._report._metrics import PodMetrics
from backstay._roles._ending import wait_stored
from backstay._threaded import ThreadedCoordinator
from backstay._timeouts import Timeouts
from backstay._transport import Agreement, ControlClient, ControlServer, Heartbeats, Link, Outbox, Peers
from backstay.errors import PeerLost, Refused, StorageError, Superseded
from backstay_cluster.net import claim_block
from backstay_rpc import bearer
from backstay_rpc.channels import open_channel
from backstay_rpc.control_pb2 import (
    COMPILING,
    TRAINING,
    Applied,
    Commit,
    GradientId,
    GradientInfo,
    HangReport,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    Leaf,
    Peer,
    ProgressReply,
    ProgressRequest,
    Spans,
    Staged,
    Written,
)
from backstay_rpc.control_pb2_grpc import ControlServicer, ControlStub, add_ControlServicer_to_server
from backstay_rpc.credentials import Credentials

from .linked import Coordinating

TOKEN = "0123456789abcdef"
LEAVES = [Leaf(path="a.w", shape=[2, 3], dtype="float32"), Leaf(path="b", shape=[], dtype="bfloat16")]

AGREEMENT = Agreement(tuple(LEAVES), {"steps": "10", "optimizer": "5ca1ab1e"})


class FakeHost:
    """A server without a shard."""

    def __init__(self, shard: int = 0, incarnation: int = 3) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.agreement = AGREEMENT
        self.threaded: ThreadedCoordinator | None = None
        self.fenced: list[dict[str, int]] = []
        self.loading = ""
        self.progressed, self.asking = 0, False
        self.beats = 0
        self.requests: list[HeartbeatRequest] = []
        self.spans: list[Spans] = []

    def not_ready(self) -> str:
        return self.loading

    def joined(self, peer: Peer) -> JoinReply:
        return JoinReply(incarnation=self.incarnation, term=1, data_address="127.0.0.1:1")

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self.beats += 1
        self.requests.append(request)
        return HeartbeatReply(clock=time.monotonic())

    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        return True

    def add_spans(self, peer: object, spans: bytes) -> None:
        self.spans.append(Spans.FromString(spans))

    def evaluated(self, request: object) -> None: ...

    def progress(self, request: object) -> ProgressReply:
        self.progressed += 1
        return ProgressReply(incarnation=self.incarnation)

    def awaits_operator(self) -> bool:
        return self.asking

    def fence(self, incarnations: dict[str, int]) -> None:
        self.fenced.append(dict(incarnations))


class Recorder:
    """A `ShardSink` that keeps the messages that it gets."""

    def __init__(self) -> None:
        self.received: list[object] = []

    def deliver(self, message: object) -> None:
        self.received.append(message)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.received]


class Silence:
    """An `Observer` that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class FakeStorage:
    stored_at = 0.0

    def write_manifest(self, order: WriteManifest) -> str:
        return f"at-{order.version}"

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        return CoordinatorState(term=above_term + 1, version=0, world=1), ""


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def server(host: FakeHost) -> Iterator[ControlServer]:
    server = ControlServer(host, Peers(), bind="127.0.0.1", port=0, credentials=Credentials(TOKEN))
    yield server
    server.close()


def client_of(server: ControlServer, rank: int = 0, incarnation: int = 0, token: str = TOKEN) -> ControlClient:
    peer = Peer(role="worker", index=rank, incarnation=incarnation)
    return ControlClient([f"127.0.0.1:{server.port}"], Credentials(token), peer, Timeouts(join=0.0, call=60.0))


def join(client: ControlClient, agreement: Agreement = AGREEMENT) -> list[JoinReply]:
    return client.join_all(agreement, lambda: False)


def test_t8_a_link_without_an_answer_is_dialled_again() -> None:
    dialled, over = threading.Semaphore(0), threading.Event()

    class Deaf(ControlServicer):
        def Coordinate(self, request: object, context: Any) -> None:  # noqa: N802
            dialled.release()
            over.wait(LONG)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the test is over")

    deaf = grpc.server(ThreadPoolExecutor(8))
    add_ControlServicer_to_server(Deaf(), deaf)
    port = deaf.add_insecure_port("127.0.0.1:0")
    deaf.start()
    peer = Peer(role="parameter-server", index=1)
    link = Link(f"127.0.0.1:{port}", Credentials(TOKEN), peer, AGREEMENT, "Sync", Timeouts(link_answer=0.5))
    link.start(Recorder())
    assert all(dialled.acquire(timeout=LONG) for _ in range(3))
    link.close()
    over.set()
    deaf.stop(0).wait(LONG)


def test_t6_a_standby_that_its_successor_found_first_is_not_replaced_by_it(
    host: FakeHost, server: ControlServer
) -> None:
    """The shard's Service selects a promoted standby that has no message yet, and both standbys connect to it."""
    host.loading = "this is the standby of shard 0"
    own, next_one = (
        ControlClient(
            [f"127.0.0.1:{server.port}"], Credentials(TOKEN), Peer(role="parameter-server", index=0, incarnation=number)
        )
        for number in (3, 4)
    )
    try:
        for client in (next_one, own):
            with pytest.raises(PeerLost, match="this is the standby"):
                client.join(0, AGREEMENT)
        host.loading = ""
        next_one.join(0, AGREEMENT)
        with pytest.raises(Superseded):
            own.join(0, AGREEMENT)
    finally:
        own.close()
        next_one.close()


def test_every_call_without_the_token_is_refused(server: ControlServer) -> None:
    """O7: every method of the service, with any message."""
    for metadata in ((), bearer("wrong"), bearer(TOKEN + "x"), (("authorization", TOKEN),), 2 * bearer(TOKEN)):
        with open_channel(f"127.0.0.1:{server.port}") as channel:  # its own connection
            stub = ControlStub(channel)
            for name, method in vars(stub).items():
                with pytest.raises(grpc.RpcError) as refused:
                    method(ProgressRequest(), metadata=metadata, timeout=LONG)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = ControlStub(channel)
        raw = channel.unary_unary("/backstay.v1.Control/Join")
        with pytest.raises(grpc.RpcError) as garbage:
            raw(b"\xff\xff\xff", metadata=bearer(TOKEN), timeout=LONG)
        assert garbage.value.code() is grpc.StatusCode.INTERNAL
        assert stub.Progress(ProgressRequest(), metadata=bearer(TOKEN), timeout=LONG).incarnation == 3


def test_the_first_leaf_that_differs_is_named(server: ControlServer) -> None:
    client = client_of(server)
    for leaves, said in (
        (
            [Leaf(path="a.w", shape=[3, 2], dtype="float32"), LEAVES[1]],
            r"a\.w is float32\[2,3\] on the server and float32\[3,2\]",
        ),
        (
            [LEAVES[0], Leaf(path="b", shape=[], dtype="float32")],
            r"b is bfloat16\[\] on the server and float32\[\] in the caller",
        ),
        ([LEAVES[0]], "b exists only on the server"),
        ([*LEAVES, Leaf(path="c", shape=[1], dtype="int8")], "c exists only in the caller"),
        (
            [Leaf(path="z", shape=[2, 3], dtype="float32"), LEAVES[1]],
            r"the leaf a\.w where the caller has z",
        ),
    ):
        with pytest.raises(Refused, match=said) as refused:
            join(client, Agreement(tuple(leaves), AGREEMENT.settings))
        assert refused.value.code == "INVALID_ARGUMENT"
    with pytest.raises(Refused, match="steps is 11 in worker 0 and 10 in shard 0") as refused:
        join(client, Agreement(AGREEMENT.leaves, {**AGREEMENT.settings, "steps": "11"}))
    assert refused.value.code == "INVALID_ARGUMENT"
    assert join(client)[0].incarnation == 3
    client.close()


@pytest.mark.parametrize("call", ["heartbeat", "evaluated", "leave", "other settings", "too large"])
@pytest.mark.parametrize("incarnation", [2, 10**6, 2**31, 2**32 - 1])
def test_t6_a_call_without_a_join_replaces_no_worker(
    server: ControlServer, host: FakeHost, call: str, incarnation: int
) -> None:
    """The caller has the token. Only a join with the job's settings, or the operator, replaces a pod."""
    real, other = client_of(server, 0, 1), client_of(server, 0, incarnation)
    join(real)
    match call:
        case "heartbeat":
            with pytest.raises(PeerLost, match=f"worker-0 of incarnation {incarnation} has not joined this server"):
                other.beat(0, 3, TRAINING, 0.0)
        case "evaluated":
            with pytest.raises(PeerLost, match="has not joined this server"):
                other.evaluated(10, {})
        case "leave":
            with pytest.raises(PeerLost, match="has not joined this server"):
                other.confirm()
        case "other settings":
            with pytest.raises(Refused, match="steps is 11"):
                join(other, Agreement(AGREEMENT.leaves, {**AGREEMENT.settings, "steps": "11"}))
        case "too large" if incarnation >= 10**6:
            with pytest.raises(Refused, match="must be at most 999999"):
                join(other)
    real.beat(0, 3, TRAINING, 0.0)
    join(real)
    real.confirm()
    assert all(fenced == {"worker-0": 1} for fenced in host.fenced)
    real.close()
    other.close()


def test_o10_an_exception_with_a_huge_text_is_reported_shortened(host: FakeHost, server: ControlServer) -> None:
    """The report of an evaluation must arrive, or the job waits for it for minutes."""
    reported: list[str] = []
    host.evaluated = lambda request: reported.append(request.error)  # type: ignore[method-assign, assignment]
    client = client_of(server)
    client.evaluated(4, {}, "\udcff" + "e" * (8 << 20))
    assert reported == ["\\udcff" + "e" * 1999]
    client.close()


def test_t6_a_heartbeat_before_a_join_does_not_keep_the_pod_out(server: ControlServer) -> None:
    """A new server has no join of the slot yet: it answers, and the number means nothing to it."""
    other, real = client_of(server, 0, 2**31), client_of(server, 0, 1)
    other.beat(0, 3, TRAINING, 0.0)
    other.leave(trained=True)
    assert join(real)[0].incarnation == 3
    real.beat(0, 3, TRAINING, 0.0)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        request = ProgressRequest(incarnations={"worker-0": 2**31})
        ControlStub(channel).Progress(request, metadata=bearer(TOKEN), timeout=LONG)
    real.beat(0, 3, TRAINING, 0.0)
    real.close()
    other.close()


def test_an_incarnation_that_was_replaced_gets_superseded(server: ControlServer, host: FakeHost) -> None:
    """T6: on joining, on heartbeats, and in calls of the operator."""
    old, new = client_of(server, 4, 0), client_of(server, 4, 1)
    join(old)
    join(new)
    assert host.fenced == [{"worker-4": 0}, {"worker-4": 1}]
    with pytest.raises(Superseded, match="replaced by incarnation 1"):
        join(old)
    with pytest.raises(Superseded):
        old.beat(0, 3, COMPILING, 0.0)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        request = ProgressRequest(incarnations={"worker-4": 2, "nonsense": 9})
        ControlStub(channel).Progress(request, metadata=bearer(TOKEN), timeout=LONG)
    assert host.fenced[-1] == {"worker-4": 2}
    silent: list[str] = []
    heart = Heartbeats(new, lambda shard, why: silent.append(why))
    heart.start()
    until(lambda: heart.superseded is not None)
    heart.close()
    assert silent
    old.close()
    new.close()


def test_t6_an_old_call_of_the_operator_does_not_count(host: FakeHost) -> None:
    """A stopped server continues and finds old calls. Their caller has timed out, and has promoted a standby since."""
    server = ControlServer(
        host, Peers(), bind="127.0.0.1", port=0, credentials=Credentials(TOKEN), timeouts=Timeouts(second_look=3600.0)
    )
    asked = threading.Event()
    host.awaits_operator = lambda: asked.set() or host.asking  # type: ignore[method-assign]
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    stub = ControlStub(channel)
    host.asking = True
    before = stub.Progress.future(ProgressRequest(), metadata=bearer(TOKEN), timeout=3000)
    assert asked.wait(LONG)
    before.cancel()
    until(before.done)
    host.asking = False
    stub.Progress(ProgressRequest(), metadata=bearer(TOKEN), timeout=LONG)  # the cancellation has arrived before this
    assert host.progressed == 1
    channel.close()
    server.close()
    assert host.progressed == 1


def test_t6_what_the_operator_states_now_replaces_what_it_sent_before(host: FakeHost) -> None:
    server = ControlServer(
        host, Peers(), bind="127.0.0.1", port=0, credentials=Credentials(TOKEN), timeouts=Timeouts(second_look=0.01)
    )
    host.asking = True
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ControlStub(channel).Progress(ProgressRequest(), metadata=bearer(TOKEN), timeout=LONG)
    assert host.progressed == 1
    server.close()


def test_another_incarnation_of_the_server_means_joining_again(server: ControlServer, host: FakeHost) -> None:
    client = client_of(server)
    with pytest.raises(PeerLost, match="has incarnation 3, not 2: join again"):
        client.beat(0, 2, COMPILING, 0.0)
    host.loading = "shard 0 is still loading"
    with pytest.raises(PeerLost, match="still loading"):
        join(client)
    client.close()


def test_t8_a_server_that_is_slow_to_answer_is_reached(server: ControlServer) -> None:
    """The server's machine is busy: the first byte of its answer comes later than any back-off between two attempts."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LONG)
    ends: list[socket.socket] = []

    def copy(source: socket.socket, sink: socket.socket, late: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(late)
                late = 0.0
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", server.port), LONG)
                near.settimeout(None)
                ends.extend((near, far))
                threading.Thread(target=copy, args=(near, far, 0.0), daemon=True).start()
                threading.Thread(target=copy, args=(far, near, 0.5), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    client = ControlClient([f"127.0.0.1:{listener.getsockname()[1]}"], Credentials(TOKEN), Peer(role="worker"))
    assert len(client.join_all(AGREEMENT, lambda: False)) == 1
    client.close()
    listener.shutdown(socket.SHUT_RDWR)  # or `accept` would wait on
    listener.close()
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def test_a_port_that_is_taken_is_named(server: ControlServer, host: FakeHost) -> None:
    with pytest.raises(OSError, match=f"port {server.port}"):
        ControlServer(host, Peers(), bind="127.0.0.1", port=server.port, credentials=Credentials(TOKEN))
    with pytest.raises(OSError, match=f"port {server.port}"):
        HttpPort(PodMetrics("job", "Worker", 0), lambda: True, bind="127.0.0.1", port=server.port)


def test_a_link_that_breaks_loses_nothing(host: FakeHost) -> None:
    """T1, T3: shard 1 reports again what it holds, and gets what it missed; once each."""
    rules = Rules(mode="Sync", shards=2, steps=100, stores=True)
    coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    threaded = ThreadedCoordinator(coordinator, FakeStorage(), Silence())
    threaded.start()
    host.threaded = threaded
    first = Recorder()
    threaded.attach(first, ServerPosition(0, 0, 0))
    block = claim_block()  # its own address: no other program takes the port while it is closed
    server = Coordinating(host, TOKEN, bind=block.node_ip)
    sink = Recorder()
    peer = Peer(role="parameter-server", index=1)
    link = Link(f"{block.node_ip}:{server.port}", Credentials(TOKEN), peer, AGREEMENT, "Sync")
    link.start(sink)
    until(lambda: sink.kinds() == ["Rollback"])
    link.started(1, 0)

    def staged(version: int) -> Staged:
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=version + 1)
        return Staged(id=gradient, info=GradientInfo(finite=True, examples=1))

    port = server.port
    server.close()  # all links break
    until(lambda: threaded.linked == {0})
    link.report(staged(0))
    threaded.report(0, staged(0))  # complete only when shard 1 is linked again and says what it holds
    assert "Commit" not in first.kinds()
    server = Coordinating(host, TOKEN, port, block.node_ip)
    until(lambda: "Commit" in sink.kinds())
    link.report(Applied(version=1))
    threaded.report(0, Applied(version=1))
    # Decided while the link is down: sent when it is up again, and the files that shard 1 wrote meanwhile count.
    link.report(staged(1))
    until(lambda: bool(coordinator.open_gradients()))
    server.close()
    until(lambda: threaded.linked == {0})
    link.report(Written(term=1, version=1))
    server = Coordinating(host, TOKEN, port, block.node_ip)
    until(lambda: len(threaded.linked) == 2)
    threaded.report(0, staged(1))
    until(lambda: [m.version for m in sink.received if type(m).__name__ == "Commit"][-1:] == [1])
    assert {m.version for m in sink.received if type(m).__name__ == "Commit"} == {0, 1}
    assert sink.kinds().count("Rollback") == 1
    link.close()
    threaded.close()
    server.close()
    block.close()


def test_t6_messages_of_a_replaced_server_are_ignored() -> None:
    """A stopped server continues with an open link: its gradients are not those of its successor."""
    rules = Rules(mode="Sync", shards=2, steps=100)
    coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    threaded = ThreadedCoordinator(coordinator, FakeStorage(), Silence())
    older, newer = Recorder(), Recorder()
    threaded.attach(older, ServerPosition(1, 0, 0, incarnation=1))
    threaded.attach(newer, ServerPosition(1, 0, 0, incarnation=2))
    gradient = GradientId(term=1, version=0, rank=0, attempt=1)
    message = Staged(id=gradient, info=GradientInfo(finite=True))
    threaded.report(1, message, older)
    assert not list(coordinator.open_gradients())
    threaded.report(1, message, newer)
    assert [staged.id for staged in coordinator.open_gradients()] == [gradient]


def test_t8_a_checkpoint_is_not_waited_for_when_its_writer_has_left() -> None:
    """A whole job is deleted: every server gets SIGTERM, and one may end before another requests its part."""
    rules = Rules(mode="Sync", shards=2, steps=100, stores=True)
    threaded = ThreadedCoordinator(
        Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), FakeStorage(), Silence()
    )
    threaded.start()
    zero, one = Recorder(), Recorder()
    threaded.attach(zero, ServerPosition(0, 1, 0))
    threaded.attach(one, ServerPosition(1, 1, 0))
    gradient = GradientId(term=1, version=0, rank=0, attempt=1)
    for shard in (0, 1):
        threaded.report(shard, Staged(id=gradient, info=GradientInfo(finite=True)))
        threaded.report(shard, Applied(version=1))
    threaded.do(Coordinator.save)
    until(lambda: "Save" in zero.kinds())
    threaded.report(0, Written(term=1, version=1))
    assert threaded.unstored()
    assert threaded.unstored_without_server() == []
    threaded.detach(1, one)
    assert threaded.unstored_without_server() == [1]
    threaded.attach(one, ServerPosition(1, 1, 1))
    assert threaded.unstored_without_server() == []
    threaded.report(1, Written(term=1, version=1))
    until(lambda: not threaded.unstored())
    threaded.close()


def test_t7_a_server_that_stops_during_training_waits_for_its_checkpoint_and_not_for_later_ones() -> None:
    """Updates continue while it is stored: with them, the newest version is another one."""
    rules = Rules(mode="Sync", shards=1, steps=100, stores=True)
    intervals = Intervals(every_steps=1)
    coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=1), intervals=intervals)
    threaded = ThreadedCoordinator(coordinator, FakeStorage(), Silence())
    threaded.start()
    threaded.attach(Recorder(), ServerPosition(0, 1, 0))

    def update(version: int) -> None:
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=version + 1)
        threaded.report(0, Staged(id=gradient, info=GradientInfo(finite=True)))
        threaded.report(0, Applied(version=version + 1))

    update(0)
    update(1)
    threaded.do(Coordinator.save)
    stopping = threading.Thread(target=wait_stored, args=(threaded, lambda: False, Timeouts(last_save=60.0)))
    stopping.start()
    until(lambda: threaded.unstored() == {1, 2})
    update(2)
    stopping.join(0.3)
    assert stopping.is_alive()
    for version in (1, 2):
        threaded.report(0, Written(term=1, version=version))
    until(lambda: not threaded.unstored())
    update(3)
    assert threaded.unstored() == {4}
    stopping.join(LONG)
    assert not stopping.is_alive()
    threaded.close()


@pytest.mark.parametrize("patience", [600.0, 0.0])
def test_t8_training_waits_a_limited_time_for_checkpoints_that_cannot_be_read(patience: float) -> None:
    timeouts = Timeouts(restore_again=0.0, restoring=patience)

    class Fails(FakeStorage):
        left = 3

        def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
            self.left -= 1
            if self.left:
                raise StorageError("away")
            return super().newest(above_term)

    rules = Rules(mode="Sync", shards=1, steps=100, timeouts=timeouts)
    threaded = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Fails(), Silence())
    threaded.start()
    sink = Recorder()
    threaded.attach(sink, ServerPosition(0, 1, 7))  # it has lived on after a coordinator that is gone
    until(lambda: bool(sink.received))
    assert sink.kinds() == (["Rollback"] if patience else ["Done"])
    threaded.close()


def test_a_shard_may_answer_from_inside_a_call() -> None:
    """Decisions keep their order, and nothing deadlocks, when a sink calls the coordinator back immediately."""
    rules = Rules(mode="Sync", shards=1, steps=50)
    threaded = ThreadedCoordinator(
        Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), FakeStorage(), Silence()
    )

    class Echo(Recorder):
        def deliver(self, commit: object) -> None:
            self.received.append(commit)
            if not isinstance(commit, Commit):
                return
            threaded.report(0, Applied(version=commit.version + 1))
            push(commit.version + 1)

    def push(version: int) -> None:
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=1)
        threaded.report(0, Staged(id=gradient, info=GradientInfo(finite=True)))

    echo = Echo()
    threaded.attach(echo, ServerPosition(0, 0, 0))
    threads = [threading.Thread(target=push, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    versions = [m.version for m in echo.received if type(m).__name__ == "Commit"]
    assert versions == list(range(50))
    assert echo.kinds().count("Done") == 1


def test_joining_is_bounded_and_can_be_stopped() -> None:
    """T8."""
    client = ControlClient(["127.0.0.1:1"], Credentials(TOKEN), Peer(role="worker"), Timeouts(join=0.0, call=60.0))
    with pytest.raises(PeerLost, match="could not join within 0 s: shard 0"):
        join(client)
    with pytest.raises(PeerLost, match="stopped while joining"):
        client.join_all(AGREEMENT, lambda: True)
    client.close()


def test_an_older_request_of_join_names_the_shard(server: ControlServer) -> None:
    request = JoinRequest(shard=7, leaves=LEAVES, settings=AGREEMENT.settings)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = ControlStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Join(request, metadata=bearer(TOKEN), timeout=LONG)
    assert "this is shard 0, not shard 7" in refused.value.details()


def test_heartbeats_carry_spans_once_the_clock_is_known_and_reports_of_hanging_pods(
    server: ControlServer, host: FakeHost
) -> None:
    _instrument.keep(100)
    _instrument.clocks._known.clear()
    client = client_of(server, rank=4)
    heart = Heartbeats(client, lambda shard, why: None)
    heart.expect([host.incarnation])
    try:
        _instrument.record("compute", 1.0, 2.0, 7)
        client.beat(0, host.incarnation, TRAINING, 0.1)
        heart.report_hang(HangReport(stacks="File x"))
        client.beat(0, host.incarnation, TRAINING, 0.1)
    finally:
        heart.close()
        client.close()
        _instrument.keep(_instrument.CAPACITY)
    first, second, third = host.requests
    assert (first.spans, first.HasField("hang_report")) == (b"", False), "the offset of the clock is not known yet"
    spans = Spans.FromString(second.spans)
    assert (list(spans.points), spans.peer.index, second.hang_report.stacks) == (["compute"], 4, "File x")
    (offset,) = spans.offsets
    assert (offset.shard, offset.incarnation) == (0, host.incarnation)
    assert abs(offset.seconds) <= offset.error, "both ends have the same clock"
    assert third.spans == b"", "each span is sent once"


def test_another_shards_server_sends_its_spans_on_its_link(host: FakeHost) -> None:
    _instrument.keep(100)
    rules = Rules(mode="Sync", shards=2, steps=10)
    host.threaded = ThreadedCoordinator(
        Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), FakeStorage(), Silence()
    )
    peer, server = Peer(role="parameter-server", index=1, incarnation=2), Coordinating(host, TOKEN)
    link, outbox = Link(f"127.0.0.1:{server.port}", Credentials(TOKEN), peer, AGREEMENT, "Sync"), Outbox(peer)
    link.send_spans(outbox.take)  # the link is not up: nothing is taken
    link.start(Recorder())
    try:
        until(lambda: link.up)
        _instrument.record("apply", 1.0, 2.0, 7)
        link.send_spans(outbox.take)
        until(lambda: bool(host.spans))
    finally:
        link.close()
        server.close()
        host.threaded.close()
        _instrument.keep(_instrument.CAPACITY)
    assert [(list(spans.points), spans.peer.index) for spans in host.spans] == [(["apply"], 1)]
