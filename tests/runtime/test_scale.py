"""T8: many shards. 64 real servers, 256 links."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from between import LONG, until

from backstay._coordination import Coordinator, CoordinatorState, Rules, ServerPosition
from backstay._pod import PodRunner
from backstay._process._environment import Environment
from backstay._process._exit import Stop
from backstay._report import HttpPort
from backstay._report._metrics import PodMetrics
from backstay._script import Script
from backstay._threaded import ThreadedCoordinator
from backstay._timeouts import Timeouts
from backstay._transport import ControlClient, Link, Links, Peers
from backstay_cluster.net import claim_block
from backstay_rpc.control_pb2 import (
    TRAINING,
    Applied,
    GradientId,
    GradientInfo,
    Hello,
    Peer,
    Position,
    Staged,
)
from backstay_rpc.credentials import Credentials

from .linked import AGREEMENT, TOKEN, Coordinating, FakeHost, MemoryStream, Quiet

SECONDS = LONG
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
    return replace(environment, timeouts=Timeouts(silent=600.0, call=60.0, link_answer=60.0))


opened: list[HttpPort] = []


class Runner(PodRunner):
    """A runner whose test closes the port that stays open for the rest of a script."""

    def _http(self, *how: Any) -> HttpPort:
        opened.append(super()._http(*how))
        return opened[-1]


def test_64_shards_train() -> None:
    """Every server and the worker are those of a pod, with real ports; only the processes are one."""
    block = claim_block()  # its own address, where no port can be taken
    plan = SCRIPT.plan(SHARDS)
    assert all(shard.nbytes for shard in plan.partition.shards)
    stop = Stop()
    statuses: dict[int, int] = {}

    def serve(shard: int) -> None:
        environment = environment_of("parameter-server", shard, block.node_ip)
        statuses[shard] = PodRunner(
            environment, SCRIPT, plan, stop, PodMetrics("job", "ParameterServer", shard)
        ).serve()

    threads = [threading.Thread(target=serve, args=(shard,)) for shard in range(SHARDS)]
    for thread in threads:
        thread.start()
    try:
        pod = Runner(environment_of("worker", 0, block.node_ip), SCRIPT, plan, Stop(), PodMetrics("job", "Worker", 0))
        result = pod.work(pod.worker())
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
        while opened:
            opened.pop().close()
        block.close()


def test_256_shards_get_every_update_in_order_and_once() -> None:
    """256 is the most that a job may have. The transport is in memory."""
    shards, steps = 256, 5
    rules = Rules(mode="Sync", shards=shards, steps=steps)
    threaded = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    threaded.start()
    links = Links(FakeHost(threaded), Peers())  # type: ignore[arg-type]
    ends = [MemoryStream() for _ in range(1, shards)]
    threads = [
        threading.Thread(
            target=links.serve,
            args=(Hello(peer=Peer(role="parameter-server", index=shard), expected_incarnation=1), end),
        )
        for shard, end in enumerate(ends, start=1)
    ]
    for thread, end in zip(threads, ends, strict=True):
        end.say(position=Position())
        thread.start()
    until(lambda: len(links) == shards - 1 and all(end.received for end in ends))
    local: list[Any] = []
    threaded.attach(Sink(local), ServerPosition(0, 0, 0))
    until(lambda: all(end.received[1:] for end in ends))
    for version in range(steps):
        gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=version + 1)
        staged = Staged(id=gradient, info=GradientInfo(finite=True))
        threaded.report(0, staged)
        for end in ends[:-1]:
            end.say(staged=staged)
        until(lambda: all(end.incoming.empty() for end in ends))
        assert ends[0].commits() == list(range(version))  # not before the last shard has it
        ends[-1].say(staged=staged)
        until(lambda: all(end.commits() == list(range(version + 1)) for end in ends))  # noqa: B023
        threaded.report(0, Applied(version=version + 1))
        for end in ends:
            end.say(applied=Applied(version=version + 1))
    for end in ends:
        end.cut()
    for thread in threads:
        thread.join(SECONDS)
    assert not links
    threaded.close()


class Sink:
    def __init__(self, received: list[Any]) -> None:
        self.received = received

    def deliver(self, message: Any) -> None:
        self.received.append(message)


def test_heartbeats_are_answered_beside_256_links() -> None:
    """Over real connections, 255 links are up, and a worker's heartbeat is answered."""
    shards = 256
    rules = Rules(mode="Sync", shards=shards, steps=10)
    threaded = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    threaded.start()
    host = FakeHost(threaded)
    server = Coordinating(host, TOKEN)
    received: list[list[Any]] = [[] for _ in range(shards)]
    links = [
        Link(
            f"127.0.0.1:{server.port}",
            Credentials(TOKEN),
            Peer(role="parameter-server", index=shard),
            AGREEMENT,
            "Sync",
        )
        for shard in range(1, shards)
    ]
    try:
        for shard, link in enumerate(links, 1):
            link.start(Sink(received[shard]))
        until(lambda: all(received[1:]))  # each has received its start
        client = ControlClient(
            [f"127.0.0.1:{server.port}"], Credentials(TOKEN), Peer(role="worker"), Timeouts(call=60.0)
        )
        client.beat(0, 1, TRAINING, 0.0)
        client.close()
        assert len(server.links) == shards - 1
    finally:
        for link in links:
            link.close()
        threaded.close()
        server.close()
