"""The rules of a definition (`x-kubernetes-validations`), evaluated with cel-python.

Programs are compiled on first use and kept. A rule is evaluated only if its value changed: an unchanged value was
accepted before, and Kubernetes ratchets in the same way.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, Final

from backstay_cluster.apiserver.errors import StatusCause
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.patch import same

# Property names that are words of CEL are escaped: https://kubernetes.io/docs/reference/using-api/cel/#escaping
_RESERVED: Final = frozenset(
    (
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    )
)
_ESCAPES: Final = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))


def _escaped(name: str) -> str:
    for plain, escape in _ESCAPES:
        name = name.replace(plain, escape)
    return f"__{name}__" if name in _RESERVED else name


@functools.cache
def _celpy() -> Any:
    import celpy

    return celpy


def _same(left: Any, right: Any) -> bool:
    """Equality as in CEL of values without errors, where those of two types are unequal, and `true` is not 1."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(itertools.starmap(_same, zip(left, right, strict=True)))
    boolean = _celpy().celtypes.BoolType
    if isinstance(left, boolean) != isinstance(right, boolean):
        return False  # Python and cel-python treat booleans as numbers
    try:
        return bool(left == right)
    except TypeError:  # an int-or-string field may change its type
        return False


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Makes an operator of CEL from a comparison, whose result is the error of an operand, if there is one."""

    def operator(left: Any, right: Any) -> Any:
        error = next((operand for operand in (left, right) if isinstance(operand, Exception)), None)
        return _celpy().celtypes.BoolType(compare(left, right)) if error is None else error

    return operator


def _functions() -> dict[str, Any]:
    celpy = _celpy()
    text, array, integer = celpy.celtypes.StringType, celpy.celtypes.ListType, celpy.celtypes.IntType

    def substring(value: str, start: int, end: int | None = None) -> Any:
        end = len(value) if end is None else end
        if not 0 <= start <= end <= len(value):
            raise ValueError("index out of range")
        return text(value[start:end])

    return {
        "_==_": _compared(_same),
        "_!=_": _compared(lambda left, right: not _same(left, right)),
        "_in_": _compared(lambda item, container: any(_same(item, each) for each in container)),
        "lowerAscii": lambda s: text(s.lower()),
        "upperAscii": lambda s: text(s.upper()),
        "trim": lambda s: text(s.strip()),
        "replace": lambda s, old, new: text(s.replace(old, new)),
        "split": lambda s, separator: array([text(p) for p in s.split(separator)]),
        "join": lambda parts, separator="": text(separator.join(parts)),
        "indexOf": lambda s, part: integer(s.index(part) if part in s else -1),
        "substring": substring,
        "isSorted": lambda values: celpy.celtypes.BoolType(all(a <= b for a, b in itertools.pairwise(values))),
        "sum": lambda values: functools.reduce(lambda a, b: a + b, values, integer(0)),
        "min": lambda values: functools.reduce(lambda a, b: a if a <= b else b, values),
        "max": lambda values: functools.reduce(lambda a, b: a if a >= b else b, values),
    }


@functools.lru_cache(maxsize=2048)
def program(rule: str) -> Any:
    """Returns a compiled expression, with the functions that an API server adds to CEL; its `evaluate` takes the
    variables."""
    environment = _environment()
    return environment.program(environment.compile(rule), _functions())


@functools.cache
def _environment() -> Any:
    return _celpy().Environment()


def compile_error(rule: str) -> str | None:
    """Returns the reason why a rule cannot be compiled, or None if it can."""
    celpy = _celpy()
    try:
        program(rule)
    except celpy.CELParseError as error:
        return str(error.args[0]) if error.args else "the expression cannot be parsed"
    return None


def to_cel(value: Any, schema: Obj) -> Any:
    """Returns a JSON value as the variables of rules (`self`, `oldSelf`), with property names escaped according to
    `schema`."""
    types = _celpy().celtypes
    if value is None:
        return None
    if isinstance(value, bool):
        return types.BoolType(value)
    if isinstance(value, str):
        return types.StringType(value)
    if isinstance(value, int | float):
        if schema.get("type") == "number" or not float(value).is_integer() or not -(2**63) <= value < 2**63:
            return types.DoubleType(value)
        return types.IntType(int(value))
    if isinstance(value, list):
        items = schema.get("items") or {}
        return types.ListType([to_cel(v, items) for v in value])
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    rest = additional if isinstance(additional, dict) else {}
    # Keys of a map are data; names of properties are identifiers and escaped.
    return types.MapType(
        {
            types.StringType(_escaped(k) if k in properties else k): to_cel(v, properties.get(k, rest))
            for k, v in value.items()
        }
    )


def has_rules(schema: Any) -> bool:
    """Returns whether any part of the schema has a rule."""
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-validations"):
            return True
        nested = [*(schema.get("properties") or {}).values(), schema.get("items"), schema.get("additionalProperties")]
        return any(has_rules(part) for part in nested if isinstance(part, dict))
    return False


class CelRules:
    """The rules of one schema."""

    def __init__(self, schema: Obj) -> None:
        self._schema = schema
        self._with_rules: dict[int, bool] = {}

    def check(self, value: Any, old: Any = None) -> list[StatusCause]:
        """Returns the rules that `value` breaks, as causes; `old` is the previous value of an update, or None."""
        causes: list[StatusCause] = []
        self._walk(self._schema, value, old, "", causes)
        return causes

    def _has_rules(self, schema: Obj) -> bool:
        found = self._with_rules.get(id(schema))
        if found is None:
            found = self._with_rules[id(schema)] = has_rules(schema)
        return found

    def _walk(self, schema: Obj, value: Any, old: Any, path: str, causes: list[StatusCause]) -> None:
        if value is None or not self._has_rules(schema):
            return
        if old is not None and same(value, old):
            return
        rules = schema.get("x-kubernetes-validations") or ()
        if rules:
            self._rules(rules, schema, value, old, path, causes)
        if isinstance(value, dict):
            properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
            before = old if isinstance(old, dict) else {}
            for key, item in value.items():
                part = properties.get(key, additional)
                if isinstance(part, dict):
                    here = f"{path}.{key}" if path else key
                    self._walk(part, item, before.get(key), here, causes)
        elif isinstance(value, list) and isinstance(schema.get("items"), dict):
            for at, item in enumerate(value):
                self._walk(schema["items"], item, _counterpart(schema, item, old), f"{path}[{at}]", causes)

    def _rules(self, rules: Any, schema: Obj, value: Any, old: Any, path: str, causes: list[StatusCause]) -> None:
        activation: dict[str, Any] | None = None
        for rule in rules:
            text = rule["rule"]
            transition = bool(re.search(r"\boldSelf\b", text))
            if transition and old is None and not rule.get("optionalOldSelf"):
                continue
            if activation is None:
                activation = {"self": to_cel(value, schema)}
                if old is not None:
                    activation["oldSelf"] = to_cel(old, schema)
            cause = _evaluate(rule, activation, path)
            if cause is not None:
                causes.append(cause)


def _counterpart(schema: Obj, item: Any, old: Any) -> Any:
    if not isinstance(old, list):
        return None
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys") or []
    if kind == "map" and isinstance(item, dict):
        return next((o for o in old if isinstance(o, dict) and all(o.get(k) == item.get(k) for k in keys)), None)
    return next((o for o in old if same(o, item)), None)


def _evaluate(rule: Obj, activation: dict[str, Any], path: str) -> StatusCause | None:
    celpy = _celpy()
    text = rule["rule"]
    message = rule.get("message") or f"failed rule: {text.strip()}"
    where = path + (rule.get("fieldPath") or "") if rule.get("fieldPath") else path
    reason = rule.get("reason") or "FieldValueInvalid"
    try:
        result = program(text).evaluate(activation)
        if result:
            return None
        if rule.get("messageExpression"):
            message = str(program(rule["messageExpression"]).evaluate(activation)).strip() or message
    except celpy.CELEvalError as error:
        shown = _shown(activation["self"])
        return StatusCause(
            path, "FieldValueInvalid", f'Invalid value: "{shown}": {_words(error)} evaluating rule: {message}'
        )
    prefix = {
        "FieldValueForbidden": "Forbidden",
        "FieldValueRequired": "Required value",
        "FieldValueDuplicate": "Duplicate value",
    }.get(reason, "Invalid value")
    return StatusCause(where.lstrip("."), reason, f"{prefix}: {message}")


def _shown(value: Any) -> str:
    types = _celpy().celtypes
    if isinstance(value, types.MapType):
        return "object"
    return "array" if isinstance(value, types.ListType) else str(value)


def _words(error: Any) -> str:
    text = str(error.args[0]) if error.args else "the rule cannot be evaluated"
    found = re.match(r"no such member in mapping: '(.*)'", text)
    return f"no such key: {found[1]}" if found else text
