"""The operator and the API server at 200 jobs of 10 pods, with a fake kubelet that marks pods running immediately.

Prints the time until all pods are created, and from a dead pod to its replacement (1 job, and at 200 jobs). It also
prints the operator's memory and both processes' CPU time, beside the limits. ``--assets DIR`` uses a real
kube-apiserver and etcd.

    python bench/jobs.py [--jobs 200] [--deaths 50] [--assets DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from backstay_cluster.client import ApiClient
from backstay_cluster.cluster import ClusterProcess
from backstay_cluster.kubelet.fake import FakeKubelet
from backstay_spec import contract
from backstay_spec.crd import build_crd

JOBS_PATH = f"/apis/{contract.API_VERSION}/namespaces/default/{contract.PLURAL}"


# All pods have this address, where one process answers the operator's calls as servers that train would.
SERVERS_IP = "127.243.255.254"

# A worker that crashes before its first gradient backs off (O4), and these pods never compute one; preempted ones do
# not back off.
PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "a benchmark took it",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def job_of(name: str) -> dict[str, Any]:
    """Returns a job with 2 servers and 8 workers."""
    return {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "example.org/trainer:1",
            "command": ["python", "train.py"],
            "parameterServers": {"replicas": 2, "maxRestarts": 10_000},
            "workers": {"replicas": 8, "maxRestarts": 10_000},
            "checkpoint": {"uri": "memory://checkpoints"},
        },
    }


async def wait_for(kubelet: FakeKubelet, count: int, seconds: float) -> None:
    """Wait until `count` pods are Running."""
    deadline = time.perf_counter() + seconds
    while (running := sum(phase(pod) == "Running" for pod in kubelet.pods.values())) < count:
        if time.perf_counter() > deadline:
            raise SystemExit(f"only {running} of {count} pods were running after {seconds:.0f} s")
        await asyncio.sleep(0.05)


def phase(pod: dict[str, Any]) -> str:
    """Returns the phase of a pod, as the watch last showed it."""
    return str(pod.get("status", {}).get("phase", ""))


def slot_of(pod: dict[str, Any]) -> tuple[str, ...]:
    """Job, role and index of a pod."""
    labels = pod["metadata"]["labels"]
    return tuple(labels[key] for key in (contract.LABEL_JOB, contract.LABEL_ROLE, contract.LABEL_INDEX))


def replaced(kubelet: FakeKubelet, victim: dict[str, Any], incarnation: int) -> bool:
    """Returns whether the slot of the pod `victim` has a newer incarnation."""
    return any(
        slot_of(pod) == slot_of(victim) and int(pod["metadata"]["labels"][contract.LABEL_INCARNATION]) > incarnation
        for pod in kubelet.pods.values()
    )


@dataclass(frozen=True)
class Replacement:
    """The time of one replacement, and its parts.

    Attributes:
        seconds: seconds between the request that makes a pod Failed and the replacement in the watch of this process.
        shown: seconds of these until the watch of this process showed the death. They do not depend on the operator.
        cpu: seconds of CPU time of the operator meanwhile. In the rest of the time it waited, for the API server or
            for a processor.
    """

    seconds: float
    shown: float
    cpu: float

    def __str__(self) -> str:
        rest = self.seconds - self.shown
        return (
            f"{self.shown * 1e3:.0f} ms API server, then {rest * 1e3:.0f} ms; {self.cpu * 1e3:.0f} ms CPU of operator"
        )


def cpu_of(process: psutil.Process) -> float:
    """CPU time of a process so far, in seconds."""
    return sum(process.cpu_times()[:2])


async def deaths(kubelet: FakeKubelet, operator: psutil.Process, count: int) -> list[Replacement]:
    """Kill workers one after another, and wait for each one's replacement.

    The time includes the kubelet's PATCH, the operator's watch, its plan, its writes, and the watch that reports the
    replacement here.
    """
    found = []
    for number in range(count):
        living = sorted(
            (
                pod
                for pod in kubelet.pods.values()
                if phase(pod) == "Running" and pod["metadata"]["labels"][contract.LABEL_ROLE] == contract.ROLE_WORKER
            ),
            key=lambda pod: pod["metadata"]["name"],
        )
        victim = living[(number * 7919) % len(living)]
        incarnation = int(victim["metadata"]["labels"][contract.LABEL_INCARNATION])
        key = (victim["metadata"]["namespace"], victim["metadata"]["name"])
        killed, cpu, shown = time.perf_counter(), cpu_of(operator), None
        kubelet.kill("default", victim["metadata"]["name"], condition=PREEMPTED)
        while not replaced(kubelet, victim, incarnation):
            if time.perf_counter() - killed > 120:
                raise SystemExit(f"{victim['metadata']['name']} was not replaced within 120 s")
            if shown is None and (key not in kubelet.pods or phase(kubelet.pods[key]) == "Failed"):
                shown = time.perf_counter() - killed
            await asyncio.sleep(0.001)  # short compared with the measured time
        seconds = time.perf_counter() - killed
        found.append(Replacement(seconds, seconds if shown is None else shown, cpu_of(operator) - cpu))
        await asyncio.sleep(0.2)
    return found


def rows_of(jobs: str, found: list[Replacement], goals: tuple[str, str]) -> None:
    """Print the lines of the table about replacements."""
    slowest = max(found, key=lambda one: one.seconds)
    row(
        f"{jobs}: pod dead -> replacement created, median",
        f"{statistics.median(o.seconds for o in found) * 1e3:.0f} ms",
        goals[0],
    )
    row(f"the slowest of {len(found)}", f"{slowest.seconds * 1e3:.0f} ms", goals[1])
    row("", "", f"({slowest})")


def row(what: str, value: str, goal: str = "") -> None:
    """Print one line of the table."""
    print(f"{what:<52}  {value:>14}  {goal}", flush=True)


async def measure(jobs: int, kills: int, assets: str | None) -> None:
    """Run the benchmark."""
    environ = {**os.environ, **({"KUBEBUILDER_ASSETS": assets} if assets else {})}
    with tempfile.TemporaryDirectory(prefix="backstay-bench-") as folder:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        cluster = ClusterProcess(Path(folder) / "cluster", kubelet=False, environ=environ)
        with cluster:
            client = cluster.client()
            await client.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", build_crd())
            kubelet = FakeKubelet(client, pod_ip=SERVERS_IP)
            await kubelet.start()
            servers = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).with_name("_servers.py")), SERVERS_IP,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert servers.stdout is not None
            if not await servers.stdout.readline():
                raise SystemExit(f"the port {SERVERS_IP}:{contract.PORT_CONTROL} is taken")
            log = (Path(folder) / "operator.log").open("wb")
            operator = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "backstay_operator", "--kubeconfig", str(cluster.kubeconfig),
                "--key-file", str(key), "--bind", "127.0.0.1", "--metrics-port", "0", "--die-with-parent",
                stdout=log, stderr=log,
            )  # fmt: skip
            try:
                await _report(client, kubelet, psutil.Process(operator.pid), cluster.pid, jobs, kills)
            finally:
                operator.terminate()
                await operator.wait()
                log.close()
                servers.terminate()
                await servers.wait()
                await kubelet.stop()
                await client.close()


async def _report(
    client: ApiClient, kubelet: FakeKubelet, operator: psutil.Process, server_pid: int | None, jobs: int, kills: int
) -> None:
    await client.create(JOBS_PATH, job_of("single"))
    await wait_for(kubelet, 10, 60)
    idle = operator.memory_info().rss
    rows_of("1 job", await deaths(kubelet, operator, kills), ("20 ms", ""))
    started = time.perf_counter()
    for number in range(jobs - 1):
        await client.create(JOBS_PATH, job_of(f"job-{number}"))
    row(f"{jobs} jobs submitted in", f"{time.perf_counter() - started:.1f} s")
    await wait_for(kubelet, jobs * 10, 600)
    total = time.perf_counter() - started
    row(f"{jobs} jobs: all {jobs * 10} pods running after", f"{total:.1f} s", f"{jobs * 10 / total:.0f} pods/s")
    goals = ("50 ms", "500 ms") if jobs <= 200 else ("", "5000 ms")
    rows_of(f"{jobs} jobs", await deaths(kubelet, operator, kills), goals)
    row("operator's memory, 1 job", f"{idle / 1e6:.0f} MB")
    row(
        f"operator's memory, {jobs} jobs of 10 pods",
        f"{operator.memory_info().rss / 1e6:.0f} MB",
        "200 MB" if jobs <= 200 else "500 MB",
    )
    row("operator's CPU time in all", f"{cpu_of(operator):.1f} s")
    before = cpu_of(operator)
    await asyncio.sleep(10)
    row("operator's CPU while nothing changes", f"{(cpu_of(operator) - before) * 10:.0f} %", "of one processor")
    row("load of this machine", "/".join(f"{load:.1f}" for load in os.getloadavg()), f"{os.cpu_count()} processors")
    if server_pid is not None:
        tree = [psutil.Process(server_pid), *psutil.Process(server_pid).children(recursive=True)]
        row("API server's CPU time in all", f"{sum(sum(process.cpu_times()[:2]) for process in tree):.1f} s")
        row("API server's memory", f"{sum(process.memory_info().rss for process in tree) / 1e6:.0f} MB")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--deaths", type=int, default=30)
    parser.add_argument("--assets", help="folder with kube-apiserver and etcd: measure on the real API server")
    arguments = parser.parse_args()
    print(f"{'what':<52}  {'measured':>14}  goal")
    asyncio.run(measure(arguments.jobs, arguments.deaths, arguments.assets))


if __name__ == "__main__":
    main()
