"""One server in this process, told things in an order that networks and takers-over bring about: T6, T8."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

from backstay._control import ControlServer, Driving, Peers
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay._environment import Environment
from backstay._exit import Stop
from backstay._metrics import Metrics
from backstay._script import Script
from backstay._server import Server
from backstay._storing import ManifestStorage
from backstay.errors import CheckpointError
from backstay_rpc.control_pb2 import Rollback

TOKEN = "0123456789abcdef"
SCRIPT = Script(
    init=lambda key: {"w": jnp.zeros(8), "b": jnp.zeros(8)},
    loss=lambda params, batch: jnp.sum(params["w"]),
    batches=lambda key: key.step,
    optimizer=optax.sgd(1.0),
    steps=10,
    evaluate=None,
    seed=0,
    clip_norm=None,
    deterministic=False,
    log_every=0.0,
)


def until(holds: object) -> None:
    deadline = time.monotonic() + 30
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Coordinated:
    """A `Host`: shard 0, without a shard."""

    shard, incarnation, leaves, digest = 0, 1, (), b""

    def __init__(self, driving: Driving) -> None:
        self.driving = driving


class Quiet:
    """A `Storage` and an `Observer` that are not asked."""

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: None


@pytest.fixture
def driving() -> Iterator[Driving]:
    rules = Rules(mode="Sync", shards=2, steps=10, replicates=True)
    made = Driving(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    made.start()
    yield made
    made.close()


@pytest.fixture
def server(driving: Driving) -> Iterator[Server]:
    control = ControlServer(Coordinated(driving), Peers(), bind="127.0.0.1", port=0, token=TOKEN)  # type: ignore[arg-type]
    environment = Environment.read(
        {
            "BACKSTAY_JOB": "job",
            "BACKSTAY_ROLE": "parameter-server",
            "BACKSTAY_INDEX": "1",
            "BACKSTAY_INCARNATION": "1",
            "BACKSTAY_SERVERS": f"127.0.0.1:{control.port},127.0.0.1:1",
            "BACKSTAY_PORT": "0",
            "BACKSTAY_DATA_PORT": "0",
            "BACKSTAY_METRICS_PORT": "0",
            "BACKSTAY_BIND": "127.0.0.1",
            "BACKSTAY_POD_IP": "127.0.0.1",
            "BACKSTAY_TOKEN": TOKEN,
            "BACKSTAY_CONFIG": json.dumps({"shards": 2, "workers": 1, "standbys": 1}),
        }
    )
    assert environment is not None
    stop = Stop()
    made = Server(environment, SCRIPT, SCRIPT.plan(2), Metrics("job", "parameter-server", 1), stop)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made
    stop.ask()
    thread.join(30)
    control.close()


def test_t8_a_shard_that_is_told_its_beginning_twice_is_ready(driving: Driving, server: Server) -> None:
    """The link breaks while the shard loads, as when it first hears who leads: the coordinator tells the beginning of
    the term again, and that comes when the shard stands there already."""
    until(lambda: not server.not_ready())
    server.on_rollback(Rollback(term=1, version=0, world=1))
    until(lambda: not server.not_ready())


def test_whoever_goes_on_from_memory_does_not_wait_for_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """T8: the newest checkpoint is good to know, and no more than that."""
    answers = threading.Event()

    class Silent:
        uri = "somewhere"

        def newest(self, *, verify: bool) -> None:
            answers.wait(30)
            raise CheckpointError("it errs in the end")

    monkeypatch.setattr("backstay._storing.KNOWN_SECONDS", 0.01)
    plan = SCRIPT.plan(1)
    storage = ManifestStorage(
        Silent(),  # type: ignore[arg-type]
        plan.partition,
        plan.rule,
        job="job",
        incarnation=2,
        steps=10,
        keep=lambda: 1,
        world=lambda: 1,
        metrics=dict,
    )
    assert storage.known() == ("", (0, -1))
    answers.set()


def test_a_checkpoint_is_known_without_being_read(tmp_path: Path) -> None:
    from backstay._checkpoint._manifest import Manifest
    from backstay._checkpoint._store import CheckpointStore

    store = CheckpointStore(str(tmp_path))
    plan = SCRIPT.plan(1)
    storage = ManifestStorage(
        store,
        plan.partition,
        plan.rule,
        job="job",
        incarnation=2,
        steps=10,
        keep=lambda: 1,
        world=lambda: 1,
        metrics=dict,
    )
    assert storage.known() == ("", (0, -1))
    manifest = Manifest(version=4, term=3, incarnation=1, shards=1, leaves=(), structure={}, files=())
    store.write_manifest(manifest)
    assert storage.known() == (f"{store.uri.rstrip('/')}/{manifest.name}", (3, 4))
