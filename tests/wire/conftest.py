"""A shard for tests, with an engine of plain NumPy, a coordinator with scripted decisions, and real streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from between import LONG

from backstay._coordination import Rules
from backstay._shard import Admission, ShardEvents, ShardRuntime
from backstay._shard._standbys import Standbys
from backstay._timeouts import Timeouts
from backstay._transport._streams._tcp import ClientStream
from backstay._transport._tensors._client import ShardedClient, connect
from backstay._transport._tensors._memory import aligned_empty
from backstay._transport._tensors._server import DataServer
from backstay._update import ShardWire
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    GradientInfo,
    Hello,
    Lost,
    Part,
    Peer,
    RejectReason,
    ShardFailed,
    Staged,
)
from backstay_rpc.credentials import Credentials

from .certificates import credentials_of, write_certificate

TOKEN = "a" * 64
OVER_TLS = {"test_ends_of_streams", "test_many_workers", "test_refused_streams", "test_streams", "test_tcp"}
DIGEST = b"d" * 32
FLOAT32 = np.dtype(np.float32)
WAIT = LONG


@dataclass(frozen=True)
class Block:
    size: int
    dtype: np.dtype = FLOAT32


@dataclass(frozen=True)
class Layout:
    shard: int
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return sum(b.size * b.dtype.itemsize for b in self.blocks)


class FakeEngine:
    """Adds the mean gradient. `gate` holds a computation back."""

    has_average = False

    def __init__(self, layout: Layout, version: int = 0) -> None:
        self.version = version
        self.values = [np.zeros(b.size, b.dtype) for b in layout.blocks]
        self.gate = threading.Event()
        self.gate.set()
        self.applied: list[list[float]] = []  # the first element of each contribution, by update
        self.weights: list[list[float]] = []
        self.fail: Exception | None = None

    def apply(
        self, gradients: Sequence[Any], *, weights: Sequence[float], divisor: int, clip_factor: float = 1.0
    ) -> None:
        if self.fail is not None:
            raise self.fail
        self.applied.append([float(g[0][0]) for g in gradients if g])
        self.weights.append(list(weights))
        for b, value in enumerate(self.values):
            total = sum(w * g[b] for w, g in zip(weights, gradients, strict=True))
            self.values[b] = (value + clip_factor * total / divisor).astype(value.dtype)
        self.version += 1

    def skip(self) -> None:
        self.version += 1

    def block(self, b: int) -> np.ndarray:
        assert self.gate.wait(WAIT)
        return self.values[b]

    def encoded(self, b: int) -> None:
        return None

    def average(self, b: int) -> np.ndarray:
        return self.values[b] / 2

    def sum_of_squares(self, gradients: Sequence[Any], *, weights: Sequence[float], divisor: int) -> float:
        return float(
            sum(
                np.sum((sum(w * g[b] for w, g in zip(weights, gradients, strict=True)) / divisor) ** 2)
                for b in range(len(self.values))
            )
        )

    def nodes(self, contribution: Sequence[Any], weight: float) -> list[Any]:
        return [weight * np.asarray(block, np.float64) for block in contribution]

    def add(self, sums: Sequence[Any]) -> list[Any]:
        return [sum(blocks) for blocks in zip(*sums, strict=True)]

    def finish(self, total: Sequence[Any], divisor: float) -> list[Any]:
        return [(block / divisor).astype(value.dtype) for block, value in zip(total, self.values, strict=True)]

    def snapshot(self, *, whole: bool = False) -> tuple[int, list[np.ndarray]]:
        del whole
        return self.version, [v.copy() for v in self.values]


class Recorder:
    """A `Coordination` that records all reports, and then lets `decide` act on staged gradients."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.changed = threading.Condition()
        self.decide: Callable[[Any], None] = lambda staged: None

    def note(self, kind: str, value: Any) -> None:
        with self.changed:
            self.events.append((kind, value))
            self.changed.notify_all()

    def of(self, kind: str) -> list[Any]:
        with self.changed:
            return [value for k, value in self.events if k == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        with self.changed:
            ended = {kind, "failed"}  # nothing follows after a failure
            assert self.changed.wait_for(lambda: sum(k in ended for k, _ in self.events) >= count, WAIT), self.events
            assert sum(k == kind for k, _ in self.events) >= count, self.events
        return self.of(kind)

    def wait_reported(self, gradient: GradientId, given_up: Callable[[], bool]) -> None:
        """Wait until it was staged or lost, or no stream pushes it any more."""
        with self.changed:
            while not given_up() and not any(k in ("staged", "lost") and v == gradient for k, v in self.events):
                self.changed.wait(0.05)

    def report(self, report: Any) -> None:
        match report:
            case Staged():
                self.note("staged", report.id)
                self.decide(report)
            case Lost():
                self.note("lost", report.id)
            case Applied():
                self.note("applied", report.version)
            case ShardFailed():
                self.note("failed", report.why)
            case _:
                self.note(type(report).__name__.lower(), report)


def gid(
    rank: int = 0, version: int = 0, *, term: int = 1, incarnation: int = 1, attempt: int | None = None
) -> GradientId:
    return GradientId(
        term=term,
        version=version,
        rank=rank,
        key_step=version,
        incarnation=incarnation,
        attempt=version if attempt is None else attempt,
    )


def commit(version: int, gradients: Sequence[GradientId], **more: Any) -> Commit:
    return Commit(
        **{
            "term": 1,
            "version": version,
            "contributions": [Contribution(id=g, weight=1.0) for g in gradients],
            "world": max(1, len(gradients)),
            "clip_factor": 1.0,
            **more,
        }
    )


def hello(rank: int = 0, *, shard: int = 0, incarnation: int = 1, **more: Any) -> Hello:
    return Hello(
        **{
            "peer": Peer(role="worker", index=rank, incarnation=incarnation),
            "shard": shard,
            "expected_incarnation": 1,
            "term": 1,
            "partition_digest": DIGEST,
            **more,
        }
    )


@dataclass
class Shard:
    layout: Layout
    engine: FakeEngine
    coordination: Recorder
    runtime: ShardRuntime
    saved: list[tuple[Any, int, int]] = field(default_factory=list)
    server: DataServer | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.port}"

    def fill(self, gradient: GradientId, value: float) -> Any:
        """Stages a gradient whose elements are all `value`, without a stream."""
        incoming = self.runtime.begin(
            hello(gradient.rank, incarnation=gradient.incarnation), Part(contribution=gradient)
        )
        for block, spec in zip(incoming.blocks, self.layout.blocks, strict=True):
            block.view(spec.dtype)[:] = value
        self.runtime.complete(incoming, GradientInfo())
        return incoming

    def gradient(self, value: float) -> list[np.ndarray]:
        return [np.full(b.size, value, b.dtype) for b in self.layout.blocks]

    def buffers(self) -> list[np.ndarray]:
        return [aligned_empty(b.size * b.dtype.itemsize) for b in self.layout.blocks]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests of streams run on plain sockets, and inside TLS."""
    if "certificates" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in OVER_TLS:
        metafunc.parametrize("certificates", ["clear", "tls"], indirect=True)


@pytest.fixture(scope="session")
def certificates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a certificate for TLS, or an empty text without TLS."""
    if getattr(request, "param", "clear") == "clear":
        return ""
    folder = tmp_path_factory.mktemp("certificates")
    write_certificate(folder)
    return str(folder)


@pytest.fixture(scope="session")
def credentials(certificates: str) -> Credentials:
    """The credentials of both ends of a stream."""
    return credentials_of(TOKEN, certificates)


@pytest.fixture
def kit(certificates: str, credentials: Credentials) -> SimpleNamespace:
    """Names that the tests use."""
    return SimpleNamespace(
        token=TOKEN,
        certificates=certificates,
        credentials=credentials,
        digest=DIGEST,
        wait=WAIT,
        Block=Block,
        Layout=Layout,
        FakeEngine=FakeEngine,
        Recorder=Recorder,
        Timeouts=Timeouts,
        exact_wire=lambda layout: ShardWire.exactly(layout.blocks),
        gid=gid,
        commit=commit,
        hello=hello,
        reasons=RejectReason,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exits:
        yield exits


@pytest.fixture
def make_shard(stack: ExitStack, credentials: Credentials) -> Callable[..., Shard]:
    """Shards that are closed at the end."""

    def make(
        sizes: Sequence[int] = (300_000, 7),
        *,
        number: int = 0,
        mode: str = "Sync",
        start: bool = True,
        serve: bool = False,
        timeouts: Timeouts | None = None,
        wire: ShardWire | None = None,
        standbys: Standbys | None = None,
        rules: Rules | None = None,
        world: int = 1,
    ) -> Shard:
        layout = Layout(number, tuple(Block(size) for size in sizes))
        recorder = Recorder()
        saved: list[tuple[Any, int, int]] = []
        runtime = ShardRuntime(
            wire or ShardWire.exactly(layout.blocks),
            Admission(number, 1, DIGEST),
            recorder,
            replace(rules or Rules("Sync", shards=1, steps=0), mode=mode, timeouts=timeouts or Timeouts()),
            events=ShardEvents(lambda snapshot, term, version: saved.append((snapshot, term, version))),
            standbys=standbys,
        )
        shard = Shard(layout, FakeEngine(layout), recorder, runtime, saved)
        runtime.fence({f"worker-{rank}": 1 for rank in range(64)})  # they have joined

        def close() -> None:
            shard.engine.gate.set()
            runtime.close()

        if serve:
            shard.server = DataServer(runtime, host="127.0.0.1", port=0, credentials=credentials, timeouts=timeouts)
            stack.callback(shard.server.close)
        stack.callback(close)
        if start:
            runtime.reset(1, shard.engine, world)
        return shard

    return make


@pytest.fixture
def dial(stack: ExitStack, credentials: Credentials) -> Callable[..., ShardedClient]:
    """Clients of shards that are closed at the end."""

    def connect_to(
        *shards: Shard, rank: int = 0, mode: str = "Sync", token: str = TOKEN, carried: Any = None, **more: Any
    ) -> ShardedClient:
        client = connect(
            [shard.address for shard in shards],
            [shard.layout for shard in shards],
            [hello(rank, shard=shard.layout.shard, **more) for shard in shards],
            credentials=replace(credentials, token=token),
            mode=mode,
            **({"carried": carried} if carried else {}),
        )
        stack.callback(client.close)
        return client

    return connect_to


@pytest.fixture
def background(stack: ExitStack) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function in a thread; the result has `result()`, as a future has."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(8)
    stack.callback(pool.shutdown, wait=False)
    return pool.submit


@pytest.fixture
def stream(kit: SimpleNamespace, stack: ExitStack) -> Callable[..., ClientStream]:
    """A bare stream, to send frames that no client sends."""

    def open_(shard: Any, rank: int = 0) -> ClientStream:
        end = ClientStream(shard.address, kit.hello(rank), kit.credentials)
        stack.callback(end.close)
        return end

    return open_
