"""Parses the path of a request, the options in the query, and the accepted form of the answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backstay_cluster.apiserver.errors import ApiError, PlainNotFound, bad_request
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.resources import Registry, Resource

Form = Literal["object", "table", "metadata"]


@dataclass(frozen=True)
class Target:
    """The object or collection at a path."""

    resource: Resource
    namespace: str | None  # None: cluster-scoped, or all namespaces
    name: str = ""
    subresource: str = ""


def locate(registry: Registry, path: str) -> Target:
    """Find the target of a path.

    Raises:
        PlainNotFound: nothing is served there.
    """
    parts = [p for p in path.split("/") if p]
    if parts[:2] == ["api", "v1"]:
        group, version, rest = "", "v1", parts[2:]
    elif len(parts) >= 3 and parts[0] == "apis":
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise PlainNotFound
    namespace: str | None = None
    if len(rest) >= 3 and rest[0] == "namespaces" and not (group == "" and rest[2] == "status"):
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        raise PlainNotFound
    resource = registry.get(group, version, rest[0])
    if resource is None or (namespace is not None and not resource.namespaced):
        raise PlainNotFound
    if namespace is None and resource.namespaced and len(rest) > 1:
        raise PlainNotFound  # without a namespace it can only be listed, in all namespaces
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    if subresource and subresource not in _subresources(resource):
        raise PlainNotFound
    return Target(resource, namespace, name, subresource)


@functools.lru_cache(maxsize=256)
def _subresources(resource: Resource) -> frozenset[str]:
    names = {s[0] for s in resource.subresources}
    if resource.status:
        names.add("status")
    if resource.scale:
        names.add("scale")
    return frozenset(names)


@functools.lru_cache(maxsize=256)
def accepted(header: str) -> Form:
    """Returns the form of the answer that an Accept header prefers, among the supported forms.

    Raises:
        ApiError: 406 if no supported form is accepted.
    """
    for choice in header.split(",") if header.strip() else ["*/*"]:
        media, *parameters = (p.strip() for p in choice.split(";"))
        if media not in {"application/json", "application/*", "*/*"}:
            continue
        options = dict(p.split("=", 1) for p in parameters if "=" in p)
        kind = options.get("as", "")
        if not kind:
            return "object"
        if options.get("g") == "meta.k8s.io" and options.get("v") in {"v1", "v1beta1"}:
            if kind == "Table":
                return "table"
            if kind.startswith("PartialObjectMetadata"):
                return "metadata"
    raise ApiError(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, "
        "application/json;as=Table;v=v1;g=meta.k8s.io, "
        "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
    )


def flag(query: Mapping[str, str], name: str) -> bool:
    """Returns a boolean option; absent is false, present without a value is true."""
    return name in query and query[name].lower() not in {"false", "0", "no"}


def number(query: Mapping[str, str], name: str) -> int | None:
    """Returns an integer option.

    Raises:
        ApiError: 400, the request is malformed.
    """
    text = query.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)


def version_option(query: Mapping[str, str]) -> int | None:
    """Returns the requested resourceVersion, or None if the request has none.

    Raises:
        ApiError: 400, the request is malformed.
    """
    text = query.get("resourceVersion", "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,18}", text):
        raise bad_request(f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax')
    return int(text)


def dry_run(query: Mapping[str, str], body: Obj | None = None) -> bool:
    """Returns whether the request must not store anything.

    Raises:
        ApiError: 400 for a value other than `All`.
    """
    value = query.get("dryRun", "")
    if not value and body:
        value = ",".join(body.get("dryRun") or [])
    if value not in {"", "All"}:
        raise bad_request(f'dryRun: Unsupported value: "{value}": supported values: "All"')
    return value == "All"


def field_validation(query: Mapping[str, str]) -> str:
    """`Strict`, `Warn` (the default) or `Ignore`.

    Raises:
        ApiError: 400, the request is malformed.
    """
    value = query.get("fieldValidation", "") or "Warn"
    if value not in {"Strict", "Warn", "Ignore"}:
        raise bad_request(
            f'fieldValidation: Unsupported value: "{value}": supported values: "", "Ignore", "Strict", "Warn"'
        )
    return value
