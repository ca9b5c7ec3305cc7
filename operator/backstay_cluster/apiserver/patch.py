"""Applies the three patches, JSON (RFC 6902), merge (RFC 7386) and strategic merge (built-in types only).

All are pure: they take JSON values and return a new one, which shares the unchanged parts.
"""

from __future__ import annotations

from typing import Any, Final

from jsonpatch import JsonPatch, JsonPatchException
from jsonpointer import JsonPointerException, resolve_pointer

from backstay_cluster.apiserver.errors import ApiError, bad_request, rejected_patch
from backstay_cluster.apiserver.objects import copy, encode
from backstay_cluster.apiserver.types import table

COPY_LIMIT: Final = 3 * 1024 * 1024  # bytes of JSON; a real server has a limit too


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values, where true is not 1, unlike in Python (but 1 is 1.0)."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return (type(one) is type(other) and one == other) or (
        isinstance(one, int | float) and isinstance(other, int | float) and one == other
    )


def json_patch(target: Any, operations: Any) -> Any:
    """Apply a JSON patch (RFC 6902).

    Raises:
        ApiError: 422 when an operation is malformed, its path is missing, or a test fails; 413 when there are too many
            operations or they copy too much. Nothing is changed in these cases.
    """
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    if len(operations) > 10_000:
        raise ApiError(
            413,
            "RequestEntityTooLarge",
            f"The allowed maximum operations in a JSON patch is 10000, got {len(operations)}",
        )
    doc, copied = copy(target), 0
    try:
        for operation in operations:
            patch = JsonPatch([copy(operation)])
            if operation["op"] == "copy" and isinstance(operation.get("from"), str):
                # Copies of copies double the document with each operation.
                copied += len(encode(resolve_pointer(doc, operation["from"])))
                if copied > COPY_LIMIT:
                    raise ApiError(
                        413,
                        "RequestEntityTooLarge",
                        f"The copy operations of a JSON patch may copy {COPY_LIMIT} bytes in total; these copy more",
                    )
            doc = patch.apply(doc, in_place=True)
    except (JsonPatchException, JsonPointerException):
        raise rejected_patch() from None
    return doc


# (type, field) -> the key that identifies the elements of the list; "" for a list of plain values that is a set.
# Every other list is replaced as a whole. From the `patchMergeKey` tags of k8s.io/api.
MERGE_KEYS: Final[dict[tuple[str, str], str]] = {
    ("V1ObjectMeta", "finalizers"): "",
    ("V1ObjectMeta", "ownerReferences"): "uid",
    ("V1PodSpec", "containers"): "name",
    ("V1PodSpec", "initContainers"): "name",
    ("V1PodSpec", "ephemeralContainers"): "name",
    ("V1PodSpec", "volumes"): "name",
    ("V1PodSpec", "imagePullSecrets"): "name",
    ("V1PodSpec", "hostAliases"): "ip",
    ("V1PodSpec", "topologySpreadConstraints"): "topologyKey",
    ("V1PodSpec", "resourceClaims"): "name",
    ("V1PodSpec", "schedulingGates"): "name",
    ("V1Container", "env"): "name",
    ("V1Container", "ports"): "containerPort",
    ("V1Container", "volumeMounts"): "mountPath",
    ("V1Container", "volumeDevices"): "devicePath",
    ("V1PodStatus", "conditions"): "type",
    ("V1PodStatus", "podIPs"): "ip",
    ("V1PodStatus", "hostIPs"): "ip",
    ("V1ServiceSpec", "ports"): "port",
    ("V1ServiceStatus", "conditions"): "type",
    ("V1ServiceAccount", "secrets"): "name",
    ("V1ServiceAccount", "imagePullSecrets"): "name",
    ("V1NodeStatus", "conditions"): "type",
    ("V1NodeStatus", "addresses"): "type",
    ("V1NodeSpec", "podCIDRs"): "",
    ("V1NamespaceStatus", "conditions"): "type",
    ("V1PersistentVolumeClaimStatus", "conditions"): "type",
}


def strategic_merge(type_name: str, target: Any, patch: Any) -> Any:
    """Applies a strategic merge to built-in types, where a list with a merge key is merged by that key. It supports
    `$patch`, `$retainKeys`, `$deleteFromPrimitiveList` and `$setElementOrder` as Kubernetes describes them.

    Raises:
        ApiError: 400 for an element without its merge key or an unknown directive.
    """
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch")
    if directive == "replace":
        return {k: v for k, v in patch.items() if k != "$patch"}
    if directive == "delete":
        return {}
    if directive not in {None, "merge"}:
        raise bad_request(f"Unknown patch type found: {directive}")
    result = dict(target) if isinstance(target, dict) else {}
    retain = patch.get("$retainKeys")
    if isinstance(retain, list):
        result = {k: v for k, v in result.items() if k in retain}
    fields = table().get(type_name, {})
    for key, value in patch.items():
        if key.startswith("$setElementOrder/"):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            result[name] = [v for v in result.get(name) or [] if v not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = _field(type_name, key, fields.get(key, "any"), result.get(key), value)
    # Last, because the order counts for the elements that the patch has added.
    for key, order in patch.items():
        if key.startswith("$setElementOrder/"):
            name = key.split("/", 1)[1]
            if isinstance(result.get(name), list):
                before = target.get(name) if isinstance(target, dict) else None
                result[name] = _ordered(result[name], order, before or [], MERGE_KEYS.get((type_name, name)))
    return result


def _field(owner: str, key: str, kind: str, target: Any, patch: Any) -> Any:
    if isinstance(patch, dict):
        return strategic_merge(kind.lstrip("{"), target, patch)
    merge_key = MERGE_KEYS.get((owner, key))
    if not isinstance(patch, list) or merge_key is None:
        return patch
    current = target if isinstance(target, list) else []
    if any(isinstance(e, dict) and e.get("$patch") == "replace" for e in patch):
        return [e for e in patch if not (isinstance(e, dict) and "$patch" in e)]
    if merge_key == "":
        return _ordered(current + [v for v in patch if v not in current], patch, current, None)
    return _list(kind.lstrip("["), merge_key, current, patch)


def _list(kind: str, merge_key: str, current: list[Any], patch: list[Any]) -> list[Any]:
    result = list(current)
    for element in patch:
        if not isinstance(element, dict) or merge_key not in element:
            raise bad_request(f"map: {element} does not contain declared merge key: {merge_key}")
        at = next(
            (i for i, e in enumerate(result) if isinstance(e, dict) and e.get(merge_key) == element[merge_key]), None
        )
        if element.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic_merge(kind, {}, element))
        else:
            result[at] = strategic_merge(kind, result[at], element)
    return _ordered(result, patch, current, merge_key)


def _ordered(items: list[Any], order: Any, before: list[Any], merge_key: str | None) -> list[Any]:
    """Elements of `order` keep its order. Another element is before the first of them that it preceded `before`."""
    if not isinstance(order, list):
        return items

    def identity(item: Any) -> Any:
        return item.get(merge_key) if merge_key and isinstance(item, dict) else item

    wanted, places = [identity(e) for e in order], [identity(e) for e in before]
    listed = sorted((i for i in items if identity(i) in wanted), key=lambda i: wanted.index(identity(i)))
    others = [i for i in items if identity(i) not in wanted]
    found = []
    while others and listed:
        one, other = identity(others[0]), identity(listed[0])
        precedes = one in places and other in places and places.index(one) < places.index(other)
        found.append((others if precedes else listed).pop(0))
    return found + listed + others
