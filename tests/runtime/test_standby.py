"""Standbys as real processes: the active server is killed, and training continues in the same term (T3, T4, T6)."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from backstay_rpc import bearer
from backstay_rpc.control_pb2 import ProgressReply, ProgressRequest
from backstay_rpc.control_pb2_grpc import ControlStub

SECONDS = 90.0


class Service:
    """A shard's address: connections go to the server that it selects now."""

    def __init__(self) -> None:
        self.target = ("127.0.0.1", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Operator:
    """Does for servers what the operator does: starts them, sets the Services, and sends the active incarnations."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.services = [Service() for _ in range(job.shards)]
        self.active = dict.fromkeys(range(job.shards), 1)
        self.ports: dict[tuple[int, int], list[int]] = {}
        self.pods: dict[tuple[int, int], Any] = {}
        job.environment["BACKSTAY_SERVERS"] = ",".join(service.address for service in self.services)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, daemon=True)
        self._thread.start()

    def server(self, shard: int, incarnation: int) -> Any:
        control, data, metrics = self.ports[shard, incarnation] = self.job.ports()
        if incarnation == self.active[shard]:
            self.services[shard].target = (self.job.address, control)
        pod = self.pods[shard, incarnation] = self.job.server(
            shard,
            incarnation,
            BACKSTAY_ACTIVE=str(self.active[shard]),
            BACKSTAY_PORT=str(control),
            BACKSTAY_DATA_PORT=str(data),
            BACKSTAY_METRICS_PORT=str(metrics),
        )
        return pod

    def promote(self, shard: int, incarnation: int) -> None:
        self.services[shard].target = (self.job.address, self.ports[shard, incarnation][0])
        self.active[shard] = incarnation
        self.send_active()

    def send_active(self) -> dict[tuple[int, int], ProgressReply]:
        incarnations = {f"parameter-server-{shard}": active for shard, active in self.active.items()}
        replies = {}
        for (shard, incarnation), (control, *_) in list(self.ports.items()):
            pod = self.pods.get((shard, incarnation))
            if pod is None or pod.process.poll() is not None:
                continue
            with grpc.insecure_channel(f"{self.job.address}:{control}") as channel, contextlib.suppress(grpc.RpcError):
                replies[shard, incarnation] = ControlStub(channel).Progress(
                    ProgressRequest(shard=shard, world=self.job.workers, incarnations=incarnations),
                    metadata=bearer("0123456789abcdef"),
                    timeout=2,
                )
        return replies

    def _send_forever(self) -> None:
        while not self._closed.wait(0.3):
            self.send_active()

    def wait(self, what: Callable[[dict[tuple[int, int], ProgressReply]], bool]) -> None:
        for _ in range(int(SECONDS / 0.1)):
            if what(self.send_active()):
                return
            self._closed.wait(0.1)
        pytest.fail(f"it did not happen:\n{self.job.logs()}")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10)
        for service in self.services:
            service.close()


@pytest.fixture
def operated(job) -> Iterator[Callable[..., Operator]]:
    made: list[Operator] = []

    def make(shards: int, workers: int, **config: object) -> Operator:
        made.append(Operator(job(shards, workers, standbys=1, **config)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual["step"] == expected["step"]
    for name, value in expected.items():
        if name.isdigit():
            np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12)


def test_standbys_continue_where_the_active_servers_were_killed(operated) -> None:
    """T3, T4: of shard 0, then of the other one; with model state; no checkpoint, no rollback, no step made again."""
    operator = operated(2, 2)
    tiny = operator.job
    tiny.environment |= {"JAX_ENABLE_X64": "1", "STEPS": "20", "CLIP": "0.5", "HOLD_AT": "4", "STATE": "1"}
    for shard in range(2):
        operator.server(shard, 1)
    workers = [tiny.worker(rank) for rank in range(2)]
    for shard in range(2):
        operator.server(shard, 2)
    operator.wait(lambda said: all((s, 1) in said and said[s, 1].standby == 2 for s in range(2)))
    for shard, step, until in ((0, 5, 9), (1, 12, 16)):
        tiny.let(until)
        tiny.wait_for(workers[0], f"step {step}/20")
        operator.pods[shard, 1].process.send_signal(signal.SIGKILL)
        operator.pods[shard, 1].wait()
        operator.promote(shard, 2)
    tiny.let()
    assert [pod.wait() for pod in workers] == [0, 0]
    expected = tiny.reference()
    for pod in workers:
        assert_same(tiny.params(pod), expected)
    leader = operator.pods[0, 2]
    assert leader.wait() == 0
    assert leader.words()["result"] == "Succeeded"
    assert "starts again" not in tiny.logs()
