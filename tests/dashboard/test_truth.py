"""What the panels show, against the truth of small made-up jobs: slow steps, few samples, coordinators that die.

`promtool test rules` computes each panel's query over series that are written down sample by sample, so no time passes
and nothing is a race. A value that is extrapolated by `rate` is compared within the error of its window.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.tool("promtool")

SCRAPE = 15
EACH_STEP = 6  # scrapes: a step takes 90 s
HOUR = 3600 // SCRAPE


def labels(role: str, index: int = 0, pod: str = "a", **more: str) -> str:
    given = {"namespace": "ns", "job": "job", "role": role, "index": str(index), "pod": pod, **more}
    return "{" + ", ".join(f'{name}="{value}"' for name, value in given.items()) + "}"


def counted(each: float, scrapes: int = HOUR, every: int = EACH_STEP) -> str:
    """A counter that grows by `each` at every `every`-th scrape."""
    return " ".join(f"{each * (at // every):g}" for at in range(scrapes))


def histogram(name: str, labels: str, edges: dict[str, bool], seconds: float) -> dict[str, str]:
    """One observation of `seconds` for each step; `edges` says which buckets count it."""
    series = {f"{name}_sum{labels}": counted(seconds), f"{name}_count{labels}": counted(1)}
    for edge, counts in edges.items():
        series[f'{name}_bucket{labels[:-1]}, le="{edge}"}}'] = counted(1 if counts else 0)
    return series


def coordinators(name: str, values: list[list[float]]) -> dict[str, str]:
    """A metric of coordinators that follow each other, each with a pod of its own, one scrape after another."""
    series, before = {}, 0
    for number, own in enumerate(values):
        text = " ".join(["_"] * before + [f"{value:g}" for value in own] + ["stale"])
        series[f"{name}{labels('ParameterServer', pod=f'pod-{number}')}"] = text
        before += len(own) + 1
    return series


@pytest.fixture
def shows(dashboard: Any, tool: Callable[[str], str], tmp_path: Path) -> Callable[..., None]:
    """Whether all samples of a panel's query lie between two values at a time."""

    def check(
        panel: str, ref: str, series: dict[str, str], low: float, high: float, *, at: int, window: str = "5m"
    ) -> None:
        (query,) = (q for q in dashboard.queries() if (q.panel, q.ref) == (panel, ref))
        expr = query.filled("ns", "job", "5m")
        inside = f"min(({expr}) >= bool {low}) * max(({expr}) <= bool {high})"
        tests = [
            {
                "interval": f"{SCRAPE}s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {"expr": inside, "eval_time": f"{at * SCRAPE}s", "exp_samples": [{"labels": "{}", "value": 1}]}
                ],
            }
        ]
        file = tmp_path / "test.yaml"
        file.write_text(yaml.safe_dump({"tests": tests}))
        done = subprocess.run([tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, f"{panel} {ref} at scrape {at}: not in [{low}, {high}]\n{done.stdout}{done.stderr}"

    return check


@pytest.mark.parametrize("at", range(60, 60 + EACH_STEP))
def test_steps_of_90_seconds_have_a_steady_rate(shows: Any, at: int) -> None:
    """Each of the scrapes between two updates: neither 0 nor twice the truth."""
    updates = {f"backstay_updates_total{labels('ParameterServer')}": counted(1)}
    shows("Updates", "A", updates, 0.75 / 90, 1.35 / 90, at=at)
    shows("Updates", "C", updates, 90 / 1.35, 90 / 0.75, at=at)
    parts = {}
    for part, seconds in {"batch_wait": 1, "compute": 60, "push": 4, "update_wait": 20, "pull": 5}.items():
        worker = labels("Worker", part=part)
        parts |= {
            f"backstay_step_seconds_sum{worker}": counted(seconds),
            f"backstay_step_seconds_count{worker}": counted(1),
        }
    shows("Step of the mean worker", "A", parts, 1 - 1e-6, 60 + 1e-6, at=at)
    shows("Compute by rank", "A", parts, 60 - 1e-6, 60 + 1e-6, at=at)


def test_a_dozen_samples_have_a_mean_and_a_bound(shows: Any) -> None:
    """43 s each: the mean is exact, and the slowest is in the bucket that ends at 60 s."""
    waits = histogram(
        "backstay_quorum_wait_seconds", labels("ParameterServer"), {"30": False, "60": True, "+Inf": True}, 43
    )
    shows("Wait for the quorum", "A", waits, 43 - 1e-6, 43 + 1e-6, at=80)
    shows("Wait for the quorum", "B", waits, 43, 60, at=80)
    applied = histogram(
        "backstay_apply_seconds", labels("ParameterServer", 1), {"0.01": False, "0.025": True, "+Inf": True}, 0.022
    )
    shows("Update by shard", "A", applied, 0.0219, 0.0221, at=80)
    stale = histogram("backstay_staleness", labels("ParameterServer"), {"0": False, "1": True, "+Inf": True}, 1)
    shows("Staleness", "A", stale, 1 - 1e-6, 1 + 1e-6, at=80)
    shows("Staleness", "B", stale, 1, 1, at=80)


def test_counters_do_not_fall_when_a_coordinator_is_replaced(shows: Any) -> None:
    """A checkpoint a minute, from one coordinator and then from its successor: about five in five minutes."""
    first, second = [at // 4 for at in range(33)], [at // 4 for at in range(40)]
    stored = coordinators("backstay_checkpoints_total", [first, second])
    for at in (32, 40, 50, 60):
        shows("Checkpoints", "A", stored, 2.5, 6.5, at=at)
    joins = coordinators("backstay_joins_total", [[4.0] * 20 + [5.0] * 13, [0.0, 4.0] + [4.0] * 38])
    shows("Pods joining", "A", joins, 3, 6.5, at=45)
    shows("Pods joining", "A", joins, 0, 0, at=70)


def test_the_checkpoints_age_goes_on_while_there_is_no_coordinator(shows: Any) -> None:
    """Stored at 60 s; the coordinator dies at 300 s. The next one starts at 600 s with the time of the manifest."""
    name = "backstay_checkpoint_timestamp_seconds"
    dead = {
        f"{name}{labels('ParameterServer')}": " ".join(["0"] * 4 + ["60"] * 16 + ["stale"]),
        f"{name}{labels('ParameterServer', pod='b')}": " ".join(["_"] * 40 + ["60"] * 20),
    }
    for at in (10, 19, 30, 39, 45):
        age = at * SCRAPE - 60
        shows("Age of the newest checkpoint", "A", dead, age, age, at=at)


def test_a_negative_loss_of_the_active_server_is_shown_beside_a_standby(shows: Any) -> None:
    """The standby has no series: see tests/runtime/test_lost_updates.py."""
    loss = {f"backstay_loss{labels('ParameterServer')}": "-2.5x10"}
    shows("Loss over time", "A", loss, -2.5, -2.5, at=5)


def test_a_wrong_value_fails(shows: Any) -> None:
    loss = {f"backstay_loss{labels('ParameterServer')}": "-2.5x10"}
    with pytest.raises(AssertionError, match="not in"):
        shows("Loss over time", "A", loss, -2.4, 0, at=5)
    with pytest.raises(AssertionError, match="not in"):
        shows("Loss over time", "A", {}, -2.5, -2.5, at=5)


def test_no_panel_shows_a_raw_counter_or_a_bucket_as_a_quantile(dashboard: Any, metrics_in: Any) -> None:
    for query in dashboard.queries():
        for selector in metrics_in(query.expr):
            if selector.metric.endswith(("_total", "_bucket", "_count", "_sum")):
                assert "rate(" in query.expr or "increase(" in query.expr, query
        assert "histogram_quantile(0" not in query.expr, query
    assert "$__rate_interval" not in json.dumps(dashboard.json)
