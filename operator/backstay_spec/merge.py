"""Merging a user's pod template over the pod that the operator builds.

This is Kubernetes' strategic merge patch, as in `kubectl patch`, with the merge keys of core/v1's PodSpec. Maps are
merged, null deletes, and ``$patch: replace`` and ``$patch: delete`` are applied. A list with a merge key is merged item
by item, and any other list is replaced. Two rules differ from Kubernetes:

- An environment variable and a volume have one source. The template's source replaces ours of that name; a mixture of
  two sources would be refused by the API server.
- Tolerations are added, and one for the same key and effect replaces ours. Kubernetes replaces the whole list. A
  template for GPU nodes would then lose the 5 s after which a pod leaves an unreachable node (O2).

Sources: the patchMergeKey tags of the API's types, and
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_DIRECTIVE: Final = "$patch"


def _by(*fields: str, **defaults: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    def key(item: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(item.get(field, defaults.get(field)) for field in fields)

    return key


# The field's name determines the list's key: no two lists of a PodSpec share a name and differ in their key.
_MERGED: Final[dict[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]] = {
    "containers": _by("name"),
    "initContainers": _by("name"),
    "ephemeralContainers": _by("name"),
    "volumeMounts": _by("mountPath"),
    "volumeDevices": _by("devicePath"),
    "ports": _by("containerPort", "protocol", protocol="TCP"),
    "imagePullSecrets": _by("name"),
    "hostAliases": _by("ip"),
    "topologySpreadConstraints": _by("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": _by("name"),
    "schedulingGates": _by("name"),
}
_REPLACED_BY_ITEM: Final[dict[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]] = {
    "env": _by("name"),
    "volumes": _by("name"),
    "tolerations": _by("key", "effect"),
}


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`patch` merged strategically over `base`; neither is changed, nor shared with the result.

    Args:
        base: a PodTemplateSpec, or any map within one.
        patch: what to lay over it. Items of merged lists that `base` lacks are appended, in `patch`'s order.
    """
    if patch.get(_DIRECTIVE) == "replace":
        return {k: _without_directives(v) for k, v in patch.items() if not k.startswith("$") and v is not None}
    result = copy.deepcopy(dict(base))
    for field, value in patch.items():
        if field.startswith("$"):
            continue
        if value is None or (isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"):
            result.pop(field, None)
        else:
            result[field] = _merged_value(field, result.get(field), value)
    return result


def _merged_value(field: str, base: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return merged(base if isinstance(base, Mapping) else {}, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, Mapping) for item in value):
            ours = [item for item in base if isinstance(item, Mapping)] if isinstance(base, list) else []
            if field in _MERGED:
                return _merged_list(ours, value, _MERGED[field], whole=False)
            if field in _REPLACED_BY_ITEM:
                return _merged_list(ours, value, _REPLACED_BY_ITEM[field], whole=True)
        return [_without_directives(item) for item in value]
    return value


def _merged_list(
    base: Sequence[Mapping[str, Any]],
    patch: Sequence[Mapping[str, Any]],
    key_of: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    *,
    whole: bool,
) -> list[Any]:
    if any(item.get(_DIRECTIVE) == "replace" for item in patch):
        return [_without_directives(item) for item in patch if _DIRECTIVE not in item]
    result = {key_of(item): copy.deepcopy(dict(item)) for item in base}
    for item in patch:
        key = key_of(item)
        if item.get(_DIRECTIVE) == "delete":
            result.pop(key, None)
        elif whole:
            result[key] = _without_directives(item)
        else:
            result[key] = merged(result.get(key, {}), item)
    return list(result.values())


def _without_directives(value: Any) -> Any:
    """Returns a copy of what a patch adds where there was nothing: no directives, no nulls."""
    if isinstance(value, Mapping):
        return {k: _without_directives(v) for k, v in value.items() if not k.startswith("$") and v is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_directives(item) for item in value]
    return value
