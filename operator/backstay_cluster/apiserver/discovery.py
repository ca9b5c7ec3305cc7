"""Lists the resources for clients in discovery documents, in the old form and the aggregated one."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

from backstay_cluster.apiserver.errors import PlainNotFound
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.resources import Registry, Resource

AGGREGATED: Final = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
VERSION: Final[Obj] = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "$Format:%H$",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "go1.26.10",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def _subresources(resource: Resource) -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    """Name, group, version, kind and verbs of each."""
    found = list(resource.subresources)
    if resource.status:
        found.append(("status", resource.group, resource.version, resource.kind, ("get", "patch", "update")))
    if resource.scale:
        found.append(("scale", "autoscaling", "v1", "Scale", ("get", "patch", "update")))
    return found


def versions(address: str) -> Obj:
    """Returns the document `/api`."""
    where = {"clientCIDR": "0.0.0.0/0", "serverAddress": address}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [where]}


def _group(registry: Registry, name: str) -> Obj:
    listed = [{"groupVersion": f"{name}/{v}", "version": v} for v in registry.versions(name)]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def group(registry: Registry, name: str) -> Obj:
    """Returns the document `/apis/GROUP`.

    Raises:
        PlainNotFound: the group does not exist.
    """
    if name not in registry.groups():
        raise PlainNotFound
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(registry, name)}


def groups(registry: Registry) -> Obj:
    """Returns the document `/apis`."""
    listed = [_group(registry, name) for name in registry.groups()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def resources(registry: Registry, group_name: str, version: str) -> Obj:
    """Returns the documents `/api/v1` and `/apis/GROUP/VERSION`.

    Raises:
        PlainNotFound: the version does not exist.
    """
    found = [r for r in registry.all() if (r.group, r.version) == (group_name, version)]
    if not found:
        raise PlainNotFound
    listed: list[Obj] = []
    for resource in found:
        entry: Obj = {
            "name": resource.plural,
            "singularName": resource.singular,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(resource.verbs),
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        seed = f"{resource.group}/{resource.version}/{resource.kind}".encode()
        entry["storageVersionHash"] = base64.b64encode(hashlib.sha256(seed).digest()[:8]).decode()
        listed.append(entry)
        for name, sub_group, sub_version, kind, verbs in sorted(_subresources(resource), key=lambda s: s[0] == "scale"):
            sub: Obj = {"name": f"{resource.plural}/{name}", "singularName": "", "namespaced": resource.namespaced}
            if (sub_group, sub_version) != (resource.group, resource.version):
                sub |= {"group": sub_group, "version": sub_version}
            listed.append({**sub, "kind": kind, "verbs": list(verbs)})
    name = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": listed}


def _discovered(resource: Resource) -> Obj:
    entry: Obj = {
        "resource": resource.plural,
        "responseKind": {"group": resource.group, "version": resource.version, "kind": resource.kind},
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": sorted(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    subs = [
        {"subresource": name, "responseKind": {"group": g, "version": v, "kind": kind}, "verbs": list(verbs)}
        for name, g, v, kind, verbs in _subresources(resource)
    ]
    if subs:
        entry["subresources"] = subs
    return entry


def aggregated(registry: Registry, *, core: bool) -> Obj:
    """Returns `/api` (core) or `/apis` in the aggregated form, with all resources in one document."""
    items: list[Obj] = []
    for name in [""] if core else registry.groups():
        listed = []
        for version in registry.versions(name):
            own = [_discovered(r) for r in registry.all() if (r.group, r.version) == (name, version)]
            listed.append({"version": version, "freshness": "Current", "resources": own})
        items.append({"metadata": {"name": name} if name else {"creationTimestamp": None}, "versions": listed})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}
