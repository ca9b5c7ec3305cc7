"""Owner-reference garbage collection over HTTP, for a real kube-apiserver that runs without its controller manager.

The small API server does this itself. A dependent is deleted when all its owners (by uid) are deleted. An object that
is being deleted with `foregroundDeletion` is released once it has no dependents left. The collector follows all kinds
that can be listed, watched and deleted, and those of custom resources when they appear.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from backstay_cluster.client import JSON_PATCH, ApiClient, ApiRequestError
from backstay_cluster.kubelet.informer import Informer
from backstay_cluster.kubelet.objects import Key, Object

logger = logging.getLogger(__name__)
DISCOVER_SECONDS = 2.0
RETRY_SECONDS = 0.5
# These are numerous, own nothing and have no owner.
IGNORED = {("", "events"), ("events.k8s.io", "events"), ("", "bindings")}


class GarbageCollector:
    """Deletes objects whose owners were deleted.

    Args:
        client: the API server.
        sleep: waits for a number of seconds.
    """

    def __init__(self, client: ApiClient, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._client = client
        self._sleep = sleep
        self._informers: dict[str, Informer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._uids: dict[str, tuple[str, Key]] = {}
        self._dependents: dict[str, set[str]] = {}  # uid of the owner -> uids
        self._objects: dict[str, Object] = {}
        self._todo: asyncio.Queue[str] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Collect until cancelled."""
        self._workers = [asyncio.create_task(self._work())]
        try:
            while True:
                try:
                    await self._discover()
                except ApiRequestError as error:
                    logger.debug("discovery: %s", error)
                await self._sleep(DISCOVER_SECONDS)
        finally:
            for task in [*self._workers, *self._tasks.values()]:
                task.cancel()
            await asyncio.gather(*self._workers, *self._tasks.values(), return_exceptions=True)

    async def _discover(self) -> None:
        paths = {"/api/v1": ""}
        groups = await self._client.get("/apis")
        for group in groups.get("groups") or []:
            paths[f"/apis/{group['preferredVersion']['groupVersion']}"] = group["name"]
        wanted = {}
        for base, group_name in paths.items():
            try:
                served = await self._client.get(base)
            except ApiRequestError:
                continue  # a group that is being removed or added
            for resource in served.get("resources") or []:
                verbs = set(resource.get("verbs") or [])
                known = {"list", "watch", "delete"} <= verbs and "/" not in resource["name"]
                if known and (group_name, resource["name"]) not in IGNORED:
                    wanted[f"{base}/{resource['name']}"] = resource
        for path in wanted.keys() - self._tasks.keys():
            namespaced = bool(wanted[path].get("namespaced"))
            informer = Informer(self._client, path, self._changed(path, namespaced=namespaced), sleep=self._sleep)
            self._informers[path] = informer
            self._tasks[path] = asyncio.create_task(informer.run())
        for path in self._tasks.keys() - wanted.keys():
            self._tasks.pop(path).cancel()
            informer = self._informers.pop(path)
            forget = self._changed(path, namespaced=True)
            for key, obj in list(informer.objects.items()):
                forget(key, obj, None)

    def _changed(self, path: str, *, namespaced: bool) -> Callable[[Key, Object | None, Object | None], None]:
        base, _, plural = path.rpartition("/")

        def changed(key: Key, old: Object | None, new: Object | None) -> None:
            seen = new or old
            if seen is None:
                return
            uid = seen["metadata"]["uid"]
            if old is not None:
                for owner in old["metadata"].get("ownerReferences") or []:
                    self._dependents.get(owner["uid"], set()).discard(uid)
            if new is None:
                self._uids.pop(uid, None)
                self._objects.pop(uid, None)
                for owner in (old or {}).get("metadata", {}).get("ownerReferences") or []:
                    self._todo.put_nowait(owner["uid"])  # it may wait for the deletion of this one
                for dependent in self._dependents.pop(uid, set()):
                    self._todo.put_nowait(dependent)
                return
            space = f"/namespaces/{key[0]}" if namespaced else ""
            self._uids[uid] = (f"{base}{space}/{plural}/{key[1]}", key)
            self._objects[uid] = new
            owners = new["metadata"].get("ownerReferences") or []
            for owner in (old or {}).get("metadata", {}).get("ownerReferences") or []:
                if owner["uid"] not in {one["uid"] for one in owners}:
                    self._todo.put_nowait(owner["uid"])  # it may have waited for this one
            for owner in owners:
                self._dependents.setdefault(owner["uid"], set()).add(uid)
            if owners or "foregroundDeletion" in (new["metadata"].get("finalizers") or []):
                self._todo.put_nowait(uid)

        return changed

    async def _work(self) -> None:
        while True:
            uid = await self._todo.get()
            try:
                await self._look_at(uid)
            except ApiRequestError as error:
                if error.code not in (404, 409):
                    logger.debug("garbage collection: %s", error)
                    await self._sleep(RETRY_SECONDS)
                    self._todo.put_nowait(uid)

    async def _look_at(self, uid: str) -> None:
        obj = self._objects.get(uid)
        if obj is None:
            return
        meta, (path, key) = obj["metadata"], self._uids[uid]
        if meta.get("deletionTimestamp"):
            if "foregroundDeletion" in (meta.get("finalizers") or []):
                await self._foreground(uid, path, obj)
            return
        owners = meta.get("ownerReferences") or []
        if owners and not any([await self._lives(owner, key[0]) for owner in owners]):
            await self._client.delete(
                path,
                {
                    "apiVersion": "v1",
                    "kind": "DeleteOptions",
                    "preconditions": {"uid": uid},
                    "propagationPolicy": "Background",
                },
            )

    async def _foreground(self, uid: str, path: str, obj: Object) -> None:
        blocking = 0
        for dependent in list(self._dependents.get(uid, ())):
            other = self._objects.get(dependent)
            if other is None:
                continue
            owners = other["metadata"].get("ownerReferences") or []
            blocking += any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in owners)
            if other["metadata"].get("deletionTimestamp"):
                continue
            others = [owner for owner in owners if owner["uid"] != uid]
            if await self._any_stays(others, self._uids[dependent][1][0]):
                patch = [
                    {"op": "test", "path": "/metadata/uid", "value": dependent},
                    {"op": "test", "path": "/metadata/ownerReferences", "value": owners},
                    {"op": "replace", "path": "/metadata/ownerReferences", "value": others},
                ]
                await self._client.request("PATCH", self._uids[dependent][0], body=patch, content_type=JSON_PATCH)
            else:
                await self._client.delete(
                    self._uids[dependent][0],
                    {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": dependent}},
                )
        if not blocking:
            finalizers = obj["metadata"]["finalizers"]
            index = finalizers.index("foregroundDeletion")
            patch = [
                {"op": "test", "path": f"/metadata/finalizers/{index}", "value": "foregroundDeletion"},
                {"op": "remove", "path": f"/metadata/finalizers/{index}"},
            ]
            await self._client.request("PATCH", path, body=patch, content_type=JSON_PATCH)

    async def _any_stays(self, owners: Sequence[Object], namespace: str) -> bool:
        """Returns whether one of these owners exists, and does not wait for its dependents to be deleted."""
        for owner in owners:
            known = (self._objects.get(owner["uid"]) or {}).get("metadata") or {}
            waits = known.get("deletionTimestamp") and "foregroundDeletion" in (known.get("finalizers") or ())
            if not waits and await self._lives(owner, namespace):
                return True
        return False

    async def _lives(self, owner: Object, namespace: str) -> bool:
        """Returns whether an owner exists. The local copies may be late, so the API server is requested for unknown
        owners."""
        if owner["uid"] in self._uids:
            return True
        group, _, version = owner["apiVersion"].rpartition("/")
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        plural = await self._plural(base, owner["kind"])
        if plural is None:
            return False
        name, namespaced = plural
        space = f"/namespaces/{namespace}" if namespaced else ""
        try:
            found = await self._client.get(f"{base}{space}/{name}/{owner['name']}")
        except ApiRequestError as error:
            if error.code == 404:
                return False
            raise
        return bool(found["metadata"]["uid"] == owner["uid"])

    async def _plural(self, base: str, kind: str) -> tuple[str, bool] | None:
        try:
            served = await self._client.get(base)
        except ApiRequestError as error:
            if error.code == 404:
                return None
            raise
        for resource in served.get("resources") or []:
            if resource["kind"] == kind and "/" not in resource["name"]:
                return resource["name"], bool(resource["namespaced"])
        return None
