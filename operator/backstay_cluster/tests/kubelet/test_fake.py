"""The kubelet without processes, and garbage collection over HTTP; both on an API server without a node."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from backstay_cluster.client import ApiRequestError
from backstay_cluster.cluster import EmbeddedCluster
from backstay_cluster.gc import GarbageCollector
from backstay_cluster.kubelet.fake import FakeKubelet
from backstay_cluster.tests.limits import LONG

PODS = "/api/v1/namespaces/default/pods"


def manifest(name: str) -> dict:
    return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}


@pytest.mark.e2e
async def test_fake_pods_run_fail_by_script_and_are_deleted(tmp_path):
    """O4: every cause of a death can be played."""
    async with EmbeddedCluster(tmp_path / "data", kubelet=False) as cluster:
        client = cluster.client()
        fake = FakeKubelet(client)
        changed = asyncio.Event()
        inner = fake._informer._on_change
        fake._informer._on_change = lambda *args: (inner(*args), changed.set())
        await fake.start()

        async def until(holds) -> None:
            async with asyncio.timeout(LONG):
                while not holds():
                    await changed.wait()
                    changed.clear()

        def status(name: str) -> dict:
            return fake.pods["default", name].get("status") or {}

        try:
            names = [f"p{i}" for i in range(20)]
            await asyncio.gather(*(client.create(PODS, manifest(name)) for name in names))
            await until(lambda: len(fake.pods) == 20 and all(status(n).get("phase") == "Running" for n in names))
            assert len({status(name)["podIP"] for name in names}) == 20
            disruption = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            fake.kill("default", "p0", exit_code=137, reason="OOMKilled", condition=disruption)
            fake.kill("default", "p1", exit_code=0, reason="Completed")
            await until(lambda: status("p0")["phase"] == "Failed" and status("p1")["phase"] == "Succeeded")
            assert status("p0")["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"
            assert {c["type"]: c["status"] for c in status("p0")["conditions"]}["DisruptionTarget"] == "True"
            with pytest.raises(KeyError):
                fake.kill("default", "none")
            await asyncio.gather(*(client.delete(f"{PODS}/{name}") for name in names))
            await until(lambda: not fake.pods)
        finally:
            await fake.stop()
            await client.close()


class Api:
    """An API of one kind, `things`, without garbage collection."""

    def __init__(self) -> None:
        self.things: dict[str, dict] = {}
        self.news: asyncio.Queue[dict] = asyncio.Queue()
        self.version = 0

    def put(self, name: str, *owners: tuple[str, str], **meta) -> None:
        refs = [
            {"apiVersion": "v1", "kind": "Thing", "name": n, "uid": u, "blockOwnerDeletion": True} for n, u in owners
        ]
        self.version += 1
        body = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.things[name] = {"metadata": {**body, "ownerReferences": refs, **meta}}
        self.news.put_nowait({"type": "MODIFIED", "object": self.things[name]})

    def drop(self, name: str) -> None:
        if (thing := self.things.pop(name, None)) is not None:
            self.news.put_nowait({"type": "DELETED", "object": thing})

    async def get(self, path: str, _params=None) -> dict:
        if path == "/apis":
            return {"groups": []}
        if path == "/api/v1":
            thing = {"name": "things", "kind": "Thing", "namespaced": True, "verbs": ["list", "watch", "delete"]}
            return {"resources": [thing, {**thing, "name": "things/status"}]}
        if path == "/api/v1/things":
            return {"items": list(self.things.values()), "metadata": {"resourceVersion": str(self.version)}}
        name = path.rpartition("/")[2]
        if name not in self.things:
            raise ApiRequestError(404, "NotFound", name)
        return self.things[name]

    async def watch(self, _path: str, _params):
        while True:
            yield await self.news.get()

    async def delete(self, path: str, body: dict) -> dict:
        name = path.removeprefix("/api/v1/namespaces/ns/things/")
        assert body["preconditions"]["uid"] == self.things[name]["metadata"]["uid"]
        self.drop(name)
        return {}

    async def request(self, _method: str, path: str, *, body, content_type: str) -> dict:
        assert content_type == "application/json-patch+json"
        assert body[0] == {"op": "test", "path": "/metadata/finalizers/0", "value": "foregroundDeletion"}
        self.drop(path.rpartition("/")[2])
        return {}


@contextlib.asynccontextmanager
async def collected(api: Api):
    """Collect garbage for a while; `settle` returns when nothing is left to do."""
    task = asyncio.create_task(GarbageCollector(api, sleep=lambda _: asyncio.Event().wait()).run())

    async def settle() -> set[str]:
        for _ in range(200):
            await asyncio.sleep(0)
        return set(api.things)

    yield settle
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_lost_its_last_owner_is_deleted_down_the_chain():
    api = Api()
    api.put("owner")
    api.put("other")
    api.put("child", ("owner", "uid-owner"))
    api.put("grandchild", ("child", "uid-child"))
    api.put("shared", ("owner", "uid-owner"), ("other", "uid-other"))
    api.put("impostor", ("other", "uid-of-an-older-other"))
    api.put("free")
    async with collected(api) as settle:
        assert await settle() == {"owner", "other", "child", "grandchild", "shared", "free"}
        api.drop("owner")
        assert await settle() == {"other", "shared", "free"}


async def test_foreground_deletion_waits_for_dependents():
    api = Api()
    api.put("owner")
    api.put("child", ("owner", "uid-owner"))
    async with collected(api) as settle:
        assert await settle() == {"owner", "child"}
        api.put("owner", deletionTimestamp="now", finalizers=["foregroundDeletion"])
        assert await settle() == set()
