"""Whole jobs, from the TrainingJob to its end, with real processes on a cluster."""

from __future__ import annotations

import json
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from trace_format import check

import backstay
from backstay.testing import train_local
from backstay_client.reading.trace import trace_of_file
from backstay_spec.goodput import PARTS

pytestmark = pytest.mark.e2e

Submit = Callable[..., str]
SCRIPT = Path(__file__).parent / "scripts" / "tiny.py"
ONE_EACH = {"parameterServers": {"replicas": 1, "maxRestarts": 0}, "workers": {"replicas": 1, "maxRestarts": 0}}


def reference(world: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the plain loop in this process."""
    monkeypatch.setenv("STEPS", "40")
    settings = runpy.run_path(str(SCRIPT))["SETTINGS"]
    return train_local(**{**settings, "evaluate": None}, world=world).params


def assert_close(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def test_t4_a_worker_that_is_killed_changes_nothing_but_the_time(
    cluster: Any, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4, O2, O4: SIGKILL in the middle; the replacement computes the same batches; the crash is counted once."""
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 3},
        "checkpoint": {"uri": str(tmp_path / "ckpt"), "everySteps": 15},
    }
    name = submit(spec, env={"BEHAVE": "suicide"})
    status = cluster.wait_for_end(name)
    assert status["step"] == 40
    assert status["roles"]["Worker"]["restarts"] == 1
    assert cluster.deaths_with_cause(name) == [("worker-1", 1, "Crashed")]
    assert status["incarnations"]["worker-1"] == 2
    assert status["incarnations"]["worker-0"] == 1
    stored = backstay.load(str(tmp_path / "ckpt"))
    assert stored.step == 40
    assert_close(stored.params, reference(3, monkeypatch))
    assert stored.params["b"][1].shape == ()
    assert set(status["metrics"]) == {"norm"}
    seconds = status["workerSeconds"]
    assert seconds.keys() <= set(PARTS)
    assert seconds["starting"] > 0
    assert min(seconds.values()) >= 0
    assert status["goodput"] == pytest.approx(seconds.get("applied", 0.0) / sum(seconds.values()), abs=1e-3)
    trace_of_file(str(tmp_path / "ckpt"), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    check(trace)
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    shown = {name.partition(" (")[0] for name in named}  # without the error of its clock
    assert shown >= {"server 0", "server 1", "worker 0", "worker 1 #2", "worker 2"}


def test_t2_with_a_backup_an_update_never_waits_for_the_worker_that_hangs(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """T2: with one backup the job ends although rank 1 is stopped permanently (and no replacement is requested)."""
    spec = {
        "parameterServers": {"replicas": 1},
        "workers": {"replicas": 3},
        "update": {"mode": "Sync", "backups": 1},
        "checkpoint": {"uri": str(tmp_path / "ckpt")},
    }
    gate = tmp_path / "gate"
    name = submit(spec, env={"HOLD_AT": "10", "GATE": str(gate)})

    def steps() -> bool:
        return any("step" in cluster.log(pod["metadata"]["name"]) for pod in cluster.pods(name))

    cluster.wait(f"{name} trains", lambda: cluster.job(name).get("status", {}).get("phase") == "Running")
    cluster.wait(f"{name} logs a step", steps)
    victim = next(pod["metadata"]["name"] for pod in cluster.pods(name) if "-worker-1-" in pod["metadata"]["name"])
    for pid in cluster.processes(victim):
        os.kill(pid, signal.SIGSTOP)
    gate.touch()
    status = cluster.wait_for_end(name)
    assert status["step"] == 40
    cluster.kill(victim)  # it cannot receive the request to stop, and the job's end would wait for it


def test_async_ends_with_every_update_counted(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    """T3, T5: Async over two shards."""
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 2},
        "update": {"mode": "Async", "maxStaleness": 4, "stalenessDamping": True},
        "checkpoint": {"uri": str(tmp_path / "ckpt")},
    }
    name = submit(spec)
    status = cluster.wait_for_end(name)
    assert status["step"] == 40
    assert backstay.load(str(tmp_path / "ckpt")).step == 40


def test_an_evaluator_evaluates_and_a_second_run_is_already_complete(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """T7: a job that finds its own checkpoint at its last step has nothing to do; another job is refused."""
    spec = {
        "workers": {"replicas": 1},
        "evaluator": {},
        "checkpoint": {"uri": str(tmp_path / "ckpt")},
    }
    name = submit(spec)
    status = cluster.wait_for_end(name)
    assert set(status["metrics"]) == {"norm"}
    other = submit(spec, fails=True)
    cluster.wait_for_end(other)
    refusal = cluster.condition(other, "Failed")
    assert refusal["reason"] == "CheckpointOfAnotherJob"
    assert f"/{name} with seed 3 (step 40)" in refusal["message"]
    cluster.delete(name)
    again = submit(spec, name=name)  # with another uid
    status = cluster.wait_for_end(again)
    assert cluster.condition(again, "Succeeded")["reason"] == "AlreadyComplete"
    assert status["step"] == 40


@pytest.mark.parametrize(
    ("behave", "says"),
    [
        ("raise", "boom at import"),
        ("exit0", "must call backstay.train"),
        ("binary", "exit code 3"),
    ],
)
def test_o4_a_script_that_does_not_train_fails_the_job_with_the_reason(
    cluster: Any, submit: Submit, behave: str, says: str
) -> None:
    name = submit(ONE_EACH, env={"BEHAVE": behave}, fails=True)
    status = cluster.wait_for_end(name)
    texts = json.dumps(status["conditions"]) + json.dumps([event["message"] for event in cluster.events(name)])
    texts += json.dumps([event["reason"] for event in cluster.events(name)])
    texts += "".join(cluster.log(pod["metadata"]["name"]) for pod in cluster.pods(name))
    assert says in texts, cluster.describe(name)


def test_other_shapes_are_refused_at_joining_and_name_the_leaf(cluster: Any, submit: Submit) -> None:
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2, "maxRestarts": 0}}
    name = submit(spec, env={"BEHAVE": "shapes"}, fails=True)
    cluster.wait_for_end(name)
    message = cluster.condition(name, "Failed")["message"]
    assert "w is float32[5,3] on the server and float32[6,3] in the caller" in message, cluster.describe(name)


def test_gradients_that_are_not_finite_fail_the_job_with_step_and_rank(cluster: Any, submit: Submit) -> None:
    spec = {"workers": {"replicas": 2}, "update": {"maxNonFinite": 2}}
    name = submit(spec, env={"BEHAVE": "nan"}, fails=True)
    cluster.wait_for_end(name)
    message = cluster.condition(name, "Failed")["message"]
    assert "rank 1" in message, cluster.describe(name)
    assert "6" in message


def test_an_invalid_image_name_fails_the_job_immediately(cluster: Any, submit: Submit) -> None:
    """O4: failures that a retry cannot fix."""
    name = submit({"image": "x:::y"}, fails=True)
    cluster.wait_for_end(name)
    assert "InvalidImageName" in json.dumps(cluster.condition(name, "Failed"))


def test_suspend_and_resume_lose_nothing_and_scale_follows(cluster: Any, submit: Submit, tmp_path: Path) -> None:
    spec = {
        "parameterServers": {"replicas": 1},
        "workers": {"replicas": 1},
        "checkpoint": {"uri": str(tmp_path / "ckpt"), "everySteps": 5},
    }
    gate = tmp_path / "gate"
    name = submit(spec, env={"HOLD_AT": "20", "GATE": str(gate)})
    folder = tmp_path / "ckpt"
    cluster.wait("there is a checkpoint", lambda: folder.exists() and any(folder.glob("*.manifest.json")))
    cluster.patch(name, [{"op": "add", "path": "/spec/runPolicy", "value": {"suspend": True}}])
    cluster.wait("the job is suspended", lambda: cluster.job(name)["status"].get("phase") == "Suspended")
    status = cluster.job(name)["status"]
    assert [pod for pod in cluster.pods(name) if pod["status"]["phase"] == "Running"] == []
    before = backstay.load(str(tmp_path / "ckpt"))
    assert 0 < before.step < 40
    assert (status["step"], status["checkpoint"]["step"]) == (before.step, before.step), "the last ones, not older ones"
    assert before.uri.endswith(status["checkpoint"]["uri"].rpartition("/")[2])
    assert cluster.condition(name, "Training")["reason"] == "Suspended"
    cluster.patch(name, [{"op": "replace", "path": "/spec/runPolicy/suspend", "value": False}])
    cluster.wait("it is resumed", lambda: (cluster.condition(name, "Suspended") or {}).get("reason") == "Resumed")
    # A worker waits at the gate before it computes, so there is no update.
    assert (cluster.condition(name, "Training") or {})["status"] == "False"
    cluster.wait("pods run", lambda: cluster.condition(name, "Running")["status"] == "True")
    assert cluster.condition(name, "Training")["status"] == "False", cluster.describe(name)
    gate.touch()
    status = cluster.wait_for_end(name)
    assert status["step"] == 40
    assert "resum" in "".join(cluster.log(pod["metadata"]["name"]).lower() for pod in cluster.pods(name)), (
        cluster.describe(name)
    )


def test_t7_a_server_that_is_killed_restarts_from_the_newest_checkpoint(
    cluster: Any, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4, T6, T7: one shard dies, the others go back with it in a higher term, and the result is the quiet run's."""
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 2},
        "checkpoint": {"uri": str(tmp_path / "ckpt"), "everySteps": 10},
    }
    gate = tmp_path / "gate"
    name = submit(spec, env={"HOLD_AT": "25", "GATE": str(gate)})
    folder = tmp_path / "ckpt"
    cluster.wait("there is a checkpoint", lambda: folder.exists() and any(folder.glob("*.manifest.json")))
    cluster.kill(next(p["metadata"]["name"] for p in cluster.pods(name) if "-ps-1-" in p["metadata"]["name"]))
    gate.touch()
    status = cluster.wait_for_end(name)
    ((slot, _, cause),) = cluster.deaths_with_cause(name)
    assert (slot, cause) == ("parameter-server-1", "Crashed"), cluster.describe(name)
    assert status["roles"]["Worker"]["restarts"] == 0, cluster.describe(name)
    assert status["term"] >= 2
    stored = backstay.load(str(folder))
    assert stored.step == 40
    assert_close(stored.params, reference(2, monkeypatch))


def test_a_wait_ends_with_the_pod_that_has_ended_with_an_error(cluster: Any, submit: Submit) -> None:
    name = submit(ONE_EACH, env={"BEHAVE": "binary"})
    with pytest.raises(AssertionError, match=rf"\A{name}-\S+ ended with exit code 3:\n"):
        cluster.wait("it never holds", lambda: False)
