"""The metrics of a job after its coordinator died without a standby, and before the first update."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from between import LONG
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from backstay._report._metrics import PodMetrics

from .operator_calls import report


def metrics_of(pod: Any) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{pod.metrics}/metrics", timeout=LONG) as reply:
        text = reply.read().decode()
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_t3_updates_that_are_lost_with_the_coordinator_are_counted(job, tmp_path: Path) -> None:
    """Killed at step 7 with a checkpoint of step 4; then somewhere, while updates are made."""
    tiny = job(1, 2, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4})
    tiny.environment = {"STEPS": str(10**7), "HOLD_AT": "7"}
    began = time.time()
    server = tiny.server(0)
    workers = [tiny.worker(rank) for rank in range(2)]
    tiny.wait_for(server, "checkpoint of step 4")
    for worker in workers:
        tiny.wait_for(worker, "step 7/")
    total, before = 0, 0
    for incarnation in (1, 2):
        after = {worker.name: len(worker.output()) for worker in workers}
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        tiny.let()
        for worker in workers:
            tiny.wait_for(worker, "connecting again", after[worker.name])
        lost_at = max(int(re.findall(r"step (\d+)/", worker.output())[-1]) for worker in workers)
        server = tiny.server(0, incarnation)
        tiny.wait_for(server, "continuing from the checkpoint of step ")
        stored = int(re.findall(r"continuing from the checkpoint of step (\d+)", server.output())[0])
        assert (lost_at, stored) == (7, 4) or incarnation == 2
        tiny.wait_for(server, f"step {stored + 1}/")  # both workers have joined
        shown, found = metrics_of(server), report(tiny)
        # The total is in the checkpoints: a coordinator that stored none takes its own share with it.
        total = (total if stored > before else 0) + lost_at - stored
        before = stored
        assert shown["backstay_steps_redone_total"] == lost_at - stored  # of two workers, counted once
        assert found.term_start is not None
        assert (found.steps_redone, found.term_start.redone) == (total, lost_at - stored)
        assert found.term_start.step == stored
        # The age of the checkpoint continues, whether or not the new coordinator has stored one itself.
        assert began < shown["backstay_checkpoint_timestamp_seconds"] <= time.time()


def test_t6_without_checkpoints_a_replaced_coordinator_begins_a_higher_term(job) -> None:
    """It starts at step 0 again. With the same term, the operator would not report the rollback."""
    tiny = job(1, 2)
    tiny.environment = {"STEPS": str(10**7), "HOLD_AT": "7"}
    server = tiny.server(0, 1)
    workers = [tiny.worker(rank) for rank in range(2)]
    for worker in workers:
        tiny.wait_for(worker, "step 7/")
    before = report(tiny).term_start
    assert before is not None
    assert (before.term, before.step) == (1, 0)
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    tiny.let()
    server = tiny.server(0, 2)
    tiny.wait_for(server, "step 1/")
    start = report(tiny).term_start
    assert start is not None
    assert start.term > before.term
    assert (start.step, start.checkpoint, start.redone) == (0, "", 7)


def test_a_leaf_that_does_not_change_is_named(job) -> None:
    """No gradient reaches the first one, and the optimizer does not change the others."""
    tiny = job(2, 2)
    tiny.environment = {"STEPS": "12", "RUNNING": "1", "MASKED": "1"}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0] * 4
    said = "the gradient of running.mean (1 of 4 leaves) was exactly zero in the first 10 updates of every worker"
    assert [pod.output().count(said) for pod in tiny.pods] == [1, 0, 0, 0]
    said = "640 of 832 bytes that each update sends did not change in the first updates: dense.bias, dense.kernel."
    assert [pod.output().count(said) for pod in tiny.pods] == [1, 0, 0, 0]
    message = tiny.pods[0].final_message()
    assert (message["untrainedLeaves"], message["unchangedLeaves"]) == (
        ["running.mean"],
        ["dense.bias", "dense.kernel"],
    )


def test_there_is_no_loss_before_the_first_one() -> None:
    metrics = PodMetrics("job", "ParameterServer", 0)
    assert b"backstay_loss{" not in generate_latest(metrics.registry)
    metrics.loss.set(-2.5)
    shown = b'backstay_loss{index="0",role="ParameterServer",training_job="job"} -2.5'
    assert shown in generate_latest(metrics.registry)
