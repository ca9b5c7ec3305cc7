"""The dashboards query exported metrics, in PromQL that Prometheus accepts, and are laid out for people.

The tests check what Grafana's dashboard-linter requires of a dashboard, except the variables `job` and `instance`, and
what was found in a Grafana (docs/decisions/0046).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from between import put
from prometheus_client.metrics import MetricWrapperBase

from backstay._report import _metrics as trainer
from backstay_operator import metrics as operator
from backstay_spec.causes import Cause

# The labels that Prometheus adds to every series of a target, through the PodMonitors' relabelings.
TARGET = frozenset({"namespace", "job", "pod", "container", "endpoint", "instance", "component"})
TRAINER_TARGET = TARGET | {"training_job", "role", "index", "node"}
# Not Backstay's: of Prometheus itself, of cAdvisor, of the DCGM exporter, and a cost from the chart's values.
OTHERS = {
    *("up", "ALERTS", "training_job:backstay_cost:per_hour"),
    *(
        "container_cpu_usage_seconds_total",
        "container_cpu_cfs_throttled_periods_total",
        "container_cpu_cfs_periods_total",
    ),
    *("container_memory_working_set_bytes", "container_spec_memory_limit_bytes"),
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP"),
}
PROCESS = ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds")
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def exported() -> dict[str, frozenset[str]]:
    """Returns every series that the code exports -> its own labels and its target's."""
    metrics = operator.OperatorMetrics()
    families = [(m, TARGET) for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)]
    families += [(m, TRAINER_TARGET) for m in trainer.PodMetrics("job", "Worker", 0).families]
    labels = {f"{m._name}{suffix}": target | frozenset(m._labelnames) for m, target in families for suffix in SUFFIXES}
    for family in metrics.job.describe():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels[name] = TARGET | frozenset(family._labelnames)
    found = {name: labels.get(name, TARGET) for name in operator.metric_names() | trainer.metric_names()}
    found |= {f"process_{name}": TRAINER_TARGET for name in PROCESS}
    return {name: known | ({"le"} if name.endswith("_bucket") else set()) for name, known in found.items()}


def check_names(expressions: list[str], metrics_in: Any, more: set[str]) -> None:
    known = exported()
    asked = [selector for expr in expressions for selector in metrics_in(expr) if selector.metric not in more]
    unknown = {s.metric for s in asked} - set(known)
    assert not unknown, f"no code exports {sorted(unknown)}"
    wrong = {(s.metric, label) for s in asked for label in s.labels - known[s.metric]}
    assert not wrong, f"no such labels: {sorted(wrong)}"


def test_every_name_in_every_query_is_exported(dashboards: Any, metrics_in: Any, rule_groups: Any) -> None:
    recorded = {rule["record"] for group in rule_groups for rule in group["rules"] if "record" in rule}
    for dashboard in dashboards:
        expressions = dashboard.expressions()
        assert len(expressions) > 15, dashboard.name
        check_names(expressions, metrics_in, OTHERS)
    # A dashboard works without the chart's rules, but for the cost, which needs the prices among them.
    of_rules = [rule["expr"] for group in rule_groups for rule in group["rules"]]
    check_names(of_rules, metrics_in, recorded | OTHERS)


def test_the_dashboards_and_rules_are_fresh(root: Path) -> None:
    folder = root / "helm" / "dashboards"
    program = f"import runpy, json; print(json.dumps(runpy.run_path({str(folder / '__main__.py')!r})['files']()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path, made in json.loads(done.stdout).items():
        assert (root / "helm" / "backstay" / path).read_text() == made, "make generate"


@pytest.mark.parametrize(
    ("expression", "metrics"),
    [
        ("up", {"up"}),
        ('sum by (role, cause) (rate(a_total{job=~"$job", x!="by (b)"}[5m]))', {"a_total"}),
        ("histogram_quantile(0.99, sum by (le) (rate(b_bucket[$__rate_interval])))", {"b_bucket"}),
        ("a / on (job) group_left (x) b unless c offset 5m > bool 1e3", {"a", "b", "c"}),
        ("max_over_time(rate(c_total[1m])[1h:1m]) + Inf", {"c_total"}),
        ('label_replace(d, "to", "$1", "from", "e(.*)")', {"d"}),
        ("sum(f) by (g)", {"f"}),
    ],
)
def test_metrics_are_found_in_promql(metrics_in: Any, expression: str, metrics: set[str]) -> None:
    assert {s.metric for s in metrics_in(expression)} == metrics


@pytest.mark.parametrize("expression", ['{job="x"}', "a ; b", "rate(a[5m]) ? 1"])
def test_what_cannot_be_read_is_not_passed_over(metrics_in: Any, expression: str) -> None:
    with pytest.raises(ValueError, match=r"not PromQL|without a metric's name"):
        metrics_in(expression)


@pytest.mark.tool("promtool")
def test_prometheus_accepts_every_query(dashboards: Any, tool: Callable[[str], str], tmp_path: Path) -> None:
    expressions = dashboards.filled()

    def check(given: list[str]) -> subprocess.CompletedProcess[str]:
        rules = [{"record": f"r{n}", "expr": expr} for n, expr in enumerate(given)]
        file = tmp_path / "rules.yaml"
        put(file, yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
        return subprocess.run([tool("promtool"), "check", "rules", str(file)], capture_output=True, text=True)

    done = check(expressions)
    assert done.returncode == 0, done.stderr + done.stdout
    assert check(["sum by (x (y)"]).returncode != 0


def test_variables_have_the_names_that_the_linter_requires(dashboards: Any) -> None:
    for dashboard in dashboards:
        for variable in dashboard.json["templating"]["list"]:
            if variable["type"] == "datasource":
                assert variable["name"] == f"{variable['query']}_datasource"
                assert variable["label"] == f"{variable['query'].title()} data source"
            if variable["type"] == "query":
                assert variable["refresh"] == 2, "reloaded when the time range changes"


def test_a_state_is_shown_by_its_name(dashboards: Any) -> None:
    """If colours come from thresholds, Grafana's state timeline shows the range of a threshold, and no mapped value."""
    (panel,) = (p for dashboard in dashboards for p in dashboard.panels if p["type"] == "state-timeline")
    assert panel["fieldConfig"]["defaults"]["color"]["mode"] != "thresholds"
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert all(one["text"] and one["color"] for one in mapping["options"].values())


def test_a_number_of_now_is_not_an_older_one(dashboards: Any) -> None:
    """Grafana's stat shows the last value of a series, even if the query has none any more at the end of the range."""
    kept = {
        ("job", "Progress"): "of a job that is gone, too",
        ("job", "Checkpoint age"): "of a job that is gone, too",
        ("fleet", "Jobs that stopped"): "always a value",
        ("fleet", "Alerts that fire"): "always a value",
        ("fleet", "Servers and ranks ready"): "always a value, and a line",
    }
    ranges = {
        (dashboard.name, panel["title"])
        for dashboard in dashboards
        for panel in dashboard.panels
        if panel["type"] == "stat" and not all(target["instant"] for target in panel["targets"])
    }
    assert ranges == set(kept)


def check_layout(panels: list[dict[str, Any]]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_panels_do_not_overlap(dashboards: Any) -> None:
    for dashboard in dashboards:
        check_layout(dashboard.json["panels"])
        for row in dashboard.json["panels"]:
            check_layout(row.get("panels", []))
        ids = [p["id"] for p in [*dashboard.json["panels"], *dashboard.panels]]
        assert len(set(ids)) == len(dashboard.json["panels"]) + sum(hidden for _, hidden in dashboard.placed())


def test_panels_state_what_they_show_and_in_which_unit(dashboards: Any) -> None:
    for dashboard in dashboards:
        titles = [p["title"] for p in dashboard.panels]
        assert len(titles) == len(set(titles))
        for panel, hidden in dashboard.placed():
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${prometheus_datasource}"}
            refs = [t["refId"] for t in panel["targets"]]
            assert len(refs) == len(set(refs)) > 0
            for target in panel["targets"]:
                assert target["legendFormat"]
                assert target["datasource"] == panel["datasource"]
            if hidden:  # a row that is collapsed may lack data, and then says what it needs
                assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


def test_rates_fit_the_resolution(dashboards: Any) -> None:
    """A window of a few samples makes a rate alternate between 0 and twice the truth (steps of 90 s).

    Grafana's `$__rate_interval` is at least four times the query's least step, which is the variable `resolution`.
    """
    for dashboard in dashboards:
        for panel in dashboard.panels:
            for target in panel["targets"]:
                if "$__rate_interval" in target["expr"]:
                    assert target["interval"] == "$resolution", panel["title"]
                windows = set(re.findall(r"\[([^\]]*)\]", target["expr"]))
                allowed = {"$__rate_interval", "$__range"} | ({"24h"} if target["instant"] else set())
                assert windows <= allowed, panel["title"]


def test_a_name_has_one_colour_that_colour_blind_people_can_distinguish(dashboards: Any) -> None:
    seen: dict[str, str] = {}
    by_panel: list[tuple[str, dict[str, str]]] = []
    for dashboard in dashboards:
        for panel in dashboard.panels:
            mine: dict[str, str] = {}
            for override in panel["fieldConfig"]["overrides"]:
                for one in override["properties"]:
                    if one["id"] == "color" and override["matcher"]["id"] == "byName":
                        mine[override["matcher"]["options"]] = one["value"]["fixedColor"]
            by_panel.append((panel["title"], mine))
            for name, colour in mine.items():
                assert seen.setdefault(name, colour) == colour, name
    greys = {"#999999", "#666666"}
    for title, mine in by_panel:
        colours = [colour for colour in mine.values() if colour not in greys]
        assert len(colours) == len(set(colours)), title
        for first, second in itertools.combinations(set(colours), 2):
            assert distance(first, second) > 9, (title, first, second)
    assert seen["applied"] != seen["abandoned"]


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def distance(first: str, second: str) -> float:
    """Returns the difference of two colours in deuteranopia, Euclidean in CIELAB.

    The matrix is that of Machado, Oliveira and Fernandes, https://doi.org/10.1109/TVCG.2009.113, severity 1.
    """
    seen = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
    xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))

    def lab(colour: str) -> tuple[float, float, float]:
        rgb = linear(colour)
        for matrix in (seen, xyz):
            rgb = [sum(a * b for a, b in zip(line, rgb, strict=True)) for line in matrix]
        x, y, z = (max(v, 0.0) / white for v, white in zip(rgb, (0.9505, 1, 1.089), strict=True))
        fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
        return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)

    return math.dist(lab(first), lab(second))


def test_a_job_s_panels_show_that_job_alone(dashboards: Any, metrics_in: Any) -> None:
    for query in dashboards.queries():
        labels = [s.labels for s in metrics_in(query.expr) if s.metric.startswith(("backstay_", "process_"))]
        match query.dashboard:
            case "job":
                assert all({"namespace", "training_job"} <= given for given in labels), query
            case "fleet":
                assert all({"namespace"} <= given for given in labels), query
            case "operator":
                assert all({"job", "pod"} <= given for given in labels), query


def test_the_dashboards_lead_to_each_other(dashboards: Any) -> None:
    assert [d.json["uid"] for d in dashboards] == ["backstay-fleet", "backstay-job", "backstay-operator"]
    for dashboard in dashboards:
        assert dashboard.json["id"] is None
        assert dashboard.json["editable"] is False
        assert dashboard.json["tags"] == ["backstay"]
        (link,) = (link for link in dashboard.json["links"] if link["type"] == "dashboards")
        assert link["tags"] == ["backstay"]
        assert link["includeVars"] is (dashboard.name != "fleet"), "All namespaces would mix jobs of one name"
        assert link["keepTime"]
    text = json.dumps(dashboards[0].json)
    assert "/d/backstay-job/" in text
    variables = [v["name"] for v in dashboards[1].json["templating"]["list"]]
    assert variables == ["prometheus_datasource", "loki_datasource", "namespace", "training_job", "resolution"]
    for name in re.findall(r"var-([a-z_]+)=", text):
        assert name in variables


def test_an_event_is_one_mark(dashboards: Any) -> None:
    """An event is not an area as long as a window, because the series' value is the time, and crashes differ from
    disruptions."""
    marks = [a for a in dashboards[1].json["annotations"]["list"] if "expr" in a]
    assert [a["name"] for a in marks] == ["Crashes", "Disruptions"]
    charged = {str(cause) for cause in Cause if cause.charged}
    for mark in marks:
        assert mark["useValueForTime"]
        assert set(re.findall(r'cause[=!]~"([^"]*)"', mark["expr"])[0].split("|")) == charged
    assert not [a for a in dashboards[2].json["annotations"]["list"] if "expr" in a]
