"""The JSON merge patch (RFC 7386) between two documents: a status is written whole, yet only changes are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What turns `old` into `new`: null where a field goes, whole lists, nothing for what is equal; {} when all is.

    `new` holds no null of its own: a merge patch cannot say one.
    """
    patch: dict[str, Any] = {}
    for name in old.keys() - new.keys():
        patch[name] = None
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif name not in old or value != before:
            patch[name] = value
    return patch
