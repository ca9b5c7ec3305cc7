"""A job's life as the planner leads it, from its Services to its end."""

from __future__ import annotations

import json

import pytest

from backstay_spec import contract
from backstay_spec.actions import CreateNetworkPolicy, CreatePod, CreateSecret, CreateService, DeletePod, PatchService
from backstay_spec.plan import refuse

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR


def test_addresses_come_before_pods(make_cluster):
    cluster = make_cluster(TWO_SERVERS)
    first = cluster.plan()
    assert [type(a) for a in first.actions] == [CreateSecret, CreateNetworkPolicy, CreateService, CreateService]
    assert first.status["phase"] == "Pending"
    assert first.status["startTime"] == "2026-03-01T12:00:00Z"
    cluster.apply(first)
    second = cluster.plan()
    assert [(a.role, a.index, a.incarnation) for a in second.actions if isinstance(a, CreatePod)] == [
        (SERVER, 0, 1),
        (SERVER, 1, 1),
        (WORKER, 0, 1),
        (WORKER, 1, 1),
        (WORKER, 2, 1),
    ]
    env = {e["name"]: e.get("value") for e in second.actions[0].manifest["spec"]["containers"][0]["env"]}
    assert env["BACKSTAY_SERVERS"] == ",".join(
        f"{s['spec']['clusterIP']}:7077" for _, s in sorted(cluster.services.items())
    )
    assert second.status["incarnations"] == {f"{SERVER}-0": 1, f"{SERVER}-1": 1} | {
        f"{WORKER}-{i}": 1 for i in range(3)
    }


def test_pods_wait_for_every_address_and_the_secret(make_cluster):
    """A half-made job makes no pods, and dies of nothing while it waits."""
    cluster = make_cluster(TWO_SERVERS)
    cluster.refuse["mnist-ps-1"] = ("Forbidden", "exceeded quota: services")
    cluster.settle()
    assert not cluster.pods
    cluster.refuse.clear()
    cluster.tick(5)
    cluster.settle()
    assert len(cluster.pods) == 5


def test_phases_and_counters_follow_the_pods(make_cluster):
    cluster = make_cluster(TWO_SERVERS)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    assert cluster.status["replicas"] == 3
    for name in cluster.pods:
        cluster.run(name, ready=False)
    cluster.settle()
    assert cluster.status["phase"] == "Starting"
    cluster.run_all()
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert cluster.status["workers"] == "3/3"
    assert cluster.condition("PodsReady")["status"] == "True"
    assert cluster.status["roles"]["ParameterServer"] == {"desired": 2, "ready": 2, "restarts": 0, "disruptions": 0}
    assert [reason for reason, _ in cluster.events] == ["Running"]


def test_a_dead_worker_is_replaced_at_once_and_once(running):
    cluster = running(TWO_SERVERS)
    dead = cluster.named(WORKER, 1)
    cluster.end(dead, 137)
    todo = cluster.plan()
    (birth,) = [a for a in todo.actions if isinstance(a, CreatePod)]
    assert (birth.role, birth.index, birth.incarnation, birth.cause) == (WORKER, 1, 2, "Crashed")
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


def test_a_service_follows_its_server(running):
    """O3: one JSON patch, tested, to the new incarnation."""
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(SERVER, 1), 139)
    (patch,) = [a for a in cluster.plan().actions if isinstance(a, PatchService)]
    path = "/spec/selector/backstay.dev~1incarnation"
    assert patch.patch == (
        {"op": "test", "path": path, "value": "1"},
        {"op": "replace", "path": path, "value": "2"},
    )
    cluster.settle()


def test_a_deleted_service_comes_back_under_its_address(running):
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-1"))
    lost = cluster.services.pop(name)
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] == lost["spec"]["clusterIP"]
    assert cluster.services[name]["spec"]["selector"] == lost["spec"]["selector"]


def test_an_address_that_is_being_freed_is_asked_for_again(running):
    """T8: the API server tells of a Service's deletion some milliseconds before it can give its address again."""
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-0"))
    lost = cluster.services.pop(name)
    cluster.refuse[name] = ("Invalid", "spec.clusterIPs: provided IP is already allocated")
    cluster.apply(cluster.plan())
    cluster.refuse.clear()
    cluster.tick(5)
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] == lost["spec"]["clusterIP"]
    assert cluster.status["roles"]["Worker"]["disruptions"] == 0


def test_where_an_address_is_lost_for_good_the_pods_that_know_it_are_replaced(running):
    """T8: they would look for their servers there for ever."""
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-0"))
    lost, before = cluster.services.pop(name), set(cluster.pods)
    cluster.refuse[name] = ("Invalid", "spec.clusterIPs: provided IP is already allocated")
    for _ in range(4):
        cluster.apply(cluster.plan())
        assert name not in cluster.services
        cluster.tick(5)
    cluster.refuse.clear()
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] != lost["spec"]["clusterIP"]
    cluster.bury()
    cluster.settle()
    assert len(cluster.living()) == 5
    assert not before & cluster.living()
    assert [(role["restarts"], role["disruptions"]) for role in cluster.status["roles"].values()] == [(0, 2), (0, 3)]


def test_what_carries_our_labels_but_another_owner_is_left_alone(running):
    """O2: labels do not make a pod ours; the owner's uid does."""
    cluster = running(TWO_SERVERS)
    stranger = json.loads(json.dumps(cluster.pods[cluster.named(WORKER, 0)]))
    stranger["metadata"] |= {"name": "mnist-worker-0-9-stranger", "uid": "x"}
    stranger["metadata"]["labels"][contract.LABEL_INCARNATION] = "9"
    stranger["metadata"]["ownerReferences"][0]["uid"] = "the uid of this job's predecessor"
    cluster.foreign.append(stranger)
    orphan = json.loads(json.dumps(stranger))
    orphan["metadata"] |= {"name": "orphan", "ownerReferences": []}
    cluster.foreign.append(orphan)
    todo = cluster.plan()
    assert todo.status is None
    assert not todo.actions


def test_success_is_shard_0s_word_alone(running):
    cluster = running(TWO_SERVERS)
    said = {"result": "Succeeded", "step": 500, "term": 3, "checkpoint": "file:///ckpt/500", "loss": 0.01375168}
    said["metrics"] = {"accuracy": 0.98}
    cluster.end(cluster.named(SERVER, 1), 0, json.dumps(said))
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps(said))
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.status["step"] == 500
    assert cluster.status["metrics"] == {"accuracy": 0.98}
    assert cluster.status["checkpoint"]["uri"] == "file:///ckpt/500"
    assert cluster.condition("Succeeded")["reason"] == "Completed"
    assert (cluster.status["loss"], cluster.status["term"]) == (0.0137517, 3)
    assert cluster.status["completionTime"]
    assert cluster.events[-1][0] == "Succeeded"
    assert sum(r["restarts"] for r in cluster.status["roles"].values()) == 0


def test_a_success_without_exit_code_0_is_a_crash(running):
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(SERVER, 0), 1, json.dumps({"result": "Succeeded", "step": 5}))
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert cluster.status["roles"]["ParameterServer"]["restarts"] == 1


@pytest.mark.parametrize("shard", [0, 1])
def test_a_servers_failure_fails_the_job(running, shard):
    cluster = running(TWO_SERVERS)
    said = {"result": "Failed", "reason": "NonFinite", "message": "3 updates in a row (step 17, rank 2)"}
    cluster.end(cluster.named(SERVER, shard), 1, json.dumps(said))
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    assert cluster.condition("Failed")["reason"] == "NonFinite"
    assert "step 17, rank 2" in cluster.condition("Failed")["message"]
    assert not cluster.living()


def test_a_reason_that_kubernetes_would_refuse_is_replaced(running):
    cluster = running(TWO_SERVERS)
    cluster.end(
        cluster.named(SERVER, 0), 1, json.dumps({"result": "Failed", "reason": "no such thing!", "message": "m"})
    )
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "TrainingFailed"


def test_workers_that_leave_when_it_is_done_are_no_deaths(running):
    """How a job ends: exit 0 after `done`, in whatever order the pods are seen to go."""
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
    """ExitedEarly: told by the servers, or after a while without them."""
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(WORKER, 0), 0)
    cluster.tick(3)
    cluster.answer(step=3)
    cluster.settle()
    assert [d.cause for d in cluster.deaths] == ["ExitedEarly"]
    cluster.progress = None
    cluster.end(cluster.named(WORKER, 1), 0)
    assert cluster.settle().requeue_after.total_seconds() <= 10
    cluster.tick(10)
    cluster.settle()
    assert [d.cause for d in cluster.deaths] == ["ExitedEarly", "ExitedEarly"]
    assert cluster.status["roles"]["Worker"]["restarts"] == 2


def test_shard_0_without_a_word_is_replaced_to_say_it(running):
    cluster = running(TWO_SERVERS)
    cluster.answer(done=True)
    cluster.end(cluster.named(SERVER, 0), 137)
    cluster.settle()
    assert cluster.named(SERVER, 0).startswith("mnist-ps-0-2-")
    cluster.run(cluster.named(SERVER, 0))
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "AlreadyComplete", "step": 9}))
    cluster.settle()
    assert cluster.condition("Succeeded")["reason"] == "AlreadyComplete"


@pytest.mark.parametrize("policy", ["Running", "All", "None"])
def test_clean_pods(running, policy):
    cluster = running(TWO_SERVERS | {"runPolicy": {"cleanPods": policy}})
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "Succeeded", "step": 9}))
    cluster.settle()
    assert len(cluster.living()) == 4, "they leave by themselves"
    cluster.tick(10)
    cluster.settle()
    cluster.bury()
    assert len(cluster.pods) == {"Running": 1, "All": 0, "None": 5}[policy]


def test_time_to_live(running):
    cluster = running(TWO_SERVERS | {"runPolicy": {"ttlSecondsAfterFinished": 30}})
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "Succeeded", "step": 9}))
    cluster.tick(10)
    cluster.apply(cluster.plan())
    cluster.tick(29)
    cluster.settle()
    assert not cluster.job_deleted
    cluster.tick(2)
    cluster.apply(cluster.plan())
    assert cluster.job_deleted


def test_active_deadline(running):
    cluster = running(TWO_SERVERS | {"runPolicy": {"activeDeadlineSeconds": 60}})
    assert 45 <= cluster.settle().requeue_after.total_seconds() <= 50
    cluster.tick(50)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "DeadlineExceeded"
    assert not cluster.living()


def test_suspension_deletes_workers_then_servers(running):
    cluster = running(TWO_SERVERS | {"evaluator": {}})
    cluster.edit(runPolicy={"suspend": True})
    todo = cluster.plan()
    assert {a.name.split("-")[1] for a in todo.actions if isinstance(a, DeletePod)} == {"worker", "eval"}
    cluster.settle()
    assert {n.split("-")[1] for n in cluster.living()} == {"ps"}
    assert cluster.status["phase"] == "Suspended"
    cluster.bury()
    cluster.settle()
    assert not cluster.living()
    cluster.bury()
    cluster.settle()
    assert not cluster.deaths
    assert "startTime" not in cluster.status

    cluster.tick(100)
    cluster.edit(runPolicy={"suspend": False}, parameterServers={"replicas": 1})
    cluster.settle()
    assert sorted(cluster.status["incarnations"].values()) == [1, 2, 2, 2, 2, 2]
    assert len(cluster.living()) == 5
    assert not cluster.deaths, "what we deleted ourselves is no death"
    assert cluster.status["startTime"] == "2026-03-01T12:01:50Z"
    assert [e for e, _ in cluster.events] == ["Running", "Suspended", "Resumed"]


def test_a_suspended_job_has_no_rate(running):
    cluster = running(TWO_SERVERS)
    cluster.tick(11)
    cluster.answer(step=9, examples_per_second=567.0)
    cluster.settle()
    assert cluster.status["examplesPerSecond"] == 567
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    assert (cluster.status["step"], cluster.status.get("examplesPerSecond")) == (9, None)


def test_a_server_that_outlived_the_suspension_is_replaced(running):
    """Suspended, edited and resumed before the servers were gone: they run on the spec from before the edit."""
    cluster = running(TWO_SERVERS)
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    assert {n.split("-")[1] for n in cluster.living()} == {"ps"}
    cluster.edit(runPolicy={"suspend": False}, update={"mode": "Async"})
    cluster.settle()
    assert len(cluster.living()) == 5
    assert set(cluster.status["incarnations"].values()) == {2}
    assert all("Async" in json.dumps(cluster.pods[n]) for n in cluster.living())
    assert not cluster.deaths


def test_suspension_waits_for_a_lost_node_only_for_its_grace(running):
    """T8: a worker that cannot be seen to die holds nobody up."""
    cluster = running(TWO_SERVERS)
    cluster.edit(runPolicy={"suspend": True})
    assert cluster.settle().requeue_after.total_seconds() <= 31
    cluster.tick(31)
    cluster.settle()
    assert not cluster.living()


def test_scaling_up_adds_ranks_and_restarts_nobody(running):
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


def test_scaling_down_before_the_start_needs_nobodys_word(make_cluster):
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


def test_progress_alone_changes_the_status_every_10_s(running):
    """O8."""
    cluster = running(TWO_SERVERS)
    cluster.tick(10)
    for second in range(30):
        cluster.answer(step=second + 1, loss=1.0, examples_per_second=float("inf"), term=1)
        before = cluster.writes
        cluster.settle()
        assert cluster.writes - before == (1 if second % 10 == 0 else 0)
        cluster.tick(1)
    assert cluster.status["step"] == 21
    assert cluster.status["world"] == 3
    assert "examplesPerSecond" not in cluster.status


def test_numbers_are_as_people_read_them(running):
    """O2: `kubectl get` prints a number with all the digits that it has."""
    cluster = running()
    cluster.tick(11)
    cluster.answer(step=9, examples_per_second=567.0988497772483, loss=0.013751725666224957)
    cluster.settle()
    assert (cluster.status["examplesPerSecond"], cluster.status["loss"]) == (567.1, 0.0137517)
    cluster.tick(11)
    cluster.answer(step=10, examples_per_second=1234567.8, loss=float("nan"))
    cluster.settle()
    assert cluster.status["examplesPerSecond"] == 1235000
    assert "loss" not in cluster.status
    assert "metrics" not in cluster.status, "nothing empty"


def test_a_checkpoint_that_cannot_be_written_is_said_and_unsaid(running):
    cluster = running(TWO_SERVERS)
    cluster.answer(step=7, checkpoint_error="no space left on device")
    cluster.settle()
    assert cluster.condition("Checkpointing")["reason"] == "WriteFailed"
    assert cluster.events[-1] == ("CheckpointFailed", "no space left on device")
    cluster.restart_operator()
    cluster.settle()
    assert cluster.condition("Checkpointing")["reason"] == "WriteFailed"
    cluster.answer(step=8, checkpoint_step=8, checkpoint_uri="file:///ckpt/8")
    cluster.settle()
    assert cluster.condition("Checkpointing")["status"] == "True"


def test_a_job_that_stores_nothing_says_so(running):
    cluster = running()
    assert cluster.condition("Checkpointing")["reason"] == "NotConfigured"
    assert [e for e, _ in cluster.events] == ["NotConfigured", "Running"]


def test_a_spec_that_breaks_a_rule_fails_the_job_once_and_ends_its_pods(running):
    cluster = running(TWO_SERVERS)
    stranger = json.loads(json.dumps(cluster.pods[cluster.named(WORKER, 0)]))
    stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
    message = "spec.workers.replicas is 0: must be at least 1"

    def refused():
        job = cluster.job
        return refuse(job.metadata, job.status, message, cluster.now, (*cluster.pods.values(), stranger))

    first = refused()
    assert first.status["phase"] == "Failed"
    assert [(e.reason, e.message) for e in first.events] == [("Failed", f"InvalidSpec: {message}")]
    assert {a.name for a in first.actions} == set(cluster.pods)
    assert len(first.actions) == 5
    cluster.apply(first)
    again = refused()
    assert (again.status, again.actions, again.events) == (None, (), ())


def test_a_refused_edit_of_a_job_that_succeeded_changes_nothing(running):
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "Succeeded", "step": 9}))
    cluster.settle()
    job = cluster.job
    again = refuse(job.metadata, job.status, "bad", cluster.now, tuple(cluster.pods.values()))
    assert (again.status, again.actions) == (None, ())


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector(running):
    cluster = running(TWO_SERVERS)
    cluster.manifest["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    cluster.end(cluster.named(WORKER, 0))
    todo = cluster.plan()
    assert (todo.status, todo.actions) == (None, ())
