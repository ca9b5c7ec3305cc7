"""Makes the JSON merge patch (RFC 7386) between two documents, because the caller has a whole status and sends only
changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the patch that changes `old` to `new`: null removes a field, lists are replaced whole; {}: they are
    equal.

    `new` must not contain null, because a merge patch cannot express it.
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
