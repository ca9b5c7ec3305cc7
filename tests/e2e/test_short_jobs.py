"""O10: a job that ends before the operator polls it succeeds. `bench/ends.py` runs many of them, also under load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1 update, 1 server": (1, 1, {}),
    "30 updates, 3 servers, evaluator": (30, 3, {"checkpoint": True, "evaluator": {}}),
    "5 updates, 2 servers, standbys": (5, 2, {"standbys": 1}),
}


def test_o10_short_jobs_succeed(cluster: Any, submit: Callable[..., str], tmp_path: Path) -> None:
    """All at the same time, so that their pods end in a random order."""
    jobs = {}
    for number, (case, (steps, servers, more)) in enumerate(CASES.items()):
        spec: dict[str, Any] = {
            "parameterServers": {"replicas": servers, "standbys": more.get("standbys", 0)},
            "workers": {"replicas": 2},
        }
        if "checkpoint" in more:
            spec["checkpoint"] = {"uri": str(tmp_path / str(number))}
        if "evaluator" in more:
            spec["evaluator"] = more["evaluator"]
        jobs[case] = submit(spec, env={"STEPS": str(steps)})
    for case, name in jobs.items():
        status = cluster.wait_for_end(name)
        assert status["step"] == CASES[case][0], f"{case}\n{cluster.describe(name)}"
        assert [entry["reason"] for entry in status["history"]][-2:] == ["Trained", "Succeeded"], case
        assert not cluster.deaths_with_cause(name), case
        interrupted = "TrainingInterrupted" in {event["reason"] for event in cluster.events(name)}
        assert not interrupted or cluster.deaths(name), case
