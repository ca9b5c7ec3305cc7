"""Which pods are deleted when the job is scaled."""

from __future__ import annotations

from backstay_spec import contract

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR


def test_scaling_up_adds_ranks_and_restarts_no_pod(running):
    cluster = running(TWO_SERVERS)
    before = set(cluster.pods)
    cluster.edit(workers={"replicas": 5})
    cluster.settle()
    assert before < set(cluster.pods)
    assert len(cluster.pods) == 7
    assert cluster.status["replicas"] == 5
    assert ("Scaled", "workers: 3 -> 5") in cluster.events


def test_scaling_down_waits_for_the_smaller_world(running):
    """The world changes by commit: down, pods go after the new world is in force, the highest rank first."""
    cluster = running(TWO_SERVERS | {"workers": {"replicas": 5}})
    cluster.answer(step=7, world=5)
    cluster.settle()
    cluster.edit(workers={"replicas": 3})
    cluster.settle()
    assert len(cluster.living()) == 7
    cluster.answer(step=9, world=3)
    assert [a.name.split("-")[2] for a in cluster.plan().actions] == ["4", "3"]
    cluster.settle()
    cluster.bury()
    assert cluster.status["replicas"] == 3
    assert not cluster.deaths
    cluster.edit(workers={"replicas": 5})
    cluster.settle()
    assert cluster.named(WORKER, 4).startswith("mnist-worker-4-2-")
    assert not cluster.deaths


def test_scaling_down_before_the_start_needs_no_coordinator(make_cluster):
    cluster = make_cluster(TWO_SERVERS | {"workers": {"replicas": 5}})
    cluster.settle()
    cluster.edit(workers={"replicas": 1})
    cluster.settle()
    assert len(cluster.living()) == 3


def test_scaling_down_with_servers_silent_waits(running):
    cluster = running(TWO_SERVERS)
    cluster.answer(step=7)
    cluster.settle()
    cluster.restart_operator()
    cluster.edit(workers={"replicas": 1})
    cluster.settle()
    assert len(cluster.living()) == 5
