"""Two releases of the chart serve a namespace each, with their own values, and one Prometheus has the rules of both."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from between import put

pytestmark = [pytest.mark.tool("helm"), pytest.mark.tool("promtool")]

MINUTES = 120
RELEASES = {
    "vision": ("goodputBelow=0.3", "podPricePerHour.Worker=2.5", "podPricePerHour.ParameterServer=0.5"),
    "speech": ("goodputBelow=0.8", "podPricePerHour.Worker=4"),
}


def series(name: str, values: str, namespace: str, **labels: str) -> dict[str, str]:
    given = {"namespace": namespace, "training_job": "job", **labels}
    text = ", ".join(f'{label}="{value}"' for label, value in given.items())
    return {"series": f"backstay_job_{name}{{{text}}}", "values": values}


def job(namespace: str) -> list[dict[str, str]]:
    """Returns the series of a job with a goodput of a half, 2 ranks of 3 pods, and a server."""
    return [
        series("worker_seconds", f"0+180x{MINUTES}", namespace, part="applied"),
        series("worker_seconds", f"0+180x{MINUTES}", namespace, part="wait"),
        series("start_timestamp_seconds", f"0x{MINUTES}", namespace),
        series("training", f"1x{MINUTES}", namespace),
        series("pod_seconds_total", f"0+360x{MINUTES}", namespace, role="Worker"),
        series("pod_seconds_total", f"0+60x{MINUTES}", namespace, role="ParameterServer"),
    ]


@pytest.fixture
def rules(helm: Any, tmp_path: Path) -> list[str]:
    """The files with the rules of both releases."""
    files = []
    for namespace, values in RELEASES.items():
        given = ",".join(f"metrics.prometheusRule.{value}" for value in ("enabled=true", *values))
        objects = helm.objects(f"--set=watchNamespace={namespace},{given}", namespace=namespace)
        (rule,) = (o for o in objects if o["kind"] == "PrometheusRule")
        for group in rule["spec"]["groups"]:
            group["name"] = f"{namespace}.{group['name']}"
            for one in group["rules"]:
                one.pop("annotations", None)  # promtool compares them
        files.append(f"{namespace}.yaml")
        put(tmp_path / files[-1], yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    return files


def test_the_values_of_a_release_are_about_its_own_jobs(
    rules: list[str], tool: Callable[[str], str], dashboards: Any, tmp_path: Path
) -> None:
    costs = [
        {
            "expr": f"round({dashboards.query('fleet', 'Jobs', 'F').filled(namespace, 'job', '4m')}, 0.01)",
            "eval_time": "60m",
            "exp_samples": [{"labels": f'{{namespace="{namespace}", training_job="job"}}', "value": value}],
        }
        for namespace, value in (("vision", 6 * 2.5 + 0.5), ("speech", 6 * 4))
    ]
    low = {"namespace": "speech", "training_job": "job", "severity": "warning"}
    alert = {"alertname": "BackstayGoodputLow", "eval_time": "60m", "exp_alerts": [{"exp_labels": low}]}
    test = {
        "interval": "1m",
        "input_series": job("vision") + job("speech"),
        "alert_rule_test": [alert],
        "promql_expr_test": costs,
    }
    file = tmp_path / "test.yaml"
    put(file, yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
