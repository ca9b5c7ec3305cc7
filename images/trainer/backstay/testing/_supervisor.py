"""A replacement for the operator: Services, incarnations and promotions of a job, without Kubernetes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import grpc

from backstay_rpc import bearer
from backstay_rpc.control_pb2 import ProgressReply, ProgressRequest
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_spec import contract

from ._pods import SECONDS, Job, Pod

__all__ = ["Service", "Supervisor"]

_ROUND = 0.3
"""Seconds between two calls to the servers; the operator's interval is 2 s."""


class Service:
    """The address of a shard: connections go to the server that it selects now."""

    def __init__(self) -> None:
        self.target = ("127.0.0.1", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="backstay-testing-service", daemon=True).start()

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
        """Close every connection."""
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Supervisor:
    """Sets the Services of a job, sends the active incarnations to its servers, and promotes standbys when asked.

    Attributes:
        active: the incarnation of each shard's active server.
        pods: the servers that were started, by shard and incarnation.
        replies: the newest reply of each of them.
    """

    def __init__(self, job: Job) -> None:
        """Pods of the job that start from now on use the Services."""
        self.job = job
        self.services = [Service() for _ in range(job.shards)]
        self.active = dict.fromkeys(range(job.shards), 1)
        self.pods: dict[tuple[int, int], Pod] = {}
        self.replies: dict[tuple[int, int], ProgressReply] = {}
        job.environment[contract.ENV_SERVERS] = ",".join(service.address for service in self.services)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, name="backstay-testing-supervisor", daemon=True)
        self._thread.start()

    def server(self, shard: int, incarnation: int) -> Pod:
        """Start a server; one whose incarnation is not the active one is a standby."""
        ports = self.job.new_ports()
        if incarnation == self.active[shard]:
            self.services[shard].target = (self.job.address, ports.control)
        pod = self.pods[shard, incarnation] = self.job.start(
            contract.ROLE_SERVER,
            shard,
            incarnation,
            ports=ports,
            environment={contract.ENV_ACTIVE: str(self.active[shard])},
        )
        return pod

    def promote(self, shard: int, incarnation: int) -> None:
        """Make a standby the active server of its shard."""
        self.services[shard].target = (self.job.address, self.pods[shard, incarnation].ports.control)
        self.active[shard] = incarnation
        self.send_active()

    def send_active(self) -> dict[tuple[int, int], ProgressReply]:
        """Send the newest incarnation of each slot to every server that runs; returns their replies."""
        incarnations = {f"{contract.ROLE_SERVER}-{shard}": active for shard, active in self.active.items()}
        for pod in list(self.job.pods):
            if pod.role != contract.ROLE_SERVER and pod.incarnation:
                name = f"{pod.role}-{pod.index}"
                incarnations[name] = max(pod.incarnation, incarnations.get(name, 0))
        replies = {}
        for (shard, incarnation), pod in list(self.pods.items()):
            if pod.process.poll() is not None:
                continue
            address = f"{self.job.address}:{pod.ports.control}"
            with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
                replies[shard, incarnation] = ControlStub(channel).Progress(  # type: ignore[no-untyped-call]
                    ProgressRequest(shard=shard, world=self.job.workers, incarnations=incarnations),
                    metadata=bearer(self.job.token),
                    timeout=2,
                )
        self.replies = {**self.replies, **replies}
        return replies

    def wait(self, what: Callable[[dict[tuple[int, int], ProgressReply]], bool]) -> None:
        """Wait until `what` is true of the replies.

        Raises:
            AssertionError: `what` did not become true; the message has the logs.
        """
        for _ in range(int(SECONDS / 0.1)):
            if what(self.send_active()):
                return
            self._closed.wait(0.1)
        raise AssertionError(f"the servers did not report it:\n{self.job.logs()}")

    def close(self) -> None:
        """End the thread, and close the Services."""
        self._closed.set()
        self._thread.join(10)
        for service in self.services:
            service.close()

    def _send_forever(self) -> None:
        while not self._closed.wait(_ROUND):
            self.send_active()
