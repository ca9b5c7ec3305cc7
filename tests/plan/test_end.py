"""How a job ends: its outcome, its deadlines, suspension, and what is deleted afterwards."""

from __future__ import annotations

import json

import pytest

from backstay_spec import contract
from backstay_spec.actions import DeletePod
from backstay_spec.job_report import TermStart
from backstay_spec.plan import refuse

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}
REFUSED = json.dumps({"result": "Refused", "reason": "OtherParameters", "message": "w is float32[5] here"})


def ends_at_the_deadline(cluster):
    """The job ends after the 100 s that it has, and not before."""
    for _ in range(9):
        cluster.tick(10)
        cluster.settle()
    assert cluster.status["phase"] != "Failed"
    for _ in range(4):
        cluster.tick(10)
        cluster.settle()
    assert cluster.condition("Failed")["reason"] == "PodRefused"


@pytest.mark.parametrize(("gone", "says"), [(False, ("True", "AllCreated")), (True, ("False", "Finished"))])
def test_a_job_that_fails_as_soon_as_its_pods_exist_says_whether_they_were_created(make_cluster, gone, says):
    cluster = make_cluster(TWO_SERVERS)
    while len(cluster.pods) < 5:
        cluster.apply(cluster.plan())
    assert cluster.condition("PodsCreated")["status"] == "Unknown"
    cluster.run_all()
    if gone:
        cluster.vanish(cluster.named(WORKER, 1))
    cluster.end(cluster.named(SERVER, 1), 1, REFUSED.replace("Refused", "Failed"))
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    created = cluster.condition("PodsCreated")
    assert (created["status"], created["reason"]) == says


def test_training_ends_by_shard_0s_word_alone(running):
    cluster = running(TWO_SERVERS)
    said = {"result": "Succeeded", "step": 500, "term": 3, "checkpoint": "file:///ckpt/500", "loss": 0.01375168}
    said["metrics"] = {"accuracy": 0.98}
    cluster.end(cluster.named(SERVER, 1), 0, json.dumps(said))
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps(said))
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Trained")["status"]) == ("Running", "True")
    cluster.end(cluster.named(WORKER, 0), 0, json.dumps({"result": "Trained", "step": 500}))
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


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ({"step": 150, "term": 2}, 150),
        ({"step": 150}, 150),
        ({"step": 40, "term": 2}, 84),
        ({"step": 150, "term": 1}, 84),  # a rollback has discarded it
        ({"step": 9, "term": 3}, 9),  # a rollback that no call has reported
        ({"step": -1}, 84),
        ({"step": 1 << 63}, 84),
        ({}, 84),
    ],
)
def test_o8_a_failed_job_has_the_last_step_that_a_pod_reported(running, said, step):
    """The newest call of the operator was made before the last updates. Its number stayed in the status."""
    cluster = running(TWO_SERVERS)
    cluster.answer(term=2, step=84)
    cluster.settle()
    failed = {"result": "Failed", "reason": "NonFinite", "message": "m", **said}
    cluster.end(cluster.named(SERVER, 1), 1, json.dumps(failed))
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["step"]) == ("Failed", step)
    assert [text for reason, text in cluster.events if reason == "Failed"] == [
        f"NonFinite: parameter server 1: m (last step: {step})"
    ]
    cluster.tick(60)
    cluster.settle()
    assert cluster.status["step"] == step


def test_o8_the_last_step_of_a_job_without_an_answer_is_in_the_message_of_a_worker(running):
    """A job of one second ends before the first call."""
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}})
    said = {"reason": "EmptyBatch", "message": "no rows", "result": "Refused", "step": 3, "term": 1}
    cluster.end(cluster.named(WORKER, 0), 1, json.dumps(said))
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["step"]) == ("Failed", 3)


def test_the_step_of_a_running_job_is_that_of_its_servers(running):
    """A worker's message counts only at the end: the servers may have gone back since."""
    cluster = running(TWO_SERVERS)
    cluster.answer(term=1, step=84)
    cluster.settle()
    cluster.end(cluster.named(WORKER, 1), 1, json.dumps({"reason": "KeyError", "message": "m", "step": 150, "term": 1}))
    cluster.settle()
    assert cluster.status["step"] == 84


def test_a_reason_that_kubernetes_would_refuse_is_replaced(running):
    cluster = running(TWO_SERVERS)
    cluster.end(
        cluster.named(SERVER, 0), 1, json.dumps({"result": "Failed", "reason": "no such thing!", "message": "m"})
    )
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "TrainingFailed"


@pytest.mark.parametrize("policy", ["Running", "All", "None"])
def test_clean_pods(running, policy):
    cluster = running(TWO_SERVERS | {"runPolicy": {"cleanPods": policy}})
    cluster.complete()
    cluster.settle()
    assert len(cluster.living()) == 3, "they leave by themselves"
    cluster.tick(10)
    cluster.settle()
    cluster.bury()
    assert len(cluster.pods) == {"Running": 2, "All": 0, "None": 5}[policy]


@pytest.mark.parametrize("policy", ["Running", "All", "None"])
@pytest.mark.parametrize("code", [0, 1])
def test_what_the_pods_used_is_deleted_when_none_of_them_runs(running, policy, code):
    """Services, Secret and NetworkPolicy of a job that has ended. A new operator does not delete them again."""
    cluster = running(TWO_SERVERS | {"runPolicy": {"cleanPods": policy}})
    if code == 0:
        cluster.complete()
    else:
        failed = {"result": "Failed", "reason": "X", "message": "m"}
        cluster.end(cluster.named(SERVER, 0), code, json.dumps(failed))
    cluster.settle()
    assert (len(cluster.services), len(cluster.policies), cluster.secrets_deleted) == (2, 1, 0), "pods still use them"
    cluster.tick(10)
    cluster.settle()
    if policy == "None":
        assert len(cluster.services) == 2
        for name in list(cluster.living()):
            cluster.end(name, 0)
    cluster.bury()
    cluster.settle()
    assert (cluster.services, cluster.policies, cluster.secrets_deleted) == ({}, {}, 1)
    cluster.restart_operator()
    cluster.settle()
    assert cluster.secrets_deleted == 1


def test_an_operator_that_dies_while_it_deletes_leaves_nothing_behind(running):
    for done in range(5):
        cluster = running(TWO_SERVERS | {"runPolicy": {"cleanPods": "All"}})
        cluster.complete()
        cluster.settle()
        cluster.tick(10)
        cluster.settle()
        cluster.bury()
        for action in cluster.plan().actions[:done]:
            cluster.act(action)
        cluster.restart_operator()
        cluster.settle()
        assert (cluster.services, cluster.policies) == ({}, {})
        assert cluster.secrets_deleted


def test_a_suspended_job_keeps_what_its_next_pods_use(running):
    cluster = running(TWO_SERVERS)
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(3):
        cluster.settle()
        cluster.bury()
    assert not cluster.pods
    assert (len(cluster.services), len(cluster.policies), cluster.secrets_deleted) == (2, 1, 0)
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    assert len(cluster.living()) == 5


def test_time_to_live(running):
    cluster = running(TWO_SERVERS | {"runPolicy": {"ttlSecondsAfterFinished": 30}})
    cluster.complete()
    cluster.tick(10)
    cluster.apply(cluster.plan())
    cluster.tick(29)
    cluster.settle()
    assert not cluster.deleted
    cluster.tick(2)
    cluster.apply(cluster.plan())
    assert cluster.deleted


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
    assert (cluster.status["phase"], cluster.condition("Suspended")["reason"]) == ("Running", "Suspending")
    cluster.bury()
    cluster.settle()
    assert not cluster.living()
    cluster.bury()
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Suspended")["reason"]) == ("Suspended", "Suspended")
    assert not cluster.deaths
    assert "startTime" not in cluster.status

    cluster.tick(100)
    cluster.edit(runPolicy={"suspend": False}, parameterServers={"replicas": 1})
    cluster.settle()
    assert sorted(cluster.status["incarnations"].values()) == [1, 2, 2, 2, 2, 2]
    assert len(cluster.living()) == 5
    assert not cluster.deaths, "what we deleted ourselves is no death"
    assert cluster.status["startTime"] == "2026-03-01T12:01:50Z"
    assert [e for e, _ in cluster.events] == ["Running", "Suspending", "Suspended", "Resumed"]


@pytest.mark.parametrize("gone", [True, False])
def test_a_resumed_job_trains_once_it_makes_updates(running, gone):
    """`kubectl wait --for=condition=Training` returned 6 s before the first update, because of the last report of the
    servers before the suspension. That one may also be of servers that still run."""
    cluster = running(TWO_SERVERS)
    cluster.tick(11)
    cluster.answer(step=9, term=1, coordinator=1, term_start=TermStart(1, 0))
    cluster.settle()
    assert cluster.condition("Training")["status"] == "True"
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    for _ in range(2 if gone else 1):
        cluster.bury()
        cluster.settle()
    assert cluster.condition("Suspended")["status"] == ("True" if gone else "False")
    cluster.tick(1)
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    assert cluster.condition("Suspended")["reason"] == "Resumed"
    assert (cluster.condition("Training")["status"], cluster.condition("Training")["reason"]) == ("False", "NotStarted")
    cluster.bury()
    cluster.tick(3)
    cluster.settle()
    cluster.run_all()
    cluster.settle()
    assert cluster.condition("Training")["reason"] == "NotStarted"
    server = cluster.status["incarnations"]["parameter-server-0"]
    start = TermStart(2, 9, "file:///c/9")
    for step, trains in ((9, "False"), (10, "True")):
        cluster.tick(2)
        cluster.answer(step=step, term=2, coordinator=server, term_start=start)
        cluster.settle()
        assert cluster.condition("Training")["status"] == trains, step
    assert "TrainingInterrupted" not in [reason for reason, _ in cluster.events]


@pytest.mark.parametrize("gone", [True, False])
def test_a_late_report_of_a_server_from_before_a_suspension_starts_nothing(running, gone):
    """The step of the report is above that of the status, and no server of the resumed job has begun."""
    cluster = running(TWO_SERVERS)
    cluster.tick(11)
    cluster.answer(step=9, term=1, coordinator=1, term_start=TermStart(1, 0))
    cluster.settle()
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    for _ in range(2 if gone else 1):
        cluster.bury()
        cluster.settle()
    cluster.tick(1)
    cluster.edit(runPolicy={"suspend": False})
    for step in (12, 13):
        cluster.answer(step=step, term=1, coordinator=1, term_start=TermStart(1, 0))
        cluster.settle()
        cluster.bury()
        assert cluster.condition("Running")["status"] == "False", cluster.condition("Running")
        assert cluster.status["phase"] in ("Pending", "Starting")
    cluster.run_all()
    cluster.settle()
    assert cluster.status["phase"] == "Running"


def test_the_last_report_of_a_server_is_in_the_status_of_a_suspended_job(running):
    cluster = running(TWO_SERVERS)
    cluster.tick(11)
    cluster.answer(step=9, term=1, coordinator=1, term_start=TermStart(1, 0))
    cluster.settle()
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    cluster.bury()
    cluster.settle()
    server = cluster.named(contract.ROLE_SERVER, 0)
    message = {"step": 12, "term": 1, "checkpoint": {"step": 12, "uri": "file:///c/12"}}
    cluster.end(server, 143, json.dumps(message))
    cluster.memory.stopped(cluster.pods[server])
    cluster.bury()
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["step"]) == ("Suspended", 12)
    assert cluster.status["checkpoint"]["uri"] == "file:///c/12"
    assert "continues from the checkpoint of step 12" in dict(cluster.events)["Suspended"]
    older = json.dumps({**message, "step": 3})
    for said in (older, "not JSON", json.dumps({"step": 99, "term": 1, "result": "Failed"}), json.dumps({"step": "x"})):
        known = cluster.memory.progress
        other = {"metadata": cluster.pods[server]["metadata"] if server in cluster.pods else {"labels": {}}}
        other["status"] = {"containerStatuses": [{"name": "trainer", "state": {"terminated": {"message": said}}}]}
        cluster.memory.stopped(other)
        assert cluster.memory.progress == known


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
    """T8: a worker whose death cannot be observed does not delay the end."""
    cluster = running(TWO_SERVERS)
    cluster.edit(runPolicy={"suspend": True})
    assert cluster.settle().requeue_after.total_seconds() <= 31
    cluster.tick(31)
    cluster.settle()
    assert not cluster.living()


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
    cluster.complete()
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


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigFailed"),
    ],
)
def test_an_obstacle_that_may_disappear_is_waited_for_until_the_deadline(running, make_cluster, reason, blocked):
    cluster = make_cluster(SPEC | {"runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.settle()
    cluster.wait(cluster.named(SERVER, 0), reason, "why")
    cluster.settle()
    assert cluster.condition("PodsReady")["reason"] == blocked
    assert cluster.events[-1][0] == blocked
    before = len(cluster.events)
    cluster.tick(99)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    assert len(cluster.events) == before
    cluster.tick(1)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == blocked


def test_the_wait_for_a_quota_ends_at_the_deadline_even_after_restarts(make_cluster):
    """T8, and nothing lost with the operator's memory."""
    cluster = make_cluster(SPEC | {"runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.refuse["mnist-worker"] = ("Forbidden", "exceeded quota")
    cluster.settle()
    cluster.run_all()
    for _ in range(4):
        cluster.tick(25)
        cluster.restart_operator()
        cluster.settle()
    cluster.tick(5)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "PodRefused"
    assert not cluster.deaths, "what never was did not die"


@pytest.mark.parametrize("pods_per_rank", [1, 2])
@pytest.mark.parametrize(("update", "replicas"), [({"backups": 1}, 3), ({"mode": "Async"}, 2)], ids=["backup", "async"])
def test_a_death_beside_a_rank_that_waits_for_room_does_not_end_the_job(running, update, replicas, pods_per_rank):
    """The backup had waited for longer than the limit, and the replacement of the dead pod for one second (O4)."""
    workers = {"replicas": replicas, "podsPerRank": pods_per_rank}
    policy = {"pendingDeadlineSeconds": 100}
    cluster = running(SPEC | {"workers": workers, "update": update, "runPolicy": policy})
    cluster.refuse[f"mnist-worker-{replicas - 1}-"] = ("Forbidden", "exceeded quota")
    last, first = (
        [
            name
            for name, pod in cluster.pods.items()
            if (pod["metadata"]["labels"][contract.LABEL_ROLE], pod["metadata"]["labels"][contract.LABEL_INDEX])
            == (WORKER, str(rank))
        ]
        for rank in (replicas - 1, 0)
    )
    assert len(last) == len(first) == pods_per_rank
    for name in last:
        cluster.delete(name)
    cluster.settle()
    for step in range(12):
        cluster.tick(20)
        cluster.answer(world=replicas, step=20 + step)
        cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.refuse["mnist-worker-0-"] = ("Forbidden", "exceeded quota")
    for name in first:
        cluster.delete(name)
    cluster.settle()
    ends_at_the_deadline(cluster)


@pytest.mark.parametrize("restarts", [False, True])
def test_ranks_that_find_no_room_after_a_scale_up_do_not_end_the_training_of_the_others(running, restarts):
    cluster = running(SPEC | {"workers": {"replicas": 2}, "runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.answer(world=2, step=9)
    cluster.settle()
    cluster.refuse["mnist-worker-2-"] = ("Forbidden", "exceeded quota")
    cluster.edit(workers={"replicas": 3})
    for step in range(20):
        cluster.tick(10)
        cluster.answer(world=2, step=10 + step)
        cluster.settle()
    if restarts:
        cluster.restart_operator()
        cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert "worker 2" in cluster.condition("PodsCreated")["message"]
    # It has joined, and is needed from now on.
    cluster.answer(world=3, step=40)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "PodRefused"


def test_a_job_with_backups_whose_pods_are_all_refused_ends_at_the_deadline(make_cluster):
    """Ranks that no update needs are created after the quorum. They were not counted as missing, and the job waited."""
    spec = SPEC | {"workers": {"replicas": 3}, "update": {"backups": 1}, "runPolicy": {"pendingDeadlineSeconds": 100}}
    cluster = make_cluster(spec)
    cluster.refuse["mnist-worker"] = ("Forbidden", "exceeded quota")
    cluster.settle()
    cluster.run_all()
    ends_at_the_deadline(cluster)


def test_a_death_while_a_rank_of_the_quorum_is_refused_does_not_end_the_job(running):
    """The others made updates for longer than the limit. The rank that died is created after the refused one."""
    policy = {"pendingDeadlineSeconds": 100}
    cluster = running(SPEC | {"workers": {"replicas": 3}, "update": {"backups": 1}, "runPolicy": policy})
    cluster.refuse["mnist-worker"] = ("Forbidden", "exceeded quota")
    cluster.delete(cluster.named(WORKER, 0))
    cluster.settle()
    for step in range(12):
        cluster.tick(20)
        cluster.answer(world=3, step=20 + step)
        cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.delete(cluster.named(WORKER, 2))
    cluster.settle()
    ends_at_the_deadline(cluster)


def test_a_worker_that_the_job_can_do_without_may_stay_pending(running):
    """With backups, one worker that finds no node does not end the training of the others."""
    cluster = running(SPEC | {"workers": {"replicas": 3}, "update": {"backups": 1}})
    cluster.delete(cluster.named(WORKER, 2))
    cluster.settle()
    cluster.bury()
    cluster.tick(700)
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.delete(cluster.named(WORKER, 1))
    cluster.settle()
    cluster.bury()
    cluster.tick(700)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "NotStarted"


def test_a_pod_that_is_refused_before_the_first_update_fails_the_job_immediately(running):
    """O4: its replacement would be refused too."""
    cluster = running(SPEC)
    cluster.answer(step=0)
    cluster.end(cluster.named(WORKER, 1), 1, REFUSED)
    cluster.settle()
    failed = cluster.condition("Failed")
    assert (failed["reason"], failed["message"]) == ("OtherParameters", "worker 1: w is float32[5] here")
    assert cluster.status["roles"]["Worker"]["restarts"] == 0


def test_a_pod_that_is_refused_later_does_not_end_what_trains(running):
    cluster = running(SPEC)
    cluster.answer(step=7)
    cluster.end(cluster.named(WORKER, 1), 1, REFUSED)
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert cluster.status["roles"]["Worker"]["restarts"] == 1
