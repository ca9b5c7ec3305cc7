"""Jobs of real processes on loopback addresses, started by hand as an operator would; all are gone after each test."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backstay_cluster.net import claim_block

from .forked import Forked, ForkingParent

SCRIPT = Path(__file__).with_name("tiny.py")
ROOT = Path(__file__).parents[2]
LIBRARY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'images/trainer'}"}
_REFERENCES: dict[str, dict[str, np.ndarray]] = {}
SECONDS = 90.0
"""No test waits for longer for anything; it is a limit, not an expectation."""


@dataclasses.dataclass
class Pod:
    """One process, with its output and its termination message."""

    name: str
    process: Forked
    log: Path
    termination: Path
    metrics: str

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def words(self) -> dict[str, object]:
        return json.loads(self.termination.read_text())

    def wait(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except TimeoutError:
            self.process.kill()
            pytest.fail(f"{self.name} did not end:\n{self.output()}")


class Job:
    """A job; pods are started one by one."""

    def __init__(self, folder: Path, parent: ForkingParent, shards: int, workers: int, **config: object) -> None:
        self.folder, self._parent = folder, parent
        self.shards, self.workers = shards, workers
        self.config = {"shards": shards, "workers": workers, **config}
        self.environment: dict[str, str] = {}
        self.pods: list[Pod] = []
        self._let = folder / "let"
        # The job has its own address, so no other process can use its ports while a pod is replaced.
        self._block = claim_block()
        self.address = self._block.node_ip
        self._numbers = itertools.count(20000)
        self._ports = {("parameter-server", shard): self.ports() for shard in range(shards)}

    def ports(self) -> list[int]:
        """Three that no pod of this job has had."""
        return [next(self._numbers) for _ in range(3)]

    def start(self, role: str, index: int, incarnation: int = 0, **environment: str) -> Pod:
        ports = self._ports.get((role, index)) or self.ports()
        name = f"{role}-{index}-{incarnation}-{len(self.pods)}"
        servers = [f"{self.address}:{self._ports['parameter-server', shard][0]}" for shard in range(self.shards)]
        pod_environment = {
            **self._parent.environ,
            "BACKSTAY_JOB": "tiny",
            "BACKSTAY_ROLE": role,
            "BACKSTAY_INDEX": str(index),
            "BACKSTAY_INCARNATION": str(incarnation),
            "BACKSTAY_SERVERS": ",".join(servers),
            "BACKSTAY_PORT": str(ports[0]),
            "BACKSTAY_DATA_PORT": str(ports[1]),
            "BACKSTAY_METRICS_PORT": str(ports[2]),
            "BACKSTAY_BIND": self.address,
            "BACKSTAY_POD_IP": self.address,
            "BACKSTAY_TOKEN": "0123456789abcdef",
            "BACKSTAY_CONFIG": json.dumps(self.config),
            "BACKSTAY_TERMINATION_LOG": str(self.folder / f"{name}.termination"),
            "OUT": str(self.folder / f"{name}.npz"),
            "LET": str(self._let),
            **self.environment,
            **environment,
        }
        log = self.folder / f"{name}.log"
        process = self._parent.start([sys.executable, str(SCRIPT)], pod_environment, log)
        pod = Pod(name, process, log, self.folder / f"{name}.termination", f"{self.address}:{ports[2]}")
        self.pods.append(pod)
        return pod

    def control(self, shard: int) -> str:
        """The address of a shard's control service."""
        return f"{self.address}:{self._ports['parameter-server', shard][0]}"

    def server(self, shard: int, incarnation: int = 0, **environment: str) -> Pod:
        return self.start("parameter-server", shard, incarnation, **environment)

    def worker(self, rank: int, incarnation: int = 0, **environment: str) -> Pod:
        return self.start("worker", rank, incarnation, **environment)

    def start_all(self) -> None:
        for shard in range(self.shards):
            self.server(shard)
        for rank in range(self.workers):
            self.worker(rank)

    def let(self, step: int | None = None) -> None:
        """Pods that `HOLD_AT` holds continue until before this step, or to the end.

        A test can therefore always observe a state before it ends, also on a slow machine.
        """
        beside = self._let.with_suffix(".part")
        beside.write_text(str(10**9 if step is None else step))
        beside.replace(self._let)

    def reference(self) -> dict[str, np.ndarray]:
        """The parameters of the plain loop in one process (T4); computed once for each script."""
        environment = {**self.environment, "WORLD": str(self.workers)}
        environment.pop("HOLD_AT", None)
        key = json.dumps(environment, sort_keys=True)
        if key not in _REFERENCES:
            out, log = self.folder / "reference.npz", self.folder / "reference.log"
            loop = {**self._parent.environ, **environment, "OUT": str(out)}
            done = self._parent.start([sys.executable, str(SCRIPT)], loop, log)
            assert done.wait(SECONDS) == 0, log.read_text(errors="replace")
            _REFERENCES[key] = dict(np.load(out))
        return _REFERENCES[key]

    def params(self, pod: Pod) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{pod.name}.npz"))

    def wait_for(self, pod: Pod, text: str, after: int = 0) -> None:
        """Until the pod has said it, after so many characters."""
        deadline = time.monotonic() + SECONDS
        while text not in pod.output()[after:]:
            if pod.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{pod.name} did not say {text!r}:\n{pod.output()}")
            time.sleep(0.02)

    def end(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGKILL)
        for pod in self.pods:
            pod.process.wait()
        self._block.close()

    def logs(self) -> str:
        return "\n".join(f"==== {pod.name}\n{pod.output()}" for pod in self.pods)


@pytest.fixture(scope="session")
def parent(compiled: Path) -> Iterator[ForkingParent]:
    """Forks the pods of all these jobs."""
    made = ForkingParent({**os.environ, **LIBRARY, "JAX_COMPILATION_CACHE_DIR": str(compiled)})
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path, parent: ForkingParent) -> Iterator[type[Job]]:
    """Makes jobs: ``job(shards, workers, **config)``."""
    made: list[Job] = []

    def make(shards: int, workers: int, **config: object) -> Job:
        # The logs of a second job do not mix with those of the first.
        folder = tmp_path / f"job-{len(made)}" if made else tmp_path
        folder.mkdir(exist_ok=True)
        made.append(Job(folder, parent, shards, workers, **config))
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.end()
        sys.stdout.write(each.logs())  # pytest shows it when the test failed
