"""Protobuf bodies, which `kubectl create` sends for a Namespace, a ConfigMap or a Secret.

Answers are always JSON, which every client accepts. Bodies of these kinds are decoded by the field numbers in
k8s.io/api's generated.proto. All other kinds are refused, with a message that requires JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

from backstay_cluster.apiserver.errors import bad_request, unsupported_media_type
from backstay_cluster.apiserver.objects import Obj

PROTOBUF: Final = "application/vnd.kubernetes.protobuf"
_MAGIC: Final = b"k8s\x00"

# message -> field number -> (name, type); "s" string, "b" bytes as base64, "i" integer, "?" boolean, "t" Time,
# "[x" repeated, "{x" map from string, otherwise a message.
_MESSAGES: Final[dict[str, dict[int, tuple[str, str]]]] = {
    "ObjectMeta": {
        1: ("name", "s"),
        2: ("generateName", "s"),
        3: ("namespace", "s"),
        5: ("uid", "s"),
        6: ("resourceVersion", "s"),
        7: ("generation", "i"),
        8: ("creationTimestamp", "t"),
        9: ("deletionTimestamp", "t"),
        10: ("deletionGracePeriodSeconds", "i"),
        11: ("labels", "{s"),
        12: ("annotations", "{s"),
        13: ("ownerReferences", "[OwnerReference"),
        14: ("finalizers", "[s"),
    },
    "OwnerReference": {
        1: ("kind", "s"),
        3: ("name", "s"),
        4: ("uid", "s"),
        5: ("apiVersion", "s"),
        6: ("controller", "?"),
        7: ("blockOwnerDeletion", "?"),
    },
    "Namespace": {1: ("metadata", "ObjectMeta"), 2: ("spec", "NamespaceSpec"), 3: ("status", "NamespaceStatus")},
    "NamespaceSpec": {1: ("finalizers", "[s")},
    "NamespaceStatus": {1: ("phase", "s")},
    "ConfigMap": {1: ("metadata", "ObjectMeta"), 2: ("data", "{s"), 3: ("binaryData", "{b"), 4: ("immutable", "?")},
    "Secret": {
        1: ("metadata", "ObjectMeta"),
        2: ("data", "{b"),
        3: ("type", "s"),
        4: ("stringData", "{s"),
        5: ("immutable", "?"),
    },
}
_UNKNOWN: Final = {1: "typeMeta", 2: "raw"}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a varint is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return value, at
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        length = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError("a field is cut off")
        yield tag >> 3, data[at : at + length]
        at += length


def _value(kind: str, raw: int | bytes) -> Any:
    if kind in {"i", "?"}:
        if not isinstance(raw, int):
            raise ValueError("a number was expected")
        if kind == "?":
            return bool(raw)
        return raw - (1 << 64) if raw >= 1 << 63 else raw
    if isinstance(raw, int):
        raise ValueError("bytes were expected")  # noqa: TRY004  # the data is invalid, not the call
    if kind == "s":
        return raw.decode()
    if kind == "b":
        return base64.b64encode(raw).decode()
    if kind == "t":
        return None  # the server sets all times that a client could send here
    return _message(kind, raw)


def _message(name: str, data: bytes) -> Obj:
    described = _MESSAGES[name]
    found: Obj = {}
    for number, raw in _fields(data):
        if number not in described:
            continue
        field, kind = described[number]
        if kind[0] == "[":
            found.setdefault(field, []).append(_value(kind[1:], raw))
        elif kind[0] == "{":
            if isinstance(raw, int):
                raise ValueError("a map entry was expected")
            entry = dict(_fields(raw))
            key = _value("s", entry.get(1, b""))
            found.setdefault(field, {})[key] = _value(kind[1:], entry.get(2, b""))
        else:
            found[field] = _value(kind, raw)
    return {k: v for k, v in found.items() if v is not None and v != ""}


def decode_protobuf(body: bytes, kind: str) -> Obj:
    """Returns the object in a protobuf body of the given kind.

    Raises:
        ApiError: 400 for bytes that are not such a message, 415 for a kind that is only served as JSON.
    """
    if kind not in _MESSAGES:
        raise unsupported_media_type(
            f"the body of the request was in an unknown format - {kind} is accepted as application/json only"
        )
    if not body.startswith(_MAGIC):
        raise bad_request("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    try:
        outer = {_UNKNOWN[n]: v for n, v in _fields(body[4:]) if n in _UNKNOWN}
        types, raw = outer.get("typeMeta", b""), outer.get("raw", b"")
        if isinstance(types, int) or isinstance(raw, int):
            raise ValueError("an envelope was expected")  # noqa: TRY004
        names = dict(_fields(types))
        found = _message(_kind(names, kind), raw)
    except (ValueError, UnicodeDecodeError, KeyError) as error:
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {error}") from None
    version = names.get(1, b"")
    return {"apiVersion": _value("s", version), "kind": _value("s", names.get(2, kind.encode())), **found}


def _kind(names: dict[int, int | bytes], expected: str) -> str:
    named = _value("s", names.get(2, b""))
    if named and named != expected:
        raise ValueError(f"it is a {named}")
    return expected
