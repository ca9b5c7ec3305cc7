"""A server's answers to calls, with fakes of its other parts."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import optax
import pytest

from backstay._coordination import Liveness
from backstay._process._environment import Environment
from backstay._report._metrics import Metrics
from backstay._roles._arbiter import Arbiter
from backstay._roles._ending import Ending
from backstay._roles._live_settings import LiveSettings
from backstay._roles._script import Script
from backstay._roles._server_host import ServerHost
from backstay._roles._shutdown import Shutdown
from backstay._timeouts import Timeouts
from backstay.errors import Superseded
from backstay_rpc.control_pb2 import CheckpointSettings, Done, HeartbeatRequest, JoinReply, Peer, ProgressRequest

SCRIPT = Script(init=lambda _: 0.0, loss=lambda *_: 0.0, batches=lambda _: 0, optimizer=optax.sgd(1.0), steps=10)
WORKER = Peer(role="worker", index=0, incarnation=2)


class Recorder:
    """Any part: records which of its methods are called."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, arguments))


class Here(Recorder):
    """The coordinator, in this process."""

    def joined(self, peer: Peer, reply: JoinReply) -> None:
        reply.key_step = 7


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
        self.ending = Ending()
        self.desired = LiveSettings.of(environment.config)
        self.coordinator, self.data = Here(driving=None), Recorder(port=7078)
        self.link = Recorder() if shard else None
        self.served = Recorder(ready=False, world=4, replication=None, runtime=Recorder(term=1, version=5))
        shutdown = Shutdown(Timeouts(), incarnation=3, took_over=False)
        shutdown.end(already_complete=False)
        self.host = ServerHost(
            environment,
            SCRIPT.plan(2).agreement,
            Metrics("job", "ParameterServer", shard),
            self.served,  # type: ignore[arg-type]
            self.coordinator,  # type: ignore[arg-type]
            self.link,  # type: ignore[arg-type]
            self.data,  # type: ignore[arg-type]
            Liveness("Sync"),
            threading.Lock(),
            ending=self.ending,
            desired=self.desired,
            arbiter=Arbiter(shard, Timeouts(), self.ending),
            shutdown=shutdown,
            page=Recorder(),  # type: ignore[arg-type]
            tracing=Recorder(black_box=Recorder(), copies=lambda _: [b"kept"]),  # type: ignore[arg-type]
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
    assert server.desired == LiveSettings(world=6, stall_seconds=60.0, keep=5)


@pytest.mark.parametrize(("shard", "expected"), [(0, []), (1, [(2, 0.0)])])
def test_t6_a_newer_coordinator_is_expected_on_the_other_shards(shard: int, expected: list[Any]) -> None:
    server = Server(shard)
    incarnations: Mapping[str, int] = {"parameter-server-0": 2, "worker-1": 4}
    server.host.fence(incarnations)
    calls = [] if server.link is None else server.link.calls
    assert [arguments for name, arguments in calls if name == "expect"] == expected
    assert server.data.calls == [("fence", (incarnations,))]


def test_t8_another_shard_keeps_a_report_of_the_result_that_comes_before_the_end() -> None:
    """The link of the shard may be broken then. The server would wait 2 minutes for that report."""
    for shard in (0, 1):
        server = Server(shard)
        shutdown = server.host._shutdown = Shutdown(Timeouts(), incarnation=3, took_over=False)
        assert server.host.left(WORKER, trained=True)
        server.ending.done = Done(version=10)
        assert shutdown.stays(1.0, stored=False, awaited=False) == (shard == 0)


def test_a_report_of_the_result_is_too_late_once_the_last_message_is_written() -> None:
    server = Server(shard=0)
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
