"""Jobs of real processes on loopback addresses, started by hand as an operator would; all are gone after each test."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("tiny.py")
ROOT = Path(__file__).parents[2]
LIBRARY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'images/trainer'}"}
_REFERENCES: dict[str, dict[str, np.ndarray]] = {}
SECONDS = 90.0
"""No test waits for longer for anything; it is a limit, not an expectation."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclasses.dataclass
class Pod:
    """One process, with its output and last words."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    termination: Path
    metrics_port: int

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def words(self) -> dict[str, object]:
        return json.loads(self.termination.read_text())

    def wait(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"{self.name} did not end:\n{self.output()}")


class Job:
    """A job; pods are started one by one."""

    def __init__(self, folder: Path, shards: int, workers: int, **config: object) -> None:
        self.folder = folder
        self.shards, self.workers = shards, workers
        self.config = {"shards": shards, "workers": workers, **config}
        self.environment: dict[str, str] = {}
        self.pods: list[Pod] = []
        self._ports = {("parameter-server", shard): free_ports(3) for shard in range(shards)}

    def start(self, role: str, index: int, incarnation: int = 0, **environment: str) -> Pod:
        ports = self._ports.get((role, index)) or free_ports(3)
        name = f"{role}-{index}-{incarnation}-{len(self.pods)}"
        servers = [f"127.0.0.1:{self._ports['parameter-server', shard][0]}" for shard in range(self.shards)]
        pod_environment = {
            **os.environ,
            **LIBRARY,
            "BACKSTAY_JOB": "tiny",
            "BACKSTAY_ROLE": role,
            "BACKSTAY_INDEX": str(index),
            "BACKSTAY_INCARNATION": str(incarnation),
            "BACKSTAY_SERVERS": ",".join(servers),
            "BACKSTAY_PORT": str(ports[0]),
            "BACKSTAY_DATA_PORT": str(ports[1]),
            "BACKSTAY_METRICS_PORT": str(ports[2]),
            "BACKSTAY_BIND": "127.0.0.1",
            "BACKSTAY_POD_IP": "127.0.0.1",
            "BACKSTAY_TOKEN": "0123456789abcdef",
            "BACKSTAY_CONFIG": json.dumps(self.config),
            "BACKSTAY_TERMINATION_LOG": str(self.folder / f"{name}.termination"),
            "OUT": str(self.folder / f"{name}.npz"),
            **self.environment,
            **environment,
        }
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT)], env=pod_environment, stdout=output, stderr=subprocess.STDOUT
            )
        pod = Pod(name, process, log, self.folder / f"{name}.termination", ports[2])
        self.pods.append(pod)
        return pod

    def control_port(self, shard: int) -> int:
        return self._ports["parameter-server", shard][0]

    def server(self, shard: int, incarnation: int = 0, **environment: str) -> Pod:
        return self.start("parameter-server", shard, incarnation, **environment)

    def worker(self, rank: int, incarnation: int = 0, **environment: str) -> Pod:
        return self.start("worker", rank, incarnation, **environment)

    def start_all(self) -> None:
        for shard in range(self.shards):
            self.server(shard)
        for rank in range(self.workers):
            self.worker(rank)

    def reference(self) -> dict[str, np.ndarray]:
        """The parameters of the plain loop in one process (T4); computed once for each script."""
        environment = {**self.environment, "WORLD": str(self.workers)}
        key = json.dumps(environment, sort_keys=True)
        if key not in _REFERENCES:
            out = self.folder / "reference.npz"
            done = subprocess.run(
                [sys.executable, str(SCRIPT)],
                env={**os.environ, **LIBRARY, **environment, "OUT": str(out)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
            assert done.returncode == 0, done.stdout.decode()
            _REFERENCES[key] = dict(np.load(out))
        return _REFERENCES[key]

    def params(self, pod: Pod) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{pod.name}.npz"))

    def wait_for(self, pod: Pod, text: str) -> None:
        """Until the pod has said it."""
        deadline = time.monotonic() + SECONDS
        while text not in pod.output():
            if pod.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{pod.name} did not say {text!r}:\n{pod.output()}")
            time.sleep(0.02)

    def end(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGKILL)
        for pod in self.pods:
            pod.process.wait()

    def logs(self) -> str:
        return "\n".join(f"==== {pod.name}\n{pod.output()}" for pod in self.pods)


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[type[Job]]:
    """Makes jobs: ``job(shards, workers, **config)``."""
    made: list[Job] = []

    def make(shards: int, workers: int, **config: object) -> Job:
        made.append(Job(tmp_path, shards, workers, **config))
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.end()
        sys.stdout.write(each.logs())  # pytest shows it when the test failed
