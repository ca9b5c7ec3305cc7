"""A job of processes on its own loopback address, whose pods a test starts one by one."""

from __future__ import annotations

import itertools
import json
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from backstay_cluster.load import slack
from backstay_cluster.net import claim_block
from backstay_spec import contract

from .._faults import ENV_FAULTS
from ._processes import KILLED, Forker, PodProcess

__all__ = ["SECONDS", "Job", "Pod", "Ports"]

_T = TypeVar("_T")

SECONDS: Final = 180.0
"""The limit of every wait on a machine without other work, in seconds. A busy machine has more."""

_POLL: Final = 0.01
_LAST: Final = 30  # lines of output in an error


@dataclass(frozen=True)
class Ports:
    """The ports of one pod."""

    control: int
    data: int
    metrics: int


@dataclass(frozen=True)
class Pod:
    """One process of a job.

    Attributes:
        name: the name of the pod, such as ``worker-1-2-4``: role, index, incarnation, and a number that differs for
            each pod.
        role: a value of `BACKSTAY_ROLE`: ``parameter-server``, ``worker`` or ``evaluator``.
        index: shard or rank.
        incarnation: the pod's incarnation in its slot.
        process: has `pid`, `poll`, `wait`, `send_signal` and `kill`.
        log: the file with its output and errors.
        termination: the file with its termination message.
        metrics: ``host:port`` of its metrics.
        control: ``host:port`` of its control service.
        ports: the pod's ports.
        job: its job.
    """

    name: str
    role: str
    index: int
    incarnation: int
    process: PodProcess
    log: Path
    termination: Path
    metrics: str
    control: str
    ports: Ports
    job: Job = field(repr=False, compare=False)

    def output(self) -> str:
        """Returns the output until now."""
        return self.log.read_text(errors="replace")

    def final_message(self) -> dict[str, Any]:
        """Returns the pod's termination message; empty if it wrote none."""
        try:
            found: dict[str, Any] = json.loads(self.termination.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def wait(self) -> int:
        """Wait until it ends; returns its exit code.

        Raises:
            AssertionError: the pod did not end, or another pod of the job died unexpectedly. The message begins with
                the name of the dead pod, and has its output. It may be why this pod ended with another code than 0.
        """
        self.job.until(lambda: self.process.poll() is not None, f"{self.name} ends", awaited=self)
        code = self.process.wait()
        if not self.job.expects(self, code):
            self.job.check(f"{self.name} ends", awaited=self)
        return code

    def may_end_with(self, *codes: int) -> Self:
        """Expect these exit codes of this pod. Returns the pod."""
        self.job.expected.setdefault(self.name, set()).update(codes)
        return self


class Job:
    """A job; pods are started one by one. As a context manager it ends all of them.

    Attributes:
        shards, workers: how many of each the job has.
        config: the job's settings, as in `BACKSTAY_CONFIG`.
        environment: variables of every pod; change them before a pod starts.
        pods: all pods that were started, in that order.
        expected: the exit codes beside 0 that the test expects, by the name of the pod; an empty name means any pod.
        forker: starts the pods.
        address: what all pods listen on. No other process uses this address, so its ports stay free while a pod is
            replaced.
        token: every call to a server carries it, so that other users of the machine cannot make one.
    """

    def __init__(
        self, argv: Sequence[str], folder: Path, forker: Forker, *, shards: int = 1, workers: int = 1, **config: Any
    ) -> None:
        """
        Args:
            argv: the command line of every pod.
            folder: an existing folder for logs and termination messages.
            forker: starts the pods.
            shards: the number of parameter servers without standbys.
            workers: the number of workers.
            config: more fields of `backstay_spec.runtime.RuntimeConfig`.
        """
        self.folder = folder
        self.shards, self.workers = shards, workers
        self.config = {"shards": shards, "workers": workers, **config}
        self.environment: dict[str, str] = {}
        self.pods: list[Pod] = []
        self.expected: dict[str, set[int]] = {}
        self._argv, self.forker = tuple(argv), forker
        self.token = secrets.token_hex(16)
        self._block = claim_block()
        self.address = self._block.node_ip
        self._numbers = itertools.count(20000)
        self._ports = {shard: self.new_ports() for shard in range(shards)}

    def new_ports(self) -> Ports:
        """Ports that no pod of this job has had."""
        return Ports(*itertools.islice(self._numbers, 3))

    def start(
        self,
        role: str,
        index: int,
        incarnation: int = 0,
        *,
        ports: Ports | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start a pod.

        Args:
            role: a value of `BACKSTAY_ROLE`.
            index: shard or rank.
            incarnation: 1 for the first pod of a slot; 0 where no operator counts them.
            ports: the pod's ports; None: those of the shard, or new ones.
            environment: more environment variables.
        """
        known = self._ports.get(index) if role == contract.ROLE_SERVER else None
        ports = ports or known or self.new_ports()
        name = f"{role}-{index}-{incarnation}-{len(self.pods)}"
        log, termination = self.folder / f"{name}.log", self.folder / f"{name}.termination"
        variables = {
            **self.forker.environ,
            contract.ENV_JOB: "tested",
            contract.ENV_ROLE: role,
            contract.ENV_INDEX: str(index),
            contract.ENV_INCARNATION: str(incarnation),
            contract.ENV_SERVERS: ",".join(self.control(shard) for shard in range(self.shards)),
            contract.ENV_PORT: str(ports.control),
            contract.ENV_DATA_PORT: str(ports.data),
            contract.ENV_METRICS_PORT: str(ports.metrics),
            contract.ENV_BIND: self.address,
            contract.ENV_POD_IP: self.address,
            contract.ENV_TOKEN: self.token,
            contract.ENV_CONFIG: json.dumps(self.config),
            contract.ENV_TERMINATION_LOG: str(termination),
            **self.variables(name),
            **self.environment,
            **(environment or {}),
        }
        for pod in self.pods:
            if pod.ports == ports and pod.process.killed:  # its ports are free once its memory is
                pod.process.wait(SECONDS * slack())
        process = self.forker.start(self._argv, variables, log)
        metrics, control_service = f"{self.address}:{ports.metrics}", f"{self.address}:{ports.control}"
        pod = Pod(name, role, index, incarnation, process, log, termination, metrics, control_service, ports, self)
        self.pods.append(pod)
        return pod.may_end_with(KILLED) if "kill" in variables.get(ENV_FAULTS, "") else pod

    def variables(self, name: str) -> dict[str, str]:
        """More variables of the pod of that name."""
        del name
        return {}

    def control(self, shard: int) -> str:
        """Returns the address of a shard's control service."""
        return f"{self.address}:{self._ports[shard].control}"

    def server(self, shard: int, incarnation: int = 0, **environment: str) -> Pod:
        """Start a parameter server."""
        return self.start(contract.ROLE_SERVER, shard, incarnation, environment=environment)

    def worker(self, rank: int, incarnation: int = 0, **environment: str) -> Pod:
        """Start a worker."""
        return self.start(contract.ROLE_WORKER, rank, incarnation, environment=environment)

    def start_all(self) -> None:
        """Start a server for each shard, and all workers."""
        for shard in range(self.shards):
            self.server(shard)
        for rank in range(self.workers):
            self.worker(rank)

    def wait_for(self, pod: Pod, text: str, after: int = 0) -> None:
        """Wait until the pod has printed a text.

        Args:
            after: number of characters at the start of the output that do not count.

        Raises:
            AssertionError: the pod ended, or did not print the text, or another pod died unexpectedly (`until`).
        """
        what = f"{pod.name} prints {text!r}"

        def printed() -> bool:
            ended = pod.process.poll() is not None  # before its output is read: all that it prints is there then
            found = text in pod.output()[after:]
            if ended and not found:
                raise AssertionError(f"{pod.name} ended in the wait until {what}:\n{pod.output()}")
            return found

        self.until(printed, what, awaited=pod)

    def until(
        self,
        holds: Callable[[], _T],
        what: str,
        *,
        ignoring: tuple[type[BaseException], ...] = (),
        awaited: Pod | None = None,
    ) -> _T:
        """Call `holds` until it returns something true, and return that. No pod may die meanwhile.

        Args:
            what: the event, for the error.
            ignoring: exceptions of `holds` after which it is called again.
            awaited: a pod that may end.

        Raises:
            AssertionError: a pod died unexpectedly: the message begins with the name of that pod, and has its output.
                Or `holds` returned nothing true within the limit: the message has the end of each output.
        """
        began = time.monotonic()
        while True:
            try:
                if found := holds():
                    return found
            except ignoring:
                pass
            except Exception:
                self.check(what, awaited=awaited)  # the death of a pod may be the cause
                raise
            self.check(what, awaited=awaited)
            if (passed := time.monotonic() - began) > SECONDS * slack():
                raise AssertionError(f"the wait until {what} did not end within {passed:.0f} s:\n{self.last()}")
            time.sleep(_POLL)

    def may_end_with(self, *codes: int) -> None:
        """The test expects these exit codes of any pod."""
        self.expected.setdefault("", set()).update(codes)

    def expects(self, pod: Pod, code: int) -> bool:
        """Returns whether the pod may have ended so. A pod that got a signal by its `process` may have any code."""
        return code == 0 or pod.process.signalled or any(code in self.expected.get(name, ()) for name in ("", pod.name))

    def check(self, what: str, *, awaited: Pod | None = None) -> None:
        """Check that no other pod than `awaited` has died.

        Args:
            what: the awaited event, for the error.

        Raises:
            AssertionError: a pod has died with an exit code that the test did not announce.
        """
        for pod in self.pods:
            code = pod.process.poll()
            if pod is not awaited and code is not None and not self.expects(pod, code):
                raise AssertionError(
                    f"{pod.name} ended with exit code {code} in the wait until {what}:\n{_end(pod.output())}"
                )

    def logs(self) -> str:
        """Returns the output of all pods."""
        return "\n".join(f"==== {pod.name}\n{pod.output()}" for pod in self.pods)

    def last(self) -> str:
        """Returns the end of the output of each pod."""
        return "\n".join(f"==== {pod.name}\n{_end(pod.output())}" for pod in self.pods)

    def end(self) -> None:
        """Kill the pods that still run, and release the address."""
        for pod in self.pods:
            pod.process.send_signal(signal.SIGKILL)
        for pod in self.pods:
            pod.process.wait()
        self._block.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-_LAST:])
