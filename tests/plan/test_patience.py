"""A job does not end for what is past, or for what no update needs."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from backstay_spec import contract
from backstay_spec.simulated import to_seconds

SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
QUOTA = ("Forbidden", "exceeded quota: pods")
ONE_SERVER = {"parameterServers": {"replicas": 1}}


def trains(cluster, step, **more):
    cluster.answer(term=1, step=step, **more)
    cluster.settle()


@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_exceptions_of_pods_that_were_replaced_do_not_end_the_job(running, mode):
    """The workers that work now are not Ready while they wait for a server."""
    cluster = running({**ONE_SERVER, "workers": {"replicas": 2}, "update": {"mode": mode}})
    trains(cluster, 50, contributed={0: 1, 1: 1})
    raised = {"reason": "ValueError", "message": "x", "at": "data.py:7", "traceback": "  data.py:7\nValueError: x"}
    for rank in (0, 1):
        cluster.end(cluster.named(WORKER, rank), 1, json.dumps(raised))
        cluster.settle()
        cluster.tick(5)
        cluster.run_all()
        cluster.tick(3600)
        trains(cluster, 500 * (rank + 1), contributed={0: 2, 1: 1 + rank})
    cluster.disrupt(cluster.named(SERVER, 0), "DeletionByTaintManager")
    cluster.settle()
    cluster.tick(10)
    for rank in (0, 1):
        cluster.run(cluster.named(WORKER, rank), ready=False)
    cluster.settle()
    assert cluster.status["phase"] != "Failed"


def test_a_restart_beside_pods_that_left_a_queue_does_not_count_the_time_in_it(make_cluster):
    """They are not scheduled yet, so their condition does not say when the gates were removed."""
    cluster = make_cluster({**ONE_SERVER, "workers": {"replicas": 1}, "scheduling": {"queue": "gpus"}})
    cluster.settle()
    names = sorted(cluster.pods)
    for name in names:
        cluster.gate(name)
    cluster.settle()
    cluster.tick(3600)
    cluster.settle()
    for name in names:
        cluster.gate(name, gated=False)
    cluster.settle()
    cluster.tick(5)
    cluster.restart_operator()
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    cluster.tick(599)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    cluster.tick(2)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "Unschedulable"


def loses_a_pod(cluster, rank, refused):
    """A rank loses its pod, and pods with this beginning of the name are refused from now on."""
    cluster.refuse[refused] = QUOTA
    cluster.delete(cluster.named(WORKER, rank))
    cluster.settle()
    cluster.bury()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_death_while_a_rank_is_refused_does_not_end_the_job_for_a_new_operator(running, restarts):
    cluster = running({**ONE_SERVER, "workers": {"replicas": 3}, "update": {"backups": 1}})
    trains(cluster, 5)
    loses_a_pod(cluster, 0, "mnist-worker")
    for step in range(60):
        cluster.tick(20)
        trains(cluster, 20 + step)
    if restarts:
        cluster.restart_operator()
    cluster.disrupt(cluster.named(WORKER, 2), "DeletionByTaintManager")
    for _ in range(3):
        cluster.settle()
        assert cluster.status["phase"] != "Failed"
        cluster.tick(1)


def test_a_death_during_a_long_compilation_beside_a_refused_rank_does_not_end_the_job(running):
    cluster = running({**ONE_SERVER, "workers": {"replicas": 3}, "update": {"backups": 1}})
    loses_a_pod(cluster, 0, "mnist-worker-0")
    for _ in range(65):
        cluster.tick(10)
        trains(cluster, 0)
    cluster.disrupt(cluster.named(WORKER, 2), "EvictionByEvictionAPI")
    cluster.end(cluster.named(WORKER, 2), 143)
    cluster.settle()
    assert cluster.status["phase"] != "Failed"


@pytest.mark.parametrize("refused", ["mnist-ps-0-", "mnist-token-"])
def test_a_refusal_of_before_a_suspension_is_past(make_cluster, refused):
    cluster = make_cluster({**ONE_SERVER, "workers": {"replicas": 1}})
    cluster.refuse = {refused: ("Forbidden", "exceeded quota: services")}
    cluster.settle()
    cluster.tick(60)
    cluster.settle()
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    cluster.refuse = {}
    cluster.tick(3600)
    cluster.settle()
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    assert len(cluster.pods) == 2


def test_pods_that_ran_and_vanished_did_not_end_before_they_started(running):
    """Spot nodes whose objects are removed, with their pods."""
    cluster = running({**ONE_SERVER, "workers": {"replicas": 1}})
    trains(cluster, 50, contributed={0: 1})
    for incarnation in range(1, 5):
        name = cluster.named(WORKER, 0)
        cluster.run(name)
        cluster.settle()
        for _ in range(10):
            cluster.tick(31)
            trains(cluster, 50, contributed={0: 1}, beating={0: incarnation})
        cluster.vanish(name)
        cluster.settle()
        cluster.tick(2)
        cluster.settle()
        assert cluster.status["phase"] != "Failed"


def test_a_scale_up_that_is_refused_does_not_hold_back_the_standby_and_the_evaluator(running):
    spec = {"parameterServers": {"replicas": 1, "standbys": 1}, "workers": {"replicas": 2}, "evaluator": {}}
    cluster = running(spec)
    trains(cluster, 5, world=2, in_sync={0: 2})
    cluster.refuse |= {"mnist-worker-2": QUOTA, "mnist-worker-3": QUOTA}
    cluster.edit(workers={"replicas": 4})
    cluster.settle()
    cluster.end(cluster.named(SERVER, 0, 1), 137)
    cluster.end(cluster.named(EVALUATOR, 0), 137)
    for step in range(5):
        cluster.tick(30)
        cluster.answer(term=2, step=6 + step, world=2, coordinator=2)
        cluster.settle()
    roles = sorted(cluster.pods[name]["metadata"]["labels"][contract.LABEL_ROLE] for name in cluster.living())
    assert roles == sorted([SERVER, SERVER, WORKER, WORKER, EVALUATOR])


def test_the_condition_names_the_standby_that_is_refused(running):
    cluster = running({"parameterServers": {"replicas": 1, "standbys": 1}, "workers": {"replicas": 1}})
    trains(cluster, 5, in_sync={0: 2})
    cluster.refuse["mnist-ps-0-3"] = QUOTA
    cluster.end(cluster.named(SERVER, 0, 2), 137)
    for _ in range(5):
        cluster.tick(10)
        trains(cluster, 6, in_sync={})
    assert cluster.condition("PodsCreated")["message"].startswith("the standby of parameter server 0: Forbidden")


@pytest.mark.parametrize("is_gone", [False, True], ids=["shown", "gone"])
def test_an_eviction_before_the_first_update_beside_a_refused_backup_does_not_end_the_job(running, is_gone):
    """The pod that was evicted may no longer be shown, so nothing of it says when it was lost."""
    cluster = running({**ONE_SERVER, "workers": {"replicas": 3}, "update": {"backups": 1}})
    loses_a_pod(cluster, 1, "mnist-worker")
    for _ in range(70):
        cluster.tick(10)
        trains(cluster, 0)
    evicted = cluster.named(WORKER, 2)
    if is_gone:
        cluster.vanish(evicted)
    else:
        cluster.end(evicted, 143)
    for _ in range(59):
        trains(cluster, 0)
        assert cluster.status["phase"] != "Failed", (evicted, cluster.status["conditions"])
        cluster.tick(10)
    cluster.tick(20)
    trains(cluster, 0)
    assert cluster.condition("Failed")["reason"] == "PodRefused"


def test_a_worker_that_vanishes_beside_a_service_that_is_refused_for_long_does_not_end_the_job(running):
    cluster = running({**ONE_SERVER, "workers": {"replicas": 1}, "evaluator": {}})
    trains(cluster, 5)
    cluster.refuse = {"mnist-eval": QUOTA, "mnist-ps-0-": ("Forbidden", "exceeded quota: services=1")}
    cluster.vanish(cluster.named(EVALUATOR, 0))
    cluster.settle()
    cluster.services = {}
    for step in range(70):
        cluster.tick(20)
        trains(cluster, 6 + step)
    cluster.vanish(cluster.named(WORKER, 0))
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    cluster.tick(599)
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    cluster.tick(2)
    cluster.settle()
    assert "services=1" in cluster.condition("Failed")["message"]


def test_the_clock_of_the_api_server_does_not_decide_whether_a_resumed_job_trains(running):
    """The times of pods are of the API server's clock, the start of a run is of the operator's."""
    cluster = running({**ONE_SERVER, "workers": {"replicas": 1}})
    trains(cluster, 50, coordinator=1)
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(6):
        cluster.settle()
        cluster.bury()
    cluster.tick(60)
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    for pod in cluster.pods.values():
        pod["metadata"]["creationTimestamp"] = to_seconds(cluster.now - timedelta(seconds=3))
    cluster.run_all()
    trains(cluster, 51, coordinator=2)
    cluster.tick(5)
    trains(cluster, 52, coordinator=2)
    assert cluster.condition("Training")["status"] == "True"


def test_the_conditions_of_a_suspended_job_are_of_no_earlier_time(make_cluster):
    cluster = make_cluster({**ONE_SERVER, "workers": {"replicas": 1}})
    cluster.refuse = {"mnist-worker": QUOTA}
    cluster.settle()
    assert cluster.condition("PodsCreated")["reason"] == "PodRefused"
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(6):
        cluster.settle()
        cluster.bury()
    assert cluster.condition("PodsCreated")["reason"] == "Suspended"
    cluster.refuse = {}
    cluster.edit(runPolicy={"suspend": False})
    cluster.apply(cluster.plan())
    assert cluster.condition("PodsCreated")["status"] == "Unknown"
    cluster.run_all()
    cluster.settle()
    trains(cluster, 1)
    assert cluster.condition("PodsCreated")["status"] == "True"
