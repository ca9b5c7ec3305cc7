"""No healthy pod is replaced when operator, servers, workers, kubelet and API server stop or starve for a while (O5,
T8)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("BACKSTAY_E2E") == "cluster", reason="it stops the embedded cluster itself"),
]

STOPPED_SECONDS = 15  # longer than a hung server has, and than an unrenewed Lease holds for its owner
STARVED_SECONDS = 25
STARVED_SHARE = 0.08  # of one processor, for two jobs and their operator


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT however the block ends."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def write_to(file_of_kernel: Path, text: str) -> None:
    with file_of_kernel.open("w") as kernel:
        kernel.write(text)


@contextlib.contextmanager
def quota(pids: list[int], share: float) -> Iterator[bool]:
    """Limit the processes to a share of one processor, by a cgroup; False where this user may not make one."""
    name = f"backstay-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    root = v1 if v1.is_dir() else v2
    group = root / name
    try:
        group.mkdir()
        if root is v1:
            write_to(group / "cpu.cfs_quota_us", str(int(100_000 * share)))
        else:
            write_to(group / "cpu.max", f"{int(100_000 * share)} 100000")
        for pid in pids:
            write_to(group / "cgroup.procs", str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                write_to(root / "cgroup.procs", pid)
        with contextlib.suppress(OSError):
            group.rmdir()


def starve(pids: list[int], share: float, seconds: float) -> None:
    """Give the processes little processor time, by a cgroup or by stopping and continuing them."""
    with quota(pids, share) as limited:
        if limited:
            time.sleep(seconds)
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with stopped(pids):
                time.sleep(1 - share)
            time.sleep(share)


def process_of(cluster: Any, module: str) -> int:
    """Returns the process of the embedded cluster that runs `module`: a child of this one, which pods are not."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            arguments = child.cmdline()
            if module in arguments and any(str(cluster.folder) in argument for argument in arguments):
                return child.pid
    raise AssertionError(f"{module} does not run")


def test_what_stops_or_starves_together_with_its_observer_is_not_replaced(
    cluster: Any, submit: Callable[..., str], tmp_path: Path
) -> None:
    """The operator judges two jobs at the same time separately, without and with standbys."""
    jobs = []
    for standbys in (0, 1):
        spec = {
            "parameterServers": {"replicas": 2, "standbys": standbys},
            "workers": {"replicas": 2},
            "checkpoint": {"uri": str(tmp_path / f"ckpt-{standbys}"), "everySteps": 10},
        }
        jobs.append(submit(spec, env={"PAUSE": "1", "STEPS": "100000", "GATE": str(tmp_path / "gate")}))

    def status(name: str) -> dict[str, Any]:
        found: dict[str, Any] = cluster.job(name).get("status", {})
        return found

    def trains(name: str, beyond: int) -> Callable[[], bool]:
        """Returns the operator reports later updates, and that all pods are ready."""

        def holds() -> bool:
            found = status(name)
            ready = all(role["ready"] == role["desired"] for role in found.get("roles", {}).values())
            return found.get("step", 0) > beyond and ready

        return holds

    def pods() -> dict[str, str]:
        found = [pod["metadata"] for name in jobs for pod in cluster.pods(name)]
        return {pod["uid"]: pod["name"] for pod in found}

    for name in jobs:
        cluster.wait(f"{name} trains", trains(name, 3), 120)
    before = pods()
    assert len(before) == 4 + 6
    servers = [pid for pod in before.values() if "-ps-" in pod for pid in cluster.processes(pod)]
    workers = [pid for pod in before.values() if "-worker-" in pod for pid in cluster.processes(pod)]
    operator, node = process_of(cluster, "backstay_operator"), process_of(cluster, "backstay_cluster")
    assert servers
    assert workers

    def all_alive(what: str) -> None:
        for name in jobs:
            cluster.wait(f"{name} trains on after: {what}", trains(name, status(name).get("step", 0) + 3), 150)
        assert pods() == before, what + "".join(f"\n{cluster.describe(name)}" for name in jobs)

    with stopped([operator]):
        with stopped(servers):
            time.sleep(STOPPED_SECONDS)
        time.sleep(0.3)
    all_alive("operator and servers stopped, the servers continued first")
    with stopped([*servers, *workers]):
        time.sleep(STOPPED_SECONDS)
    all_alive("servers and workers stopped, the operator not")
    with stopped([node]):
        time.sleep(STOPPED_SECONDS)
    all_alive("API server and kubelet stopped")
    with stopped([node, operator]):
        with stopped([*servers, *workers]):
            time.sleep(STOPPED_SECONDS)
        time.sleep(0.3)
    all_alive("everything stopped")
    starve([operator, *servers, *workers], STARVED_SHARE, STARVED_SECONDS)
    all_alive("operator, servers and workers starved")
    starve(servers, STARVED_SHARE, STARVED_SECONDS)
    all_alive("servers starved")
    for name in jobs:
        roles = status(name)["roles"]
        charged = {(role["restarts"], role["disruptions"]) for role in roles.values()}
        assert charged == {(0, 0)}, cluster.describe(name)
        cluster.delete(name)
