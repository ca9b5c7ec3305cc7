"""O4: what a death costs, by its cause; what waits, and what fails the job at once."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from backstay_spec import contract
from backstay_spec.actions import DeletePod
from backstay_spec.budgets import wait_after
from backstay_spec.causes import Cause, exit_text, obstacle_of, outcome_of, verdict_of
from backstay_spec.observed import Stalled

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


def pod(status, **metadata):
    return {"metadata": metadata, "status": status}


def ended(code, reason="Error", message="", finished="2026-03-01T12:00:10Z"):
    state = {"exitCode": code, "reason": reason, "finishedAt": finished, "message": message}
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}],
    }


def target(why, **more):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": why, "message": "because"}
    return {"phase": "Running", "conditions": [condition], **more}


DELETED = {"deletionTimestamp": "2026-03-01T12:00:40Z", "deletionGracePeriodSeconds": 30}


@pytest.mark.parametrize(
    ("seen", "cause", "text"),
    [
        (pod(ended(1)), "Crashed", "exit code 1"),
        (pod(ended(139)), "Crashed", "exit code 139 (SIGSEGV)"),
        (
            pod(ended(128, "StartError", "no such file: pyton")),
            "Crashed",
            "exit code 128, StartError: no such file: pyton",
        ),
        (pod(ended(1, message="Traceback\n  line\nValueError: no")), "Crashed", "ValueError: no"),
        (pod(ended(1, message='{"reason": "ShapesDiffer", "message": "leaf w"}')), "Crashed", "ShapesDiffer: leaf w"),
        (pod(ended(0, "Completed")), "ExitedEarly", "exit code 0"),
        (pod(ended(137, "OOMKilled")), "OutOfMemory", "OOMKilled"),
        (pod(ended(137, "ContainerStatusUnknown")), "NodeLost", "ContainerStatusUnknown"),
        (pod({"phase": "Failed"}), "Crashed", "no exit status"),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}),
            "Evicted",
            "Evicted: low on memory",
        ),
        (pod({"phase": "Failed", "reason": "NodeLost"}), "NodeLost", "NodeLost"),
        (pod({"phase": "Failed", "reason": "Terminated"}), "NodeShutdown", "Terminated"),
        (pod({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}), "NotAdmitted", "OutOf"),
        (pod({"phase": "Failed", "reason": "UnexpectedAdmissionError"}), "NotAdmitted", "Unexpected"),
        (pod(target("PreemptionByScheduler"), **DELETED), "Preempted", "because"),
        (pod(target("EvictionByEvictionAPI"), **DELETED), "Evicted", "because"),
        (pod(target("DeletionByTaintManager"), **DELETED), "NodeLost", "because"),
        (pod(target("DeletionByPodGC", phase="Failed")), "NodeLost", "because"),
        (pod(target("TerminationByKubelet", phase="Failed", reason="Evicted")), "Evicted", "because"),
        (pod(target("TerminationByKubelet", phase="Failed", reason="Terminated")), "NodeShutdown", "because"),
        (pod(target("SomethingNew")), "Evicted", "because"),
        (pod({"phase": "Running"}, **DELETED), "Deleted", "deleted"),
        (pod(ended(143), **DELETED), "Deleted", "deleted"),
        (pod(ended(137, finished="2026-03-01T12:00:09Z"), **DELETED), "Crashed", "SIGKILL"),
        (pod(ended(0, "Completed", finished="2026-03-01T12:00:20Z"), **DELETED), "Deleted", "deleted"),
    ],
)
def test_every_cause_has_its_name(seen, cause, text):
    verdict = verdict_of(seen)
    assert verdict.cause == cause
    assert text in verdict.text


def test_the_program_pays_for_its_own_deaths_only():
    assert {c for c in Cause if c.charged} == {"Crashed", "OutOfMemory", "ExitedEarly", "Stalled"}


@pytest.mark.parametrize("message", ["TypeError: no such leaf", "no such leaf"])
def test_last_words_name_the_error_once(message):
    said = json.dumps({"reason": "TypeError", "message": message})
    state = {"exitCode": 1, "reason": "Error", "message": said}
    pod = {"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}}
    assert verdict_of(pod).text == "exit code 1: TypeError: no such leaf"


def test_who_was_killed_had_no_last_words_only_a_log_and_lines_of_json_are_read():
    """The kubelet gives the log's end as the message of any that failed, however old it is."""
    log = '{"level": "info", "message": "checkpoint of step 5"}\n{"level": "info", "message": "step 7"}\nfree text\n[1]'
    states = {code: {"exitCode": code, "reason": "Error", "message": log} for code in (1, 137)}
    told = {
        code: verdict_of(
            {"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}}
        ).text
        for code, state in states.items()
    }
    assert told[1] == "exit code 1: checkpoint of step 5\nstep 7\nfree text\n[1]"
    assert told[137] == "exit code 137 (SIGKILL); its log ends: checkpoint of step 5\nstep 7\nfree text\n[1]"


def test_an_unknown_signal_is_still_a_number():
    assert exit_text(128 + 99) == "exit code 227"
    assert exit_text(-1) == "exit code -1"


@pytest.mark.parametrize(
    "message", ["", "[1]", "{}", "NaN", '{"result": "Fine"}', '{"result": ["Failed"]}', "{" * 5000]
)
def test_what_is_no_outcome_is_none(message):
    assert outcome_of(pod(ended(0, message=message))) is None


def test_an_outcome_of_odd_types_keeps_what_can_be_kept():
    said = {"result": "Succeeded", "step": True, "checkpoint": 5, "metrics": {"a": float("nan"), "b": "x", "c": 1}}
    outcome = outcome_of(pod(ended(0, message=json.dumps(said))))
    assert (outcome.step, outcome.checkpoint, outcome.metrics) == (None, "", {"c": 1.0})


@pytest.mark.parametrize(
    ("status", "blocked"),
    [
        ({"phase": "Pending"}, "NotStarted"),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, "Unschedulable"),
        ({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}, None),
        ({"phase": "Running"}, None),
    ],
)
def test_what_keeps_a_pod_from_starting(status, blocked):
    obstacle = obstacle_of(pod(status))
    assert (obstacle.blocked if obstacle else None) == blocked


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigFailed"),
    ],
)
def test_what_may_mend_is_waited_for_until_the_deadline(running, make_cluster, reason, blocked):
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


def test_an_invalid_image_name_fails_the_job_at_once(make_cluster):
    cluster = make_cluster(SPEC)
    cluster.settle()
    cluster.wait(cluster.named(WORKER, 1), "InvalidImageName", "couldn't parse image name")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "InvalidImageName"
    assert "worker 1" in cluster.condition("Failed")["message"]


def test_a_pod_that_the_api_refuses_as_invalid_fails_the_job_at_once(make_cluster):
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


def test_a_quota_is_waited_for_until_the_deadline_whoever_restarts(make_cluster):
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


def test_a_pod_that_waits_for_a_volume_says_where_the_reason_is(make_cluster):
    """O4: the kubelet tells of a ConfigMap that is not there in the pod's events alone."""
    cluster = make_cluster(SPEC | {"code": {"configMap": "missing"}})
    cluster.settle()
    cluster.tick(20)
    cluster.settle()
    assert cluster.condition("PodsReady")["reason"] == "NotReady"
    cluster.tick(20)
    cluster.settle()
    assert cluster.condition("PodsReady")["reason"] == "NotStarted"
    assert f"events --for pod/{cluster.named(SERVER, 0)}" in cluster.condition("PodsReady")["message"]
    cluster.run_all()
    cluster.settle()
    assert cluster.condition("PodsReady")["status"] == "True"


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


def test_the_budget_ends_the_job(running):
    cluster = running(SPEC | {"workers": {"replicas": 2, "maxRestarts": 2}})
    for _ in range(3):
        for _ in range(2):
            cluster.run_all()
            cluster.tick(2)
        cluster.end(cluster.named(WORKER, 0), 1, "ValueError: boom")
        cluster.settle()
    assert cluster.condition("Failed")["reason"] == "MaxRestartsExceeded"
    assert "ValueError: boom" in cluster.condition("Failed")["message"]
    assert "spec.workers.maxRestarts of 2" in cluster.condition("Failed")["message"]
    assert cluster.status["roles"]["Worker"]["restarts"] == 2
    assert [d.charged for d in cluster.deaths] == [True, True, False]


def test_the_waits_double_up_to_a_minute():
    assert [wait_after(n).total_seconds() for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert wait_after(10**9) == timedelta(seconds=60)


def test_a_rank_that_crashes_before_its_first_gradient_backs_off(running):
    cluster = running(SPEC)
    waits = []
    for _ in range(4):
        cluster.end(cluster.named(WORKER, 0), 1)
        cluster.settle()
        if not cluster.status.get("backoff"):
            continue
        waited = 0
        while cluster.status["backoff"]["worker-0"].get("notBefore"):
            assert cluster.condition("PodsReady")["reason"] == "BackingOff"
            cluster.tick(1)
            waited += 1
            cluster.settle()
        waits.append(waited)
    assert waits == [1, 2, 4], "the first had been ready"
    assert len(cluster.deaths) == 4
    cluster.run_all()
    cluster.tick(2)
    cluster.run_all()
    cluster.settle()
    assert "backoff" not in cluster.status or cluster.status["backoff"] == {}


def test_a_wait_survives_the_operator(running):
    """O5: no count lost, and no crash counted twice."""
    cluster = running(SPEC)
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    restarts = cluster.status["roles"]["Worker"]["restarts"]
    cluster.restart_operator()
    cluster.vanish(cluster.named(WORKER, 0))
    cluster.settle()
    assert cluster.status["roles"]["Worker"] | {"ready": 0} == {
        "desired": 2,
        "ready": 0,
        "restarts": restarts,
        "disruptions": 0,
    }


def test_the_servers_know_who_has_worked(running):
    """A gradient handed in counts more than a probe that was never asked."""
    cluster = running(SPEC)
    name = cluster.named(WORKER, 0)
    cluster.run(name, ready=False)
    cluster.pods[name]["status"]["conditions"][0]["lastTransitionTime"] = "2026-03-01T12:00:00Z"
    cluster.answer(step=3, contributed={0: 1})
    cluster.end(name, 1)
    cluster.settle()
    assert cluster.named(WORKER, 0) != name, "replaced without a wait"


def test_a_hung_worker_is_killed_replaced_and_charged(running):
    cluster = running(SPEC)
    name = cluster.named(WORKER, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no gradient for 300 s"),))
    assert DeletePod(name, cluster.pods[name]["metadata"]["uid"], 1, "Stalled") in cluster.plan().actions
    cluster.settle()
    assert [(d.cause, d.charged) for d in cluster.deaths] == [("Stalled", True)]
    assert cluster.named(WORKER, 1) != name
    cluster.settle()
    assert len(cluster.deaths) == 1, "the old answer is about the old incarnation"


def test_a_hung_worker_does_not_outlive_an_operator_that_forgot_to_kill_it(running):
    """The operator dies after the status that counts the death, before the delete: the old incarnation still goes."""
    cluster = running(SPEC)
    name = cluster.named(WORKER, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no gradient for 300 s"),))
    cluster.write_status(cluster.plan())
    cluster.restart_operator()
    cluster.settle()
    cluster.bury()
    assert name not in cluster.pods
    assert [d.cause for d in cluster.deaths] == ["Stalled"]
    assert cluster.status["incarnations"]["worker-1"] == 3


def test_a_pod_that_is_gone_is_dead_once_a_live_get_says_so(running):
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
    cluster.write_status(cluster.plan())
    assert "notBefore" not in cluster.status["backoff"]["worker-0"]
    cluster.restart_operator()
    cluster.apply(cluster.plan())
    cluster.run(cluster.named(WORKER, 1), ready=False)  # so that there is something else to write
    cluster.settle()
    assert cluster.named(WORKER, 0).startswith("mnist-worker-0-4-")
    assert cluster.status["roles"]["Worker"]["restarts"] == 2
    assert [d.pod for d in cluster.deaths if d.index == 0 and d.incarnation == 3] == []


REFUSED = json.dumps({"result": "Refused", "reason": "OtherParameters", "message": "w is float32[5] here"})


def test_a_pod_that_is_refused_before_the_first_update_fails_the_job_at_once(running):
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


def test_a_secret_that_was_deleted_comes_back_when_a_pod_lacks_it(running):
    """O7 forbids to look whether it is there; a pod that waits for want of it tells."""
    cluster = running(SPEC)
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    made = cluster.secrets
    name = cluster.named(WORKER, 0)
    cluster.tick(11)
    cluster.wait(name, "CreateContainerConfigError", 'secret "mnist-abc" not found')
    cluster.settle()
    assert cluster.secrets == made + 1
    cluster.settle()
    assert cluster.secrets == made + 1, "not without end"
    assert timedelta(0) < cluster.settle().requeue_after <= timedelta(seconds=10)


def test_a_sidecar_does_not_keep_a_dead_trainer_alive(running):
    cluster = running(SPEC)
    name = cluster.named(WORKER, 0)
    cluster.end(name, 1)
    cluster.pods[name]["status"]["phase"] = "Running"
    cluster.settle()
    assert cluster.named(WORKER, 0) != name
    assert cluster.pods[name]["metadata"]["deletionTimestamp"]


@pytest.mark.parametrize("role", [SERVER, WORKER])
def test_t8_a_pod_that_runs_and_never_joins_fails_a_job_that_has_not_trained(make_cluster, role):
    """T8: a script that hangs at import. The wait ends at `pendingDeadlineSeconds`, and the pod is named."""
    cluster = make_cluster(SPEC | {"runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.settle()
    cluster.run_all()
    cluster.run(cluster.named(role, 0), ready=False)
    cluster.settle()
    events = len(cluster.events)
    cluster.tick(99)
    cluster.settle()
    assert "Failed" not in {c["type"] for c in cluster.status["conditions"] if c["status"] == "True"}
    assert len(cluster.events) == events
    cluster.tick(1)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "NotJoined"
    assert "0 did not join" in cluster.condition("Failed")["message"]


def test_t8_a_replacement_that_never_joins_is_replaced_when_the_job_has_trained(running):
    """T8: the others may train on, so it costs a restart and not the job; one that joined is left alone."""
    cluster = running(SPEC | {"runPolicy": {"pendingDeadlineSeconds": 100}})
    cluster.answer(step=5, contributed={0: 1, 1: 1}, beating={0: 1})
    cluster.run(cluster.named(WORKER, 0), ready=False)  # it lost its servers for a moment
    cluster.end(cluster.named(WORKER, 1), 1)
    cluster.settle()
    silent = cluster.named(WORKER, 1)
    cluster.run(silent, ready=False)
    cluster.settle()
    cluster.tick(100)
    cluster.answer(step=5, contributed={0: 1, 1: 1}, beating={0: 1})
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert "deletionTimestamp" in cluster.pods[silent]["metadata"]
    assert "deletionTimestamp" not in cluster.pods[cluster.named(WORKER, 0)]["metadata"]
    assert [death.cause for death in cluster.deaths] == [Cause.CRASHED, Cause.STALLED]


@pytest.mark.parametrize(("step", "fails"), [(0, True), (7, False)])
def test_o4_a_rank_that_crashes_again_and_again_fails_a_job_that_has_not_trained(running, step, fails):
    """O4: six times in a row before the first update; a job that trains spends its budget instead."""
    cluster = running(SPEC | {"workers": {"replicas": 2, "maxRestarts": 100}})
    for _ in range(6):
        cluster.answer(step=step)
        cluster.end(cluster.named(WORKER, 1), 1, "ValueError: not today")
        cluster.settle()
        cluster.tick(61)
        cluster.answer(step=step)
        cluster.settle()
        if cluster.status["phase"] != "Failed":
            cluster.run_all()
    assert (cluster.status["phase"] == "Failed") is fails
    if fails:
        assert cluster.condition("Failed")["reason"] == "CrashLoop"
        assert "not today" in cluster.condition("Failed")["message"]


def test_what_a_script_printed_cannot_move_a_reader_s_cursor():
    """O4: its last words are in the status, and `kubectl` prints that as it is."""
    red = "\x1b[31mValueError\x1b[0m:\ttoo hot\r\n"
    state = {"terminated": {"exitCode": 1, "message": red}}
    verdict = verdict_of({"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}})
    assert "ValueError" in verdict.text
    assert "too hot" in verdict.text
    assert not {"\x1b", "\r", "\t"} & set(verdict.text)
