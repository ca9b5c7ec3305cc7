"""`checkpoint.keepBest` in a job of real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay._checkpoint import CheckpointStore


@pytest.mark.parametrize("mode", ["Max", "Min"])
def test_t7_the_best_checkpoint_stays_though_the_server_of_shard_0_dies(job: Any, tmp_path: Path, mode: str) -> None:
    """T6, T7: only the newest checkpoint and the best one stay, and the next server finds the evaluations."""
    uri = str(tmp_path / "checkpoints")
    rule = {"metric": "squares", "mode": mode}
    tiny = job(1, 1, evaluator=True, checkpoint={"uri": uri, "every_steps": 2, "keep": 1, "keep_best": rule})
    tiny.environment = {"STEPS": "8", "HOLD_AT": "2", "LEARNING_RATE": "0.3"}
    server, worker, evaluator = tiny.server(0, 1), tiny.worker(0), tiny.start("evaluator", 0)
    servers = [server]
    tiny.wait_for(server, "evaluation of step 2 ")
    tiny.let(4)
    tiny.wait_for(server, "evaluation of step 4 ")
    server.process.send_signal(signal.SIGKILL)
    servers.append(tiny.server(0, 2))
    tiny.let(8)
    assert [pod.wait() for pod in (servers[-1], worker, evaluator)] == [0, 0, 0]
    said = "".join(pod.output() for pod in servers)
    values = {int(step): float(value) for step, value in re.findall(r"evaluation of step (\d+)  squares (\S+)", said)}
    assert {2, 4, 8} <= set(values)
    best = (max if mode == "Max" else min)(values, key=values.__getitem__)
    assert {name.version for name in CheckpointStore(uri).contents().manifests} == {best, 8}
    found = backstay.load(uri, best=True)
    assert found.step == best
    assert found.metrics["squares"] == pytest.approx(values[best], rel=1e-5)
    assert backstay.load(uri).step == 8


def test_t7_a_server_that_takes_over_keeps_the_checkpoint_that_is_being_evaluated(job: Any, tmp_path: Path) -> None:
    """It deleted the checkpoint, whose evaluation was then lost: nothing had reported the evaluation to this server."""
    uri = str(tmp_path / "checkpoints")
    rule = {"metric": "squares", "mode": "Max"}
    tiny = job(1, 1, evaluator=True, checkpoint={"uri": uri, "every_steps": 2, "keep": 1, "keep_best": rule})
    evaluate = tmp_path / "evaluate"
    tiny.environment = {"STEPS": "8", "HOLD_AT": "2", "EVALUATE": str(evaluate)}
    server, worker, evaluator = tiny.server(0, 1), tiny.worker(0), tiny.start("evaluator", 0)
    tiny.wait_for(evaluator, "evaluate waits")
    server.process.send_signal(signal.SIGKILL)
    server = tiny.server(0, 2)
    tiny.wait_for(server, "the checkpoint of step 2 is kept until it is evaluated")
    tiny.let(8)
    tiny.wait_for(server, "checkpoint of step 8")
    assert {name.version for name in CheckpointStore(uri).contents().manifests} == {2, 8}
    evaluate.touch()
    tiny.wait_for(server, "evaluation of step 2 ")
    assert [pod.wait() for pod in (server, worker, evaluator)] == [0, 0, 0]


def test_an_evaluator_that_is_too_small_for_the_model_is_named(job: Any, tmp_path: Path) -> None:
    tiny = job(1, 1, evaluator=True, checkpoint={"uri": str(tmp_path / "checkpoints")})
    tiny.environment = {"STEPS": "2", "EVALUATE": str(tmp_path), "TOO_LARGE": "1"}
    server, worker, evaluator = tiny.server(0, 1), tiny.worker(0), tiny.start("evaluator", 0)
    tiny.wait_for(server, "the evaluator has too little memory. The model has ")
    assert [pod.wait() for pod in (server, worker, evaluator)] == [0, 0, 0]


def test_a_metric_that_evaluate_does_not_return_is_named(job: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "checkpoints")
    rule = {"metric": "acuracy", "mode": "Max"}
    tiny = job(1, 1, evaluator=True, checkpoint={"uri": uri, "every_steps": 4, "keep_best": rule})
    tiny.environment = {"STEPS": "4"}
    tiny.start_all()
    tiny.start("evaluator", 0)
    assert [pod.wait() for pod in tiny.pods] == [0, 0, 0]
    assert "has no finite number 'acuracy', which spec.checkpoint.keepBest names; it has: squares" in (
        tiny.pods[0].output()
    )
