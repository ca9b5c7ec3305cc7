"""Writes `data/types.json`: which fields each built-in type has, and of which type each is.

Strict field validation, pruning and OpenAPI need that table. It is derived from the generated models of the
`kubernetes` client, so that it needs no manual maintenance; the server itself only reads the JSON.
Run as `python -m backstay_cluster.apiserver.typegen > operator/backstay_cluster/apiserver/data/types.json`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from backstay_cluster.apiserver.resources import BUILTIN

_SCALARS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "object": "any",
    "datetime": "time",
}
# Bodies of subresources; and a type that other programs check against this table.
_EXTRA = ("V1Eviction", "V1Binding", "V1Scale", "V1DeleteOptions", "V1PodTemplateSpec")


def _type(text: str) -> str:
    if text in _SCALARS:
        return _SCALARS[text]
    if found := re.fullmatch(r"[Ll]ist\[(.*)\]", text):
        return f"[{_type(found[1])}"
    if found := re.fullmatch(r"[Dd]ict(?:\(|\[)str, (.*)(?:\)|\])", text):
        return f"{{{_type(found[1])}"
    return text


def generate() -> dict[str, dict[str, str]]:
    """Maps a type name to JSON field names and types. A type is a scalar, a type name, ``[T`` for a list or ``{T``
    for a map."""
    from kubernetes.client import models

    todo = [r.type_name for r in BUILTIN] + list(_EXTRA)
    table: dict[str, dict[str, str]] = {}
    while todo:
        name = todo.pop()
        if name in table:
            continue
        model: Any = getattr(models, name)
        table[name] = {model.attribute_map[k]: _type(v) for k, v in sorted(model.openapi_types.items())}
        todo += [t for t in (re.sub(r"[\[{]", "", v) for v in table[name].values()) if hasattr(models, t)]
    return dict(sorted(table.items()))


def render() -> str:
    """Returns the text of the file, with one line for each type."""
    lines = [f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in generate().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(render())
