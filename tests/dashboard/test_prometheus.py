"""A real Prometheus watches a job with a slow worker, deaths, a failover, a full disk and a rollback.

Every query of every visible panel must have had data in that run, and one alert fires. Numbers that depend on no clock
are compared with the job's spec and status; `test_truth` compares the others, over series that are written down.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from between import put
from watched import (
    BATCH,
    FAULTS,
    JOB,
    NAMESPACE,
    RATE,
    SCRIPT,
    VALUES,
    Cluster,
    Prometheus,
    Watch,
    spec_of,
    suffer,
    until,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.tool("prometheus"),
    pytest.mark.tool("helm"),
    pytest.mark.timeout(1200),
]
WINDOW = "15s"
Sample = tuple[dict[str, str], float]

# Nothing of these need happen in this run: (dashboard, panel, query) -> why not.
MAY_BE_EMPTY = {
    ("job", "Updates", "B"): "no gradient that is not finite",
    ("operator", "Reconciliations", "B"): "no error of the operator",
    ("operator", "Watches, late and missed", "B"): "no deletion that a watch missed",
    ("job", "Worker seconds by part", "B"): "a replacement may fill a slot within one scrape",
}
# A processor's peak and memory are not known.
NO_DATA = ("Model FLOPs utilization", "Device memory")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Cluster]:
    put(tmp_path / "train.py", SCRIPT)
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


class Shown:
    """The values of the dashboards at the end of the run."""

    def __init__(self, dashboards: Any, prometheus: Prometheus, began: float) -> None:
        self._dashboards, self._prometheus = dashboards, prometheus
        self.began, self.now = began, time.time()

    def all(self, where: str, ref: str = "A") -> list[Sample]:
        """Returns the samples of a query now."""
        query = self._dashboards.query(*where.split(": ", 1), ref)
        found = self._prometheus.query(self._filled(query), self.now)
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def one(self, where: str, ref: str = "A") -> float:
        ((_, value),) = self.all(where, ref)
        return value

    def by(self, label: str, where: str, ref: str = "A") -> dict[str, float]:
        return {metric[label]: value for metric, value in self.all(where, ref)}

    def over_time(self, where: str, ref: str = "A") -> list[Sample]:
        """Returns the series of a query, as `history` has them."""
        return self.history(self._filled(self._dashboards.query(*where.split(": ", 1), ref)))

    def history(self, expr: str) -> list[Sample]:
        """Returns each series with the largest value that it had; a mean over a window without an observation is
        none."""
        found = self._prometheus.series(expr, self.began, self.now, 1)
        numbers = [
            (one["metric"], [v for _, text in one["values"] if math.isfinite(v := float(text))]) for one in found
        ]
        return [(metric, max(values)) for metric, values in numbers if values]

    def _filled(self, query: Any) -> str:
        expr: str = query.filled(NAMESPACE, JOB, WINDOW, f"{math.ceil(self.now - self.began)}s")
        return expr


def test_the_panels_show_what_happened(
    watched: Cluster, helm: Any, dashboards: Any, rule_groups: Any, tool: Callable[[str], str], tmp_path: Path
) -> None:
    began = time.time()
    watched.start(spec_of(tmp_path, FAULTS))
    watch = Watch(watched, helm.objects(*VALUES), tool("prometheus"), tmp_path)
    with watch.prometheus as prometheus:
        try:
            suffer(watched, watch, calm=5)  # a few scrapes of the whole job
        except AssertionError as error:
            pytest.fail(f"{error}\n{json.dumps(watched.status())}\n{watched.logs()}\n{prometheus.logs()[-1500:]}")

        # A scrape of a busy process may fail, and its series are missing until the next one.
        def look() -> bool:
            watch.discover()
            shown = Shown(dashboards, prometheus, began)
            try:
                what_depends_on_no_clock(shown, watched)
                every_query_had_data(shown, dashboards)
                one_alert_fired(shown, prometheus, rule_groups)
            except (AssertionError, LookupError, ValueError) as error:
                refuted[:] = [f"{type(error).__name__}: {error}"]
                return False
            return True

        refuted: list[str] = []
        try:
            until("the panels show what happened", look)
        except AssertionError as error:
            pytest.fail(f"{error}\n{refuted}")
        marks_are_at_deaths(Shown(dashboards, prometheus, began), dashboards)
        # The labels of a training pod's series are Kubernetes', and are not there twice.
        ((labels, _),) = Shown(dashboards, prometheus, began).history(
            'backstay_world_size{role="ParameterServer", index="0"} == 3'
        )[-1:]
        assert {"training_job": JOB, "namespace": NAMESPACE}.items() <= labels.items()
        assert not [label for label in labels if label.startswith("exported_")]


def every_query_had_data(shown: Shown, dashboards: Any) -> None:
    empty = [
        (query.dashboard, query.panel, query.ref)
        for query in dashboards.queries()
        if not query.hidden
        and (query.dashboard, query.panel, query.ref) not in MAY_BE_EMPTY
        and not shown.over_time(f"{query.dashboard}: {query.panel}", query.ref)
    ]
    assert empty == []
    assert [shown.all(f"job: {panel}") for panel in NO_DATA] == [[], []]


def what_depends_on_no_clock(shown: Shown, cluster: Cluster) -> None:
    """A whole job stays as it is, so that these need no common moment of seven processes."""
    roles = cluster.status()["roles"]
    assert shown.one("job: State") == 3
    for where, refs, values in (("Workers", "ABCD", [3, 3, 3, 3]), ("Servers", "ABC", [2, 2, 1])):
        assert [shown.one(f"job: {where}", ref) for ref in refs] == values
    assert shown.by("role", "job: Pods lost") == {role: r["restarts"] for role, r in roles.items() if r["restarts"]}
    assert shown.by("role", "job: Pods lost", "B") == {"Worker": roles["Worker"]["disruptions"]}
    ((last, at),) = shown.all("job: Last death")
    assert last["role"] == "ParameterServer"
    assert shown.began * 1000 < at < shown.now * 1000
    assert shown.one("job: Updates redone") > 0
    assert shown.by("part", "job: Worker seconds by part")["data"] > 0  # the script sleeps in its batches
    assert shown.one("job: Learning rate") == pytest.approx(RATE)
    assert shown.by("name", "job: Metrics of the loss function") == {"tokens": BATCH[0] * BATCH[1]}
    assert set(shown.by("name", "job: Loss", "B")) == {"norm"}
    assert 0 < shown.one("fleet: Jobs", "F") <= 4 * 2.5  # the price of an hour; a replacement may meet its predecessor
    assert shown.by("role", "fleet: Servers and ranks ready by role") == {
        "ParameterServer": 2,
        "Worker": 3,
        "Evaluator": 1,
    }
    assert shown.by("pod", "operator: Leader over time") == {"operator": 1}
    deaths = {(m["role"], m["cause"]) for m, _ in shown.over_time("operator: Deaths")}
    assert deaths >= {("ParameterServer", "Crashed"), ("Worker", "Crashed"), ("Worker", "Deleted")}


def marks_are_at_deaths(shown: Shown, dashboards: Any) -> None:
    for mark in (a for a in dashboards[1].json["annotations"]["list"] if "expr" in a):
        expr = mark["expr"].replace("$namespace", NAMESPACE).replace("$training_job", JOB)
        times = [value / 1000 for _, value in shown.history(expr)]
        assert times, mark["name"]
        assert all(shown.began < at < shown.now for at in times)


def one_alert_fired(shown: Shown, prometheus: Prometheus, rule_groups: Any) -> None:
    """The rules can be computed, and one alert fired that should, and none that should not."""
    rules = prometheus.rules()
    names = {r.get("alert") or r["record"] for g in rule_groups for r in g["rules"]}
    assert {r["name"] for r in rules} >= names
    assert [r["name"] for r in rules if r["health"] != "ok"] == []
    fired = {metric["alertname"] for metric, _ in shown.history('ALERTS{alertstate="firing"}')}
    assert "BackstayCheckpointsFail" in fired
    wrong = {"BackstayJobFailed", "BackstayNotFinite", "BackstayRestartBudgetLow", "BackstayWatchStale"}
    assert not fired & wrong
