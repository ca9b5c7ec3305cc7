"""Serves OpenAPI, by which kubectl decides whether the server validates fields (`apply`) and which exist (`explain`).

Version 3 is served by group and version. Version 2 is an empty document in the protobuf form that kubectl requests.
kubectl fetches it before a client-side apply, and works without the parts that it does not find in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

from backstay_cluster.apiserver import types
from backstay_cluster.apiserver.custom import CustomType
from backstay_cluster.apiserver.errors import PlainNotFound
from backstay_cluster.apiserver.objects import Obj, copy, encode
from backstay_cluster.apiserver.patch import MERGE_KEYS
from backstay_cluster.apiserver.resources import Registry, Resource

V2_PROTOBUF: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_SCALARS: Final[dict[str, Obj]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time"},
    "bytes": {"type": "string", "format": "byte"},
    "any": {"x-kubernetes-preserve-unknown-fields": True},
}
_WRITES: Final = (("put", "put"), ("patch", "patch"), ("delete", "delete"))


def _field_bytes(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def v2_protobuf() -> bytes:
    """Returns an openapi.v2.Document with only its version and title."""
    info = _field_bytes(1, b"Kubernetes") + _field_bytes(2, b"v1.36.2")
    return _field_bytes(1, b"2.0") + _field_bytes(2, info)


def v2_json() -> Obj:
    """Returns the document in JSON."""
    return {"swagger": "2.0", "info": {"title": "Kubernetes", "version": "v1.36.2"}, "paths": {}, "definitions": {}}


def _reference(kind: str) -> Obj:
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind[0] == "[":
        return {"type": "array", "items": _reference(kind[1:])}
    if kind[0] == "{":
        return {"type": "object", "additionalProperties": _reference(kind[1:])}
    return {"allOf": [{"$ref": f"#/components/schemas/{kind}"}], "default": {}}


def _builtin_schemas(roots: list[str]) -> dict[str, Obj]:
    todo, found = list(roots), dict[str, Obj]()
    while todo:
        name = todo.pop()
        if name in found or name not in types.table():
            continue
        properties: Obj = {}
        for field, kind in types.table()[name].items():
            described = dict(_reference(kind))
            key = MERGE_KEYS.get((name, field))
            if key is not None:
                described["x-kubernetes-patch-strategy"] = "merge"
                if key:
                    described["x-kubernetes-patch-merge-key"] = key
            properties[field] = described
            todo.append(kind.lstrip("[{"))
        found[name] = {"type": "object", "properties": properties}
    return found


def _gvk(resource: Resource) -> Obj:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _operation(resource: Resource, action: str) -> Obj:
    operation: Obj = {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _gvk(resource),
        "responses": {"200": {"description": "OK"}},
    }
    if action in {"post", "put", "patch"}:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in ("dryRun", "fieldManager", "fieldValidation")
        ]
    return operation


def _paths(resource: Resource) -> Obj:
    base = resource.base_path + ("/namespaces/{namespace}" if resource.namespaced else "") + "/" + resource.plural
    single: Obj = {"get": _operation(resource, "get")}
    single |= {method: _operation(resource, action) for method, action in _WRITES}
    collection = {"get": _operation(resource, "list"), "post": _operation(resource, "post")}
    return {base: collection, base + "/{name}": single}


class OpenApi:
    """The documents, created at the first request and kept until the resources change."""

    def __init__(self, registry: Registry, custom: Callable[[Resource], CustomType]) -> None:
        self._registry = registry
        self._custom = custom
        self._made: dict[str, bytes] = {}
        self._generation = -1

    def _fresh(self) -> dict[str, bytes]:
        if self._generation != self._registry.generation:
            self._made, self._generation = {}, self._registry.generation
        return self._made

    def index(self) -> Obj:
        """Returns the document `/openapi/v3`."""
        names = dict.fromkeys(r.base_path.lstrip("/") for r in self._registry.all())
        paths = {}
        for name in names:
            own = [r for r in self._registry.all() if r.base_path == "/" + name]
            # Clients keep a document as long as its hash is the same, even when this server is restarted.
            seed = [self._custom(r).schema if r.custom else r.plural for r in own]
            digest = hashlib.sha256(encode(seed)).hexdigest().upper()
            paths[name] = {"serverRelativeURL": f"/openapi/v3/{name}?hash={digest}"}
        return {"paths": paths}

    def document(self, name: str) -> bytes:
        """`/openapi/v3/api/v1` and similar paths; `name` is `api/v1` or `apis/GROUP/VERSION`.

        Raises:
            PlainNotFound: the version does not exist.
        """
        made = self._fresh()
        if name not in made:
            own = [r for r in self._registry.all() if r.base_path == "/" + name]
            if not own:
                raise PlainNotFound
            made[name] = encode(self._make(own))
        return made[name]

    def _make(self, own: list[Resource]) -> Obj:
        paths: Obj = {}
        schemas = _builtin_schemas([r.type_name for r in own if not r.custom] + ["V1ObjectMeta", "V1DeleteOptions"])
        for resource in own:
            paths |= _paths(resource)
            if resource.custom:
                name = f"{resource.group}.{resource.version}.{resource.kind}"
                schema: Any = copy(self._custom(resource).schema)
                schema.setdefault("properties", {}).update(
                    apiVersion={"type": "string"},
                    kind={"type": "string"},
                    metadata={"allOf": [{"$ref": "#/components/schemas/V1ObjectMeta"}]},
                )
                schemas[name] = schema
            else:
                name = resource.type_name
            schemas[name]["x-kubernetes-group-version-kind"] = [_gvk(resource)]
        info = {"title": "Kubernetes", "version": "v1.36.2"}
        return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
