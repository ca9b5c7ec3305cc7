"""Restricts a list, a watch or a delete of a collection by label and field selectors.

The grammar and the error texts are those of k8s.io/apimachinery, because clients show them to people.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from backstay_cluster.apiserver.errors import ApiError, bad_request
from backstay_cluster.apiserver.objects import Obj, dig, meta

LABEL_VALUE: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LABEL_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_TOKENS: Final = re.compile(r"\s*(?:(!=|==|=|!|,|\(|\)|>|<)|([^\s!=,()<>]+))")


@dataclass(frozen=True)
class Requirement:
    """One condition on one label, whose ``op`` is in, notin, exists, !, gt or lt."""

    key: str
    op: str
    values: frozenset[str] = frozenset()

    def matches(self, labels: dict[str, str]) -> bool:
        """Returns whether the labels match it."""
        value = labels.get(self.key)
        if self.op == "in":
            return value is not None and value in self.values
        if self.op == "notin":
            return value is None or value not in self.values
        if self.op == "exists":
            return value is not None
        if self.op == "!":
            return value is None
        bound = int(next(iter(self.values)))
        try:
            number = int(value or "")
        except ValueError:
            return False
        return number > bound if self.op == "gt" else number < bound


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        rest = text
        while rest.strip():
            found = _TOKENS.match(rest)
            if found is None:  # pragma: no cover  # the two alternatives cover every character
                raise bad_request(f"unable to parse requirement: {rest!r}")
            symbol, word = found.groups()
            self.tokens.append(("op", symbol) if symbol else ("id", word))
            rest = rest[found.end() :]
        self.tokens.append(("end", ""))
        self.at = 0

    def take(self) -> tuple[str, str]:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at]

    def parse(self) -> list[Requirement]:
        found: list[Requirement] = []
        while True:
            kind, text = self.peek()
            if kind == "end":
                return found
            if kind != "id" and text != "!":
                raise bad_request(f"found '{text}', expected: !, identifier, or 'end of string'")
            found.append(self.requirement())
            kind, text = self.take()
            if kind == "end":
                return found
            if text != ",":
                raise bad_request(f"found '{text}', expected: ',' or 'end of string'")
            kind, text = self.peek()
            if kind != "id" and text != "!":
                raise bad_request(f"found '{text}', expected: identifier after ','")

    def requirement(self) -> Requirement:
        kind, text = self.take()
        negated = text == "!" and kind == "op"
        if negated:
            kind, text = self.take()
        if kind != "id":
            raise bad_request(f"found '{text}', expected: identifier")
        key = text
        _check_key(key)
        if negated:
            return Requirement(key, "!")
        kind, text = self.peek()
        if kind == "end" or text == ",":
            return Requirement(key, "exists")
        self.take()
        if text in {"in", "notin"}:
            return Requirement(key, text, self.values())
        if text in {"=", "==", "!="}:
            value = self.exact()
            return Requirement(key, "notin" if text == "!=" else "in", frozenset((value,)))
        if text in {">", "<"}:
            value = self.exact()
            if not re.fullmatch(r"[+-]?\d+", value):
                raise bad_request("for 'Gt', 'Lt' operators, the value must be an integer")
            return Requirement(key, "gt" if text == ">" else "lt", frozenset((value,)))
        raise bad_request(f"found '{text}', expected: in, notin, =, ==, !=, gt, lt")

    def exact(self) -> str:
        kind, text = self.peek()
        if kind == "end" or text == ",":
            return ""
        if kind != "id":
            raise bad_request(f"found '{text}', expected: identifier")
        self.take()
        _check_value(text)
        return text

    def values(self) -> frozenset[str]:
        _, text = self.take()
        if text != "(":
            raise bad_request(f"found '{text}' expected: '('")
        found: set[str] = set()
        word = ""
        while True:
            kind, text = self.take()
            if kind == "id":
                _check_value(text)
                word = text
            elif text in {",", ")"}:
                found.add(word)
                word = ""
                if text == ")":
                    return frozenset(found)
            else:
                raise bad_request(f"found '{text}', expected: ',', or ')'")


def _check_key(key: str) -> None:
    name = key.rsplit("/", 1)[-1]
    if not LABEL_NAME.fullmatch(name) or len(name) > 63:
        raise bad_request(
            f'unable to parse requirement: key: Invalid value: "{key}": name part must consist of alphanumeric '
            "characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or "
            "'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )


def _check_value(value: str) -> None:
    if not LABEL_VALUE.fullmatch(value) or len(value) > 63:
        raise bad_request(
            f'unable to parse requirement: values[0][]: Invalid value: "{value}": a valid label must be an empty '
            "string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
            "alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
            "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        )


@functools.lru_cache(maxsize=1024)
def parse_labels(text: str) -> tuple[Requirement, ...]:
    """Returns the requirements of a label selector.

    Raises:
        ApiError: 400; the message has the found and the expected text.
    """
    return tuple(_Parser(text).parse())


_EVERY: Final = ("metadata.name", "metadata.namespace")
_FIELDS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("", "pods"): (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    ("", "events"): (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "regarding.kind",
        "regarding.namespace",
        "regarding.name",
        "regarding.uid",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    ("", "secrets"): ("type",),
    ("", "namespaces"): ("status.phase",),
    ("", "nodes"): ("spec.unschedulable",),
    ("", "services"): ("spec.clusterIP", "spec.type"),
}


def _field(obj: Obj, path: str) -> str:
    if path == "source":
        return str(dig(obj, "source", "component") or "")
    if path.startswith("regarding."):
        path = "involvedObject." + path.removeprefix("regarding.")
    value = dig(obj, *path.split("."))
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "false" if path in {"spec.hostNetwork", "spec.unschedulable"} else ""
    return str(value)


@functools.lru_cache(maxsize=1024)
def parse_fields(
    storage: tuple[str, str], text: str, selectable: tuple[str, ...] = ()
) -> tuple[tuple[str, str, bool], ...]:
    """Returns the terms of a field selector, each with a path, a value, and whether it must be equal.

    Raises:
        ApiError: 400 for a path that the resource cannot be selected by, or for text that is not a selector.
    """
    found: list[tuple[str, str, bool]] = []
    for term in re.split(r"(?<!\\),", text):
        if not term:
            continue
        split = re.match(r"([^=!]*)(!=|==|=)(.*)", term)
        if split is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        path, op, value = split.groups()
        if path not in _EVERY + _FIELDS.get(storage, ()) + selectable:
            raise _unsupported(storage, path)
        found.append((path, re.sub(r"\\(.)", r"\1", value), op != "!="))
    return tuple(found)


def _unsupported(storage: tuple[str, str], path: str) -> ApiError:
    if storage in _FIELDS or "." in storage[0]:
        return bad_request(f"field label not supported: {path}")
    return bad_request(f'"{path}" is not a known field selector: only "metadata.name", "metadata.namespace"')


Matcher = Callable[[Obj], bool]


def matcher(storage: tuple[str, str], labels: str, fields: str, selectable: tuple[str, ...] = ()) -> Matcher | None:
    """Returns a function that returns whether an object is selected, or None if all objects are selected.

    Raises:
        ApiError: 400 when one of the two texts is not a selector.
    """
    requirements = parse_labels(labels)
    terms = parse_fields(storage, fields, selectable)
    if not requirements and not terms:
        return None

    def matches(obj: Obj) -> bool:
        if requirements:
            own: dict[str, Any] = meta(obj).get("labels") or {}
            if not all(r.matches(own) for r in requirements):
                return False
        return all((_field(obj, path) == value) == equal for path, value, equal in terms)

    return matches
