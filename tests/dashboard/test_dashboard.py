"""The dashboard asks for what the code exports, in PromQL that Prometheus accepts, and is laid out for people."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from backstay._roles import _metrics as trainer
from backstay_operator import metrics as operator

# What Prometheus adds to every series of a target, through the PodMonitors' relabelings.
TARGET = frozenset({"namespace", "job", "pod", "container", "endpoint", "instance"})
TRAINER_TARGET = TARGET | {"role", "index"}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def exported() -> dict[str, frozenset[str]]:
    """Every series that the code exports -> its own labels and its target's."""
    made = vars(operator.Metrics()).values()
    families = [(m, TARGET) for m in made if isinstance(m, MetricWrapperBase)]
    families += [(m, TRAINER_TARGET) for m in trainer.Metrics("job", "Worker", 0).families]
    labels = {f"{m._name}{suffix}": target | frozenset(m._labelnames) for m, target in families for suffix in SUFFIXES}
    found = {name: labels.get(name, TARGET) for name in operator.metric_names() | trainer.metric_names()}
    return {name: known | ({"le"} if name.endswith("_bucket") else set()) for name, known in found.items()}


def test_every_name_in_every_query_is_exported(dashboard: Any, metrics_in: Any) -> None:
    known = exported()
    asked = [selector for expr in dashboard.expressions() for selector in metrics_in(expr)]
    assert len(asked) > 50
    unknown = {s.metric for s in asked} - set(known)
    assert not unknown, f"no code exports {sorted(unknown)}"
    wrong = {(s.metric, label) for s in asked for label in s.labels - known[s.metric]}
    assert not wrong, f"no such labels: {sorted(wrong)}"


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
def test_prometheus_accepts_every_query(dashboard: Any, tool: Callable[[str], str], tmp_path: Path) -> None:
    expressions = [*(q.filled("ns", "job", "1m") for q in dashboard.queries())]
    expressions += [e.replace("$namespace", "ns").replace("$job", "job") for e in dashboard.other_expressions()]

    def check(given: list[str]) -> subprocess.CompletedProcess[str]:
        rules = [{"record": f"r{n}", "expr": expr} for n, expr in enumerate(given)]
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
        return subprocess.run([tool("promtool"), "check", "rules", str(file)], capture_output=True, text=True)

    done = check(expressions)
    assert done.returncode == 0, done.stderr + done.stdout
    assert check(["sum by (x (y)"]).returncode != 0


def test_panels_do_not_overlap_and_leave_no_hole(dashboard: Any) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard.json["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    height = max(y for _, y in taken) + 1
    assert len(taken) == 24 * height
    ids = [p["id"] for p in dashboard.json["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_say_what_they_show_and_in_which_unit(dashboard: Any) -> None:
    titles = [p["title"] for p in dashboard.panels]
    assert len(titles) == len(set(titles))
    for panel in dashboard.panels:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [t["refId"] for t in panel["targets"]]
        assert len(refs) == len(set(refs))
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"] == panel["datasource"]


def test_a_job_s_panels_show_that_job_alone(dashboard: Any, metrics_in: Any) -> None:
    for query in dashboard.queries():
        of_job = {s.metric.startswith("backstay_operator_") for s in metrics_in(query.expr)}
        assert len(of_job) == 1, query
        if of_job == {False}:
            assert all({"namespace", "job"} <= s.labels for s in metrics_in(query.expr)), query


def test_variables_choose_data_source_namespace_and_job(dashboard: Any) -> None:
    variables = {v["name"]: v for v in dashboard.json["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job", "window"]
    assert variables["window"]["current"]["value"] == "5m"
    assert "$namespace" in variables["job"]["query"]["query"]
    assert dashboard.json["id"] is None
    assert dashboard.json["uid"]
