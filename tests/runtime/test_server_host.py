"""A server's answers to calls, with a context as in a pod and fakes of the shard, the coordinator and the streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import optax
import pytest

from backstay._process._environment import Environment
from backstay._process._exit import Stop
from backstay._report import PodMetrics, ServerReports
from backstay._roles._ending import ServerEnd
from backstay._roles._server._context import LiveSettings, ServerContext
from backstay._roles._server._coordinators import CoordinatorAccess, LinkedShard
from backstay._roles._server._server_host import ServerHost
from backstay._script import Script
from backstay._timeouts import Timeouts
from backstay._transport import Link
from backstay.errors import Superseded
from backstay_rpc.control_pb2 import CheckpointSettings, Done, HeartbeatRequest, JoinReply, Peer, ProgressRequest

SCRIPT = Script(init=lambda _: 0.0, loss=lambda *_: 0.0, batches=lambda _: 0, optimizer=optax.sgd(1.0), steps=10)
WORKER = Peer(role="worker", index=0, incarnation=2)


@dataclass
class Runtime:
    """The position of the shard."""

    term: int = 1
    version: int = 5


@dataclass
class Shard:
    """The shard of the server."""

    ready: bool = False
    world: int = 4
    replication: None = None
    runtime: Runtime = field(default_factory=Runtime)


class Coordinated(CoordinatorAccess):
    """A coordinator that knows the next contribution of a worker."""

    def __init__(self) -> None:
        self.expected: list[int] = []

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        reply.key_step = 7

    def expect(self, incarnation: int) -> None:
        self.expected.append(incarnation)

    def start(self, sink: Any) -> None: ...
    def tick(self, now: float, silent: set[int]) -> None: ...
    def check(self, now: float) -> None: ...
    def save_and_wait(self) -> None: ...
    def close(self) -> None: ...
    def release(self) -> None: ...
    def report(self, report: Any) -> None: ...
    def outcome(self, done: Done, term: int) -> dict[str, Any]:
        return {}


class Streams:
    """The data streams of the server."""

    port = 7078

    def __init__(self) -> None:
        self.fenced: list[Mapping[str, int]] = []

    def fence(self, incarnations: Mapping[str, int]) -> None:
        self.fenced.append(incarnations)


class Keeping(ServerReports):
    """Reports with one message of spans for a worker."""

    def copies(self, rank: int) -> list[bytes]:
        return [b"kept"]


class Server:
    """The parts of a server around its host."""

    def __init__(self, shard: int) -> None:
        environment = Environment.read(
            {
                "BACKSTAY_JOB": "job",
                "BACKSTAY_ROLE": "parameter-server",
                "BACKSTAY_INDEX": str(shard),
                "BACKSTAY_INCARNATION": "3",
                "BACKSTAY_SERVERS": "127.0.0.1:1,127.0.0.1:2",
                "BACKSTAY_POD_IP": "10.0.0.9",
                "BACKSTAY_TOKEN": "secret",
                "BACKSTAY_CONFIG": json.dumps({"shards": 2, "workers": 4, "standbys": 1}),
            }
        )
        assert environment is not None
        self.context = context = ServerContext.of(environment, SCRIPT, SCRIPT.plan(2), Stop())
        self.ending, self.live = context.ending, context.live
        self.coordinator, self.streams, self.served = Coordinated(), Streams(), Shard()
        self.end = ServerEnd(Timeouts(), incarnation=3)
        self.host = ServerHost(
            context,
            Keeping(context, PodMetrics("job", "ParameterServer", shard)),
            self.served,  # type: ignore[arg-type]
            self.coordinator,
            self.streams,  # type: ignore[arg-type]
            self.end,
        )


@pytest.fixture
def server() -> Server:
    return Server(shard=1)


def test_pods_join_once_the_shard_is_loaded_and_after_the_end(server: Server) -> None:
    assert server.host.not_ready() == "shard 1 is still loading"
    server.ending.done = Done(version=10)
    assert server.host.not_ready() == ""
    server.ending.done, server.served.ready = None, True
    assert server.host.not_ready() == ""


def test_the_coordinator_completes_the_reply_to_a_join(server: Server) -> None:
    reply = server.host.joined(WORKER)
    assert (reply.data_address, reply.incarnation, reply.version, reply.key_step) == ("10.0.0.9:7078", 3, 5, 7)
    assert (reply.done, reply.failed) == (False, "")
    server.ending.done = Done(failed="no checkpoint", reason="RestoreFailed")
    reply = server.host.joined(WORKER)
    assert (reply.done, reply.failed) == (False, "RestoreFailed: no checkpoint")


def test_t6_the_operator_reports_a_newer_incarnation_and_the_server_ends(server: Server) -> None:
    server.host.progress(ProgressRequest(incarnations={"parameter-server-1": 3}))
    assert server.ending.error is None
    server.host.progress(ProgressRequest(incarnations={"parameter-server-1": 4}))
    assert isinstance(server.ending.error, Superseded)


def test_settings_that_the_operator_leaves_out_stay(server: Server) -> None:
    server.host.progress(ProgressRequest(world=6, stall_seconds=60, checkpoint=CheckpointSettings(keep=5)))
    server.host.progress(ProgressRequest())
    assert server.live == LiveSettings(world=6, stall_seconds=60.0, keep=5)


def test_t6_a_call_names_the_newest_coordinator(server: Server) -> None:
    incarnations: Mapping[str, int] = {"parameter-server-0": 2, "worker-1": 4}
    server.host.fence(incarnations)
    server.host.fence({"worker-1": 5})
    assert server.coordinator.expected == [2]
    assert server.streams.fenced == [incarnations, {"worker-1": 5}]


@pytest.mark.parametrize(("standbys", "after"), [(1, 0.0), (0, Timeouts().last_save + Timeouts().silent)])
def test_t6_a_shard_expects_a_newer_coordinator(server: Server, standbys: int, after: float) -> None:
    """Without standbys, the previous server may still run, and need this shard for its last checkpoint."""
    expected: list[tuple[int, float]] = []

    class Recording(Link):
        def expect(self, coordinator: int, after: float = 0.0) -> None:
            expected.append((coordinator, after))

    environment = server.context.environment
    config = environment.config.model_copy(update={"standbys": standbys})
    context = replace(server.context, environment=replace(environment, config=config))
    LinkedShard(
        context, Recording("127.0.0.1:1", environment.credentials, context.peer, context.plan.agreement, "Sync")
    ).expect(2)
    assert expected == [(2, after)]


def test_t8_another_shard_keeps_a_report_of_the_result_that_comes_before_the_end() -> None:
    """The link of the shard may be broken then. The server would wait 2 minutes for that report."""
    for shard in (0, 1):
        server = Server(shard)
        assert server.host.left(WORKER, trained=True)
        server.ending.done = Done(version=10)
        assert server.end.stays(1.0, stored=False, awaited=False) == (shard == 0)


def test_a_report_of_the_result_is_too_late_once_the_last_message_is_written() -> None:
    server = Server(shard=0)
    server.end.end(already_complete=False)
    assert server.host.left(WORKER, trained=True)  # before the end it says nothing
    server.ending.done = Done(version=10)
    assert not server.host.left(WORKER, trained=True)
    assert server.host.left(Peer(role="worker", index=1), trained=True)  # only rank 0 counts


def test_a_heartbeat_brings_the_world_and_the_end(server: Server) -> None:
    server.host.joined(WORKER)
    reply = server.host.beat(HeartbeatRequest(peer=WORKER))
    assert (reply.world, reply.done, list(reply.spans)) == (4, False, [b"kept"])
    assert server.host.progress(ProgressRequest()).beating == {0: 2}
    server.ending.done = Done(version=10)
    assert server.host.beat(HeartbeatRequest(peer=WORKER)).done
