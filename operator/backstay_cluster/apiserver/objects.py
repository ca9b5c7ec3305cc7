"""The shape of an API object in this package, and the few helpers that every module needs.

Objects are plain JSON dictionaries. A stored one is never changed in place: whoever wants another version copies
what it changes. That makes every version that was ever handed to a watch a consistent snapshot.
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
    """A deep copy of a JSON value; several times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {k: copy(v) if isinstance(v, dict | list) else v for k, v in value.items()}
    if isinstance(value, list):
        return [copy(v) if isinstance(v, dict | list) else v for v in value]
    return value


def meta(obj: Obj) -> Obj:
    """The object's metadata; an empty dictionary that is not part of the object when it has none."""
    found = obj.get("metadata")
    return cast("Obj", found) if isinstance(found, dict) else {}


def now() -> str:
    """The present in the form of metav1.Time: seconds, UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_uid() -> str:
    """A new random uid."""
    return str(uuid.uuid4())


def dig(value: Any, *path: str) -> Any:
    """The value at a path of keys, or None where the path ends early."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def show_go(value: Any) -> str:
    """A value as Go prints it with `%v`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{k}:{show_go(v)}" for k, v in sorted(value.items())) + "]"
    if isinstance(value, list):
        return "[" + " ".join(show_go(v) for v in value) + "]"
    return "<nil>" if value is None else str(value)
