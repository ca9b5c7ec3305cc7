"""Which pods that end with exit code 0 are replaced, and which left because training is complete."""

from __future__ import annotations

import json

from backstay_spec import contract

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR


def test_workers_that_leave_a_completed_job_are_not_deaths(running):
    """The end of a job has exit code 0 after `done`, and the pods end in any order."""
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(WORKER, 0), 0)
    cluster.settle()
    assert not cluster.deaths, "the servers may not have said yet"
    cluster.answer(done=True)
    cluster.end(cluster.named(WORKER, 1), 0)
    cluster.end(cluster.named(WORKER, 2), 1)
    cluster.end(cluster.named(SERVER, 1), 0)
    cluster.tick(60)
    cluster.settle()
    assert not cluster.deaths
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "Succeeded", "step": 9}))
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert not cluster.deaths


def test_exit_0_before_done_is_a_crash(running):
    """The pod is ExitedEarly by a report of the servers, or after some time without them."""
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(WORKER, 0), 0)
    cluster.tick(3)
    cluster.answer(step=3)
    cluster.settle()
    assert [d.cause for d in cluster.deaths] == ["ExitedEarly"]
    cluster.memory.progress = None
    cluster.end(cluster.named(WORKER, 1), 0)
    assert cluster.settle().requeue_after.total_seconds() <= 10
    cluster.tick(10)
    cluster.settle()
    assert [d.cause for d in cluster.deaths] == ["ExitedEarly", "ExitedEarly"]
    assert cluster.status["roles"]["Worker"]["restarts"] == 2


def test_shard_0_without_a_termination_message_is_replaced(running):
    cluster = running(TWO_SERVERS)
    cluster.answer(done=True)
    cluster.end(cluster.named(SERVER, 0), 137)
    cluster.settle()
    assert cluster.named(SERVER, 0).startswith("mnist-ps-0-2-")
    cluster.run(cluster.named(SERVER, 0))
    cluster.complete(result="AlreadyComplete")
    cluster.settle()
    assert cluster.condition("Succeeded")["reason"] == "AlreadyComplete"
