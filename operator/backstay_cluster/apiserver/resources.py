"""Holds the built-in resources in one table, and the custom ones that CRDs add.

Routing, discovery, OpenAPI and the store share the registry; no other module names resources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

VERBS: Final = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Resource:
    """One resource in one version. The versions of a custom resource have the same `storage`."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    status: bool = False
    scale: bool = False
    subresources: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = ()  # name, group, version, kind, verbs
    type_name: str = ""  # in builtin types; empty for a custom resource
    list_kind: str = ""
    custom: bool = False
    generation: bool = False  # the server counts changes of the spec

    @property
    def storage(self) -> tuple[str, str]:
        """Where the objects of all versions are."""
        return self.group, self.plural

    @property
    def group_version(self) -> str:
        """`v1` or `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def base_path(self) -> str:
        """`/api/v1` or `/apis/group/version`."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


def _r(
    group: str,
    version: str,
    plural: str,
    kind: str,
    short: str = "",
    *,
    cluster: bool = False,
    cat: str = "",
    status: bool = False,
    subs: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (),
    type_name: str = "",
    generation: bool = False,
) -> Resource:
    return Resource(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        namespaced=not cluster,
        singular=kind.lower(),
        short_names=tuple(short.split()),
        categories=tuple(cat.split()),
        status=status,
        subresources=subs,
        type_name=type_name or f"V{version[1:]}{kind}",
        list_kind=kind + "List",
        generation=generation,
    )


_POD_SUBRESOURCES: Final = (
    ("binding", "", "v1", "Binding", ("create",)),
    ("eviction", "policy", "v1", "Eviction", ("create",)),
    ("log", "", "v1", "Pod", ("get",)),
)

BUILTIN: Final[tuple[Resource, ...]] = (
    _r("", "v1", "configmaps", "ConfigMap", "cm"),
    _r("", "v1", "events", "Event", "ev", type_name="CoreV1Event"),
    _r("", "v1", "namespaces", "Namespace", "ns", cluster=True, status=True),
    _r("", "v1", "nodes", "Node", "no", cluster=True, status=True),
    _r("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc", status=True),
    _r("", "v1", "pods", "Pod", "po", cat="all", status=True, subs=_POD_SUBRESOURCES, generation=True),
    _r("", "v1", "secrets", "Secret"),
    _r("", "v1", "serviceaccounts", "ServiceAccount", "sa"),
    _r("", "v1", "services", "Service", "svc", cat="all", status=True),
    _r(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        "crd crds",
        cluster=True,
        cat="api-extensions",
        status=True,
        generation=True,
    ),
    _r("coordination.k8s.io", "v1", "leases", "Lease"),
    _r("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", "netpol", generation=True),
    _r("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", "pc", cluster=True),
)


class Registry:
    """The resources that are served now."""

    def __init__(self) -> None:
        self._by_path: dict[tuple[str, str, str], Resource] = {}
        self.generation = 0  # grows with every change; data that is derived from the registry is cached by it
        for resource in BUILTIN:
            self._by_path[resource.group, resource.version, resource.plural] = resource

    def get(self, group: str, version: str, plural: str) -> Resource | None:
        """Returns the resource served at group, version and plural."""
        return self._by_path.get((group, version, plural))

    def must(self, group: str, plural: str) -> Resource:
        """Returns the built-in resource of that name, in its only version."""
        return next(r for r in BUILTIN if r.group == group and r.plural == plural)

    def add(self, resource: Resource) -> None:
        """Serve a custom resource, or its new description."""
        self._by_path[resource.group, resource.version, resource.plural] = resource
        self.generation += 1

    def remove(self, group: str, plural: str) -> None:
        """Stop serving all versions of a custom resource."""
        for key in [k for k in self._by_path if k[0] == group and k[2] == plural]:
            del self._by_path[key]
        self.generation += 1

    def all(self) -> list[Resource]:
        """Returns every resource, the built-in ones first."""
        return list(self._by_path.values())

    def by_kind(self, group_version: str, kind: str) -> Resource | None:
        """Returns the resource whose objects have this apiVersion and kind."""
        for resource in self._by_path.values():
            if resource.kind == kind and resource.group_version == group_version:
                return resource
        return None

    def versions(self, group: str) -> list[str]:
        """Returns the versions of a group, in the order they were added."""
        return list(dict.fromkeys(r.version for r in self._by_path.values() if r.group == group))

    def groups(self) -> list[str]:
        """Returns the named groups (without the core group ``""``)."""
        return list(dict.fromkeys(r.group for r in self._by_path.values() if r.group))

    def storages(self, *, namespaced: bool | None = None) -> dict[tuple[str, str], Resource]:
        """Returns one resource for each storage."""
        found: dict[tuple[str, str], Resource] = {}
        for resource in self._by_path.values():
            if namespaced is None or resource.namespaced == namespaced:
                found.setdefault(resource.storage, resource)
        return found
