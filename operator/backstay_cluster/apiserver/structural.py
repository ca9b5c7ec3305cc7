"""Prunes unknown fields, sets defaults, and validates by structural schemas of custom resources.

Messages are those of the real server's schema validator. The same errors as in the real server prevent rules (CEL) from
being checked.
"""

from __future__ import annotations

import collections
import datetime
import functools
import ipaddress
import itertools
import re
from typing import Any, Final

from backstay_cluster.apiserver.errors import StatusCause, invalid_value, not_supported, required, show
from backstay_cluster.apiserver.objects import Obj, copy
from backstay_cluster.apiserver.patch import same

BLOCKING: Final = frozenset(
    ("FieldValueNotSupported", "FieldValueRequired", "FieldValueTooLong", "FieldValueTooMany", "FieldValueTypeInvalid")
)
UNCHECKED: Final = StatusCause(
    "<nil>",
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
)
_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING: Final = "x-kubernetes-int-or-string"
_EMBEDDED: Final = "x-kubernetes-embedded-resource"


def prune(schema: Obj, value: Any, path: str, unknown: list[str], *, root: bool = False) -> None:
    """Remove from `value`, in place, the fields that are not in the schema; their paths are added to `unknown`."""
    if isinstance(value, list):
        items = schema.get("items")
        if isinstance(items, dict):
            for at, element in enumerate(value):
                prune(items, element, f"{path}[{at}]", unknown)
        return
    if not isinstance(value, dict):
        return
    properties = schema.get("properties") or {}
    additional = schema.get("additionalProperties")
    known = {"apiVersion", "kind", "metadata"} if root or schema.get(_EMBEDDED) else ()
    for key in list(value):
        here = f"{path}.{key}" if path else key
        if key in known:
            continue
        if key in properties:
            prune(properties[key], value[key], here, unknown)
        elif isinstance(additional, dict):
            prune(additional, value[key], here, unknown)
        elif not additional and not schema.get(_PRESERVE):
            del value[key]
            unknown.append(here)


def default(schema: Obj, value: Any) -> None:
    """Set the schema's defaults in `value`, in place; a null that is not allowed counts as a missing field."""
    if isinstance(value, list):
        items = schema.get("items")
        if isinstance(items, dict):
            for element in value:
                default(items, element)
        return
    if not isinstance(value, dict):
        return
    properties = schema.get("properties") or {}
    for key, part in properties.items():
        # `kubectl apply` and charts write null to unset a field.
        if key in value and value[key] is None and not part.get("nullable"):
            if "default" in part:
                value[key] = copy(part["default"])
            else:
                del value[key]
        elif key not in value and "default" in part:
            value[key] = copy(part["default"])
        if key in value:
            default(part, value[key])
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        for key in [k for k in value if k not in properties]:
            if value[key] is None and not additional.get("nullable"):
                del value[key]
            else:
                default(additional, value[key])


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    # In the language of schemas `$` is the end of the text; in Python it also matches before a final newline.
    return re.compile(re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1\\Z", pattern))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _fits(expected: str, value: Any) -> bool:
    found = _type_of(value)
    if expected == "number":
        return found in {"number", "integer"}
    if expected == "integer":
        # Beyond 64 bits a number is a float in the real server. Beyond 2**53 its schemas do not accept a float as
        # integer.
        if found == "integer":
            return bool(-(2**63) <= value < 2**63)
        return bool(found == "number" and float(value).is_integer() and abs(value) <= 2**53)
    return found == expected


_FORMATS = {"date-time", "date", "ipv4", "ip", "ipv6", "cidr", "uuid", "duration"}
_GO_TYPES = {"integer": "int64", "number": "float64", "boolean": "bool"}  # in messages about formats


class Validator:
    """Collects the errors of a value. `name` is the path in messages, `path` the path in causes."""

    def __init__(self) -> None:
        self.causes: list[StatusCause] = []

    def check(self, schema: Obj, value: Any, path: str, name: str | None = None) -> None:
        """Validate `value` at `path`."""
        name = path if name is None else name
        if value is None and schema.get("nullable"):
            return
        fits = self._type(schema, value, path, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._number(schema, value, path, name)
        elif fits and isinstance(value, str):
            self._string(schema, value, path, name)
        elif fits and isinstance(value, list):
            self._array(schema, value, path, name)
        elif fits and isinstance(value, dict):
            self._object(schema, value, path, name)
        if "enum" in schema and not any(same(value, choice) for choice in schema["enum"]):
            self.causes.append(not_supported(path, value, [c for c in schema["enum"] if c is not None]))
        self._combined(schema, value, path, name)

    def _type(self, schema: Obj, value: Any, path: str, name: str) -> bool:
        if schema.get(_INT_OR_STRING):
            expected = ["integer", "string"]
        elif schema.get("type"):
            expected = [schema["type"]]
        else:
            return True
        if any(_fits(e, value) for e in expected):
            return True
        found = _type_of(value)
        if expected == ["string"] and schema.get("format") in _FORMATS:
            expected, found = [schema["format"]], _GO_TYPES.get(found, found)
        text = f'{name} in body must be of type {",".join(expected)}: "{found}"'
        self.causes.append(StatusCause(path, "FieldValueTypeInvalid", f'Invalid value: "{found}": {text}'))
        return False

    def _invalid(self, path: str, value: Any, text: str) -> None:
        self.causes.append(invalid_value(path, value, text))

    def _string(self, schema: Obj, value: str, path: str, name: str) -> None:
        limit = schema.get("maxLength")
        if limit is not None and len(value) > limit:
            self.causes.append(StatusCause(path, "FieldValueTooLong", f"Too long: may not be more than {limit} bytes"))
        elif len(value) < schema.get("minLength", 0):
            self._invalid(path, value, f"{name} in body should be at least {schema['minLength']} chars long")
        elif schema.get("pattern") and not _regex(schema["pattern"]).search(value):
            self._invalid(path, value, f"{name} in body should match '{schema['pattern']}'")
        elif schema.get("format") and not _formatted(schema["format"], value):
            text = f'{name} in body must be of type {schema["format"]}: "{value}"'
            self.causes.append(StatusCause(path, "FieldValueTypeInvalid", f"Invalid value: {show(value)}: {text}"))

    def _number(self, schema: Obj, value: float, path: str, name: str) -> None:
        top, bottom, step = schema.get("maximum"), schema.get("minimum"), schema.get("multipleOf")
        if step and abs(value / step - round(value / step)) > 1e-9:
            self._invalid(path, value, f"{name} in body should be a multiple of {show(step)}")
        if top is not None:
            if schema.get("exclusiveMaximum") and value >= top:
                self._invalid(path, value, f"{name} in body should be less than {show(top)}")
            elif value > top:
                self._invalid(path, value, f"{name} in body should be less than or equal to {show(top)}")
        if bottom is not None:
            if schema.get("exclusiveMinimum") and value <= bottom:
                self._invalid(path, value, f"{name} in body should be greater than {show(bottom)}")
            elif value < bottom:
                self._invalid(path, value, f"{name} in body should be greater than or equal to {show(bottom)}")
        bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
        if bits and not -(2**bits) <= value < 2**bits:
            text = f"Checked value must be of type {schema['type']} with format {schema['format']} in {name}"
            self._whole(text)

    def _array(self, schema: Obj, value: list[Any], path: str, name: str) -> None:
        most, least = schema.get("maxItems"), schema.get("minItems", 0)
        if most is not None and len(value) > most:
            text = f"Too many: {len(value)}: must have at most {most} items"
            self.causes.append(StatusCause(path, "FieldValueTooMany", text))
        if len(value) < least:
            self._invalid(path, len(value), f"{name} in body should have at least {least} items")
        items = schema.get("items")
        if isinstance(items, dict):
            for at, element in enumerate(value):
                self.check(items, element, f"{path}[{at}]", f"{name}[{at}]")
        self._unique(schema, value, path)

    def _unique(self, schema: Obj, value: list[Any], path: str) -> None:
        kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys") or []
        if kind not in {"set", "map"}:
            return
        seen: collections.Counter[str] = collections.Counter()
        for at, element in enumerate(value):
            identity = element
            if kind == "map":
                if not isinstance(element, dict):
                    self._invalid(f"{path}[{at}]", element, "must be an object for an array of list-type map")
                    continue
                identity = {k: element[k] for k in keys if k in element}
            text = show(identity)
            seen[text] += 1
            if seen[text] == 2:
                self.causes.append(StatusCause(f"{path}[{at}]", "FieldValueDuplicate", f"Duplicate value: {text}"))

    def _object(self, schema: Obj, value: Obj, path: str, name: str) -> None:
        most, least = schema.get("maxProperties"), schema.get("minProperties", 0)
        if most is not None and len(value) > most:
            text = f"Too many: {len(value)}: must have at most {most} items"
            self.causes.append(StatusCause(path, "FieldValueTooMany", text))
        if len(value) < least:
            self._invalid(path, len(value), f"{name} in body should have at least {least} properties")
        properties = schema.get("properties") or {}
        self.causes += [
            required(f"{path}.{key}" if path else key) for key in schema.get("required") or () if key not in value
        ]
        additional = schema.get("additionalProperties")
        for key, item in value.items():
            here = (f"{path}.{key}" if path else key, f"{name}.{key}" if name else key)
            if key in properties:
                self.check(properties[key], item, *here)
            elif isinstance(additional, dict):
                self.check(additional, item, *here)

    def _combined(self, schema: Obj, value: Any, path: str, name: str) -> None:
        some, one, every = (schema.get(kind) or () for kind in ("anyOf", "oneOf", "allOf"))
        if some:
            found = [_causes(part, value, path, name) for part in some]
            if all(found):
                self._whole(f'"{name}" must validate at least one schema (anyOf)')
                self.causes += found[0]
        if one:
            found = [_causes(part, value, path, name) for part in one]
            count = sum(not causes for causes in found)
            if count != 1:
                what = "Found none valid" if not count else f"Found {count} valid alternatives"
                self._whole(f'"{name}" must validate one and only one schema (oneOf). {what}')
                self.causes += [] if count else found[0]
        failed = [causes for part in every if (causes := _causes(part, value, path, name))]
        if failed:
            self.causes += itertools.chain(*failed)
            self._whole(f'"{name}" must validate all the schemas (allOf)')
        if isinstance(schema.get("not"), dict) and valid(schema["not"], value):
            self._whole(f'"{name}" must not validate the schema (not)')

    def _whole(self, text: str) -> None:
        """Add an error for which the real server names no field."""
        self.causes.append(StatusCause("<nil>", "FieldValueInvalid", f'Invalid value: "": {text}'))


def _causes(schema: Obj, value: Any, path: str, name: str) -> list[StatusCause]:
    validator = Validator()
    validator.check(schema, value, path, name)
    return validator.causes


def valid(schema: Obj, value: Any) -> bool:
    """Returns whether a value matches a schema."""
    return not _causes(schema, value, "", "")


_DATE, _TIME = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d(\.\d+)?"


def _formatted(name: str, value: str) -> bool:
    try:
        if name == "date-time":
            datetime.datetime.fromisoformat(value.upper())
            return bool(re.fullmatch(rf"{_DATE}[Tt]{_TIME}([Zz]|[+-]\d\d:\d\d)", value, re.ASCII))
        if name == "date":
            datetime.date.fromisoformat(value)
        elif name in {"ipv4", "ip"}:
            ipaddress.IPv4Address(value) if name == "ipv4" else ipaddress.ip_address(value)
        elif name == "ipv6":
            ipaddress.IPv6Address(value)
        elif name == "cidr":
            ipaddress.ip_network(value, strict=False)
        elif name == "uuid":
            return bool(re.fullmatch(r"(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", value))
        elif name == "duration":
            return bool(re.fullmatch(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h|d|w))+|0", value))
    except ValueError:
        return False
    return True
