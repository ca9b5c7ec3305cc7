"""Decodes built-in objects by keeping the fields of the type, dropping and naming the others, and refusing wrong types.

A real server decodes JSON into Go structs, which affects its answers. Nulls and empty collections vanish, unknown
fields are pruned (or refused, under strict validation), and a wrong type is an error that names the struct.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from importlib import resources
from typing import Any

from backstay_cluster.apiserver.objects import Obj

# Integers have 32 bits in Kubernetes except these; the model generator does not keep the difference.
_INT64 = frozenset(
    (
        "terminationGracePeriodSeconds",
        "activeDeadlineSeconds",
        "tolerationSeconds",
        "runAsUser",
        "runAsGroup",
        "fsGroup",
        "generation",
        "observedGeneration",
        "deletionGracePeriodSeconds",
        "gracePeriodSeconds",
        "expirationSeconds",
        "supplementalGroups",
        "maxLength",
        "minLength",
        "maxItems",
        "minItems",
        "maxProperties",
        "minProperties",
    )
)
# Fields whose map values are quantities, which may be written as numbers.
_QUANTITIES = frozenset(
    (
        "limits",
        "requests",
        "capacity",
        "allocatable",
        "hard",
        "used",
        "overhead",
        "allocatedResources",
        "max",
        "min",
        "default",
    )
)
_KEEP_EMPTY = frozenset(("emptyDir", "securityContext"))


class TypeMismatch(Exception):  # noqa: N818  # the caller turns it into an ApiError
    """A value of another JSON type than its field; the message is that of Go's decoder."""


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Type name -> field -> type, as `typegen` describes it."""
    text = resources.files("backstay_cluster.apiserver").joinpath("data/types.json").read_text()
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


@functools.cache
def go_name(type_name: str) -> str:
    """Returns the Go struct of a type, such as `PodSpec` for `V1PodSpec`."""
    return re.sub(r"^(Core|Events)?V\d+((alpha|beta)\d+)?", "", type_name)


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int):
        return "number"
    if isinstance(value, float):
        return f"number {json.dumps(value)}"
    return "array" if isinstance(value, list) else "object"


def _go_type(spec: str, field: str) -> str:
    if spec == "integer":
        return "int64" if field in _INT64 else "int32"
    if spec.startswith("["):
        return "[]" + _go_type(spec[1:], field)
    if spec.startswith("{"):
        return "map[string]" + _go_type(spec[1:], field)
    simple = {"boolean": "bool", "number": "float64", "time": "Time", "bytes": "[]uint8"}
    if spec in simple or spec == "string":
        return simple.get(spec, spec)
    return "v1." + go_name(spec)


class _Decoder:
    def __init__(self) -> None:
        self.unknown: list[str] = []

    def struct(self, spec: str, value: Obj, path: str, plain: str) -> Obj:
        fields = table()[spec]
        result: Obj = {}
        for key, item in value.items():
            kind = fields.get(key)
            if kind is None:
                self.unknown.append(f"{path}{key}")
                continue
            if item is None:
                continue
            found = self.value(spec, key, kind, item, f"{path}{key}", f"{plain}{key}")
            if found in ({}, []) and kind[0] in "[{" and key not in _KEEP_EMPTY:
                continue  # an empty collection is the same as a missing one
            result[key] = found
        return result

    def value(self, owner: str, field: str, kind: str, value: Any, path: str, plain: str) -> Any:
        if kind == "any":
            return value
        if kind[0] == "[":
            if isinstance(value, list):
                inner = kind[1:]
                if inner == "any":
                    return value
                return [
                    self.value(owner, field, inner, v, f"{path}[{i}]", plain)
                    for i, v in enumerate(value)
                    if v is not None
                ]
        elif kind[0] == "{":
            if isinstance(value, dict):
                inner = kind[1:]
                if inner == "string" and field in _QUANTITIES:
                    return {k: str(v) if isinstance(v, int | float) else v for k, v in value.items()}
                if inner == "bytes":
                    return {k: self._bytes(v) for k, v in value.items() if v is not None}
                return {
                    k: self.value(owner, field, inner, v, f"{path}.{k}", plain)
                    for k, v in value.items()
                    if v is not None
                }
        elif kind in table():
            if isinstance(value, dict):
                return self.struct(kind, value, path + ".", plain + ".")
        elif (
            (kind in {"string", "time"} and isinstance(value, str))
            or (kind == "boolean" and isinstance(value, bool))
            or (kind == "number" and isinstance(value, int | float) and not isinstance(value, bool))
            or (kind == "integer" and isinstance(value, int) and not isinstance(value, bool))
        ):
            return value
        elif kind == "bytes" and isinstance(value, str):
            return self._bytes(value)
        # JSON does not distinguish 3 from 3.0, and a quantity such as a size may be a number.
        elif kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        elif kind == "string" and isinstance(value, int | float) and field in {"sizeLimit", "divisor"}:
            return str(value)
        raise TypeMismatch(
            f"json: cannot unmarshal {_json_type(value)} into Go struct field {go_name(owner)}.{plain} "
            f"of type {_go_type(kind, field)}"
        )

    @staticmethod
    def _bytes(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeMismatch(f"json: cannot unmarshal {_json_type(value)} into Go value of type []uint8")
        try:
            base64.b64decode(value.encode(), validate=True)
        except (binascii.Error, ValueError):
            bad = next((i for i, c in enumerate(value) if not re.match(r"[A-Za-z0-9+/=]", c)), max(0, len(value) - 1))
            raise TypeMismatch(f"illegal base64 data at input byte {bad}") from None
        return value


def decode(type_name: str, obj: Obj) -> tuple[Obj, list[str]]:
    """Keep the fields of the type.

    Returns:
        The object without unknown fields, nulls and empty collections, and the paths of the unknown fields.

    Raises:
        TypeMismatch: a value has another JSON type than its field.
    """
    decoder = _Decoder()
    return decoder.struct(type_name, obj, "", ""), decoder.unknown
