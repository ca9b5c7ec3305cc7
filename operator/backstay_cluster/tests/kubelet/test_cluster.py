"""The cluster as a whole runs beside another one, is killed, orphaned and stopped, and survives an outage of its API
server."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys

import pytest
import yaml

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.cluster import ClusterProcess, EmbeddedCluster
from backstay_cluster.kubelet.kubelet import Kubelet
from backstay_cluster.kubelet.logs import LogOptions
from backstay_cluster.net import claim_block
from backstay_cluster.tests.files import put
from backstay_cluster.tests.limits import LONG

pytestmark = pytest.mark.e2e
FAMILY = "sleep 600 & echo $!; (setsid sh -c 'echo $$$$; exec sleep 600' &) ; echo $$$$; exec sleep 600"


def manifest(name: str, script: str) -> dict:
    container = {"name": "main", "image": "x", "command": ["sh", "-c", script]}
    return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}}


def wait_gone(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], LONG)[0], f"process {pid} is still there"
    finally:
        os.close(fd)


async def pids_of(cluster: ClusterProcess, name: str, script: str = FAMILY) -> list[int]:
    """Run a pod whose script prints three numbers, such as the ids of its processes; the numbers."""
    client = cluster.client()
    try:
        await client.create("/api/v1/namespaces/default/pods", manifest(name, script))
    finally:
        await client.close()
    file = cluster.logs_dir / "default" / name / "main.log"
    async with asyncio.timeout(LONG):
        while True:
            words = file.read_text().split() if file.exists() else []
            if len(words) == 3:
                return [int(word) for word in words]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("problem", [None, "KUBEBUILDER_ASSETS", "another program wrote this file"])
async def test_a_cluster_deletes_nothing_that_it_has_not_made(tmp_path, monkeypatch, problem):
    """The folder may be a project with such folders. A failed start deleted them, too, and the kubeconfig."""
    kept = [tmp_path / name / "mine" for name in ("run", "control-plane", "compiled")]
    for file in kept:
        file.parent.mkdir()
        file.touch()
    config = tmp_path / "own.kubeconfig"
    put(config, "mine")
    taken = problem is not None and "file" in problem
    made = EmbeddedCluster(tmp_path, kubeconfig_path=config if taken else None, kubelet=False)
    if problem is None or taken:
        monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    else:
        monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "none"))
    if problem is None:
        await made.start()
        assert made.kubeconfig.exists()
        await made.stop()
        assert not made.kubeconfig.exists()
    else:
        with pytest.raises(Exception, match=problem):
            await made.start()
    assert all(file.exists() for file in kept)
    assert config.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"run", "control-plane", "compiled", "pods"}


async def test_a_second_cluster_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    async with EmbeddedCluster(tmp_path, kubelet=False) as first:
        (tmp_path / ".compiled").mkdir()
        second = EmbeddedCluster(tmp_path, kubelet=False)
        with pytest.raises(ValueError, match=f"another embedded cluster uses the folder {tmp_path}; choose another"):
            await second.start()
        await second.stop()
        assert (tmp_path / ".compiled").is_dir()
        assert first.url in first.kubeconfig.read_text()
    async with second:  # the first one has ended
        assert second.url in second.kubeconfig.read_text()


async def test_a_cluster_does_not_remove_the_kubeconfig_of_another_one(tmp_path):
    config = tmp_path / "shared.kubeconfig"
    first = await EmbeddedCluster(tmp_path / "a", kubeconfig_path=config, kubelet=False).start()
    try:
        async with EmbeddedCluster(tmp_path / "b", kubeconfig_path=config, kubelet=False) as second:
            await first.stop()
            assert second.url in config.read_text()
        assert not config.exists()
    finally:
        await first.stop()


async def test_two_clusters_at_the_same_time_share_nothing(tmp_path, cluster, driver):
    """It survives two `backstay run` at the same time."""
    with ClusterProcess(tmp_path / "data", log_file=tmp_path / "log") as other:
        client = other.client()
        nodes = [(await c.get("/api/v1/nodes/backstay"))["status"] for c in (client, driver.client)]
        assert nodes[0]["addresses"][0] != nodes[1]["addresses"][0]
        assert other.url != cluster.url
        assert (await client.get("/api/v1/pods"))["items"] == []
        with pytest.raises(ApiRequestError) as refused:
            await ApiClient.get(stranger := ApiClient(other.url, cluster.token, ssl=client._ssl), "/api/v1/pods")
        assert refused.value.code == 401
        await stranger.close()
        await client.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_no_process_is_left_however_the_cluster_ends(tmp_path, number):
    """Neither Ctrl-C nor SIGKILL leaves anything behind."""
    cluster = ClusterProcess(tmp_path / "data", log_file=tmp_path / "log")
    try:
        cluster.start()
        assert cluster.kubeconfig.suffix == ".kubeconfig"
        assert cluster.kubeconfig.stat().st_mode & 0o077 == 0
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        assert config["clusters"][0]["cluster"]["server"] == cluster.url
        pids = await pids_of(cluster, "family")
        os.kill(cluster.pid, number)
        for pid in [cluster.pid, *pids]:
            await asyncio.to_thread(wait_gone, pid)
    finally:
        cluster.stop()
    if number != signal.SIGKILL:
        assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["pods"]
    assert (tmp_path / "data" / "pods" / "default" / "family" / "main.log").exists()


async def test_a_handler_of_sigterm_has_five_seconds_at_the_end_of_the_cluster(tmp_path):
    """The documentation promises them."""
    clean_up = "trap 'sleep 0.5; echo cleaned; exit' TERM; echo 1 2 3; while :; do sleep 0.05; done"
    with ClusterProcess(tmp_path / "data", log_file=tmp_path / "log") as cluster:
        await pids_of(cluster, "slow", clean_up)
        log = cluster.logs_dir / "default" / "slow" / "main.log"
    assert log.read_text() == "1 2 3\ncleaned\n"


PARENT = """
import sys, time
from backstay_cluster.cluster import ClusterProcess
cluster = ClusterProcess(sys.argv[1], log_file=sys.argv[2]).start()
print(cluster.pid, flush=True)
time.sleep(600)
"""


def test_a_cluster_ends_with_its_parent(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "data"), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_gone(pid)
    assert not (tmp_path / "data" / "cluster.kubeconfig").exists()


def test_an_invalid_command_line_is_refused_with_the_reason(tmp_path):
    command = [sys.executable, "-m", "backstay_cluster", "--data-dir", str(tmp_path), "--kubeconfig", "x.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 1
    assert re.search(r"must end in \.kubeconfig", ended.stderr)
    assert "Traceback" not in ended.stderr
    environ = {**os.environ, "KUBEBUILDER_ASSETS": str(tmp_path)}
    ended = subprocess.run(command[:-2], capture_output=True, text=True, timeout=LONG, env=environ)
    assert ended.returncode == 1
    assert "etcd and kube-apiserver must be executable files there" in ended.stderr


class Gate:
    """A proxy between kubelet and API server that can be closed, as in an outage of the API server."""

    def __init__(self, target: str, ssl) -> None:
        self.target = target.removeprefix("https://").split(":")
        self.ssl = ssl
        self.open = True
        self.writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"https://localhost:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader, writer) -> None:
        if not self.open:
            writer.transport.abort()
            return
        back_reader, back = await asyncio.open_connection(*self.target)
        self.writers |= {writer, back}

        async def copy(source, sink) -> None:
            try:
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            except ConnectionError:
                pass
            sink.close()

        await asyncio.gather(copy(reader, back), copy(back_reader, writer))
        self.writers -= {writer, back}

    def close_gate(self) -> None:
        self.open = False
        for writer in self.writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self.close_gate()
        self.server.close()
        await asyncio.sleep(0)


async def test_an_api_server_that_is_away_costs_no_pod_and_no_status(tmp_path):
    """O5: pods run on, and what happened meanwhile is in the status once it is back."""
    async with EmbeddedCluster(tmp_path / "data", kubelet=False) as cluster:
        gate = Gate(cluster.url, None)
        block = claim_block()
        through = ApiClient(await gate.start(), cluster.token, ssl=cluster.client()._ssl)
        kubelet = Kubelet(through, tmp_path / "node", block.pod_cidr)
        direct = cluster.client()
        pods = "/api/v1/namespaces/default/pods"
        try:
            await kubelet.start()
            for name, script in (
                ("lives", "exec sleep 600"),
                ("ends", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 9"),
            ):
                await direct.create(pods, manifest(name, script))

            async def phase(name: str, wanted: str) -> dict:
                async with asyncio.timeout(LONG):
                    while True:
                        pod = await direct.get(f"{pods}/{name}")
                        if pod["status"].get("phase") == wanted:
                            return pod
                        await asyncio.sleep(0.02)

            before = await phase("lives", "Running")
            await phase("ends", "Running")
            gate.close_gate()
            (tmp_path / "go").touch()
            log = kubelet.node.sinks["default", "ends", "main"]
            async with asyncio.timeout(LONG):
                async for _ in log.read(LogOptions(follow=True)):
                    pass
            assert (await direct.get(f"{pods}/ends"))["status"]["phase"] == "Running"
            gate.open = True
            after = await phase("ends", "Failed")
            assert after["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 9
            assert (await direct.get(f"{pods}/lives"))["status"]["containerStatuses"] == before["status"][
                "containerStatuses"
            ]
        finally:
            await kubelet.stop(0)
            await through.close()
            await direct.close()
            await gate.stop()
            block.close()


async def test_what_one_pod_compiled_its_replacement_loads(cluster, driver):
    """A shared place for JAX's persistent compilation cache, which a job may turn off.

    The names of its entries do not depend on the place.
    """
    said = "echo [$JAX_COMPILATION_CACHE_DIR] $JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
    first, second = await driver.pod(said), await driver.pod(said)
    off = await driver.pod(said, container={"env": [{"name": "JAX_COMPILATION_CACHE_DIR", "value": ""}]})
    for name in (first, second, off):
        await driver.phase(name, "Succeeded")
    logs = [await driver.log(name) for name in (first, second, off)]
    folder = cluster.logs_dir.parent / ".compiled"
    assert [log.strip() for log in logs] == [f"[{folder}] none", f"[{folder}] none", "[] none"]
