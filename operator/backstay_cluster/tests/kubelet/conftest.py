"""One embedded cluster for all tests here that need one, and a small driver to wait for what should become true."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.cluster import ClusterProcess
from backstay_cluster.tests.limits import slack

DEADLINE = 60.0
_names = itertools.count()


class Driver:
    """Creates pods in the default namespace, waits for them by watch, and removes them."""

    def __init__(self, client: ApiClient, logs_dir: Path) -> None:
        self.client = client
        self.logs_dir = logs_dir
        self.prefix = f"t{os.getpid()}"

    def name(self) -> str:
        return f"{self.prefix}-{next(_names)}"

    def path(self, name: str, kind: str = "pods") -> str:
        return f"/api/v1/namespaces/default/{kind}/{name}"

    async def make(self, kind: str, name: str, **body):
        return await self.client.create(f"/api/v1/namespaces/default/{kind}", {"metadata": {"name": name}, **body})

    async def pod(self, script: str | None = None, *, labels=None, annotations=None, container=None, **spec) -> str:
        """Create a pod of one container that runs a shell script; its name."""
        name = self.name()
        main = {"name": "main", "image": "example.org/shell:1"}
        if script is not None:
            # As Kubernetes documents, a doubled dollar sign is one.
            main["command"] = ["/bin/sh", "-c", script.replace("$$", "$$$$")]
        body = {
            "metadata": {"name": name, "labels": labels or {}, "annotations": annotations or {}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 20,
                "containers": [{**main, **(container or {})}],
                **spec,
            },
        }
        await self.client.create("/api/v1/namespaces/default/pods", body)
        return name

    async def until(self, name: str, holds: Callable[[dict], object], kind: str = "pods") -> dict:
        """Returns the object as soon as `holds` of it is true."""
        params = {"fieldSelector": f"metadata.name={name}"}
        seen = None
        try:
            async with asyncio.timeout(DEADLINE * slack()):
                while True:
                    path = f"/api/v1/namespaces/default/{kind}"
                    found = await self.client.get(path, params)
                    for seen in found["items"]:
                        if holds(seen):
                            return seen
                    since = {**params, "resourceVersion": found["metadata"]["resourceVersion"], "timeoutSeconds": "30"}
                    with contextlib.suppress(ApiRequestError):
                        async with contextlib.aclosing(self.client.watch(path, since)) as events:
                            async for event in events:
                                seen = event["object"]
                                if event["type"] != "BOOKMARK" and event["type"] != "DELETED" and holds(seen):
                                    return seen
        except TimeoutError:
            raise AssertionError(f"{kind} {name} did not become as expected, last seen: {seen}") from None

    async def gone(self, name: str) -> None:
        """Wait until the pod no longer exists."""
        async with asyncio.timeout(DEADLINE * slack()):
            while True:
                try:
                    found = await self.client.get(self.path(name))
                except ApiRequestError as error:
                    if error.code != 404:
                        raise
                    return
                since = {
                    "fieldSelector": f"metadata.name={name}",
                    "resourceVersion": found["metadata"]["resourceVersion"],
                    "timeoutSeconds": "30",
                }
                with contextlib.suppress(ApiRequestError):
                    async with contextlib.aclosing(
                        self.client.watch("/api/v1/namespaces/default/pods", since)
                    ) as events:
                        async for event in events:
                            if event["type"] == "DELETED":
                                break

    async def phase(self, name: str, *phases: str) -> dict:
        return await self.until(name, lambda pod: (pod.get("status") or {}).get("phase") in phases)

    async def ended(self, name: str) -> dict:
        """Returns the terminated state of the pod's only container, with the pod's phase beside it."""
        pod = await self.phase(name, "Succeeded", "Failed")
        return {"phase": pod["status"]["phase"], **pod["status"]["containerStatuses"][0]["state"]["terminated"]}

    async def log(self, name: str, **params: str) -> str:
        """Returns the container's log through the API server."""
        forever = aiohttp.ClientTimeout()
        async with self.client.open("GET", f"{self.path(name)}/log", timeout=forever, params=params) as answer:
            if answer.status != 200:
                raise ApiRequestError.of(answer.status, await answer.json(), "log")
            return (await answer.read()).decode(errors="replace")

    async def events(self, name: str) -> dict[str, str]:
        """Reason -> message of the pod's events."""
        found = await self.client.get(
            "/api/v1/namespaces/default/events", {"fieldSelector": f"involvedObject.name={name}"}
        )
        return {item["reason"]: item["message"] for item in found["items"]}

    async def noted(self, name: str, *reasons: str) -> dict[str, str]:
        """Wait until the pod has events with these reasons; the kubelet writes events in the background."""
        async with asyncio.timeout(DEADLINE * slack()):
            while True:
                found = await self.events(name)
                if set(reasons) <= found.keys():
                    return found
                await asyncio.sleep(0.02)

    async def printed(self, name: str, pattern: str) -> re.Match[str]:
        """Wait until the container's log file matches."""
        file = self.logs_dir / "default" / name / "main.log"
        async with asyncio.timeout(DEADLINE * slack()):
            while True:
                text = file.read_text(errors="replace") if file.exists() else ""
                if found := re.search(pattern, text):
                    return found
                await asyncio.sleep(0.01)

    async def delete(self, name: str, **options) -> None:
        await self.client.delete(self.path(name), {"kind": "DeleteOptions", "apiVersion": "v1", **options})


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    folder = tmp_path_factory.mktemp("cluster")
    with ClusterProcess(folder / "data", log_file=folder / "cluster.log") as running:
        yield running
    assert "Traceback" not in (folder / "cluster.log").read_text()


@pytest.fixture
async def driver(cluster: ClusterProcess) -> AsyncIterator[Driver]:
    client = cluster.client()
    yield Driver(client, cluster.logs_dir)
    await client.close()


def pid_lives(pid: int) -> bool:
    """Returns whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
