"""T8: the number of shards is not limited by threads of the control service. 64 real servers, 256 links."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._control import Agreement, ControlClient, ControlServer, Driving, Link, Peers
from backstay._control._service import ControlService
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay._process._environment import Environment
from backstay._process._exit import Stop
from backstay._roles._metrics import Metrics
from backstay._roles._script import Script
from backstay._roles._server import Server
from backstay._roles._worker import Worker
from backstay._timeouts import Timeouts
from backstay_cluster.net import claim_block
from backstay_rpc.channels import Credentials
from backstay_rpc.control_pb2 import (
    TRAINING,
    Applied,
    CoordinatorMessage,
    GradientId,
    GradientInfo,
    HeartbeatReply,
    Leaf,
    Peer,
    Position,
    ShardMessage,
    Staged,
)
from backstay_rpc.loop import call, rpc_loop

TOKEN = "0123456789abcdef"
AGREEMENT = Agreement((Leaf(path="w", dtype="float32"),), {"steps": "10"})
SECONDS = 240.0
SHARDS, STEPS, FIRST_PORT = 64, 12, 20_000
SCRIPT = Script(
    init=lambda key: {f"w{n:03}": jnp.full(4, float(n)) for n in range(2 * SHARDS)},
    loss=lambda params, batch: sum(jnp.sum(params[name]) for name in params),
    batches=lambda key: key.step,
    optimizer=optax.sgd(1.0),
    steps=STEPS,
    evaluate=None,
    seed=0,
    clip_norm=None,
    deterministic=False,
    log_every=0.0,
)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def environment_of(role: str, index: int, address: str) -> Environment:
    environment = Environment.read(
        {
            "BACKSTAY_JOB": "job",
            "BACKSTAY_ROLE": role,
            "BACKSTAY_INDEX": str(index),
            "BACKSTAY_INCARNATION": "1",
            "BACKSTAY_SERVERS": ",".join(f"{address}:{FIRST_PORT + shard}" for shard in range(SHARDS)),
            "BACKSTAY_PORT": str(FIRST_PORT + index),
            "BACKSTAY_DATA_PORT": "0",
            "BACKSTAY_METRICS_PORT": "0",
            "BACKSTAY_BIND": address,
            "BACKSTAY_POD_IP": address,
            "BACKSTAY_TOKEN": TOKEN,
            "BACKSTAY_CONFIG": json.dumps({"shards": SHARDS, "workers": 1}),
        }
    )
    assert environment is not None
    return environment


def test_64_shards_train() -> None:
    """Every server and the worker are those of a pod, with real ports; only the processes are one."""
    block = claim_block()  # an address of its own, where no port can be taken
    plan = SCRIPT.plan(SHARDS)
    assert all(shard.nbytes for shard in plan.partition.shards)
    stop = Stop()
    statuses: dict[int, int] = {}
    servers = [
        Server(
            environment_of("parameter-server", shard, block.node_ip),
            SCRIPT,
            plan,
            Metrics("job", "ParameterServer", shard),
            stop,
        )
        for shard in range(SHARDS)
    ]

    def serve(shard: int) -> None:
        statuses[shard] = servers[shard].run()

    threads = [threading.Thread(target=serve, args=(shard,)) for shard in range(SHARDS)]
    for thread in threads:
        thread.start()
    try:
        worker = Worker(environment_of("worker", 0, block.node_ip), SCRIPT, plan, Metrics("job", "Worker", 0), Stop())
        result = worker.run()
        for thread in threads:
            thread.join(SECONDS)
        assert result.step == STEPS
        for n in range(2 * SHARDS):
            np.testing.assert_array_equal(result.params[f"w{n:03}"], np.full(4, n - STEPS, np.float32))
        assert statuses == dict.fromkeys(range(SHARDS), 0)
    finally:
        stop.request()
        for thread in threads:
            thread.join(SECONDS)
        block.close()


class FakeHost:
    """Shard 0, without a shard."""

    shard, incarnation, agreement = 0, 1, AGREEMENT

    def __init__(self, driving: Driving) -> None:
        self.driving = driving

    def beat(self, _: object) -> HeartbeatReply:
        return HeartbeatReply()

    def fence(self, _: object) -> None: ...


class Quiet:
    """A `Storage` and an `Observer` that are not asked."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class FakeCall:
    """A `Coordinate` call as gRPC's context: an end of a transport in memory."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.received: list[CoordinatorMessage] = []
        self.accepted = False

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    async def read(self) -> Any:
        data = await self.incoming.get()
        return data or grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        self.received.append(CoordinatorMessage.FromString(data))

    async def send_initial_metadata(self, _: object) -> None:
        self.accepted = True

    def say(self, **kind: Any) -> None:
        rpc_loop().call_soon_threadsafe(self.incoming.put_nowait, ShardMessage(**kind).SerializeToString())

    def commits(self) -> list[int]:
        return [message.commit.version for message in self.received if message.HasField("commit")]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_256_shards_need_no_thread_each(pool: ThreadPoolExecutor) -> None:
    """As many as a job may have, against a transport in memory: updates reach every shard, in order, and once."""
    shards, steps = 256, 5
    rules = Rules(mode="Sync", shards=shards, steps=steps)
    driving = Driving(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    driving.start()
    service = ControlService(FakeHost(driving), Peers(), Credentials(TOKEN), pool, Timeouts(message=SECONDS))  # type: ignore[arg-type]
    before = threading.active_count()
    calls = [FakeCall() for _ in range(1, shards)]

    async def begin() -> list[asyncio.Future[None]]:
        return [asyncio.ensure_future(service._coordinate(each)) for each in calls]

    links = call(begin(), SECONDS)
    for shard, each in enumerate(calls, start=1):
        each.say(hello=Peer(role="parameter-server", index=shard))
        each.say(position=Position(leaves=AGREEMENT.leaves, settings=AGREEMENT.settings))
    until(lambda: all(each.accepted for each in calls) and len(service.links) == shards - 1)
    local: list[Any] = []
    driving.attach(0, Sink(local), 0, 0)
    until(lambda: all(each.received for each in calls))
    for version in range(steps):
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=version + 1)
        staged = Staged(id=gradient, info=GradientInfo(finite=True))
        driving.report(0, staged)
        for each in calls[:-1]:
            each.say(staged=staged)
        until(lambda: all(each.incoming.empty() for each in calls))
        assert calls[0].commits() == list(range(version))  # not before the last shard has it
        calls[-1].say(staged=staged)
        until(lambda: all(each.commits() == list(range(version + 1)) for each in calls))  # noqa: B023
        driving.report(0, Applied(version=version + 1))
        for each in calls:
            each.say(applied=Applied(version=version + 1))
    assert threading.active_count() <= before + 2
    for each in calls:
        rpc_loop().call_soon_threadsafe(each.incoming.put_nowait, b"")

    async def end() -> None:
        await asyncio.wait_for(asyncio.gather(*links, return_exceptions=True), SECONDS)

    call(end(), SECONDS)
    assert not service.links
    driving.close()


class Sink:
    def __init__(self, received: list[Any]) -> None:
        self.received = received

    def deliver(self, message: Any) -> None:
        self.received.append(message)


def test_heartbeats_are_answered_beside_256_links() -> None:
    """Over real connections: 255 links are up, and a worker's heartbeat is answered."""
    shards = 256
    rules = Rules(mode="Sync", shards=shards, steps=10)
    driving = Driving(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    driving.start()
    host = FakeHost(driving)
    server = ControlServer(host, Peers(), bind="127.0.0.1", port=0, token=TOKEN)  # type: ignore[arg-type]
    received: list[list[Any]] = [[] for _ in range(shards)]
    links = [
        Link(
            f"127.0.0.1:{server.port}",
            TOKEN,
            Peer(role="parameter-server", index=shard),
            AGREEMENT,
            Sink(received[shard]),
            "Sync",
        )
        for shard in range(1, shards)
    ]
    try:
        for link in links:
            link.start()
        until(lambda: all(received[1:]))  # each was told where to start
        client = ControlClient([f"127.0.0.1:{server.port}"], TOKEN, Peer(role="worker"))
        client.beat(0, 1, TRAINING, 0.0)
        client.close()
        assert server.linked() == shards - 1
    finally:
        for link in links:
            link.close()
        driving.close()
        server.close()
