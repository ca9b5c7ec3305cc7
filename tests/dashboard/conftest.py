"""The tests of the dashboards and rules share their queries, and a parser of PromQL expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """Returns every metric that a PromQL expression reads.

    A name before a parenthesis or `by (...)` is a function or an aggregation, and not a metric. Words of the language
    and names in the label list of `by (...)` are not metrics either. Label matchers belong to the previous name.
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

    dashboard: str
    panel: str
    ref: str
    expr: str
    instant: bool
    hidden: bool

    def filled(self, namespace: str, job: str, window: str, span: str = "10m") -> str:
        """Returns the expression as Grafana sends it; `window` is `$__rate_interval`, `span` the time range."""
        return fill(self.expr, namespace, job, window, span)


def fill(expr: str, namespace: str, job: str, window: str = "4m", span: str = "10m") -> str:
    """Returns an expression with the values of a dashboard's variables."""
    values = {
        "__rate_interval": window,
        "__range": span,
        "namespace": namespace,
        "training_job": job,
        "job": ".*/backstay-operator",  # as with several releases
        "pod": "operator",
    }
    for name, value in values.items():
        expr = re.sub(rf"\${name}\b", value, expr)
    assert "$" not in expr, expr
    return expr


class Dashboard:
    """One of the committed dashboards."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.json: dict[str, Any] = json.loads(path.read_text())

    @property
    def panels(self) -> list[dict[str, Any]]:
        """With those in collapsed rows."""
        return [one for one, _ in self.placed()]

    def placed(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yields each panel, and whether it is in a collapsed row."""
        for panel in self.json["panels"]:
            if panel["type"] != "row":
                yield panel, False
            for inner in panel.get("panels", ()):
                yield inner, True

    def queries(self) -> Iterator[Query]:
        for panel, hidden in self.placed():
            for target in panel["targets"]:
                instant = bool(target["instant"])
                yield Query(self.name, panel["title"], target["refId"], target["expr"], instant, hidden)

    def other_expressions(self) -> Iterator[str]:
        """Yields the expressions of annotations and variables."""
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


class Dashboards(list[Dashboard]):
    """All of them."""

    def queries(self) -> list[Query]:
        return [query for one in self for query in one.queries()]

    def filled(self) -> list[str]:
        """Returns every expression, with values in place of variables."""
        return [fill(expr, "ns", "job") for one in self for expr in one.expressions()]

    def query(self, dashboard: str, panel: str, ref: str = "A") -> Query:
        (found,) = (q for q in self.queries() if (q.dashboard, q.panel, q.ref) == (dashboard, panel, ref))
        return found


@pytest.fixture(scope="session")
def dashboards(root: Path) -> Dashboards:
    folder = root / "helm" / "backstay" / "dashboards"
    return Dashboards(Dashboard(path) for path in sorted(folder.glob("*.json")))


@pytest.fixture(scope="session")
def rule_groups(root: Path) -> list[dict[str, Any]]:
    """The groups of the chart's rules."""
    found: list[dict[str, Any]] = yaml.safe_load((root / "helm/backstay/rules/backstay.yaml").read_text())["groups"]
    return found


@pytest.fixture(scope="session")
def metrics_in() -> Any:
    return selectors
