"""Creates, gets, lists, replaces, patches and deletes objects, without HTTP. The operations follow Kubernetes'
rules: versions, generations, finalizers, graceful deletion and admission.

They are synchronous: each is one atomic step of the event loop, so the server needs no lock and has no race.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from backstay_cluster.apiserver import metadata
from backstay_cluster.apiserver.errors import (
    ApiError,
    already_exists,
    bad_request,
    conflict,
    expired,
    forbidden,
    invalid,
    invalid_value,
    not_found,
)
from backstay_cluster.apiserver.objects import Obj, copy, meta, new_uid, now
from backstay_cluster.apiserver.patch import same
from backstay_cluster.apiserver.resources import Registry, Resource
from backstay_cluster.apiserver.selectors import Matcher
from backstay_cluster.apiserver.store import Key, Store, Stored
from backstay_cluster.apiserver.strategy import Strategy

_SERVER_SET = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")
FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


@dataclass(frozen=True)
class DeleteOptions:
    """How to delete (metav1.DeleteOptions)."""

    grace: int | None = None
    policy: str | None = None  # Background, Foreground, Orphan
    uid: str | None = None
    version: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Page:
    """One answer to a list, with the objects, their version, and the continue token."""

    items: list[Stored]
    version: int
    token: str = ""
    remaining: int | None = None


class Api:
    """The state of one API server and the operations on it."""

    def __init__(self, *, history: int = 8192) -> None:
        self.store = Store(history=history)
        self.registry = Registry()
        self._strategies: dict[tuple[str, str], Strategy] = {}
        self._factories: dict[tuple[str, str], Callable[[Resource], Strategy]] = {}
        self._pages: OrderedDict[str, tuple[int, list[Stored]]] = OrderedDict()
        self._page_count = 0

    # Strategies

    def use(self, storage: tuple[str, str], factory: Callable[[Resource], Strategy]) -> None:
        """Set the rules of a kind, by its storage."""
        self._factories[storage] = factory
        self._strategies.pop(storage, None)

    def strategy(self, resource: Resource) -> Strategy:
        """Returns the rules of the resource's kind."""
        found = self._strategies.get(resource.storage)
        if found is None:
            found = self._factories.get(resource.storage, Strategy)(resource)
            self._strategies[resource.storage] = found
        return found

    # Reading

    def find(self, resource: Resource, key: Key) -> Stored | None:
        """Returns the object, or None."""
        return self.store.storage(resource.storage).get(key)

    def get(self, resource: Resource, key: Key) -> Stored:
        """Returns the object.

        Raises:
            ApiError: 404.
        """
        found = self.find(resource, key)
        if found is None:
            raise not_found(resource.group, resource.plural, key[1])
        return found

    def select(
        self,
        resource: Resource,
        namespace: str | None,
        matches: Matcher | None = None,
        *,
        limit: int = 0,
        token: str = "",
        selector: str = "",
    ) -> Page:
        """Returns the selected objects in order of namespace and name, at most `limit` of them.

        A continued list has the version of its first page: the rest of it is kept in the meantime.

        Raises:
            ApiError: 410 when the rest is no longer kept.
        """
        if token:
            version, rest = self._resume(token)
        else:
            version = self.store.version
            storage = self.store.storage(resource.storage)
            rest = [s for s in storage.select(namespace) if matches is None or matches(s.obj)]
        if not limit or len(rest) <= limit:
            return Page(rest, version)
        self._page_count += 1
        token = f"{self.store.version}.{self._page_count}"
        self._pages[token] = (version, rest[limit:])
        while len(self._pages) > 64:
            self._pages.popitem(last=False)
        # The real server returns the number of remaining objects only if no selector makes it read them all.
        return Page(rest[:limit], version, token, None if selector else len(rest) - limit)

    def _resume(self, token: str) -> tuple[int, list[Stored]]:
        try:
            return self._pages[token]
        except KeyError:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result. You must start a new "
                "list without the continue parameter, or use the continue token in this response to retrieve the "
                "remainder of the results."
            ) from None

    # Creating

    def create(self, resource: Resource, namespace: str, obj: Obj, *, dry_run: bool = False) -> Stored:
        """Store a new object.

        Raises:
            ApiError: 400, 403, 404 (the namespace), 409 or 422.
        """
        strategy = self.strategy(resource)
        data = obj.setdefault("metadata", {})
        self._set_namespace(resource, namespace, data)
        if data.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        for name in (*_SERVER_SET, "resourceVersion", "managedFields"):
            data.pop(name, None)
        if resource.status and not getattr(strategy, "keeps_status_on_create", False):
            obj.pop("status", None)
        generated = not data.get("name") and bool(data.get("generateName"))
        if generated:
            data["name"] = metadata.generate_name(data["generateName"])
        data["uid"] = new_uid()
        data["creationTimestamp"] = now()
        if resource.generation:
            data["generation"] = 1
        strategy.default(obj)
        if resource.namespaced and data.get("name"):
            self._admit_into(resource, namespace, data["name"])
        causes = metadata.check(data, strategy.name_rule, custom=resource.custom)
        if not causes:
            strategy.before_create(obj, dry_run=dry_run)
        causes += strategy.validate(obj, None)
        if causes:
            kind = obj.pop("__kind__", resource.kind)
            raise invalid(resource.group, kind, data.get("name", ""), causes)
        key = (data.get("namespace", ""), data["name"])
        while self.find(resource, key) is not None:
            if not generated:
                raise already_exists(resource.group, resource.plural, data["name"])
            data["name"] = metadata.generate_name(data["generateName"])
            key = (key[0], data["name"])
        if dry_run:
            return Stored(obj, 0)
        stored = self.store.put(resource.storage, obj)
        strategy.created(stored.obj)
        return stored

    def _set_namespace(self, resource: Resource, namespace: str, data: Obj) -> None:
        own = data.get("namespace") or ""
        if not resource.namespaced:
            data.pop("namespace", None)
            return
        if own and own != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        data["namespace"] = namespace

    def _admit_into(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.find(self.registry.must("", "namespaces"), ("", namespace))
        if found is None:
            raise not_found("", "namespaces", namespace)
        if meta(found.obj).get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            error = forbidden(resource.group, resource.plural, name, text)
            details = cast("Obj", error.details)
            details["causes"] = [
                {
                    "reason": "NamespaceTerminating",
                    "message": f"namespace {namespace} is being terminated",
                    "field": "metadata.namespace",
                }
            ]
            raise error

    # Updating

    def update(
        self,
        resource: Resource,
        key: Key,
        obj: Obj,
        *,
        part: str = "",
        dry_run: bool = False,
    ) -> Stored:
        """Replace an object, or with `part="status"` only its status.

        Returns:
            The stored object; the old one if nothing changed.

        Raises:
            ApiError: 400, 404, 409 or 422.
        """
        strategy = self.strategy(resource)
        data = obj.setdefault("metadata", {})
        if not data.get("name"):
            raise (
                bad_request("name must be provided")
                if key[1] == ""
                else invalid(
                    resource.group,
                    resource.kind,
                    "",
                    [invalid_value("metadata.name", "", "name is required on updates")],
                )
            )
        if data["name"] != key[1]:
            raise bad_request(f"the name of the object ({data['name']}) does not match the name on the URL ({key[1]})")
        stored = self.find(resource, key)
        if stored is None and strategy.create_on_update and not part:
            return self.create(resource, key[0], obj, dry_run=dry_run)
        stored = self.get(resource, key)
        self._set_namespace(resource, key[0], data)
        old = stored.obj
        self._check_version(resource, key[1], data, old)
        if not data.get("resourceVersion") and not strategy.unconditional_update:
            text = "must be specified for an update"
            raise invalid(resource.group, resource.kind, key[1], [invalid_value("metadata.resourceVersion", 0, text)])
        self._keep(resource, strategy, obj, old, part)
        strategy.default(obj)
        if not part:
            strategy.before_update(obj, old)
        if self._unchanged(obj, old):
            return stored
        causes = metadata.check(obj["metadata"], strategy.name_rule, custom=resource.custom)
        causes += metadata.check_new_finalizers(obj["metadata"], old["metadata"])
        causes += strategy.validate_status(obj, old) if part == "status" else strategy.validate(obj, old)
        if causes:
            raise invalid(resource.group, obj.pop("__kind__", resource.kind), key[1], causes)
        obj.pop("__kind__", None)
        if resource.generation and part != "status" and self._content(resource, obj) != self._content(resource, old):
            obj["metadata"]["generation"] = int(meta(old).get("generation", 0)) + 1
        if dry_run:
            return Stored(obj, stored.version)
        fresh = obj["metadata"]
        # The update that removes the last finalizer is what deletes an object that was marked.
        if fresh.get("deletionTimestamp") and not fresh.get("finalizers"):
            spec = obj.get("spec") or {}
            if not fresh.get("deletionGracePeriodSeconds") and not (
                resource.storage == ("", "namespaces") and spec.get("finalizers")
            ):
                self.remove(resource, key)
                return Stored(obj, stored.version)
        return self.store.put(resource.storage, obj)

    def _check_version(self, resource: Resource, name: str, data: Obj, old: Obj) -> None:
        if data.get("uid") and data["uid"] != old["metadata"]["uid"]:
            text = f"Precondition failed: UID in precondition: {data['uid']}, UID in object meta: {meta(old)['uid']}"
            raise conflict(resource.group, resource.plural, name, text)
        version = data.get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise conflict(resource.group, resource.plural, name)

    def _keep(self, resource: Resource, strategy: Strategy, obj: Obj, old: Obj, part: str) -> None:
        before = old["metadata"]
        if part == "status":
            status = obj.get("status")
            own = obj["metadata"]
            for name in [n for n in obj if n not in {"metadata", "status"}]:
                del obj[name]
            obj.update({k: v for k, v in old.items() if k not in {"metadata", "status"}})
            if strategy.status_keeps_metadata:
                obj["metadata"] = dict(before)
            else:
                own["ownerReferences"] = before.get("ownerReferences")
                obj["metadata"] = {k: v for k, v in own.items() if v is not None}
            if status is None:
                obj.pop("status", None)
        elif resource.status:
            obj.pop("status", None)
            if "status" in old:
                obj["status"] = old["status"]
        data = obj["metadata"]
        data.pop("managedFields", None)
        for name in _SERVER_SET:
            data.pop(name, None)
            if name in before:
                data[name] = before[name]
        data["resourceVersion"] = before["resourceVersion"]

    @staticmethod
    def _unchanged(obj: Obj, old: Obj) -> bool:
        return obj == old and same(obj, old)  # the first comparison is fast, but accepts 1 for true

    @staticmethod
    def _content(resource: Resource, obj: Obj) -> Obj:
        if resource.custom or not resource.type_name:
            return {k: v for k, v in obj.items() if k not in {"metadata", "status"}}
        return {"spec": obj.get("spec")}

    def modify(self, resource: Resource, key: Key, change: Callable[[Obj], None]) -> Stored | None:
        """Change an object from inside the server (controllers). Returns None if it does not exist then."""
        stored = self.find(resource, key)
        if stored is None:
            return None
        obj = cast("Obj", copy(stored.obj))
        change(obj)
        if obj == stored.obj:
            return stored
        if obj["metadata"].get("deletionTimestamp") and not obj["metadata"].get("finalizers"):
            spec: Any = obj.get("spec") or {}
            held = resource.storage == ("", "namespaces") and spec.get("finalizers")
            if not obj["metadata"].get("deletionGracePeriodSeconds") and not held:
                self.remove(resource, key)
                return None
        return self.store.put(resource.storage, obj)

    # Deleting

    def remove(self, resource: Resource, key: Key) -> Stored:
        """Remove an object from the store, independent of its finalizers."""
        gone = self.store.remove(resource.storage, key)
        self.strategy(resource).deleted(gone.obj)
        return gone

    def delete(self, resource: Resource, key: Key, options: DeleteOptions | None = None) -> tuple[Stored, bool]:
        """Delete an object; if it has a grace period or a finalizer, mark it instead.

        Returns:
            Its last version, and whether it was removed.

        Raises:
            ApiError: 404, or 409 when a precondition fails.
        """
        options = options or DeleteOptions()
        strategy = self.strategy(resource)
        stored = self.get(resource, key)
        data = stored.obj["metadata"]
        self._check_preconditions(resource, key[1], data, options)
        base = stored.obj if data.get("deletionTimestamp") else strategy.before_delete(stored.obj)
        data, fresh = stored.obj["metadata"], dict(base["metadata"])
        wanted = self._policy_finalizers(fresh.get("finalizers") or [], options.policy)
        if wanted:
            fresh["finalizers"] = wanted
        else:
            fresh.pop("finalizers", None)
        held = bool(wanted) or self._held(resource, base)
        grace = strategy.grace_period(stored.obj, options.grace)
        # A second delete may only shorten the grace period, as with a real API server.
        if data.get("deletionTimestamp"):
            current = data.get("deletionGracePeriodSeconds") or 0
            if current and (options.grace is None or grace is None or grace >= current):
                if fresh != data and not options.dry_run:
                    stored = self.store.put(resource.storage, {**base, "metadata": fresh})
                return stored, False
            if current and grace is not None:
                fresh["deletionGracePeriodSeconds"] = grace
                fresh["deletionTimestamp"] = _moved(data["deletionTimestamp"], grace - current)
        elif grace is not None or held:
            fresh["deletionTimestamp"] = _later(grace or 0)
            if not strategy.plain_mark:
                fresh["deletionGracePeriodSeconds"] = grace or 0
                if fresh.get("generation"):
                    fresh["generation"] += 1
        if options.dry_run:
            return Stored({**base, "metadata": fresh}, stored.version), not held
        if fresh != data:
            stored = self.store.put(resource.storage, {**base, "metadata": fresh})
        if held or fresh.get("deletionGracePeriodSeconds"):
            return stored, False
        self.remove(resource, key)
        return stored, True

    def _held(self, resource: Resource, obj: Obj) -> bool:
        spec = obj.get("spec") or {}
        return resource.storage == ("", "namespaces") and bool(spec.get("finalizers"))

    @staticmethod
    def _policy_finalizers(present: list[str], policy: str | None) -> list[str]:
        if policy is None:
            return present
        kept = [f for f in present if f not in {FOREGROUND, ORPHAN}]
        if policy == "Foreground":
            kept.append(FOREGROUND)
        elif policy == "Orphan":
            kept.append(ORPHAN)
        return kept

    @staticmethod
    def _check_preconditions(resource: Resource, name: str, data: Obj, options: DeleteOptions) -> None:
        def refuse(what: str, requested: str, found: str) -> ApiError:
            text = (
                f"the {what} in the precondition ({requested}) does not match the {what} in record ({found}). "
                "The object might have been "
            )
            text += "deleted and then recreated" if what == "UID" else "modified"
            # The real server names the kind here, not the resource.
            return conflict(resource.group, resource.kind, name, text)

        if options.uid and options.uid != data["uid"]:
            raise refuse("UID", options.uid, data["uid"])
        if options.version and options.version != data["resourceVersion"]:
            raise refuse("ResourceVersion", options.version, data["resourceVersion"])


def _later(seconds: int) -> str:
    return _moved(now(), seconds)


def _moved(stamp: str, seconds: int) -> str:
    when = datetime.datetime.fromisoformat(stamp) + datetime.timedelta(seconds=seconds)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
