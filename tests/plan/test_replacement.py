"""O2, O4: which pod fills a slot after the last one died, vanished, or was refused."""

from __future__ import annotations

import json

from backstay_spec import contract
from backstay_spec.actions import CreatePod

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


def test_a_dead_worker_is_replaced_immediately_and_once(running):
    cluster = running(TWO_SERVERS)
    dead = cluster.named(WORKER, 1)
    cluster.end(dead, 137)
    todo = cluster.plan()
    (created,) = [a for a in todo.actions if isinstance(a, CreatePod)]
    assert (created.role, created.index, created.incarnation, created.cause) == (WORKER, 1, 2, "Crashed")
    assert todo.status["incarnations"][f"{WORKER}-1"] == 2
    assert [(e.type, e.reason) for e in todo.events] == [("Warning", "Crashed")]
    assert "exit code 137 (SIGKILL)" in todo.events[0].message
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == 1
    assert dead in cluster.pods, "the last dead one is kept for its log"
    for _ in range(2):
        cluster.run_all()
        cluster.tick(2)
    cluster.end(cluster.named(WORKER, 1), 1)
    cluster.settle()
    cluster.bury()
    assert dead not in cluster.pods


def test_a_replacement_does_not_wait_for_termination(running):
    """O2: a pod with a deletionTimestamp is dead to the planner."""
    cluster = running(TWO_SERVERS)
    cluster.delete(cluster.named(WORKER, 2))
    cluster.settle()
    assert cluster.named(WORKER, 2).startswith("mnist-worker-2-2-")
    assert cluster.status["roles"]["Worker"] == {"desired": 3, "ready": 2, "restarts": 0, "disruptions": 1}


def test_a_success_without_exit_code_0_is_a_crash(running):
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(SERVER, 0), 1, json.dumps({"result": "Succeeded", "step": 5}))
    cluster.settle()
    assert cluster.status["phase"] == "Starting"
    assert cluster.status["roles"]["ParameterServer"]["restarts"] == 1


def test_an_invalid_image_name_fails_the_job_immediately(make_cluster):
    cluster = make_cluster(SPEC)
    cluster.settle()
    cluster.wait(cluster.named(WORKER, 1), "InvalidImageName", "couldn't parse image name")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "InvalidImageName"
    assert "worker 1" in cluster.condition("Failed")["message"]


def test_a_pod_that_the_api_refuses_as_invalid_fails_the_job_immediately(make_cluster):
    cluster = make_cluster(SPEC)
    cluster.refuse["mnist-worker-1"] = ("Invalid", "spec.containers[0].resources: must be positive")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "InvalidPod"
    assert "must be positive" in cluster.condition("Failed")["message"]


def test_a_quota_is_waited_for_with_one_incarnation(make_cluster):
    cluster = make_cluster(SPEC | {"runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.refuse["mnist-worker"] = ("Forbidden", "exceeded quota")
    cluster.settle()
    assert cluster.condition("PodsCreated")["reason"] == "PodRefused"
    for _ in range(10):
        cluster.tick(5)
        cluster.settle()
    assert set(cluster.status["incarnations"].values()) == {1}
    cluster.refuse.clear()
    cluster.tick(5)
    cluster.settle()
    assert len(cluster.living()) == 3
    assert not cluster.deaths


def test_disruptions_cost_nothing(running):
    cluster = running(SPEC | {"workers": {"replicas": 2, "maxRestarts": 0}})
    for incarnation, reason in enumerate(
        ["EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager"], 1
    ):
        cluster.disrupt(cluster.named(WORKER, 0), reason)
        cluster.settle()
        cluster.bury()
        assert cluster.status["incarnations"]["worker-0"] == incarnation + 1
    assert cluster.status["phase"] == "Running"
    assert cluster.status["roles"]["Worker"]["disruptions"] == 3
    assert [e for e, _ in cluster.events][-3:] == ["Evicted", "Preempted", "NodeLost"]


def test_a_pod_that_is_gone_is_dead_once_a_live_get_reports_it(running):
    """O2: a recorded pod that a live GET does not find is dead; its number is never given again."""
    cluster = running(SPEC)
    cluster.tick(10)
    cluster.settle()
    cluster.vanish(cluster.named(WORKER, 1))
    cluster.settle()
    assert cluster.named(WORKER, 1).startswith("mnist-worker-1-2-")
    assert [(d.cause, d.charged) for d in cluster.deaths] == [("Vanished", False)]


def test_a_pod_that_was_seen_and_is_gone_is_counted_however_young(running):
    """O5: no count lost. A second one that is deleted before the status has noted the first one's replacement."""
    cluster = running(SPEC)
    for _ in range(2):
        cluster.vanish(cluster.named(WORKER, 1))
        cluster.settle()
    assert cluster.condition("PodsCreated")["status"] == "Unknown"
    assert cluster.status["roles"]["Worker"]["disruptions"] == 2
    assert len(cluster.deaths) == 2


def test_a_pod_that_was_never_made_is_not_counted(running):
    """O5: the operator dies after it recorded the incarnation that ends a wait, before it creates the pod."""
    cluster = running(SPEC)
    for _ in range(2):
        cluster.end(cluster.named(WORKER, 0), 1)
        cluster.settle()
    cluster.tick(1)
    cluster.write(cluster.plan())
    assert "notBefore" not in cluster.status["backoff"]["worker-0"]
    cluster.restart_operator()
    cluster.apply(cluster.plan())
    cluster.run(cluster.named(WORKER, 1), ready=False)  # so that there is something else to write
    cluster.settle()
    assert cluster.named(WORKER, 0).startswith("mnist-worker-0-4-")
    assert cluster.status["roles"]["Worker"]["restarts"] == 2
    assert [d.pod for d in cluster.deaths if d.index == 0 and d.incarnation == 3] == []


def test_a_sidecar_does_not_keep_a_dead_trainer_alive(running):
    cluster = running(SPEC)
    name = cluster.named(WORKER, 0)
    cluster.end(name, 1)
    cluster.pods[name]["status"]["phase"] = "Running"
    cluster.pods[name]["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})
    cluster.settle()
    assert cluster.named(WORKER, 0) != name
    assert cluster.pods[name]["metadata"]["deletionTimestamp"]
