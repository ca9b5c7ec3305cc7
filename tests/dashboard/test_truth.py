"""The values of the panels equal the truth of small made-up jobs with slow steps, few samples, and coordinators that
die.

`promtool test rules` computes each panel's query over series that are written down sample by sample, so no time passes
and nothing is a race. A value that is extrapolated by `rate` is compared within the error of its window.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from between import put

pytestmark = pytest.mark.tool("promtool")

SCRAPE = 15
EACH_STEP = 6  # scrapes: a step takes 90 s
HOUR = 3600 // SCRAPE
# Counters that are kept in the job's status: neither the operator's nor a pod's end sets them to 0.
LASTING = {f"backstay_job_{name}_total" for name in ("restarts", "disruptions", "steps_redone")}


def labels(role: str, index: int = 0, pod: str = "a", **more: str) -> str:
    given = {"namespace": "ns", "training_job": "job", "role": role, "index": str(index), "pod": pod, **more}
    return "{" + ", ".join(f'{name}="{value}"' for name, value in given.items()) + "}"


def counted(each: float, scrapes: int = HOUR, every: int = EACH_STEP) -> str:
    """Returns a counter that grows by `each` at every `every`-th scrape."""
    return " ".join(f"{each * (at // every):g}" for at in range(scrapes))


def histogram(name: str, labels: str, edges: dict[str, bool], seconds: float) -> dict[str, str]:
    """Returns one observation of `seconds` for each step; `edges` says which buckets count it."""
    series = {f"{name}_sum{labels}": counted(seconds), f"{name}_count{labels}": counted(1)}
    for edge, counts in edges.items():
        series[f'{name}_bucket{labels[:-1]}, le="{edge}"}}'] = counted(1 if counts else 0)
    return series


def coordinators(name: str, values: list[list[float]]) -> dict[str, str]:
    """Returns a metric of coordinators that follow each other, each in another pod, one scrape after another."""
    series, before = {}, 0
    for number, own in enumerate(values):
        text = " ".join(["_"] * before + [f"{value:g}" for value in own] + ["stale"])
        series[f"{name}{labels('ParameterServer', pod=f'pod-{number}')}"] = text
        before += len(own) + 1
    return series


@pytest.fixture
def shows(dashboards: Any, tool: Callable[[str], str], tmp_path: Path) -> Callable[..., None]:
    """Whether all samples of a panel's query lie between two values at a time; with `number`, whether they are so
    many."""

    def check(
        panel: str,
        ref: str,
        series: dict[str, str],
        low: float,
        high: float,
        *,
        at: int,
        dashboard: str = "job",
        number: int = 0,
    ) -> None:
        expr = dashboards.query(dashboard, panel, ref).filled("ns", "job", "4m", "15m")
        inside = f"min(({expr}) >= bool {low}) * min(({expr}) <= bool {high})"
        if number:
            inside += f" * (count({expr}) == bool {number})"
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
        put(file, yaml.safe_dump({"tests": tests}))
        done = subprocess.run([tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, f"{panel} {ref} at scrape {at}: not in [{low}, {high}]\n{done.stdout}{done.stderr}"

    return check


@pytest.mark.parametrize("at", range(60, 60 + EACH_STEP))
def test_steps_of_90_seconds_have_a_steady_rate(shows: Any, at: int) -> None:
    """Each of the scrapes between two updates shows neither 0 nor twice the truth."""
    updates = {f"backstay_updates_total{labels('ParameterServer')}": counted(1)}
    shows("Updates", "A", updates, 0.75 / 90, 1.35 / 90, at=at)
    shows("Updates", "C", updates, 90 / 1.35, 90 / 0.75, at=at)
    parts = {}
    for part, seconds in {"data": 1, "compute": 60, "send": 4, "wait": 20, "receive": 5}.items():
        worker = labels("Worker", part=part)
        parts |= {
            f"backstay_step_part_seconds_sum{worker}": counted(seconds),
            f"backstay_step_part_seconds_count{worker}": counted(1),
        }
    shows("Step of the mean worker", "A", parts, 1 - 1e-6, 60 + 1e-6, at=at)
    own = {
        f"backstay_gradient_seconds_sum{labels('Worker')}": counted(61),
        f"backstay_gradient_seconds_count{labels('Worker')}": counted(1),
    }
    shows("Slowest ranks", "A", own, 61 - 1e-6, 61 + 1e-6, at=at)


def test_a_dozen_samples_have_a_mean_and_a_bound(shows: Any) -> None:
    """With 43 s each, the mean is exact, and the slowest is in the bucket that ends at 60 s."""
    waits = histogram(
        "backstay_quorum_wait_seconds", labels("ParameterServer"), {"30": False, "60": True, "+Inf": True}, 43
    )
    shows("Wait for the quorum", "A", waits, 43 - 1e-6, 43 + 1e-6, at=80)
    shows("Wait for the quorum", "B", waits, 43, 60, at=80)
    applied = histogram(
        "backstay_apply_seconds", labels("ParameterServer", 1), {"0.01": False, "0.025": True, "+Inf": True}, 0.022
    )
    shows("Update by shard", "A", applied, 0.0219, 0.0221, at=80)
    shows("Update by shard", "B", applied, 0.022, 0.025, at=80)
    edges = {"0": False, "1": True, "+Inf": True}
    stale = histogram("backstay_staleness_versions", labels("ParameterServer"), edges, 1)
    shows("Staleness", "A", stale, 1 - 1e-6, 1 + 1e-6, at=80)
    shows("Staleness", "B", stale, 1, 1, at=80)


def test_counters_do_not_fall_when_a_coordinator_is_replaced(shows: Any) -> None:
    """A checkpoint a minute, from one coordinator and then from its successor."""
    first, second = [at // 4 for at in range(33)], [at // 4 for at in range(40)]
    stored = coordinators("backstay_checkpoints_total", [first, second])
    for at in (32, 40, 50, 60):
        shows("Checkpoints", "A", stored, 0.4, 1.4, at=at)
    joins = coordinators("backstay_joins_total", [[4.0] * 20 + [5.0] * 13, [0.0, 4.0] + [4.0] * 38])
    shows("Connections", "A", joins, 0.6, 1.4, at=45)
    shows("Connections", "A", joins, 0, 0, at=70)


def of_job(name: str, **more: str) -> str:
    """Returns a series of the operator about the job."""
    given = {"namespace": "ns", "training_job": "job", **more}
    return f"backstay_job_{name}{{" + ", ".join(f'{label}="{value}"' for label, value in given.items()) + "}"


def test_the_checkpoints_age_grows_while_there_is_no_coordinator(shows: Any) -> None:
    """Stored at 60 s; the operator has it from the job's status, even without a coordinator."""
    stored = {
        of_job("checkpoint_timestamp_seconds"): " ".join(["_"] * 4 + ["60"] * 56),
        of_job("checkpoint_interval_seconds"): "60x60",
    }
    for at in (10, 19, 30, 39, 45):
        age = at * SCRAPE - 60
        shows("Age of the newest checkpoint", "A", stored, age, age, at=at)
        shows("Checkpoint age", "A", stored, age, age, at=at)
        shows("Checkpoint age", "B", stored, age / 60, age / 60, at=at)


def test_a_negative_loss_of_the_active_server_is_shown_beside_a_standby(shows: Any) -> None:
    """The standby has no series: see tests/runtime/test_lost_updates.py."""
    loss = {f"backstay_loss{labels('ParameterServer')}": "-2.5x10"}
    shows("Loss", "A", loss, -2.5, -2.5, at=5)


def spent(part: str, each: str) -> dict[str, str]:
    """Returns the job's worker pods spend this number of seconds of every 15 s between scrapes on a part."""
    return {of_job("worker_seconds", part=part): each}


def test_goodput_is_the_share_of_worker_seconds_whose_computation_counts(shows: Any) -> None:
    """One worker computes 12 s of every 15, a third of it for nothing, and the slot beside it is empty."""
    series = spent("applied", "0+8x240") | spent("dropped", "0+4x240") | spent("wait", "0+3x240")
    series |= spent("missing", "0+15x240")
    truth = 8 / 30
    shows("Goodput", "A", series, truth - 1e-3, truth + 1e-3, at=100)
    shows("Jobs", "D", series, truth - 1e-3, truth + 1e-3, at=100, dashboard="fleet")
    shows("Worker seconds by part", "A", series, 3 / 30 - 1e-3, 15 / 30 + 1e-3, at=100)


def test_seconds_that_a_rollback_discarded_reduce_the_goodput_of_that_time(shows: Any) -> None:
    """The range is 15 minutes, 60 scrapes: in it, 400 of 600 applied seconds are discarded."""
    series = spent("applied", "0+10x210 1700+10x30") | spent("redone", "0x210 400x30") | spent("wait", "0+5x241")
    shows("Goodput", "A", series, 0.2, 0.25, at=240)


def test_goodput_of_a_job_that_stopped_is_zero(shows: Any) -> None:
    series = spent("wait", "0+15x240") | spent("applied", "7x240")
    shows("Goodput", "A", series, 0, 0, at=100)


def test_the_state_is_what_the_job_does(shows: Any) -> None:
    """1 Pending, 2 Starting, 3 Training, 4 Stopped, 5 Suspended, 6 Succeeded, 7 Failed, 8 Ending.

    Only a job that is to train lacks pods.
    """

    def phase(name: str, **more: str) -> dict[str, str]:
        names = ("Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed")
        return {of_job("phase", phase=one): f"{int(one == name)}x10" for one in names} | {
            of_job(metric): f"{value}x10" for metric, value in more.items()
        }

    for made, state in (
        (phase("Pending"), 1),
        (phase("Starting", training="0"), 2),
        (phase("Running", training="1", step="5"), 3),
        (phase("Running", training="0", step="5"), 4),
        (phase("Starting", training="0", step="5"), 4),
        (phase("Suspended", step="5"), 5),
        (phase("Succeeded", step="5"), 6),
        (phase("Failed", step="5"), 7),
        (phase("Running", step="5"), 8),
    ):
        shows("State", "A", made, state, state, at=5)
    for ready, state in ((0, 10), (1, 11), (2, 12)):
        pods = {
            of_job("pods", role="Worker", state="desired"): "2x10",
            of_job("pods", role="Worker", state="ready"): f"{ready}x10",
        }
        shows("State", "B", pods | {of_job("training"): "0x10"}, state, state, at=5)
        with pytest.raises(AssertionError, match="not in"):
            shows("State", "B", pods, 10, 12, at=5)


def test_updates_redone_add_up_over_two_operators(shows: Any) -> None:
    """In the 15 minutes of the range, 40 under one and 30 under its successor."""
    redone = {
        of_job("steps_redone_total", pod="first"): "0x10 40x20 stale",
        of_job("steps_redone_total", pod="second"): "_x31 40x5 70x20",
    }
    shows("Updates redone", "A", redone, 65, 75, at=56)


def test_progress_time_left_and_the_fleets_row(shows: Any) -> None:
    """Step 40 of 100, an update every 30 s."""
    series = {
        of_job("step"): "0+0.5x80 40x20",
        of_job("goal_steps"): "100x100",
        of_job("updates_per_second"): f"{1 / 30}x100",
        of_job("restarts_total", role="Worker"): "0x40 3x60",
        of_job("disruptions_total", role="Worker"): "0x40 1x60",
    }
    for panel, ref, low, high in (("Progress", "A", 0.4, 0.4), ("Time left", "A", 1790, 1810)):
        shows(panel, ref, series, low, high, at=80)
    for ref, low, high in (("B", 0.4, 0.4), ("C", 1790, 1810), ("G", 3, 3), ("H", 1, 1)):
        shows("Jobs", ref, series, low, high, at=80, dashboard="fleet")


def test_without_an_operator_there_is_no_leader(shows: Any) -> None:
    """The operator's series end with the operator, and a stat would show the last value."""
    for panel in ("Leader", "Operators up"):
        shows(panel, "A", {}, 0, 0, at=10, dashboard="operator")


def test_each_release_has_a_leader(shows: Any) -> None:
    """Two releases have two leaders, and one without any is shown."""

    def leads(namespace: str, *values: int) -> dict[str, str]:
        job = f'job="{namespace}/backstay-operator", namespace="{namespace}"'
        return {
            f'backstay_operator_leader{{{job}, pod="operator", instance="{n}"}}': f"{value}x10"
            for n, value in enumerate(values)
        }

    shows("Leader", "A", leads("a", 1, 0) | leads("b", 0, 1), 1, 1, at=5, dashboard="operator")
    for values in ((0, 0), (1, 1)):
        with pytest.raises(AssertionError, match="not in"):
            shows("Leader", "A", leads("a", 1, 0) | leads("b", *values), 1, 1, at=5, dashboard="operator")


def test_alerts_about_operators_count_beside_those_about_jobs(shows: Any) -> None:
    def fires(name: str, **more: str) -> str:
        given = {"alertname": f"Backstay{name}", "alertstate": "firing", **more}
        return "ALERTS{" + ", ".join(f'{label}="{value}"' for label, value in given.items()) + "}"

    job = {"namespace": "ns", "training_job": "job"}
    series = [
        fires("JobFailed", **job),
        fires("TargetDown", **job, pod="a"),
        fires("NoLeader", namespace="system"),
        fires("NoLeader"),
        fires("WatchStale", namespace="system", pod="b"),
        fires("JobFailed", namespace="other", training_job="job"),
        fires("JobNotUpdating", **job).replace("firing", "pending"),
        'ALERTS{alertname="Other", alertstate="firing", namespace="ns"}',
    ]
    shows("Alerts that fire", "A", dict.fromkeys(series, "1x10"), 5, 5, at=5, dashboard="fleet")
    shows("Alerts that fire", "A", {}, 0, 0, at=5, dashboard="fleet")


def test_updates_wait_for_a_rank_and_its_node(shows: Any) -> None:
    """3 s of every 15 s for rank 1, which has moved to another node, and 1.5 s for rank 0."""
    waited = {
        f"backstay_waited_for_seconds_total{labels('ParameterServer', rank=rank, part='compute')}": f"0+{each}x80"
        for rank, each in (("0", 1.5), ("1", 3))
    }
    places = (("0", "north", "a"), ("1", "north", "b"), ("1", "south", "c"))
    nodes = {f"backstay_step{labels('Worker', int(rank), pod, node=node)}": "0x80" for rank, node, pod in places}
    shows("Waited for", "A", waited, 0.1 - 1e-6, 0.2 + 1e-6, at=60)
    shows("Waited for, by node", "A", waited | nodes, 0.1 - 1e-6, 0.3 + 1e-6, at=60)
    total = {f"backstay_step{labels('Worker', n, f'pod-{n}', node='north')}": "0x80" for n in (0, 1)}
    shows("Waited for, by node", "A", waited | total, 0.3 - 1e-6, 0.3 + 1e-6, at=60)
    several = {f"backstay_step{labels('Worker', 1, node, node=node)}": "0x80" for node in ("north", "south")}
    shows("Waited for, by node", "A", waited | several, 0.2 - 1e-6, 0.2 + 1e-6, at=60, number=2)
    world = {f"backstay_world_size{labels('ParameterServer')}": "2x80"}
    shows("Waited for", "B", world, 0, 0, at=60)


def test_numbers_of_devices_and_scripts(shows: Any) -> None:
    """Two ranks of 2e12 operations a contribution, one of which a scrape; a quarter of them is not applied."""
    tokens = {f"backstay_tokens_total{labels('ParameterServer')}": "0+1500x80"}
    shows("Tokens", "A", tokens, 100 - 1e-6, 100 + 1e-6, at=60)
    series = {}
    for rank in (0, 1):
        series[f"backstay_contribution_flops{labels('Worker', rank, f'pod-{rank}')}"] = "2e12x80"
        for outcome, each in (("applied", 3), ("late", 1)):
            worker = labels("Worker", rank, f"pod-{rank}", outcome=outcome)
            series[f"backstay_worker_contributions_total{worker}"] = f"0+{each}x80"
    shows("Floating-point operations", "A", series, 0.8e12 - 1, 0.8e12 + 1, at=60)
    shows("Floating-point operations", "B", series, 1.066e12, 1.067e12, at=60)
    used = {f"backstay_mfu_ratio{labels('Worker', n, f'pod-{n}')}": f"{value}x80" for n, value in ((0, 0.4), (1, 0.2))}
    shows("Model FLOPs utilization", "A", used, 0.3 - 1e-9, 0.3 + 1e-9, at=60)
    shows("Model FLOPs utilization", "B", used, 0.2, 0.2, at=60)
    memory = {
        f"backstay_device_memory_bytes{labels('Worker', rank, f'pod-{rank}', device='0', state=state)}": f"{value}x80"
        for rank in (0, 1)
        for state, value in (("in_use", 5 + rank), ("peak", 7 + rank), ("limit", 80 + rank))
    }
    for ref, value in (("A", 6), ("B", 8), ("C", 80)):
        shows("Device memory", ref, memory, value, value, at=60)


def test_a_wrong_value_fails(shows: Any) -> None:
    loss = {f"backstay_loss{labels('ParameterServer')}": "-2.5x10"}
    with pytest.raises(AssertionError, match="not in"):
        shows("Loss", "A", loss, -2.4, 0, at=5)
    with pytest.raises(AssertionError, match="not in"):
        shows("Loss", "A", {}, -2.5, -2.5, at=5)


def test_no_panel_shows_a_raw_counter_or_a_bucket_as_a_quantile(dashboards: Any, metrics_in: Any) -> None:
    for query in dashboards.queries():
        for selector in metrics_in(query.expr):
            if selector.metric.endswith(("_total", "_bucket", "_count", "_sum")) and selector.metric not in LASTING:
                assert "rate(" in query.expr or "increase(" in query.expr, query
        assert "histogram_quantile(0" not in query.expr, query
