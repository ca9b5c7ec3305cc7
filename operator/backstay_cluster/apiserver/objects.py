"""The form of an API object in this package, and small functions that every module needs.

Objects are plain JSON dictionaries. A stored object is never changed in place: code that needs another version copies
the parts that it changes. So every version that a watch received stays a consistent snapshot.
"""

from __future__ import annotations

import datetime
import json
import uuid
from typing import Any, cast

Obj = dict[str, Any]


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def copy(value: Any) -> Any:
    """Returns a deep copy of a JSON value; several times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {k: copy(v) if isinstance(v, dict | list) else v for k, v in value.items()}
    if isinstance(value, list):
        return [copy(v) if isinstance(v, dict | list) else v for v in value]
    return value


def meta(obj: Obj) -> Obj:
    """Returns the object's metadata; if it has none, an empty dictionary that is not part of the object."""
    found = obj.get("metadata")
    return cast("Obj", found) if isinstance(found, dict) else {}


def now() -> str:
    """Returns the current time as a metav1.Time, in seconds and UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_uid() -> str:
    """Returns a new random uid."""
    return str(uuid.uuid4())


def dig(value: Any, *path: str) -> Any:
    """Returns the value at a path of keys; None if a key is missing."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def show_go(value: Any) -> str:
    """Returns a value in the format of Go's `%v`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{k}:{show_go(v)}" for k, v in sorted(value.items())) + "]"
    if isinstance(value, list):
        return "[" + " ".join(show_go(v) for v in value) + "]"
    return "<nil>" if value is None else str(value)
