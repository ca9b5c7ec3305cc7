"""Code after `train`, and scripts that fail before the first update, in whole jobs with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay

pytestmark = pytest.mark.e2e

Submit = Callable[..., str]


def leader(cluster: Any, name: str) -> str:
    return max(p["metadata"]["name"] for p in cluster.pods(name) if "-worker-0-" in p["metadata"]["name"])


def test_t8_a_killed_worker_0_is_replaced_and_the_job_waits_for_its_script(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """T7, T8: killed when the job has ended and before `train` returns; the replacement exports the same model."""
    gate = tmp_path / "gate"
    spec = {"workers": {"replicas": 2}, "checkpoint": {"uri": str(tmp_path / "ckpt")}}
    env = {"BEHAVE": "export", "EXPORT": str(tmp_path), "GATE": str(gate), "FAULT_INJECTION": "kill worker/0 @0 done"}
    name = submit(spec, env=env)
    cluster.wait(f"{name} exports", (tmp_path / "2").exists)
    cluster.wait(
        f"{name} has trained",
        lambda: any(
            (c["type"], c["status"]) == ("Trained", "True") for c in cluster.job(name)["status"].get("conditions", ())
        ),
    )
    assert cluster.job(name)["status"]["phase"] == "Running"
    gate.touch()
    status = cluster.wait_for_end(name)
    assert cluster.condition(name, "AfterTrainingComplete")["status"] == "True"
    assert not (tmp_path / "1").exists()
    assert status["step"] == backstay.load(str(tmp_path / "ckpt")).step == 40


def test_t8_a_script_that_is_deleted_while_it_exports_is_not_run_again(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """T8: Succeeded, with a condition and a warning that say that the export may not be complete."""
    spec = {"workers": {"replicas": 1}, "checkpoint": {"uri": str(tmp_path / "ckpt")}}
    name = submit(spec, env={"BEHAVE": "export", "EXPORT": str(tmp_path), "GATE": str(tmp_path / "never")})
    cluster.wait(f"{name} exports", (tmp_path / "1").exists)
    cluster.delete_pod(leader(cluster, name))
    cluster.wait_for_end(name)
    assert cluster.condition(name, "AfterTrainingComplete")["reason"] == "PodLost"
    cluster.wait(  # events are sent after the status is written
        "the loss is an event", lambda: "AfterTrainingLost" in {event["reason"] for event in cluster.events(name)}
    )
    assert not (tmp_path / "2").exists()


def test_an_export_that_fails_fails_the_job_and_is_repeated_by_the_next_one(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """The traceback is in the condition; another start finds the training complete, and runs the code again."""
    spec = {"workers": {"replicas": 1}, "checkpoint": {"uri": str(tmp_path / "ckpt")}}
    name = submit(spec, env={"BEHAVE": "export-fails"}, fails=True)
    cluster.wait_for_end(name)
    failed = cluster.condition(name, "Failed")
    assert failed["reason"] == "AfterTrainingFailed"
    assert failed["message"].endswith("KeyError: 'no such bucket'")
    assert "the checkpoint of step 40 is" in failed["message"]


@pytest.mark.parametrize("workers", [1, 3])
def test_o4_a_script_that_raises_in_all_pods_fails_the_job_immediately(
    cluster: Any, submit: Submit, workers: int
) -> None:
    """O4: with budgets left; each slot has died at most twice when the job fails."""
    name = submit({"workers": {"replicas": workers}}, env={"BEHAVE": "raise"}, fails=True)
    status = cluster.wait_for_end(name)
    failed = cluster.condition(name, "Failed")
    assert failed["reason"] == "ScriptFailed"
    assert failed["message"].endswith("RuntimeError: boom at import")
    assert all(incarnation <= 2 for incarnation in status["incarnations"].values())


def test_processes_are_named_after_their_role_and_rank(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    """`ps -eo comm` distinguishes a worker from a server."""
    name = submit({"workers": {"replicas": 1}}, env={"HOLD_AT": "3", "GATE": str(tmp_path / "gate")})
    cluster.wait(f"{name} trains", lambda: cluster.job(name).get("status", {}).get("phase") == "Running")
    named = {
        Path(f"/proc/{pid}/comm").read_text().strip()
        for pod in cluster.pods(name)
        for pid in cluster.processes(pod["metadata"]["name"])
    }
    assert {"worker-0", "server-0"} <= named
