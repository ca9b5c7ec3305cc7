"""Validates JSON against a structural schema like the API server, but reports every mistake with a valid alternative.

Like the API server, it drops nulls, fills in defaults, and keeps values under
``x-kubernetes-preserve-unknown-fields``. Unlike the API server, it treats unknown fields as mistakes, and suggests the
field with the most similar name.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from backstay_spec.crd_schema import INT_OR_STRING, PRESERVE, Schema, spec_schema
from backstay_spec.errors import SpecError
from backstay_spec.rules import BOUNDS

__all__ = ["FoundMistakes", "display", "join", "kind_of"]

MAX_DEPTH: Final = 64
"""Deepest nesting of what is passed on to Kubernetes; no pod comes near it, and a bomb must not exhaust the stack."""

_SHOWN: Final = 60
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_VALID: Final = {bound.path: bound.valid for bound in BOUNDS if bound.valid}
_TYPES: Final = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "object": "a mapping",
    "array": "a list",
}


def join(path: str, name: object) -> str:
    """Returns the path of a field, quoted where its name would be misread."""
    text = str(name)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return f"{path}[{display(text)}]"
    return f"{path}.{text}" if path else text


def display(value: object) -> str:
    """Returns a value as a message shows it: JSON, cut when long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def kind_of(value: object) -> str:
    """Returns the type of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}, which JSON does not have"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> object:
    """3.0 as 3, as YAML tools send it to an API server."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    """(name, path) of every field below a schema."""
    for name, inner in schema.get("properties", {}).items():
        here = join(path, name)
        yield name, here
        if "items" in inner:
            yield from _fields(inner["items"], f"{here}[]")
        yield from _fields(inner, here)


@cache
def _where_is() -> dict[str, list[str]]:
    """Returns all paths of each field name in spec, the shortest first."""
    by_name: dict[str, list[str]] = {}
    for name, path in _fields(spec_schema(), "spec"):
        by_name.setdefault(name, []).append(path)
    return {name: sorted(paths, key=lambda path: path.count(".")) for name, paths in by_name.items()}


def _close(word: str, words: list[str]) -> str | None:
    plain = {one.lower(): one for one in words}
    squeezed = word.lower().replace("_", "").replace("-", "")
    if squeezed in plain:
        return plain[squeezed]
    near = difflib.get_close_matches(squeezed, list(plain), n=1, cutoff=0.7)
    return plain[near[0]] if near else None


def _unknown(name: str, names: list[str], path: str) -> str:
    parent = path or "a TrainingJob"
    near = _close(name, names)
    if near is not None:
        return f"is not a field of {parent}: did you mean {near}?"
    paths = _where_is().get(name, [])
    below = [one for one in paths if one.startswith(f"{path}.")]
    if paths:
        likely = [one for one in below or paths if one.count(".") == (below or paths)[0].count(".")]
        return f"is not a field of {parent}: it belongs at {' or '.join(likely)}"
    return f"is not a field of {parent}: its fields are {', '.join(names)}"


@dataclass
class FoundMistakes:
    """The mistakes found so far.

    Attributes:
        errors: the list to which every mistake is appended.
        malformed: paths whose value is missing or cannot be used; rules that read them are not judged.
    """

    errors: list[SpecError] = field(default_factory=list)
    malformed: set[str] = field(default_factory=set)

    def refuse(self, path: str, message: str) -> None:
        """Notes a value that cannot be used."""
        self.errors.append(SpecError(path, message))
        self.malformed.add(path)

    def usable(self, path: str) -> bool:
        """Returns whether nothing at, below or above a path is malformed."""
        return not any(_related(path, bad) for bad in self.malformed)

    def value(self, value: Any, schema: Schema, path: str, schema_path: str, *, lenient: bool = False) -> Any:
        """Returns the value with nulls dropped and defaults filled in, as far as it can be used.

        Args:
            value: what a person wrote; not changed.
            schema: what it must be.
            path: where it is, for messages.
            schema_path: the same with ``[]`` for every item of a list and ``{}`` for every value of a map.
            lenient: drop unknown fields instead of refusing them.
        """
        if INT_OR_STRING in schema:
            return self._int_or_string(value, schema, path, schema_path)
        kind = schema.get("type")
        if kind is None:
            return self._free(value, path)
        if kind in {"integer", "number"}:
            value = _whole(value) if kind == "integer" else value
        valid = {
            "integer": isinstance(value, int) and not isinstance(value, bool),
            "number": _is_number(value) and math.isfinite(value),
            "boolean": isinstance(value, bool),
            "string": isinstance(value, str),
            "object": isinstance(value, Mapping),
            "array": isinstance(value, list | tuple),
        }[kind]
        if not valid:
            self.refuse(path, self._wrong_type(value, kind))
            return None
        if kind == "object":
            return self._object(value, schema, path, schema_path, lenient)
        if kind == "array":
            self._size(len(value), schema, path, schema_path, "Items")
            items = schema["items"]
            return [
                self.value(one, items, f"{path}[{index}]", f"{schema_path}[]", lenient=lenient)
                for index, one in enumerate(value)
            ]
        if kind == "string":
            self._string(value, schema, path, schema_path)
        elif kind in {"integer", "number"}:
            self._range(value, schema, path)
        return value

    @staticmethod
    def _wrong_type(value: Any, kind: str) -> str:
        hint = ""
        if isinstance(value, str) and kind in {"integer", "number"} and re.fullmatch(r"-?[0-9]+", value):
            hint = f"; write {value} without quotes"
        elif isinstance(value, str) and kind == "boolean" and value.lower() in {"true", "false"}:
            hint = f"; write {value.lower()} without quotes"
        # YAML made another type of what the user wrote, and quotes are the whole cure.
        elif kind == "string" and isinstance(value, bool | int | float):
            hint = f"; write {display(str(value).lower() if isinstance(value, bool) else str(value))} in quotes"
        elif kind == "string" and isinstance(value, datetime.date | None):
            hint = f"; write {display('null' if value is None else str(value))} in quotes"
        elif kind == "array" and isinstance(value, str):
            hint = f"; write {display(value.split())}"
        shown = kind_of(value) if isinstance(value, Mapping | list | tuple) else f"{display(value)}, {kind_of(value)}"
        if value is None or isinstance(value, bool) or (isinstance(value, float) and kind in {"integer", "number"}):
            shown = display(value)
        return f"is {shown}: must be {_TYPES[kind]}{hint}"

    def _object(
        self, value: Mapping[Any, Any], schema: Schema, path: str, schema_path: str, lenient: bool
    ) -> dict[str, Any]:
        properties: Schema = schema.get("properties", {})
        extra = schema.get("additionalProperties")
        clean: dict[str, Any] = {}
        for name, inner in value.items():
            here, there = join(path, name), join(schema_path, name)
            if not self._is_name(name, here):
                continue
            if name in properties:
                if inner is not None:
                    clean[name] = self.value(inner, properties[name], here, there, lenient=lenient)
            elif extra is not None:
                if inner is not None:
                    clean[name] = self.value(inner, extra, here, f"{schema_path}{{}}", lenient=lenient)
            elif schema.get(PRESERVE):
                clean[name] = self._free(inner, here)
            elif not lenient:
                self.errors.append(SpecError(here, _unknown(name, list(properties), path)))
        for name, inner in properties.items():
            if name not in clean and "default" in inner:
                clean[name] = self.value(inner["default"], inner, join(path, name), join(schema_path, name))
        for name in schema.get("required", ()):
            if name not in clean:
                self.refuse(join(path, name), self._missing(properties[name], join(schema_path, name)))
        self._size(len(clean), schema, path, schema_path, "Properties")
        return clean

    def _is_name(self, name: object, path: str) -> bool:
        if isinstance(name, str):
            return self._is_text(name, path)
        self.refuse(path, f"is a field named by {kind_of(name)}: must be named by a string; write it in quotes")
        return False

    @staticmethod
    def _missing(schema: Schema, schema_path: str) -> str:
        return f"is missing: must be {_VALID.get(schema_path) or _TYPES[schema['type']]}"

    def _int_or_string(self, value: Any, schema: Schema, path: str, schema_path: str) -> Any:
        value = _whole(value)
        if isinstance(value, str):
            self._string(value, schema, path, schema_path)
        elif isinstance(value, int) and not isinstance(value, bool):
            self._range(value, schema, path)
        else:
            hint = f"; write {display(str(value))} in quotes" if isinstance(value, float) else ""
            self.refuse(
                path, f"is {display(value)}: must be {_VALID.get(schema_path) or 'a whole number or a string'}{hint}"
            )
        return value

    def _string(self, value: str, schema: Schema, path: str, schema_path: str) -> None:
        if not self._is_text(value, path):
            return
        choices: list[str] = schema.get("enum", [])
        if choices and value not in choices:
            near = _close(value, choices) if len(choices) > 1 else None
            hint = f"; did you mean {near}?" if near else ""
            self.refuse(path, f"is {display(value)}: must be {' or '.join(choices)}{hint}")
            return
        # In the API server, a dollar sign matches the end only. In Python it also matches before a last line break.
        pattern = str(schema.get("pattern", "")).removesuffix("$")
        if len(value) < schema.get("minLength", 0):
            self.refuse(path, f"is empty: must be {_VALID.get(schema_path) or 'a string that is not empty'}")
        elif len(value) > schema.get("maxLength", len(value)):
            longest = f", of at most {schema['maxLength']} characters"
            self.refuse(path, f"is {display(value)}: must be {_VALID.get(schema_path) or 'a string'}{longest}")
        elif pattern and re.search(rf"{pattern}\Z", value) is None:
            self.refuse(path, f"is {display(value)}: must be {_VALID[schema_path]}")

    def _is_text(self, value: str, path: str) -> bool:
        """Refuse what Python makes of bytes that are not UTF-8; an API server would store another text."""
        if value.isascii() or _LONE_SURROGATE.search(value) is None:
            return True
        self.refuse(path, f"is {display(value)}, which is not UTF-8 text: must be UTF-8, as all text in Kubernetes")
        return False

    def _range(self, value: float, schema: Schema, path: str) -> None:
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is None or value >= low) and (high is None or value <= high):
            return
        if low is not None and high is not None and high == low + 1:
            self.refuse(path, f"is {display(value)}: must be {low} or {high}")
        elif low is not None and high is not None and high < 2**31 - 1:
            self.refuse(path, f"is {display(value)}: must be between {low} and {high}")
        elif low is not None and value < low:
            self.refuse(path, f"is {display(value)}: must be at least {low}")
        else:
            self.refuse(path, f"is {display(value)}: must be at most {high}")

    def _size(self, size: int, schema: Schema, path: str, schema_path: str, keyword: str) -> None:
        noun = {"Items": "items", "Properties": "fields"}[keyword]
        low, high = schema.get(f"min{keyword}", 0), schema.get(f"max{keyword}", size)
        if size < low:
            self.refuse(path, f"is empty: must be {_VALID[schema_path]}")
        elif size > high:
            self.refuse(path, f"has {size} {noun}: must have at most {high}")

    def _free(self, value: Any, path: str) -> Any:
        """Check that a value without a schema is JSON with a bounded depth. Does not recurse."""
        waiting = [(path, value, 0)]
        while waiting:
            where, one, depth = waiting.pop()
            if depth > MAX_DEPTH:
                self.refuse(path, f"is nested more than {MAX_DEPTH} deep: no field of a pod is")
                return None
            if isinstance(one, Mapping):
                for name, inner in one.items():
                    self._is_name(name, join(where, name))
                    waiting.append((join(where, name), inner, depth + 1))
            elif isinstance(one, list | tuple):
                waiting.extend((f"{where}[{index}]", inner, depth + 1) for index, inner in enumerate(one))
            elif isinstance(one, float) and not math.isfinite(one):
                self.refuse(where, f"is {one}: must be a finite number, JSON has no other")
            elif isinstance(one, str):
                self._is_text(one, where)
            elif not (one is None or isinstance(one, bool | int | float)):
                self.refuse(where, f"is {kind_of(one)}: must be a string; write it in quotes")
        return value


def _related(path: str, other: str) -> bool:
    """Returns whether two paths are the same or one lies within the other."""
    short, long = sorted((path, other), key=len)
    return long.startswith(short) and (not short or len(long) == len(short) or long[len(short)] in ".[")
