"""Each alert fires when its condition holds and not when it does not, and has a page that says what to do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from between import put

MINUTES = 120
JOB = {"namespace": "ns", "training_job": "job"}
SERVER = {**JOB, "role": "ParameterServer", "index": "0", "pod": "a"}
WORKER = {**JOB, "role": "Worker", "index": "0", "pod": "w"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    given = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{given}}}", "values": values}


def of_job(name: str, values: str, **labels: str) -> dict[str, str]:
    return series(f"backstay_job_{name}", values, **JOB, **labels)


def training(values: str = f"1x{MINUTES}") -> dict[str, str]:
    return of_job("training", values)


def updates(values: str = f"0+60x{MINUTES}") -> dict[str, str]:
    """By default one a second."""
    return series("backstay_updates_total", values, **SERVER)


def started(values: str = f"0x{MINUTES}") -> dict[str, str]:
    return of_job("start_timestamp_seconds", values)


def rare(minutes: int, number: int, lasts: int = 60) -> list[dict[str, str]]:
    """Returns the series of a job with this number of updates, one each `minutes`, and none in the hours after them."""
    made = [min(at // minutes, number) for at in range(minutes * (number + 1) + 60 * lasts)]
    return [
        updates(" ".join(map(str, made))),
        of_job("last_update_timestamp_seconds", " ".join(str(60 * minutes * n) for n in made)),
        started(f"0x{len(made)}"),
        training(f"1x{len(made)}"),
    ]


def resumed(minute: int, more: str = "") -> list[dict[str, str]]:
    """Returns the series of a job that trained for an hour, and resumed from a suspension at this minute. Its pods are
    not ready yet, if there are no `more` times of updates."""
    stands = minute - 61
    return [
        updates("0+60x60 stale"),
        of_job("last_update_timestamp_seconds", f"{NOW}60 3600x{stands} {more or f'3600x{MINUTES}'}"),
        started(f"0x60 stale _x{stands - 1} {60 * minute}x{MINUTES}"),
        training(f"1x60 stale _x{stands - 1} 0x{MINUTES}"),
    ]


def began(minute: int) -> list[dict[str, str]]:
    """Returns the series of a job that began to run at this minute, and has made no update."""
    return [started(f"_x{minute} {60 * minute}x{MINUTES}"), training(f"_x{minute} 0x{MINUTES}")]


def goodput(applied: float) -> list[dict[str, str]]:
    """Returns the series of one worker with this number of useful seconds in each minute."""
    return [
        of_job("worker_seconds", f"0+{applied}x{MINUTES}", part="applied"),
        of_job("worker_seconds", f"0+{60 - applied}x{MINUTES}", part="wait"),
    ]


def first_update(minute: int) -> dict[str, str]:
    """Returns the series of a job whose first update since its start was made at this minute."""
    values = f"_x{minute} {60 * minute}x{10 * MINUTES}" if minute else f"0x{10 * MINUTES}"
    return of_job("first_update_timestamp_seconds", values)


def interrupted(updates_after: int) -> list[dict[str, str]]:
    """Returns the series of a job with an update a second for two hours, none for 40 minutes, and then a few."""
    made = [*range(0, 7200, 60), *[7200] * 40, *[7200 + updates_after] * 200]
    last = [*range(0, 7200, 60), *[7200] * 40, *[9600] * 200]
    return [
        updates(" ".join(map(str, made))),
        of_job("last_update_timestamp_seconds", " ".join(map(str, last))),
        started(f"0x{len(made)}"),
        training(f"1x{len(made)}"),
    ]


def slower(times: int) -> list[dict[str, str]]:
    """Returns the series of a job with an update a second for two hours, and then with one in so many seconds."""
    made = [min(at, 120) * 60 + max(at - 120, 0) * 60 // times for at in range(60 * 4)]
    last = [60 * at if at <= 120 else 7200 + (at - 120) * 60 // times * times for at in range(60 * 4)]
    return [
        updates(" ".join(map(str, made))),
        of_job("last_update_timestamp_seconds", " ".join(map(str, last))),
        started(f"0x{60 * 4}"),
        training(f"1x{60 * 4}"),
    ]


# name -> (series, minute, what fires then: labels beside severity, or None)
INTERVAL = of_job("checkpoint_interval_seconds", f"60x{MINUTES}")
RUNNING = of_job("phase", f"1x{MINUTES}", phase="Running")
LONG_INTERVAL = of_job("checkpoint_interval_seconds", f"60x{10 * MINUTES}")
STORED = of_job("checkpoint_timestamp_seconds", f"3600x{10 * MINUTES}")
NOW = "0+60x"  # a Unix time that increases with the test's clock, which begins at 0
STOPS = f"{NOW}60 3600x60"
BEGAN = first_update(0)
CASES: dict[str, dict[str, tuple[list[dict[str, str]], int, dict[str, str] | None]]] = {
    "BackstayJobNotUpdating": {
        "stopped after an hour of an update a second": (
            [of_job("last_update_timestamp_seconds", STOPS), updates("0+60x60 3600x60"), started(), training()],
            63,
            JOB,
        ),
        "still, an hour later": (
            [of_job("last_update_timestamp_seconds", STOPS), updates("0+60x60 3600x60"), started(), training()],
            115,
            JOB,
        ),
        "updates": (
            [of_job("last_update_timestamp_seconds", f"{NOW}{MINUTES}"), updates(), started(), training()],
            63,
            None,
        ),
        "steps of ten minutes, the last nine minutes ago": (
            [
                of_job("last_update_timestamp_seconds", f"0x60 3600x{MINUTES - 60}"),
                updates("0x9 1x9 2x9 3x9 4x9 5x9 6x60"),
                started(),
                training(),
            ],
            69,
            None,
        ),
        "an update each 55 minutes, the next is due": (rare(55, 10), 55 * 11 - 1, None),
        "an update each 55 minutes, ten are due": (rare(55, 10), 55 * 21, JOB),
        "stopped twelve hours ago": (rare(1, 60), 60 * 13, JOB),
        "stopped again after an interruption and three updates": (interrupted(3), 190, JOB),
        "300 times slower for an hour": (slower(300), 60 * 3 + 4, None),
        "resumed": (resumed(180), 200, None),
        "resumed, and stopped after an update": (resumed(180, f"11040x{MINUTES}"), 200, JOB),
        "an earlier job of its name trained": (
            [of_job("last_update_timestamp_seconds", "0+60x60 stale"), updates("0+60x60 stale"), *began(70)],
            100,
            None,
        ),
        "stopped because it has ended": (
            [
                of_job("last_update_timestamp_seconds", STOPS),
                updates("0+60x60 3600x60"),
                started(),
                training("1x60 stale"),
            ],
            66,
            None,
        ),
    },
    "BackstayJobFailed": {
        "failed": (
            [of_job("phase", f"1x{MINUTES}", phase="Failed"), of_job("completion_timestamp_seconds", f"60x{MINUTES}")],
            5,
            JOB,
        ),
        "runs": ([of_job("phase", f"0x{MINUTES}", phase="Failed")], 5, None),
        "succeeded": (
            [of_job("phase", f"0x{MINUTES}", phase="Failed"), of_job("completion_timestamp_seconds", f"60x{MINUTES}")],
            5,
            None,
        ),
    },
    "BackstayRestartBudgetLow": {
        "9 of 10": (
            [
                of_job("restarts_total", f"9x{MINUTES}", role="Worker"),
                of_job("restarts_limit", f"10x{MINUTES}", role="Worker"),
                training(),
            ],
            5,
            {**JOB, "role": "Worker"},
        ),
        "8 of 10": (
            [
                of_job("restarts_total", f"8x{MINUTES}", role="Worker"),
                of_job("restarts_limit", f"10x{MINUTES}", role="Worker"),
                training(),
            ],
            5,
            None,
        ),
    },
    "BackstayCheckpointOld": {
        "none for ten intervals": (
            [of_job("checkpoint_timestamp_seconds", f"600x{MINUTES}"), INTERVAL, BEGAN, started(), training()],
            20,
            JOB,
        ),
        "absent": ([INTERVAL, BEGAN, started(), training()], 20, JOB),
        "absent in a crash loop, which repeats its first updates": (
            [INTERVAL, BEGAN, started(), training("0x120")],
            20,
            JOB,
        ),
        "three intervals after a start of an hour": ([INTERVAL, first_update(60), started(), training()], 63, None),
        "none after a start of an hour": ([INTERVAL, first_update(60), started(), training()], 66, JOB),
        "a start that lasts": ([INTERVAL, started(), training("0x120")], 100, None),
        "each minute": (
            [of_job("checkpoint_timestamp_seconds", f"{NOW}{MINUTES}"), INTERVAL, BEGAN, started(), training()],
            20,
            None,
        ),
        "just begun": ([INTERVAL, first_update(19), started(f"1140x{MINUTES}"), training()], 20, None),
        "an update takes ten minutes, and so does a checkpoint": (
            [
                of_job("checkpoint_timestamp_seconds", f"0x60 3600x{MINUTES - 60}"),
                INTERVAL,
                BEGAN,
                updates("0x9 1x9 2x9 3x9 4x9 5x9 6x60"),
                started(),
                training(),
            ],
            69,
            None,
        ),
        "an update each 55 minutes, and so does a checkpoint": (
            [
                *rare(55, 10),
                of_job("checkpoint_timestamp_seconds", " ".join(str(3300 * (at // 55)) for at in range(660))),
                LONG_INTERVAL,
            ],
            55 * 11 - 1,
            None,
        ),
        "resumed": ([*resumed(180), first_update(0), STORED, LONG_INTERVAL], 200, None),
        "resumed, and none since": ([*resumed(180), first_update(180), STORED, LONG_INTERVAL], 186, JOB),
        "a job that stores nothing": ([BEGAN, started(), training()], 20, None),
    },
    "BackstayCheckpointsFail": {
        "one failed": ([series("backstay_checkpoint_failures_total", "0x10 1x100", **SERVER), RUNNING], 15, JOB),
        "long ago": ([series("backstay_checkpoint_failures_total", "0x10 1x100", **SERVER), RUNNING], 30, None),
        "of a job that has ended": (
            [
                series("backstay_checkpoint_failures_total", "0x10 1x100", **SERVER),
                of_job("phase", "1x11 0x100", phase="Running"),
            ],
            15,
            None,
        ),
    },
    "BackstayStandbyOutOfSync": {
        "one of two": (
            [of_job("standbys", f"2x{MINUTES}"), of_job("standbys_in_sync", "2x10 1x100"), training()],
            20,
            JOB,
        ),
        "for two minutes": (
            [of_job("standbys", f"2x{MINUTES}"), of_job("standbys_in_sync", "2x10 1x2 2x100"), training()],
            20,
            None,
        ),
        "both": (
            [of_job("standbys", f"2x{MINUTES}"), of_job("standbys_in_sync", f"2x{MINUTES}"), training()],
            20,
            None,
        ),
    },
    "BackstayStragglers": {
        "more slow ranks than have a series": (
            [
                series("backstay_stragglers", f"21x{MINUTES}", **SERVER),
                of_job("backups", f"20x{MINUTES}"),
                training(),
            ],
            15,
            JOB,
        ),
        "one slow rank, one backup": (
            [
                series("backstay_stragglers", f"1x{MINUTES}", **SERVER),
                of_job("backups", f"1x{MINUTES}"),
                training(),
            ],
            15,
            None,
        ),
    },
    "BackstayNotFinite": {
        "one skipped": ([series("backstay_updates_skipped_total", "0x10 1x100", **SERVER), training()], 15, JOB),
        "none skipped": ([series("backstay_updates_skipped_total", f"0x{MINUTES}", **SERVER), training()], 15, None),
    },
    "BackstayGoodputLow": {
        "a third": ([*goodput(20), started(), training()], 60, JOB),
        "two thirds": ([*goodput(40), started(), training()], 60, None),
        "a third, just begun": ([*goodput(20), started(f"3000x{MINUTES}"), training()], 60, None),
    },
    "BackstayNoLeader": {
        "two that do not lead": (
            [
                series("backstay_operator_leader", f"0x{MINUTES}", pod="a"),
                series("backstay_operator_leader", f"0x{MINUTES}", pod="b"),
            ],
            5,
            {},
        ),
        "no operator at all": ([series("up", f"1x{MINUTES}", job="other")], 5, {}),
        "one of two releases": (
            [
                series("backstay_operator_leader", f"0x{MINUTES}", namespace="research", pod="a"),
                series("backstay_operator_leader", f"1x{MINUTES}", namespace="vision", pod="b"),
            ],
            5,
            {"namespace": "research"},
        ),
        "one leads": (
            [
                series("backstay_operator_leader", f"0x{MINUTES}", pod="a"),
                series("backstay_operator_leader", f"1x{MINUTES}", pod="b"),
            ],
            5,
            None,
        ),
        "a change of a minute": (
            [series("backstay_operator_leader", "1x4 0 1x100", pod="a")],
            6,
            None,
        ),
    },
    "BackstayWatchStale": {
        "two minutes overdue": (
            [series("backstay_operator_watch_overdue_seconds", f"{NOW}{MINUTES}", namespace="system", pod="a")],
            5,
            {"namespace": "system", "pod": "a"},
        ),
        "a slow API server": ([series("backstay_operator_watch_overdue_seconds", f"5x{MINUTES}", pod="a")], 5, None),
    },
    "BackstayTargetDown": {
        "a worker": ([series("up", f"0x{MINUTES}", **WORKER)], 10, WORKER),
        "the operator": (
            [series("up", f"0x{MINUTES}", component="backstay-operator", pod="a")],
            10,
            {"component": "backstay-operator", "pod": "a"},
        ),
        "a pod that starts": ([series("up", "0x3 1x100", **WORKER)], 10, None),
        "another's pod": ([series("up", f"0x{MINUTES}", job="other")], 10, None),
    },
}


@pytest.fixture(scope="session")
def alerts(rule_groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in rule_groups for rule in group["rules"] if "alert" in rule}


@pytest.mark.tool("promtool")
def test_each_alert_fires_when_it_should_and_not_else(
    root: Path, alerts: dict[str, dict[str, Any]], tool: Callable[[str], str], tmp_path: Path
) -> None:
    groups = yaml.safe_load((root / "helm/backstay/rules/backstay.yaml").read_text())["groups"]

    def written(name: str, cases: list[dict[str, Any]]) -> str:
        """Writes the tests of one alert, with no rules but those that it needs: promtool computes each at each
        minute."""
        rules: list[dict[str, Any]] = []
        needed: str = alerts[name]["expr"]
        for rule in reversed([rule for group in groups for rule in group["rules"]]):  # a rule uses earlier ones
            if rule.get("alert") == name or rule.get("record", "nothing of this name") in needed:
                # The texts are templates over the value: promtool compares them, so the rules are tested without them.
                rules.insert(0, {key: value for key, value in rule.items() if key != "annotations"})
                needed += rule["expr"]
        put(tmp_path / f"{name}.rules", yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
        document = {"rule_files": [f"{name}.rules"], "evaluation_interval": "1m", "tests": cases}
        put(tmp_path / f"{name}.yaml", yaml.safe_dump(document))
        return str(tmp_path / f"{name}.yaml")

    def run(files: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tool("promtool"), "test", "rules", *files], capture_output=True, text=True)

    def fires(name: str, labels: dict[str, str] | None) -> list[dict[str, dict[str, str]]]:
        return [] if labels is None else [{"exp_labels": {**labels, "severity": alerts[name]["labels"]["severity"]}}]

    tests: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "name": f"{name}: {case}",
                "interval": "1m",
                "input_series": given,
                "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": fires(name, labels)}],
            }
            for case, (given, minute, labels) in cases.items()
        ]
        for name, cases in CASES.items()
    }
    done = run([written(name, cases) for name, cases in tests.items()])
    assert done.returncode == 0, done.stdout + done.stderr
    name = "BackstayJobFailed"
    tests[name][0]["alert_rule_test"][0]["exp_alerts"] = []
    assert run([written(name, tests[name][:1])]).returncode != 0  # the test can fail


def test_each_alert_is_tested_firing_and_not_firing(alerts: dict[str, dict[str, Any]]) -> None:
    assert set(CASES) == set(alerts)
    for name, cases in CASES.items():
        assert {case[2] is None for case in cases.values()} == {True, False}, name


def test_each_alert_has_a_page_that_states_what_to_do(root: Path, alerts: dict[str, dict[str, Any]]) -> None:
    for name, alert in alerts.items():
        notes = alert["annotations"]
        assert notes["summary"]
        assert notes["description"].endswith(".")
        assert notes["runbook_url"].endswith(f"/docs/runbooks/{name}.md")
        assert alert["labels"]["severity"] in ("warning", "critical")
        page = (root / "docs" / "runbooks" / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert headings == ["What it means", "What to examine", "What to do"], name
        assert f"runbooks/{name}.md" in (root / "mkdocs.yml").read_text()
    pages = {path.stem for path in (root / "docs" / "runbooks").glob("Backstay*.md")}
    assert pages == set(alerts)
