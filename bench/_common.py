"""Shared code of the benchmarks of the data plane, which run roles as processes that read commands line by line.

A benchmark starts one server process and some worker processes, with the allocator settings of a pod. It controls them
through their standard input and output. All rows of one table are therefore measured in one run, in turns.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backstay_rpc.credentials import Credentials

REPO = Path(__file__).resolve().parent.parent
TOKEN = "benchmark"
RAW_BYTES = 64 << 20
HOST = "127.0.8.1"  # of the servers; bench/_link.py limits what is not between 127.0.0.1 and itself


def allocator_environment() -> dict[str, str]:
    """Returns the variables that the operator sets in every pod of a job."""
    from backstay_spec.manifests_pod import ALLOCATOR

    return dict(ALLOCATOR)


class BenchProcess:
    """A role of a benchmark in its own process. Both sides send one JSON object on each line.

    Args:
        script: its file name in `bench/`.
        role: one of the script's roles.
        args: more arguments of the script.
        python: the interpreter; default: the one of this program.
    """

    def __init__(self, script: str, role: str, *args: str, python: str = sys.executable) -> None:
        environment = {**os.environ, **allocator_environment(), "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [python, str(REPO / "bench" / script), "--role", role, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPO,
        )

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a benchmark's process ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def ask(self, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.receive()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def processes() -> Iterator[list[BenchProcess]]:
    """A list of processes that are killed at the end, even after an exception."""
    running: list[BenchProcess] = []
    try:
        yield running
    finally:
        for process in reversed(running):
            process.kill()


def commands() -> Iterator[dict[str, Any]]:
    """Yields the commands that a role receives from its `BenchProcess`."""
    for line in sys.stdin:
        yield json.loads(line)


def reply(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def free_address() -> str:
    """Returns a free port of the loopback interface, with its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


class RawServer:
    """Sends `RAW_BYTES` over a plain TCP connection for each byte that it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        data = memoryview(bytearray(b"\1") * RAW_BYTES)
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection, data), daemon=True).start()

    @staticmethod
    def _serve(connection: socket.socket, data: memoryview) -> None:
        with connection:
            while connection.recv(1):
                connection.sendall(data)


class RawClient:
    """Receives the bytes of `RawServer` into an existing buffer, at the highest rate of a socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = memoryview(bytearray(b"\1") * RAW_BYTES)

    def seconds(self) -> float:
        begin = time.perf_counter()
        self._socket.sendall(b"g")
        at = 0
        while at < RAW_BYTES:
            got = self._socket.recv_into(self._buffer[at:])
            if not got:
                raise RuntimeError("the raw server ended")
            at += got
        return time.perf_counter() - begin


def float_tree(arrays: int, elements: int) -> dict[str, np.ndarray]:
    """Returns a tree of `arrays` float32 arrays, each with `elements` elements."""
    rng = np.random.default_rng(0)
    return {f"w{i:02}": rng.standard_normal(elements, dtype=np.float32) for i in range(arrays)}


class Quorum:
    """A minimal coordinator of one shard. It commits a version when `quorum` ranks have staged a gradient for it."""

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._lock = threading.Lock()
        self._staged: dict[int, dict[int, Any]] = {}
        self.sink: Any = None

    def report(self, report: Any) -> None:
        from backstay_rpc.control_pb2 import Commit, Contribution, Lost, ShardFailed, Staged

        if isinstance(report, ShardFailed):
            print(report.why, file=sys.stderr)
            os._exit(1)
        if isinstance(report, Lost):
            print(f"a gradient was lost: {report.id}", file=sys.stderr)
            os._exit(1)
        if not isinstance(report, Staged):
            return
        gradient = report.id
        with self._lock:
            ranks = self._staged.setdefault(gradient.version, {})
            ranks[gradient.rank] = gradient
            if len(ranks) < self._quorum:
                return
            del self._staged[gradient.version]
        contributions = [Contribution(id=ranks[rank], weight=1.0) for rank in sorted(ranks)]
        self.sink.deliver(
            Commit(
                term=gradient.term,
                version=gradient.version,
                contributions=contributions,
                world=self._quorum,
                clip_factor=1.0,
            )
        )


class BenchServer:
    """One shard with all its parts, as in a pod."""

    def __init__(self, params: Any, optimizer: Any, workers: int, wire: Any = None) -> None:
        from backstay._coordination import Rules
        from backstay._shard import Admission, ShardRuntime
        from backstay._transport._tensors._server import DataServer
        from backstay._update._codecs import Wire, coded_leaves, shard_wires
        from backstay._update._engine import ShardEngine
        from backstay._update._partition import partition
        from backstay._update._rules import analyse
        from backstay._update._tree import describe

        tree = describe(params)
        rule = analyse(optimizer, tree)
        wire = wire or Wire()
        coded = coded_leaves(tree, wire)
        layout = partition(tree, rule, 1, coded=coded)
        wires = shard_wires(layout, wire, coded)[0]
        engine = ShardEngine(layout, 0, rule, params)
        engine.compile([workers], wires=wires.gradients, parameters=wires.parameters)
        coordination = Quorum(workers)
        self.shard = ShardRuntime(wires, Admission(0, 1, layout.digest), coordination, Rules("Sync", shards=1, steps=0))
        coordination.sink = self.shard
        self.shard.fence({f"worker-{rank}": 1 for rank in range(workers)})  # as after their joins
        self.server = DataServer(self.shard, host=HOST, port=0, credentials=Credentials(TOKEN))
        self.shard.reset(1, engine, workers)


class BenchWorker:
    """The data plane of one worker. Gradients are in JAX's memory, and JAX uses received parameters without a copy."""

    def __init__(self, params: Any, optimizer: Any, port: int, rank: int, wire: Any = None) -> None:
        import jax
        import jax.numpy as jnp

        from backstay._compute._encoding import Encoder
        from backstay._transport._tensors._buffers import Arrangement, ParamBuffers
        from backstay._transport._tensors._client import connect
        from backstay._update._codecs import Wire, coded_leaves, shard_wires
        from backstay._update._partition import partition
        from backstay._update._rules import analyse
        from backstay._update._tree import describe
        from backstay_rpc.control_pb2 import Hello, Peer

        tree = describe(params)
        wire = wire or Wire()
        coded = coded_leaves(tree, wire)
        layout = partition(tree, analyse(optimizer, tree), 1, coded=coded)
        wires = shard_wires(layout, wire, coded)
        self.nbytes = sum(block.nbytes for block in (*wires[0].gradients, *wires[0].parameters))
        self._encoder = Encoder(wires[:1], 0)
        self._rank = rank
        self._arrangement = Arrangement(layout)
        self._buffers = ParamBuffers.of(self._arrangement)
        leaves = jax.tree_util.tree_leaves(params)
        self._gradient = jax.jit(self._arrangement.pack)([jnp.full_like(jnp.asarray(leaf), 1e-3) for leaf in leaves])
        jax.block_until_ready(self._gradient)
        hello = Hello(peer=Peer(role="worker", index=rank, incarnation=1), term=1, partition_digest=layout.digest)
        self._client = connect(
            [f"{HOST}:{port}"], layout.shards, [hello], credentials=Credentials(TOKEN), mode="Sync", wires=wires
        )
        slot = self._buffers.take()
        self._version = self._client.exchange_all(None, 0, slot.blocks).version
        self._params = slot.host()

    def _contribution(self) -> Any:
        from types import SimpleNamespace

        from backstay import BatchKey

        blocks = self._arrangement.gradient_blocks(self._gradient)
        return SimpleNamespace(key=BatchKey(step=self._version, rank=self._rank, world=1), blocks=blocks)

    def step(self) -> None:
        from backstay._transport._tensors._client import Push
        from backstay_rpc.control_pb2 import GradientId, GradientInfo

        gradient = GradientId(
            term=1, version=self._version, rank=self._rank, key_step=self._version, incarnation=1, attempt=self._version
        )
        slot = self._buffers.take()
        with self._encoder.sending(self._contribution()) as sending:
            push = Push(gradient, sending.blocks, lambda: GradientInfo(finite=True))
            pulled = self._client.exchange_all(push, 0, slot.blocks)
        self._params = slot.host()
        if pulled.version != self._version + 1:
            raise RuntimeError(f"version {pulled.version} came after {self._version}")
        self._version = pulled.version

    def seconds(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begin)
        return times


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as a table with aligned columns. The first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
