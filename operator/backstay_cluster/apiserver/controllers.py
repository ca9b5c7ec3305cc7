"""The parts of a controller manager that the API itself promises. Owner references are followed, a deleted namespace is
emptied, and a definition becomes a resource, which is deleted with its objects.

They follow the changes of the store, and act in the event loop immediately after the request that caused the change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from backstay_cluster.apiserver.definitions import CLEANUP, STORAGE, Definitions
from backstay_cluster.apiserver.objects import Obj, dig
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.rest import FOREGROUND, ORPHAN, Api, DeleteOptions
from backstay_cluster.apiserver.store import Change, Key

log = logging.getLogger(__name__)

Place = tuple[tuple[str, str], Key]  # storage and key
_NAMESPACES: Final = ("", "namespaces")
_REMEMBERED: Final = 65536  # uids of deleted objects


class Controllers:
    """Keeps the promises of the API that need more than one write."""

    def __init__(self, api: Api, definitions: Definitions) -> None:
        self._api = api
        self._definitions = definitions
        self._live: dict[str, Place] = {}  # uid -> its storage and key
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._dependents: dict[str, dict[Place, None]] = {}  # owner's uid -> its dependents; ordered
        self._terminating: set[str] = set()
        self._work: deque[Callable[[], None]] = deque()
        self._scheduled = False
        api.store.observers.append(self._observe)

    # Observing changes

    def _observe(self, storage: tuple[str, str], change: Change) -> None:
        obj = change.after.obj
        data = obj["metadata"]
        place = (storage, change.after.key)
        before = _owners(change.before.obj) if change.before is not None else set()
        after = _owners(obj) if change.type != "DELETED" else set()
        for uid in before - after:
            named = self._dependents.get(uid)
            if named is not None:
                named.pop(place, None)
                if not named:
                    del self._dependents[uid]
        for uid in after - before:
            self._dependents.setdefault(uid, {})[place] = None
        # Work is only queued here. The store calls this while it changes, and must not be changed by it.
        if change.type == "DELETED":
            self._vanished(storage, place, data, before)
        else:
            self._live[data["uid"]] = place
            if after - before:
                self._later(lambda: self._check(place))
            finalizers = data.get("finalizers") or ()
            if data.get("deletionTimestamp"):
                if FOREGROUND in finalizers:
                    self._later(lambda: self._foreground(data["uid"]))
                if ORPHAN in finalizers:
                    self._later(lambda: self._orphan(data["uid"]))
        if storage == _NAMESPACES:
            self._namespace(change)
        elif storage == STORAGE:
            self._definition(change)
        if self._work and not self._scheduled:
            self._schedule()

    def _vanished(self, storage: tuple[str, str], place: Place, data: Obj, owners: set[str]) -> None:
        self._live.pop(data["uid"], None)
        self._gone[data["uid"]] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        for dependent in self._dependents.get(data["uid"], ()):
            self._later(lambda dependent=dependent: self._check(dependent))  # type: ignore[misc]
        for uid in owners:
            self._later(lambda uid=uid: self._foreground(uid))  # type: ignore[misc]
        namespace = place[1][0]
        if namespace in self._terminating:
            self._later(lambda: self._empty(namespace))
        if storage in {r.storage for r in self._api.registry.all() if r.custom}:
            self._later(lambda: self._clean(f"{storage[1]}.{storage[0]}"))

    def _namespace(self, change: Change) -> None:
        name = change.after.key[1]
        if change.type == "DELETED":
            self._terminating.discard(name)
        elif change.after.obj["metadata"].get("deletionTimestamp") and name not in self._terminating:
            self._terminating.add(name)
            self._later(lambda: self._empty(name))

    def _definition(self, change: Change) -> None:
        obj, name = change.after.obj, change.after.key[1]
        if change.type == "DELETED":
            self._definitions.forget(obj)
        elif obj["metadata"].get("deletionTimestamp"):
            self._later(lambda: self._clean(name))
        elif change.before is None or change.before.obj["spec"] != obj["spec"]:
            self._later(lambda: self._definitions.establish(name))

    # Acting on changes

    def _later(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def _schedule(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # before the server runs, the caller calls `drain`
        self._scheduled = True
        loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self.drain()

    def drain(self) -> None:
        """Do all pending work now."""
        while self._work:
            work = self._work.popleft()
            try:
                work()
            except Exception:  # the other work must be done
                log.exception("a controller of the API server failed")

    def _resource(self, storage: tuple[str, str]) -> Resource | None:
        return self._api.registry.storages().get(storage)

    def _find(self, place: Place) -> tuple[Resource, Obj] | None:
        resource = self._resource(place[0])
        stored = None if resource is None else self._api.find(resource, place[1])
        return None if resource is None or stored is None else (resource, stored.obj)

    def _present(self, owner: Obj, namespace: str) -> bool:
        """Returns whether the owner exists, as far as this server can determine."""
        place = self._live.get(owner["uid"])
        if place is not None:
            return place[1][0] in {"", namespace}
        unknown = self._api.registry.by_kind(owner.get("apiVersion", ""), owner.get("kind", "")) is None
        return unknown and owner["uid"] not in self._gone

    def _waits(self, owner: Obj) -> bool:
        """Returns whether the owner waits for its dependents to be deleted."""
        place = self._live.get(owner["uid"])
        found = None if place is None else self._find(place)
        if found is None:
            return False
        data = found[1]["metadata"]
        return bool(data.get("deletionTimestamp")) and FOREGROUND in (data.get("finalizers") or ())

    def _check(self, place: Place) -> None:
        """Delete a dependent without owners; drop references to deleted owners."""
        found = self._find(place)
        if found is None:
            return
        resource, obj = found
        owners = obj["metadata"].get("ownerReferences") or []
        present = [o for o in owners if self._present(o, place[1][0])]
        keep = [o for o in present if not self._waits(o)]
        if not owners or (keep and len(keep) == len(owners)):
            return
        if keep:
            self._set_owners(resource, place[1], keep)
        else:
            self._delete(resource, place[1], obj)

    def _set_owners(self, resource: Resource, key: Key, owners: list[Obj]) -> None:
        def change(obj: Obj) -> None:
            if owners:
                obj["metadata"]["ownerReferences"] = owners
            else:
                obj["metadata"].pop("ownerReferences", None)

        self._api.modify(resource, key, change)

    def _delete(self, resource: Resource, key: Key, obj: Obj) -> None:
        data = obj["metadata"]
        if data.get("deletionTimestamp"):
            return
        policy = (
            "Foreground"
            if self._dependents.get(data["uid"]) and any(map(self._waits, data["ownerReferences"]))
            else "Background"
        )
        self._api.delete(resource, key, DeleteOptions(policy=policy, uid=data["uid"]))

    def _foreground(self, uid: str) -> None:
        place = self._live.get(uid)
        found = None if place is None else self._find(place)
        if found is None or place is None:
            return
        resource, obj = found
        data = obj["metadata"]
        if not data.get("deletionTimestamp") or FOREGROUND not in (data.get("finalizers") or ()):
            return
        for dependent in list(self._dependents.get(uid, ())):
            self._check(dependent)
        if not any(self._blocks(dependent, uid) for dependent in self._dependents.get(uid, ())):
            self._drop_finalizer(resource, place[1], FOREGROUND)

    def _blocks(self, dependent: Place, uid: str) -> bool:
        found = self._find(dependent)
        owners = found[1]["metadata"].get("ownerReferences", ()) if found else ()
        return any(o["uid"] == uid and o.get("blockOwnerDeletion") for o in owners)

    def _orphan(self, uid: str) -> None:
        place = self._live.get(uid)
        found = None if place is None else self._find(place)
        if found is None or place is None:
            return
        for dependent in list(self._dependents.get(uid, ())):
            other = self._find(dependent)
            if other is not None:
                owners = [o for o in other[1]["metadata"]["ownerReferences"] if o["uid"] != uid]
                self._set_owners(other[0], dependent[1], owners)
        self._drop_finalizer(found[0], place[1], ORPHAN)

    def _drop_finalizer(self, resource: Resource, key: Key, finalizer: str) -> None:
        def change(obj: Obj) -> None:
            rest = [f for f in obj["metadata"].get("finalizers", ()) if f != finalizer]
            if rest:
                obj["metadata"]["finalizers"] = rest
            else:
                obj["metadata"].pop("finalizers", None)

        self._api.modify(resource, key, change)

    def _empty(self, namespace: str) -> None:
        """Delete the objects in a namespace that is being deleted, and then the namespace."""
        left = False
        for storage, resource in self._api.registry.storages(namespaced=True).items():
            for stored in list(self._api.store.storage(storage).select(namespace)):
                if not stored.obj["metadata"].get("deletionTimestamp"):
                    self._api.delete(resource, stored.key)
            left = left or namespace in self._api.store.storage(storage).spaces
        if left or namespace not in self._terminating:
            return

        def release(obj: Obj) -> None:
            obj["spec"] = {}

        self._terminating.discard(namespace)
        self._api.modify(self._api.registry.must(*_NAMESPACES), ("", namespace), release)

    def _clean(self, name: str) -> None:
        """Delete the objects of a definition that is being deleted, and then the definition."""
        resource = self._api.registry.must(*STORAGE)
        stored = self._api.find(resource, ("", name))
        if stored is None or not stored.obj["metadata"].get("deletionTimestamp"):
            return
        left = False
        for custom in self._definitions.resources_of(stored.obj)[:1]:
            storage = self._api.store.storage(custom.storage)
            for item in list(storage.select(None)):
                if not dig(item.obj, "metadata", "deletionTimestamp"):
                    self._api.delete(custom, item.key)
            left = storage.count > 0
        if not left:
            self._drop_finalizer(resource, ("", name), CLEANUP)


def _owners(obj: Obj) -> set[str]:
    return {o["uid"] for o in obj["metadata"].get("ownerReferences") or () if o.get("uid")}
