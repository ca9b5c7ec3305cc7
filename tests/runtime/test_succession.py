"""One server in this process gets messages in the order that broken links and takeovers cause. T6, T8."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from between import LONG, until

from backstay._checkpoint import (
    CheckpointStore,
    Claim,
    Contents,
    FolderLease,
    Holder,
    Identity,
    JobIdentity,
    Manifest,
    ManifestStorage,
    Origin,
)
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay._process._environment import Environment
from backstay._process._exit import Stop
from backstay._report._metrics import PodMetrics
from backstay._roles._server import Server
from backstay._roles._standby import Inherited, Standby
from backstay._script import Script
from backstay._shard import HeldState
from backstay._threaded import ThreadedCoordinator
from backstay._timeouts import Timeouts
from backstay._transport import ControlClient
from backstay._update import ShardEngine
from backstay.errors import BackstayError, CheckpointError, StorageError, Superseded
from backstay_rpc.control_pb2 import Activity, Done, GradientId, GradientInfo, Hello, Part, Peer, Rollback
from backstay_rpc.credentials import Credentials

from .linked import Coordinating
from .servers import server_of

TOKEN = "0123456789abcdef"
HISTORY = "00000000000000aa"
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


class Coordinated:
    """A `Host` of shard 0, without a shard."""

    shard, incarnation = 0, 1

    def __init__(self, threaded: ThreadedCoordinator) -> None:
        self.threaded = threaded
        self.agreement = SCRIPT.plan(2).agreement

    def fence(self, _: object) -> None: ...


class Quiet:
    """A `CheckpointStorage` and an `Observer` that the test does not use."""

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: None


@pytest.fixture
def threaded() -> Iterator[ThreadedCoordinator]:
    rules = Rules(mode="Sync", shards=2, steps=10, replicates=True)
    made = ThreadedCoordinator(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)), Quiet(), Quiet())
    made.start()
    yield made
    made.close()


def environment_of(shard: int, servers: str, config: dict[str, Any]) -> Environment:
    """Returns the environment of a server that listens on free ports."""
    environment = Environment.read(
        {
            "BACKSTAY_JOB": "job",
            "BACKSTAY_ROLE": "parameter-server",
            "BACKSTAY_INDEX": str(shard),
            "BACKSTAY_INCARNATION": "1",
            "BACKSTAY_SERVERS": servers,
            "BACKSTAY_PORT": "0",
            "BACKSTAY_DATA_PORT": "0",
            "BACKSTAY_METRICS_PORT": "0",
            "BACKSTAY_BIND": "127.0.0.1",
            "BACKSTAY_POD_IP": "127.0.0.1",
            "BACKSTAY_TOKEN": TOKEN,
            "BACKSTAY_CONFIG": json.dumps(config),
        }
    )
    assert environment is not None
    return environment


def environment_at(control: Coordinating) -> Environment:
    """Returns the environment of shard 1's server, in a job whose coordinator runs."""
    servers = f"127.0.0.1:{control.port},127.0.0.1:1"
    return environment_of(1, servers, {"shards": 2, "workers": 1, "standbys": 1})


@pytest.fixture
def coordinator(threaded: ThreadedCoordinator) -> Iterator[Coordinating]:
    control = Coordinating(Coordinated(threaded), TOKEN)
    yield control
    control.close()


@pytest.fixture
def metrics() -> PodMetrics:
    return PodMetrics("job", "ParameterServer", 1)


@pytest.fixture
def server(coordinator: Coordinating, metrics: PodMetrics) -> Iterator[Server]:
    stop = Stop()
    made = server_of(environment_at(coordinator), SCRIPT, stop, metrics)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made
    stop.request()
    thread.join(LONG)


def test_t8_a_shard_that_receives_its_rollback_twice_is_ready(threaded: ThreadedCoordinator, server: Server) -> None:
    """The link breaks while the shard loads, for example when the shard first receives the leader.

    The coordinator sends the beginning of the term again. The shard is already there when it gets this message.
    """
    until(lambda: not server.host.not_ready())
    server.served.runtime.deliver(Rollback(term=1, version=0, world=1))
    until(lambda: not server.host.not_ready())


def test_t8_a_server_that_took_over_at_the_end_waits_for_workers_that_lost_their_last_parameters(
    coordinator: Coordinating, tmp_path: Path
) -> None:
    """No worker has joined it, and the job has ended. A worker may have been pulling from the previous server."""
    plan, stop, metrics = SCRIPT.plan(2), Stop(), PodMetrics("job", "ParameterServer", 1)
    message = tmp_path / "termination-log"
    environment = environment_at(coordinator)
    environment = replace(environment, timeouts=Timeouts(newcomer=30.0), termination_log=message)
    standby = Standby(environment, SCRIPT, plan, stop, metrics.step.set)
    engine = ShardEngine(plan.partition, 1, plan.rule, SCRIPT.beginning.trained())
    held = HeldState(term=1, world=1, offset=0, engine=engine, last=None)
    inherited = Inherited(held, standby._control, standby._peers, 0.0)
    server = server_of(environment, SCRIPT, stop, metrics, inherited)
    server.served.runtime.deliver(Done(version=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    address = f"127.0.0.1:{inherited.control.port}"
    worker = ControlClient([address, address], Credentials(TOKEN), Peer(role="worker", index=0), Timeouts(call=60.0))
    try:
        until(message.exists)  # it waits for nothing else any more
        worker.join(1, plan.agreement)
        assert worker.beat(1, server.host.incarnation, Activity.WAITING, 0.0).done
    finally:
        worker.close()
        stop.request()
        thread.join(LONG)


def test_t8_a_contribution_that_arrives_while_a_coordinator_takes_over_is_used() -> None:
    """The server took over and accepts contributions, but its coordinator does not have its position yet.

    A job hung: the coordinator dropped the report of the contribution, and waited for the worker.
    """
    plan, stop, metrics = SCRIPT.plan(1), Stop(), PodMetrics("job", "ParameterServer", 0)
    environment = environment_of(0, "127.0.0.1:1", {"shards": 1, "workers": 2})
    standby = Standby(environment, SCRIPT, plan, stop, metrics.step.set)
    engine = ShardEngine(plan.partition, 0, plan.rule, SCRIPT.beginning.trained())
    state, start = CoordinatorState(term=1, version=0, world=2), Rollback(term=1, world=2)
    held = HeldState(term=1, world=2, offset=0, engine=engine, last=None, coordinator=state, start=start)
    inherited = Inherited(held, standby._control, standby._peers, 0.0)
    server = server_of(environment, SCRIPT, stop, metrics, inherited)
    runtime = server.served.runtime
    runtime.fence({"worker-0": 0, "worker-1": 0})  # they have joined

    def contribute(rank: int) -> None:
        peer, gradient = Peer(role="worker", index=rank), GradientId(term=1, rank=rank, attempt=1)
        incoming = runtime.begin(Hello(peer=peer, term=1), Part(contribution=gradient))
        runtime.complete(incoming, GradientInfo(finite=True, loss=1.0, examples=1))

    contribute(0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.host.threaded is not None and server.host.threaded.linked)
        contribute(1)
        until(lambda: runtime.version == 1)
    finally:
        stop.request()
        thread.join(LONG)


def test_a_pod_that_joins_again_is_counted_once(server: Server, metrics: PodMetrics) -> None:
    """Workers connect again and again while another shard is away: that is not 150 pods in a minute."""
    for incarnation in (0, 0, 0, 1, 1):
        server.host.joined(Peer(role="worker", index=0, incarnation=incarnation))
    server.host.joined(Peer(role="worker", index=1))
    labels = {"training_job": "job", "role": "ParameterServer", "index": "1"}
    assert metrics.registry.get_sample_value("backstay_joins_total", labels) == 3


def storage_of(store: Any) -> ManifestStorage:
    """Returns the manifest storage of a job with one shard."""
    plan = SCRIPT.plan(1)
    job = JobIdentity(namespace="default", name="job", uid="1")
    lease = FolderLease(store, Holder(job, 2), lost=lambda error: None, wait=lambda seconds: False)
    return ManifestStorage(
        store,
        lease,
        plan.partition,
        Identity(job, incarnation=2, seed=0, steps=10, settings={}),
        SimpleNamespace(keep=1, world=1),
        SimpleNamespace(evaluation=lambda: (None, {}), examples=lambda: None),
    )


def test_a_coordinator_that_continues_from_memory_does_not_wait_for_the_storage() -> None:
    """T8: the newest checkpoint is good to know, and no more than that."""
    answers = threading.Event()

    class Silent:
        uri = "somewhere"
        folder = None

        def contents(self) -> None:
            answers.wait(LONG)
            raise CheckpointError("the folder cannot be written")

    storage = storage_of(Silent())
    assert storage.known(CoordinatorState(3, 5, 1, history=HISTORY), seconds=0.01) == ("", (0, -1))
    answers.set()
    until(lambda: all(thread.name != "backstay-newest" for thread in threading.enumerate()))


def test_t6_a_server_that_did_not_wait_for_the_storage_does_not_continue_what_it_did_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held step 5. The previous one had stored step 6, which is found only later, and is not in the history then."""
    store, job = CheckpointStore(str(tmp_path)), JobIdentity(namespace="default", name="job", uid="1")
    four, six = (store_manifest(store, job, version=version, term=3) for version in (4, 6))
    assert store.newest().manifest == six
    answers, contents = threading.Event(), store.contents

    def slowly() -> Contents:
        assert answers.wait(LONG)
        return contents()

    storage = storage_of(store)
    try:
        with monkeypatch.context() as slow:
            slow.setattr(store, "contents", slowly)
            assert storage.known(CoordinatorState(3, 5, 1, history=HISTORY), seconds=0.01) == ("", (0, -1))
            answers.set()
            storage.hold()
        assert store.newest().manifest == four
    finally:
        storage.close()


def test_t6_a_server_that_lost_the_storage_while_it_took_over_keeps_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was written, and then nothing could be read: the claim must not say that the history is empty."""
    store, job = CheckpointStore(str(tmp_path)), JobIdentity(namespace="default", name="job", uid="1")
    four = store_manifest(store, job, version=4, term=3)
    storage = storage_of(store)
    try:
        with monkeypatch.context() as broken:

            def fail(**more: object) -> None:
                raise StorageError("the storage fails")

            broken.setattr(store, "newest", fail)
            assert storage.known(CoordinatorState(3, 5, 1, history=HISTORY), seconds=60.0) == ("", (0, -1))
        storage.hold()
        assert store.newest().manifest == four
    finally:
        storage.close()


def store_manifest(store: CheckpointStore, job: JobIdentity, *, version: int, term: int) -> Manifest:
    """Returns a whole checkpoint without parameters, of incarnation 1."""
    info = store.write_shard([], history=HISTORY, version=version, term=term, shard=0, shards=1, incarnation=1)
    return store.write_manifest(
        Manifest(
            origin=Origin(history=HISTORY, job=job, seed=0),
            lease=1,
            version=version,
            term=term,
            incarnation=1,
            shards=1,
            leaves=(),
            structure={"dict": []},
            files=(info,),
            state=CoordinatorState(term, version, 1, history=HISTORY).to_json(),
        )
    )


def test_t6_a_promoted_server_takes_the_folder_over_immediately(tmp_path: Path) -> None:
    """It finds the newest checkpoint, and what the previous incarnation stores after that is not in the history."""
    store = CheckpointStore(str(tmp_path))
    job = JobIdentity(namespace="default", name="job", uid="1")
    lost: list[BackstayError] = []
    previous = FolderLease(store, Holder(job, 1), lost=lost.append, wait=lambda seconds: False)
    previous.acquire()

    four = store_manifest(store, job, version=4, term=3)
    storage = storage_of(store)
    try:
        assert storage.known(CoordinatorState(3, 5, 1, history=HISTORY), seconds=60.0) == (store.uri_of(four), (3, 4))
        late = store_manifest(store, job, version=6, term=3)
        newest = store.newest()
        assert newest.manifest == four
        assert late.name in newest.skipped[0]
        with pytest.raises(Superseded, match="incarnation 2"):
            previous.check()
        assert [type(error) for error in lost] == [Superseded]
    finally:
        storage.close()
        previous.release()


def test_t6_a_folder_that_is_taken_over_late_continues_where_the_term_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file could be written when the term began. Earlier files of the previous incarnation do not count."""
    store = CheckpointStore(str(tmp_path))
    job = JobIdentity(namespace="default", name="job", uid="1")
    storage = storage_of(store)
    origin = Origin(history=HISTORY, job=job, seed=0, structure=SCRIPT.plan(1).partition.structure_digest.hex())
    store.write_claim(Claim(origin=origin, lease=1, term=1, incarnation=1))
    with monkeypatch.context() as full:

        def refuse(name: str, fill: object) -> None:
            raise CheckpointError("cannot write: the disk is full")

        full.setattr(store.folder, "write", refuse)
        state, checkpoint = storage.newest(0)
    assert (state.version, checkpoint) == (0, "")
    info = store.write_shard([], history=HISTORY, version=6, term=1, shard=0, shards=1, incarnation=1)
    late = store.write_manifest(
        Manifest(
            origin=origin,
            lease=1,
            version=6,
            term=1,
            incarnation=1,
            shards=1,
            leaves=(),
            structure={"dict": []},
            files=(info,),
            state=CoordinatorState(1, 6, 1, history=HISTORY).to_json(),
        )
    )
    assert store.newest().manifest == late
    try:
        storage.hold()
        assert store.newest().manifest is None
    finally:
        storage.close()
