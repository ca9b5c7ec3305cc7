"""What the tests of the dashboard share: the dashboard itself, its queries, and what is in a PromQL expression."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Everything that PromQL gives a meaning where a metric's name could stand.
GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
WORDS = GROUPING | {"and", "or", "unless", "bool", "offset", "inf", "nan", "start", "end", "atan2"}
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
      | (?P<range>\[[^\]]*\])
      | (?P<number>0x[0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:ms|[smhdwy])?)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Selector:
    """A metric in an expression, and the labels that it is selected by."""

    metric: str
    labels: frozenset[str]


def tokens(expression: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(expression):
        match = TOKEN.match(expression, at)
        if match is None:
            raise ValueError(
                f"{expression!r}: what begins at character {at} is not PromQL: {expression[at : at + 20]!r}"
            )
        at = match.end()
        kind = str(match.lastgroup)
        if kind != "space":
            found.append((kind, match.group()))
    return found


def selectors(expression: str) -> list[Selector]:
    """Every metric that a PromQL expression reads.

    A name is a metric's unless a parenthesis or `by (...)` follows it (a function, an aggregation), it is a word of the
    language, or it stands in the label list of `by (...)` and its like. Label matchers belong to the name before them.
    """
    given = tokens(expression)
    found: list[Selector] = []
    at = 0
    while at < len(given):
        kind, text = given[at]
        following = given[at + 1][1] if at + 1 < len(given) else ""
        if kind == "name" and text.lower() in GROUPING and following == "(":
            at = given.index(("mark", ")"), at)
        elif kind == "name" and text.lower() not in WORDS and following.lower() not in ("(", "by", "without"):
            labels: frozenset[str] = frozenset()
            if following == "{":
                end = given.index(("mark", "}"), at)
                labels = frozenset(name for what, name in given[at + 2 : end] if what == "name")
                at = end
            found.append(Selector(text, labels))
        elif text == "{":
            raise ValueError(f"{expression!r}: a selector without a metric's name")
        at += 1
    return found


@dataclass(frozen=True)
class Query:
    """One target of a panel."""

    panel: str
    ref: str
    expr: str
    instant: bool

    def filled(self, namespace: str, job: str, window: str) -> str:
        """The expression as Grafana sends it."""
        made = self.expr.replace("$window", window).replace("$namespace", namespace).replace("$job", job)
        assert "$" not in made, made
        return made


class Dashboard:
    """The committed dashboard."""

    def __init__(self, path: Path) -> None:
        self.json: dict[str, Any] = json.loads(path.read_text())

    @property
    def panels(self) -> list[dict[str, Any]]:
        return [p for p in self.json["panels"] if p["type"] != "row"]

    def queries(self) -> Iterator[Query]:
        for panel in self.panels:
            for target in panel["targets"]:
                yield Query(panel["title"], target["refId"], target["expr"], bool(target.get("instant")))

    def other_expressions(self) -> Iterator[str]:
        """Of annotations and variables."""
        for annotation in self.json["annotations"]["list"]:
            if "expr" in annotation:
                yield annotation["expr"]
        for variable in self.json["templating"]["list"]:
            if variable["type"] == "query":
                inner = re.fullmatch(r"label_values\((.*), [a-z_]+\)", variable["query"]["query"])
                assert inner, variable["query"]
                yield inner.group(1)

    def expressions(self) -> list[str]:
        return [query.expr for query in self.queries()] + list(self.other_expressions())


@pytest.fixture(scope="session")
def dashboard(root: Path) -> Dashboard:
    return Dashboard(root / "helm" / "backstay" / "dashboards" / "backstay.json")


@pytest.fixture(scope="session")
def metrics_in() -> Any:
    return selectors
