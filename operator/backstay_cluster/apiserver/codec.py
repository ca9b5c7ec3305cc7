"""Reads request bodies as the real server does, and writes objects in a resource's version.

An object is stored once, without apiVersion and kind.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from backstay_cluster.apiserver import types
from backstay_cluster.apiserver.errors import ApiError, WrongTypeError, bad_request, unsupported_media_type
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.protobuf import PROTOBUF, decode_protobuf
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.store import Stored

_SURROGATE: Final = re.compile(rb"\\u[dD]|\xed")
"""An escape, or three bytes, that may be half of a surrogate pair."""
_GO_MESSAGES: Final = (
    ("Expecting property name", "invalid character {!r} looking for beginning of object key string"),
    ("Illegal trailing comma", "invalid character {!r} looking for beginning of object key string"),
    ("Expecting value", "invalid character {!r} looking for beginning of value"),
    ("Expecting ':'", "invalid character {!r} after object key"),
    ("Expecting ','", "invalid character {!r} after object key:value pair"),
    ("Extra data", "invalid character {!r} after top-level value"),
    ("Invalid control", "invalid character {!r} in string literal"),
)


def _integer(text: str) -> int | float:
    if len(text) > 400:  # no float is as large, and Python refuses to convert many more digits
        raise ValueError(f"json parse error: {text[:20]}... has {len(text)} digits: too large for a 64-bit number")
    value = int(text)
    return value if -(2**63) <= value < 2**63 else _finite(text)  # beyond 64 bits a number is a float


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"json parse error: {text[:20]} is not a number in the range of a 64-bit float")
    return value


def parse_json(body: bytes) -> Any:
    """Returns the JSON value of a body.

    Raises:
        ValueError: the body is not JSON. The message is that of Go's decoder, followed by the start of the body.
    """
    try:
        found = json.loads(body, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
        return _unicode(found) if _SURROGATE.search(body) else found
    except json.JSONDecodeError as error:
        message = "unexpected end of JSON input"
        if error.pos < len(error.doc):
            text = next((t for start, t in _GO_MESSAGES if error.msg.startswith(start)), "invalid character {!r}")
            message = text.format(error.doc[error.pos])
        shown = body[:512].decode(errors="replace")
        raise ValueError(f"json parse error: {message} ({shown})") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"json parse error: {error}") from None


def _unicode(value: Any) -> Any:
    """Replaces halves of surrogate pairs, as Go's decoder does: no answer could contain them."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_unicode(inner) for inner in value]
        case dict():
            return {_unicode(key): _unicode(inner) for key, inner in value.items()}
    return value


def read_object(resource: Resource, body: bytes, content_type: str, kind: str = "") -> Obj:
    """Returns the object in a request's body.

    Raises:
        ApiError: 400 when it cannot be read or is of another version, 415 for a media type that is not served.
    """
    wanted = kind or resource.kind
    if content_type == PROTOBUF:
        return decode_protobuf(body, wanted)
    if content_type in {"application/json", ""}:
        try:
            value = parse_json(body)
        except ValueError as error:
            raise _unrecognized(wanted, f"couldn't get version/kind; {error}") from None
    else:
        raise unsupported_media_type(
            "the body of the request was in an unknown format - accepted media types include: application/json, "
            "application/vnd.kubernetes.protobuf"
        )
    if not isinstance(value, dict):
        raise _unrecognized(
            wanted,
            "couldn't get version/kind; json parse error: json: cannot unmarshal value into Go "
            "value of type struct { APIVersion string; Kind string }",
        )
    return value


def _unrecognized(kind: str, why: str) -> ApiError:
    return bad_request(f"the object provided is unrecognized (must be of type {kind}): {why}")


def decode_builtin(
    resource: Resource, obj: Obj, *, type_name: str = "", kind: str = "", version: str = ""
) -> tuple[Obj, list[str]]:
    """Check kind and version of a built-in object, and keep the fields of its type.

    Returns:
        The object without apiVersion and kind, and the paths of unknown fields.

    Raises:
        ApiError: 400, the request is malformed.
    """
    kind, version = kind or resource.kind, version or resource.group_version
    check_version(obj, kind, version)
    short = version.rsplit("/", 1)[-1]
    try:
        clean, unknown = types.decode(type_name or resource.type_name, obj)
    except types.TypeMismatch as error:
        raise WrongTypeError(f'{kind} in version "{short}" cannot be handled as a {kind}: {error}', error) from None
    clean.pop("apiVersion", None)
    clean.pop("kind", None)
    return clean, unknown


def check_version(obj: Obj, kind: str, version: str) -> None:
    """Refuse an object of another kind or version than the request's.

    Raises:
        ApiError: 400, the request is malformed.
    """
    found_version, found_kind = obj.get("apiVersion") or version, obj.get("kind") or kind
    if found_version != version:
        raise bad_request(
            f"the API version in the data ({found_version}) does not match the expected API version ({version})"
        )
    if found_kind != kind:
        short = version.rsplit("/", 1)[-1]
        raise bad_request(
            f'{found_kind} in version "{short}" cannot be handled as a {kind}: converting '
            f"({version}, Kind={found_kind}) to ({version}, Kind={kind}): unknown conversion"
        )


def full(resource: Resource, obj: Obj) -> Obj:
    """Returns the object in the form for clients."""
    return {"kind": resource.kind, "apiVersion": resource.group_version, **obj}


def head(resource: Resource) -> bytes:
    """Returns the start of an object's JSON, which is followed by the stored bytes without its first brace."""
    return b'{"kind":"%s","apiVersion":"%s",' % (resource.kind.encode(), resource.group_version.encode())


def full_bytes(resource: Resource, stored: Stored) -> bytes:
    """Returns the object's JSON in the form for clients."""
    return head(resource) + stored.body[1:]
