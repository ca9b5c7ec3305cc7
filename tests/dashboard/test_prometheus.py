"""A real Prometheus watches a job with a slow worker, deaths, a failover, a full disk and a rollback.

Every query of every visible panel must have had data in that run. Every panel is compared with the truth: the job's
status, the pods' logs, the spec and the script.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from between import slack
from watched import (
    BATCH,
    FAULTS,
    GOAL,
    JOB,
    NAMESPACE,
    RATE,
    SCRIPT,
    SLOW_RANK,
    VALUES,
    Cluster,
    Prometheus,
    Watch,
    spec_of,
    suffer,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.tool("prometheus"),
    pytest.mark.tool("helm"),
    pytest.mark.timeout(1200),
]
WINDOW = "15s"
AGREE_SECONDS = 180.0
Sample = tuple[dict[str, str], float]

# Nothing of these need happen in this run: (dashboard, panel, query) -> why not.
MAY_BE_EMPTY = {
    ("job", "Updates", "B"): "no gradient that is not finite",
    ("operator", "Reconciliations", "B"): "no error of the operator",
    ("operator", "Watches, late and missed", "B"): "no deletion that a watch missed",
    ("job", "Worker seconds by part", "B"): "a replacement may fill a slot within one scrape",
}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


class Shown:
    """The values of the dashboards at the end of the run."""

    def __init__(self, dashboards: Any, prometheus: Prometheus, began: float) -> None:
        self._dashboards, self._prometheus = dashboards, prometheus
        self.now = time.time()
        self.span = f"{math.ceil(self.now - began)}s"
        self.began = began
        self.asked: set[tuple[str, str, str]] = set()

    def filled(self, query: Any) -> str:
        expr: str = query.filled(NAMESPACE, JOB, WINDOW, self.span)
        return expr

    def all(self, where: str, ref: str = "A") -> list[Sample]:
        dashboard, panel = where.split(": ", 1)
        self.asked.add((dashboard, panel, ref))
        found = self._prometheus.query(self.filled(self._dashboards.query(dashboard, panel, ref)), self.now)
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def answer(self, expr: str) -> list[Sample]:
        """A query of no panel."""
        return [(one["metric"], float(one["value"][1])) for one in self._prometheus.query(expr, self.now)]

    def one(self, where: str, ref: str = "A") -> float:
        found = self.all(where, ref)
        assert len(found) == 1, (where, ref, found)
        return found[0][1]

    def by(self, label: str, where: str, ref: str = "A") -> dict[str, float]:
        return {metric[label]: value for metric, value in self.all(where, ref)}

    def over_time(self, where: str, ref: str = "A") -> list[Sample]:
        """Each series with the largest value that it had."""
        dashboard, panel = where.split(": ", 1)
        self.asked.add((dashboard, panel, ref))
        expr = self.filled(self._dashboards.query(dashboard, panel, ref))
        found = self._prometheus.series(expr, self.began, self.now, 1)
        return most(found)


def between(events: float) -> float:
    """How much the rates of two counters of the same events may differ.

    A pod counts one after the other, so a scrape may fall between them, at the start and at the end of the window. Ten
    of its seconds lie between two scrapes, or more.

    Args:
        events: the largest number of events that may happen at the same time.
    """
    return 2 * events / 10


def in_a_calm_window(look: Callable[[], Shown], check: Callable[[Shown], None], discover: Callable[[], None]) -> Shown:
    """Look and check until all numbers of one window agree; a number that differs in every window fails.

    The numbers of a window come from seven processes, which are read one after the other and at most once a second. If
    the machine pauses one of them or a scrape, the numbers of that window belong to different times.
    """
    began = time.monotonic()
    while True:
        shown = look()
        try:
            check(shown)
            return shown
        except (AssertionError, LookupError, ValueError, OSError):
            if time.monotonic() > began + AGREE_SECONDS * slack():
                raise
        discover()
        time.sleep(1)


def most(found: list[dict[str, Any]]) -> list[Sample]:
    """Each series with its largest number; a mean over a window without an observation is none."""
    numbers = [(one["metric"], [v for _, text in one["values"] if math.isfinite(v := float(text))]) for one in found]
    return [(metric, max(values)) for metric, values in numbers if values]


def check_job(shown: Shown, cluster: Cluster, redone: int) -> None:
    """The job's dashboard against status, spec, script and logs."""
    roles = cluster.status()["roles"]
    speed = shown.one("job: Updates")
    assert 0.5 < speed < 11  # a batch takes 0.1 s, and the quorum needs no slow worker
    assert shown.one("job: Updates", "C") == pytest.approx(1 / speed)
    batch = BATCH[0]
    assert shown.one("job: Examples") == pytest.approx(speed * 2 * batch, abs=between(2 * batch))  # a quorum of two
    outcomes = shown.by("outcome", "job: Contributions by outcome")
    assert outcomes["applied"] == pytest.approx(2 * speed, rel=0.15)
    assert 0 < outcomes["late"] <= speed * 1.2
    step = shown.one("job: Progress") * GOAL
    assert step == pytest.approx(cluster.status()["step"], abs=15 * 11)
    assert shown.one("job: Time left") == pytest.approx((GOAL - step) / speed, rel=0.2)

    assert shown.one("job: State") == 3
    assert shown.by("role", "job: State", "B") == {"ParameterServer": 12, "Worker": 12, "Evaluator": 12}
    ((metric, value),) = shown.all("job: Last death")
    assert metric["role"] == "ParameterServer"
    assert shown.began * 1000 < value < shown.now * 1000
    assert shown.one("job: Updates redone") == pytest.approx(redone, rel=0.1)
    parts = shown.by("part", "job: Worker seconds by part")
    assert parts["data"] == max(parts.values())  # the script sleeps in its batches
    assert sum(parts.values()) == pytest.approx(1, rel=0.15)  # three slots, three workers
    assert 0 < shown.one("job: Goodput") < 0.5
    age = shown.one("job: Checkpoint age")
    assert -1 < age < 8
    assert shown.one("job: Checkpoint age", "B") == pytest.approx(age / 2, abs=1)
    assert shown.one("job: Age of the newest checkpoint") == pytest.approx(age, abs=3)
    assert shown.one("job: Age of the newest checkpoint", "B") == 6
    assert shown.one("job: Loss") > 0
    assert set(shown.by("name", "job: Loss", "B")) == {"norm"}

    step_parts = shown.by("part", "job: Step of the mean worker")
    assert set(step_parts) == {"data", "compute", "send", "wait", "receive"}
    assert 0.02 < step_parts["data"] < 0.4  # 0.1 s, 0.1 s and 0.3 s, less what is prefetched
    assert {m["le"] for m, _ in shown.all("job: Workers by their own part of a step")} >= {"0.1", "0.25", "0.5"}
    assert set(shown.by("index", "job: Slowest ranks")) == {"0", "1", "2"}
    slowest = shown.by("index", "job: Slowest ranks")
    assert max(slowest, key=slowest.__getitem__) == str(SLOW_RANK)
    assert min(slowest.values()) < shown.one("job: Slowest ranks", "B") < max(slowest.values())
    delays = shown.by("rank", "job: Stragglers")
    assert max(delays, key=delays.__getitem__) == str(SLOW_RANK)
    assert 0.1 < delays[str(SLOW_RANK)] < 5
    assert shown.one("job: Stragglers", "B") == 0
    waited = {(m["rank"], m["part"]): share for m, share in shown.all("job: Waited for")}
    assert all(0 < share < 1.5 for share in waited.values())
    assert {rank for rank, _ in waited} <= {"0", "1", "2"}
    (by_node,) = shown.all("job: Waited for, by node")  # the embedded cluster is one node
    assert by_node[1] >= sum(waited.values()) * (1 - 1e-6)
    assert shown.one("job: Waited for", "B") == shown.one("job: Waited for, by node", "B") == 0
    for where in ("job: Wait for the quorum",):
        assert 0 < shown.one(where) <= shown.one(where, "B")
    (applied,) = shown.by("index", "job: Update by shard").items()
    assert applied[0] == "0"
    assert 0 < applied[1] <= shown.one("job: Update by shard", "B")

    for where, refs in (("job: Workers", "ABCD"), ("job: Servers", "ABC")):
        found = [shown.one(where, ref) for ref in refs]
        assert found == ([3, 3, 3, 3] if "Workers" in where else [2, 2, 1])
    assert shown.by("role", "job: Pods lost") == {role: r["restarts"] for role, r in roles.items() if r["restarts"]}
    assert shown.by("role", "job: Pods lost", "B") == {"Worker": roles["Worker"]["disruptions"]}
    assert shown.one("job: Pods lost", "C") == 0
    assert {metric["role"] for metric, _ in shown.all("job: Pods")} == {"ParameterServer", "Worker", "Evaluator"}
    for ref in "ABCD":
        table = shown.all("job: Pods", ref)
        running = {p["metadata"]["name"] for p in cluster.pods() if p.get("status", {}).get("phase") == "Running"}
        assert {metric["pod"] for metric, _ in table} == running
    for ref in "AB":  # a new server was joined by all, and the workers had lost the old one
        ((_, most),) = shown.over_time("job: Connections", ref)
        assert most > 0

    assert shown.one("job: Checkpoints") > 0
    ((_, failed),) = shown.over_time("job: Checkpoints", "B")
    assert failed > 0
    assert shown.one("job: Checkpoints", "B") == 0
    assert set(shown.by("index", "job: Writing a shard's part")) == {"0"}
    assert shown.one("job: Bytes written") > 0
    wire = shown.by("direction", "job: Tensors on the wire")
    assert wire["sent"] == pytest.approx(wire["received"], abs=between(3 * 4 * 2 * 4))  # three workers
    assert wire["sent"] == pytest.approx(sum(outcomes.values()) * 4 * 2 * 4, rel=0.2)  # a 4 x 2 float32 each
    carried, exact = (shown.one("job: Traffic of an update", ref) for ref in "AB")
    assert carried == exact  # no codec
    # Both directions of the 4 x 2 float32. The slow worker misses updates, and some contributions are sent twice.
    assert 0.5 * 2 * 4 * 2 * 4 < carried < 1.5 * 2 * 4 * 2 * 4
    for where in ("job: Processors by role", "job: Memory by role"):
        assert set(shown.by("role", where)) == {"ParameterServer", "Worker", "Evaluator"}
    busiest = shown.by("role", "job: Processors by role", "B")
    assert all(busiest[role] <= used for role, used in shown.by("role", "job: Processors by role").items())
    assert min(shown.by("role", "job: Memory by role").values()) > 50e6


def check_model(shown: Shown) -> None:
    """The collapsed row of numbers that this script provides; a processor's peak and memory are not known."""
    tokens, examples = shown.one("job: Tokens"), shown.one("job: Examples")
    assert tokens == pytest.approx(examples * BATCH[1], abs=between(2 * BATCH[0] * BATCH[1]))
    assert 0 < shown.one("job: Gradient norm") < 100
    assert shown.one("job: Learning rate") == pytest.approx(RATE)
    assert shown.by("name", "job: Metrics of the loss function") == {"tokens": BATCH[0] * BATCH[1]}
    flops = {metric["index"]: value for metric, value in shown.answer("backstay_contribution_flops")}
    assert set(flops) == {"0", "1", "2"}
    (each,) = set(flops.values())  # one script
    outcomes = shown.by("outcome", "job: Contributions by outcome")
    assert shown.one("job: Floating-point operations") == pytest.approx(outcomes["applied"] * each, rel=1e-6)
    assert shown.one("job: Floating-point operations", "B") == pytest.approx(sum(outcomes.values()) * each, rel=1e-6)
    for where in ("Model FLOPs utilization", "Device memory"):
        assert shown.all(f"job: {where}") == []


def check_fleet(shown: Shown, cluster: Cluster) -> None:
    phases = shown.by("phase", "fleet: Jobs by phase")
    assert {phase: n for phase, n in phases.items() if n} == {"Running": 1}
    assert shown.by("phase", "fleet: Jobs over time") == {"Running": 1}
    assert shown.one("fleet: Jobs that stopped") == 0
    assert shown.one("fleet: Alerts that fire") >= 1  # BackstayCheckpointsFail, for ten minutes
    assert shown.one("fleet: Pods ready") == 6
    assert shown.by("role", "fleet: Pods ready by role") == {"ParameterServer": 2, "Worker": 3, "Evaluator": 1}
    roles = cluster.status()["roles"]
    row = {ref: shown.all("fleet: Jobs", ref) for ref in "ABCDEFGHIJK"}
    assert [metric["phase"] for metric, _ in row["A"]] == ["Running"]
    cells = {ref: found[0][1] for ref, found in row.items()}
    assert cells["B"] == pytest.approx(shown.one("job: Progress"), rel=0.1)
    assert cells["C"] == pytest.approx(shown.one("job: Time left"), rel=0.01)
    assert cells["D"] == pytest.approx(shown.one("job: Goodput"), rel=0.1)
    hours = (shown.now - shown.began) / 3600
    assert 3 * hours < cells["E"] < 6.5 * hours  # six pods, less the time in which they were missing
    assert cells["F"] == 3 * 2.5
    assert cells["G"] == pytest.approx(sum(r["restarts"] for r in roles.values()), abs=1)
    assert cells["G"] == int(cells["G"])
    assert cells["H"] == 1
    assert cells["I"] == pytest.approx(shown.one("job: Checkpoint age"), abs=3)
    assert cells["J"] >= 1
    assert cells["K"] == pytest.approx(shown.one("job: Examples"), rel=0.6)
    assert shown.one("fleet: Goodput by job") == pytest.approx(shown.one("job: Goodput"), abs=0.5)
    lost = {ref: max(value for _, value in shown.over_time("fleet: Pods lost", ref)) for ref in "AB"}
    assert lost["A"] >= 1
    assert lost["B"] >= 0.9
    assert shown.one("fleet: Examples") == cells["K"]
    assert set(shown.by("part", "fleet: Worker seconds by part")) >= {"data", "applied"}


def check_operator(shown: Shown) -> None:
    assert shown.one("operator: Leader") == shown.one("operator: Operators up") == 1
    assert shown.by("pod", "operator: Leader over time") == {"operator": 1}
    assert shown.one("operator: Watch overdue") < 60
    assert shown.one("operator: Watches, late and missed") < 60
    assert shown.one("operator: Errors") >= 0
    assert 0 < shown.one("operator: Replacement") < 60
    assert 0 < shown.one("operator: Recovery of workers") < 120
    assert shown.by("phase", "operator: Jobs by phase") == {"Running": 1}
    assert {m["role"] for m, _ in shown.over_time("operator: Pods created")} >= {"ParameterServer", "Worker"}
    assert shown.one("operator: Pods created", "B") == 0
    deaths = {(m["role"], m["cause"]) for m, _ in shown.over_time("operator: Deaths")}
    assert deaths >= {("ParameterServer", "Crashed"), ("Worker", "Crashed"), ("Worker", "Deleted")}
    assert shown.one("operator: Deaths", "B") == 0
    for panel in ("Dead pod to replacement", "Duration of a reconciliation"):
        ((_, slowest),) = shown.over_time(f"operator: {panel}", "B")
        ((_, mean),) = shown.over_time(f"operator: {panel}")
        assert 0 < mean <= slowest, panel
    assert {m["role"] for m, _ in shown.over_time("operator: Dead pod to working again")} >= {"ParameterServer"}
    calls = shown.by("code", "operator: Calls to the jobs' servers")
    assert calls["OK"] == pytest.approx(1, rel=0.5)  # two servers, each every 2 s
    assert shown.one("operator: Reconciliations") > 0
    assert {m["verb"] for m, _ in shown.over_time("operator: Requests to the API server")} >= {"create", "patch"}
    answers = shown.by("verb", "operator: Answers of the API server")
    assert max(answers.values()) <= shown.one("operator: Answers of the API server", "B")
    assert {m["resource"] for m, _ in shown.over_time("operator: Watches")} >= {"pods", "trainingjobs"}
    assert 0 < shown.one("operator: Processor") < 2
    assert 30e6 < shown.one("operator: Memory") < 500e6


def test_the_panels_show_what_happened(
    watched: Cluster, helm: Any, dashboards: Any, rule_groups: Any, tool: Callable[[str], str], tmp_path: Path
) -> None:
    began = time.time()
    watched.start(spec_of(tmp_path, FAULTS))
    watch = Watch(watched, helm.objects(*VALUES), tool("prometheus"), tmp_path)
    with watch.prometheus as prometheus:
        try:
            suffer(watched, watch, calm=17)  # a window in which nothing happens
        except AssertionError as error:
            pytest.fail(f"{error}\n{json.dumps(watched.status())}\n{watched.logs()}\n{prometheus.logs()[-1500:]}")

        def job(shown: Shown) -> None:
            redone = sum(map(int, re.findall(r": ([0-9]+) updates are redone", watched.log())))
            assert redone > 0
            check_job(shown, watched, redone)

        def all_have_data(shown: Shown) -> None:
            empty = []
            for query in dashboards.queries():
                key = (query.dashboard, query.panel, query.ref)
                where = f"{query.dashboard}: {query.panel}"
                if not (query.hidden or key in MAY_BE_EMPTY or shown.over_time(where, query.ref)):
                    empty.append((key, shown.filled(query)))
            assert not empty, "\n".join(f"{key}: {expr}" for key, expr in empty)

        def marks_are_at_deaths(shown: Shown) -> None:
            for mark in (a for a in dashboards[1].json["annotations"]["list"] if "expr" in a):
                expr = mark["expr"].replace("$namespace", NAMESPACE).replace("$training_job", JOB)
                times = [float(sample["value"][1]) / 1000 for sample in prometheus.query(expr, shown.now)]
                assert times, mark["name"]
                assert all(began < at < shown.now for at in times)

        def alerts(shown: Shown) -> None:
            """The rules can be computed, and one alert fired that should, and none that should not."""
            rules = prometheus.rules()
            names = {r.get("alert") or r["record"] for g in rule_groups for r in g["rules"]}
            assert {r["name"] for r in rules} >= names
            assert [r["name"] for r in rules if r["health"] != "ok"] == []
            fired = {m["alertname"] for m, _ in history(prometheus, 'ALERTS{alertstate="firing"}', shown)}
            assert "BackstayCheckpointsFail" in fired
            wrong = {"BackstayJobFailed", "BackstayNotFinite", "BackstayRestartBudgetLow", "BackstayWatchStale"}
            assert not fired & wrong

        # Each has its own window: all numbers of one window seldom agree on a busy machine.
        compared = set[tuple[str, str]]()
        for check in (job, check_model, partial(check_fleet, cluster=watched), check_operator):
            shown = in_a_calm_window(lambda: Shown(dashboards, prometheus, began), check, watch.discover)
            compared |= {(dashboard, panel) for dashboard, panel, _ in shown.asked}
        for check in (all_have_data, marks_are_at_deaths, alerts):
            in_a_calm_window(lambda: Shown(dashboards, prometheus, began), check, watch.discover)
        assert {(q.dashboard, q.panel) for q in dashboards.queries() if not q.hidden} - compared == set()
        # The labels of a training pod's series are Kubernetes', and are not there twice.
        worlds = prometheus.query('backstay_world_size{role="ParameterServer", index="0"}')
        for world in worlds:
            assert {"training_job": JOB, "namespace": NAMESPACE}.items() <= world["metric"].items()
            assert not [label for label in world["metric"] if label.startswith("exported_")]


def history(prometheus: Prometheus, expr: str, shown: Shown) -> list[Sample]:
    return most(prometheus.series(expr, shown.began, shown.now, 1))
