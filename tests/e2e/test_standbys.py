"""With hot standbys, the operator promotes and the servers continue, with the result of a run without faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import backstay


def _arrays(folder: Path) -> list[np.ndarray]:
    params = backstay.load(str(folder)).params
    return [np.asarray(params["w"]), *(np.asarray(leaf) for leaf in params["b"])]


def test_killed_servers_cost_no_update(cluster: Any, submit: Callable[..., str], tmp_path: Path) -> None:
    """T3, T4, T6, O3: the active server of shard 0, then of shard 1; bit for bit the quiet run's parameters."""

    def spec(folder: Path) -> dict[str, Any]:
        return {
            "parameterServers": {"replicas": 2, "standbys": 1},
            "workers": {"replicas": 2},
            "checkpoint": {"uri": str(folder), "everySteps": 1000, "everySeconds": 0},
        }

    # Slow until both were killed, and held before the end: a new standby may take longer than all of the steps.
    gate = tmp_path / "gate"
    slow = {"PAUSE": "0.3", "HOLD_AT": "50", "GATE": str(gate)}
    quiet = submit(spec(tmp_path / "quiet"), env={"STEPS": "60"})
    name = submit(spec(tmp_path / "killed"), env={"STEPS": "60", **slow})

    def status() -> dict[str, Any]:
        return cluster.job(name).get("status", {})

    for shard in (0, 1):
        key = f"parameter-server-{shard}"
        cluster.wait(
            f"{name} trains, and its standbys follow",
            lambda: status().get("step", 0) > 0 and status()["roles"]["ParameterServer"]["ready"] == 4,
        )
        active = status()["active"][key]
        labels = {"backstay.dev/role": "parameter-server", "backstay.dev/index": str(shard)}
        pod = next(
            pod["metadata"]["name"]
            for pod in cluster.pods(name)
            if (labels | {"backstay.dev/incarnation": str(active)}).items() <= pod["metadata"]["labels"].items()
        )
        cluster.kill(pod)
        cluster.wait(f"the standby of shard {shard} serves", lambda: status()["active"][key] > active)  # noqa: B023
    gate.touch()
    ended = cluster.wait_for_end(name)
    assert ended["step"] == 60
    assert ended["term"] == 1, "no rollback"
    killed = [(slot, cause) for slot, _, cause in cluster.deaths_with_cause(name)]
    assert killed == [(f"parameter-server-{shard}", "Crashed") for shard in (0, 1)]
    cluster.wait_for_end(quiet)
    for mine, theirs in zip(_arrays(tmp_path / "killed"), _arrays(tmp_path / "quiet"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
