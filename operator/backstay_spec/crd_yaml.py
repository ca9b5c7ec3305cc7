"""Writes JSON values as YAML for people, in block style with folded long text, without YAML that needs a library.

`backstay_spec` imports pydantic and the standard library only. Users read and review the CRD, so it is not one line of
JSON. The same value always gives the same text.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["to_yaml"]

WIDTH: Final = 110

# Plain scalars that every YAML reader takes as the string that they are; all else is quoted.
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_STRINGS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"})


def _character(one: str) -> str:
    """Returns a character within double quotes; YAML has no surrogate pairs, so JSON's own escapes will not do."""
    if one in '"\\':
        return f"\\{one}"
    if one.isprintable():
        return one
    return f"\\u{ord(one):04x}" if ord(one) < 0x10000 else f"\\U{ord(one):08x}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
            return value
        return f'"{"".join(map(_character, value))}"'
    if isinstance(value, float) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # YAML 1.1 reads 1e+16 as a string
    return json.dumps(value)


def _folds(value: str) -> bool:
    """Returns whether a string reads better folded, and comes back the same: single spaces, no line ends."""
    return len(value) > WIDTH // 2 and value.isprintable() and value == " ".join(value.split())


def _lines(value: Any, indent: int) -> Iterator[str]:
    """Yields the lines of a mapping or a list that is not empty."""
    pad = " " * indent
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{pad}{_scalar(key)}:", item, indent)
        return
    for item in value:
        if isinstance(item, Mapping | list | tuple) and item:
            first, *rest = _lines(item, indent + 2)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {_scalar(item) if not isinstance(item, Mapping | list | tuple) else json.dumps(item)}"


def _entry(head: str, item: Any, indent: int) -> Iterator[str]:
    if isinstance(item, Mapping) and item:
        yield head
        yield from _lines(item, indent + 2)
    elif isinstance(item, list | tuple) and item:
        yield head
        yield from _lines(item, indent)
    elif isinstance(item, Mapping | list | tuple):
        yield f"{head} {json.dumps(item)}"
    elif isinstance(item, str) and _folds(item):
        yield f"{head} >-"
        pad = " " * (indent + 2)
        width = max(40, WIDTH - len(pad))
        for line in textwrap.wrap(item, width, break_long_words=False, break_on_hyphens=False):
            yield pad + line
    else:
        yield f"{head} {_scalar(item)}"


def to_yaml(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Returns a JSON mapping or list as YAML, with a line break at its end.

    Raises:
        TypeError: the document holds something that is not JSON.
    """
    if not value:
        return json.dumps(value) + "\n"
    return "\n".join(_lines(value, 0)) + "\n"
