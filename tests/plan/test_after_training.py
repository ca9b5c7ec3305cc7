"""The end of training and the script of worker 0, which continues after it: O1, O4, O5, T7, T8."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.actions import CreatePod

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {
    "parameterServers": {"replicas": 1},
    "workers": {"replicas": 2},
    "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}},
    "runPolicy": {"afterTrainingSeconds": 100},
}
RETURNED = json.dumps({"result": "Trained", "step": 9, "checkpoint": "file:///ckpt/9"})
RAISED = {
    "result": "AfterTrainingFailed",
    "reason": "KeyError",
    "message": "'model'",
    "traceback": "Traceback (most recent call last):\n  File \"train.py\", line 9, in export\nKeyError: 'model'",
}


def leader(cluster, incarnation=None):
    return cluster.named(WORKER, 0, incarnation)


def after(running, spec=SPEC, **fields):
    """Returns a job whose training has ended, while the script of worker 0 continues."""
    cluster = running(spec)
    cluster.train(**fields)
    cluster.settle()
    return cluster


def test_the_job_waits_for_the_script_of_worker_0(running):
    """O1: Trained, with the last checkpoint; Succeeded with exit code 0; no other pod counts or is replaced."""
    cluster = after(running)
    assert cluster.status["phase"] == "Running"
    assert cluster.condition("Trained")["message"] == "trained to step 9, stored as file:///ckpt/9"
    assert cluster.condition("AfterTrainingComplete")["status"] == "Unknown"
    assert cluster.status["checkpoint"]["uri"] == "file:///ckpt/9"
    cluster.end(cluster.named(WORKER, 1), 1)
    cluster.settle()
    assert not cluster.deaths
    cluster.tick(50)
    cluster.end(leader(cluster), 0, RETURNED)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert (cluster.condition("Succeeded")["reason"], cluster.status["step"]) == ("Completed", 9)
    assert cluster.condition("AfterTrainingComplete")["status"] == "True"
    assert [reason for reason, _ in cluster.events] == ["Running", "Trained", "Succeeded"]


def test_a_job_that_stopped_early_succeeds_with_that_reason(running):
    """Shard 0's last message has the reason; so has the message of worker 0, which may be seen first."""
    for seen_first in ("server", "worker"):
        cluster = running(SPEC)
        if seen_first == "server":
            cluster.train(reason="StoppedEarly")
            cluster.settle()
            cluster.end(leader(cluster), 0, RETURNED)
        else:
            cluster.end(leader(cluster), 0, json.dumps({**json.loads(RETURNED), "reason": "StoppedEarly"}))
            cluster.settle()
            cluster.train(reason="StoppedEarly")
        cluster.settle()
        assert cluster.status["phase"] == "Succeeded"
        assert cluster.condition("Succeeded")["reason"] == "StoppedEarly"
        assert "training was stopped early, at step 9, because stop_when" in cluster.condition("Trained")["message"]


def test_an_exception_fails_the_job_with_its_traceback_and_the_checkpoint(running):
    """The condition has the traceback, the event one line, both the checkpoint."""
    cluster = after(running)
    cluster.end(leader(cluster), 1, json.dumps(RAISED))
    cluster.settle()
    failed = cluster.condition("Failed")
    assert failed["reason"] == "AfterTrainingFailed"
    first, *trace = failed["message"].splitlines()
    assert "exit code 1: KeyError: 'model'; the checkpoint of step 9 is file:///ckpt/9" in first
    assert trace == RAISED["traceback"].splitlines()
    assert "\n" not in cluster.events[-1][1]
    assert (cluster.status["step"], cluster.status["checkpoint"]["uri"]) == (9, "file:///ckpt/9")
    assert not cluster.living()


def test_a_long_exception_hides_neither_the_pod_nor_the_checkpoint(running):
    """The first line of the condition keeps its beginning and its end."""
    cluster = after(running)
    cluster.end(leader(cluster), 1, json.dumps({**RAISED, "message": "x\n" * 500}))
    cluster.settle()
    first = cluster.condition("Failed")["message"].splitlines()[0]
    assert first.startswith("worker 0 (pod ")
    assert first.endswith("the checkpoint of step 9 is file:///ckpt/9")
    assert cluster.condition("Failed")["message"].endswith("in export\nKeyError: 'model'")


@pytest.mark.parametrize(("code", "reason", "said"), [(3, "", "exit code 3"), (137, "OOMKilled", "more memory than")])
def test_every_exit_code_and_running_out_of_memory_fail_the_job(running, code, reason, said):
    """O4: the program is to blame for both, so another attempt would end the same way."""
    cluster = after(running)
    cluster.end(leader(cluster), code, RETURNED, reason)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "AfterTrainingFailed"
    assert said in cluster.condition("Failed")["message"]


def test_t8_the_deadline_counts_from_the_end_of_training_and_may_change(running):
    """T8, O5: also across a restart of the operator, and with another deadline while the job runs."""
    cluster = after(running)
    assert cluster.settle().requeue_after <= timedelta(seconds=100)
    cluster.tick(99)
    cluster.restart_operator()
    cluster.settle()
    cluster.edit(runPolicy={"afterTrainingSeconds": 200})
    cluster.tick(100)
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.tick(2)
    cluster.settle()
    assert "has not ended within spec.runPolicy.afterTrainingSeconds (200 s)" in cluster.condition("Failed")["message"]
    assert "file:///ckpt/9" in cluster.condition("Failed")["message"]


@pytest.mark.parametrize("how", ["evicted", "deleted", "vanished"])
def test_a_script_that_was_lost_is_not_run_again(running, how):
    """Succeeded; a condition and a warning report that the outcome of the script is unknown."""
    cluster = after(running)
    name = leader(cluster)
    if how == "evicted":
        cluster.disrupt(name, "EvictionByEvictionAPI")
    elif how == "deleted":
        cluster.delete(name)
    else:
        cluster.vanish(name)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert (cluster.condition("AfterTrainingComplete")["status"], cluster.condition("Succeeded")["reason"]) == (
        "False",
        "Completed",
    )
    assert cluster.condition("AfterTrainingComplete")["reason"] == "PodLost"
    assert [reason for reason, _ in cluster.events][-2:] == ["AfterTrainingLost", "Succeeded"]
    assert cluster.status["incarnations"]["worker-0"] == 1


@pytest.mark.parametrize("how", ["killed", "alive", "evicted", "vanished"])
def test_t8_a_worker_without_the_result_is_replaced_from_the_checkpoint(running, how):
    """T7, T8: shard 0 says that no incarnation of rank 0 has the result: its replacement gets it, and runs the code."""
    cluster = running(SPEC)
    if how == "killed":
        cluster.end(leader(cluster), 137)
    elif how == "evicted":
        cluster.disrupt(leader(cluster), "EvictionByEvictionAPI")
    elif how == "vanished":
        cluster.vanish(leader(cluster))
    cluster.train(returned=0, metrics={"accuracy": 0.5})
    cluster.settle()
    if how == "killed":
        cluster.tick(2)
        cluster.settle()
    pod = cluster.pods[leader(cluster, 2)]
    (trainer,) = pod["spec"]["containers"]
    restored = next(v["value"] for v in trainer["env"] if v["name"] == "BACKSTAY_TRAINED")
    assert json.loads(restored) == {"step": 9, "checkpoint": "file:///ckpt/9", "metrics": {"accuracy": 0.5}}
    assert [mount["mountPath"] for mount in trainer["volumeMounts"]] == [contract.CHECKPOINT_MOUNT]
    cluster.bury()
    assert {name for name in cluster.living() if "-worker-0-" in name} == {leader(cluster, 2)}
    cluster.run(leader(cluster, 2))
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.end(leader(cluster, 2), 0, RETURNED)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"


@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_before_train_returns_is_not_the_code_s_after_training(running, inside):
    """The worker has reported that it has the result; its final message shows whether `train` had returned."""
    cluster = running(SPEC)
    cluster.end(leader(cluster), 1, json.dumps({"reason": "OSError", "message": "x"}) if inside else "log")
    cluster.train(returned=1)
    cluster.settle()
    cluster.tick(2)
    cluster.settle()
    if inside:
        assert cluster.status["incarnations"]["worker-0"] == 2
        assert cluster.status["phase"] == "Running"
    else:
        assert cluster.condition("Failed")["reason"] == "AfterTrainingFailed"


def test_a_result_that_was_lost_before_the_servers_left_is_not_made_again(running):
    """The worker with the result is replaced while the servers still run; then shard 0 names the one that had
    it."""
    cluster = running(SPEC)
    cluster.disrupt(leader(cluster), "EvictionByEvictionAPI")
    cluster.settle()
    assert cluster.status["incarnations"]["worker-0"] == 2
    cluster.run(leader(cluster, 2))
    cluster.train(returned=1)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.condition("AfterTrainingComplete")["reason"] == "PodLost"
    assert "incarnation 1 of worker 0 had the result" in cluster.condition("AfterTrainingComplete")["message"]


@pytest.mark.parametrize("ready", [True, False])
def test_a_replacement_runs_the_code_once_too(running, ready):
    """A worker that gets the result from the checkpoint is Ready as soon as it has it."""
    cluster = running(SPEC)
    cluster.disrupt(leader(cluster), "EvictionByEvictionAPI")
    cluster.train(returned=0)
    cluster.settle()
    cluster.run(leader(cluster, 2), ready=False)
    cluster.tick(1)
    cluster.run(leader(cluster, 2), ready=ready)
    cluster.settle()
    cluster.disrupt(leader(cluster, 2), "EvictionByEvictionAPI")
    cluster.settle()
    if ready:
        assert cluster.condition("AfterTrainingComplete")["reason"] == "PodLost"
    assert (cluster.status["phase"] == "Succeeded") is ready
    assert cluster.status["incarnations"]["worker-0"] == (2 if ready else 3)


@pytest.mark.parametrize("code", [1, 137])
def test_o10_a_replacement_that_dies_while_it_evaluates_is_replaced(running, code):
    """`train` has not returned there, though its message says that training has ended."""
    cluster = running(SPEC)
    cluster.disrupt(leader(cluster), "EvictionByEvictionAPI")
    cluster.train(returned=0)
    cluster.settle()
    cluster.run(leader(cluster, 2), ready=False)
    cluster.settle()
    message = {"result": "Trained", "evaluates": True, "step": 9, "checkpoint": "file:///ckpt/9"}
    cluster.end(leader(cluster, 2), code, json.dumps(message))
    cluster.settle()
    cluster.tick(5)
    cluster.settle()
    assert cluster.status["phase"] not in ("Succeeded", "Failed")
    assert cluster.status["incarnations"]["worker-0"] == 3
    cluster.run(leader(cluster, 3), ready=False)
    cluster.end(leader(cluster, 3), 0, json.dumps(message))
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded", "the script ended its process with code 0 in `evaluate`"


def test_a_result_that_nothing_holds_fails_the_job(running):
    """The job cannot continue without a checkpoint and without a worker that has the result."""
    cluster = running({**SPEC, "checkpoint": {}})
    cluster.end(leader(cluster), 137)
    cluster.train(returned=0, checkpoint="")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "AfterTrainingFailed"
    assert "the job stores no checkpoint" in cluster.condition("Failed")["message"]


def test_worker_0_may_be_seen_to_end_before_shard_0(running):
    """The last message of shard 0's server has the loss; it is waited for, but not for long (T8)."""
    cluster = running(SPEC)
    cluster.end(leader(cluster), 0, RETURNED)
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Trained")["status"]) == ("Running", "True")
    assert not cluster.deaths
    cluster.train(loss=0.25)
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["loss"]) == ("Succeeded", 0.25)
    silent = running(SPEC)
    silent.end(leader(silent), 0, RETURNED)
    silent.settle()
    silent.tick(20)
    silent.settle()
    assert silent.status["phase"] == "Succeeded"


def test_a_failed_script_may_be_seen_to_end_before_shard_0(running):
    """The job's failure names the checkpoint, which the last message of shard 0's server has."""
    cluster = running(SPEC)
    cluster.end(leader(cluster), 1, json.dumps(RAISED))
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.train(loss=0.25)
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    assert "the checkpoint of step 9 is file:///ckpt/9" in cluster.condition("Failed")["message"]
    silent = running(SPEC)
    silent.end(leader(silent), 1, json.dumps(RAISED))
    silent.settle()
    silent.tick(20)
    silent.settle()
    assert silent.status["phase"] == "Failed"


def test_before_the_servers_leave_a_worker_without_the_result_is_replaced(running):
    """T8: `done` alone does not say that worker 0 has the result; a script that failed after it is not run again."""
    cluster = running(SPEC)
    cluster.answer(done=True, step=9, contributed={0: 1})
    cluster.end(leader(cluster), 137)
    cluster.settle()
    assert cluster.status["incarnations"]["worker-0"] == 2
    other = running(SPEC)
    other.answer(done=True, step=9)
    other.disrupt(leader(other), "EvictionByEvictionAPI")
    status = other.pods[leader(other)]["status"]
    status["containerStatuses"] = [
        {"name": "trainer", "state": {"terminated": {"exitCode": 143, "message": RETURNED, "startedAt": None}}}
    ]
    other.settle()
    assert other.status["incarnations"]["worker-0"] == 1
    assert other.status["phase"] == "Succeeded" or other.condition("Trained")["status"] == "True"


def suspended(running):
    """Returns a job that is suspended after its training, and whose pods are gone."""
    cluster = after(running)
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    cluster.bury()
    cluster.settle()
    return cluster


def test_suspended_after_training_it_begins_again_from_the_checkpoint(running):
    """The spec may change in between, so the earlier messages of the pods do not count."""
    cluster = suspended(running)
    assert (cluster.status["phase"], cluster.condition("Trained")["status"]) == ("Suspended", "False")
    cluster.tick(500)
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    assert len(cluster.living()) == 3
    assert (cluster.status["phase"], cluster.condition("Trained")["status"]) == ("Pending", "False")
    cluster.run_all()
    cluster.settle()
    cluster.train(result="AlreadyComplete", returned=0)
    cluster.settle()
    assert cluster.condition("Trained")["reason"] == "AlreadyComplete"
    cluster.tick(90)
    cluster.run(leader(cluster))
    cluster.end(leader(cluster), 0, RETURNED)
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Succeeded")["reason"]) == ("Succeeded", "AlreadyComplete")
    assert len(cluster.living()) == 1, "it was ready, and leaves by itself"


def test_o1_a_job_that_resumes_with_its_last_checkpoint_ends(running):
    """O1: a server that finds the end may not know who has the result. A pod that never was Ready has none."""
    cluster = suspended(running)
    cluster.tick(500)
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    before = leader(cluster)
    cluster.run(before, ready=False)
    cluster.run(cluster.named(SERVER, 0))
    cluster.train(result="AlreadyComplete", returned=None)
    cluster.settle()
    restored = leader(cluster)
    assert restored != before
    cluster.tick(90)
    cluster.run(restored)
    cluster.settle()
    assert leader(cluster) == restored
    assert len(cluster.living()) > 1
    cluster.end(restored, 0, RETURNED)
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Succeeded")["reason"]) == ("Succeeded", "AlreadyComplete")
    cluster.bury()
    assert not cluster.living(), "the other pods never joined, so they do not know that the job has ended"


def test_the_other_deadlines_still_count(running):
    cluster = after(running, {**SPEC, "runPolicy": {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 5}})
    cluster.tick(60)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "DeadlineExceeded"
    assert "file:///ckpt/9" in cluster.condition("Failed")["message"]
    complete = cluster.condition("AfterTrainingComplete")
    assert (complete["status"], complete["reason"]) == ("False", "DeadlineExceeded")
    cluster.tick(5)
    cluster.settle(1) if cluster.deleted else cluster.apply(cluster.plan())
    assert cluster.deleted


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    returned=st.sampled_from([None, 0, 1]),
    steps=st.lists(
        st.sampled_from(["run", "exit0", "exit1", "kill", "delete", "bury", "evict", "vanish", "restart", "wait"]),
        max_size=10,
    ),
)
def test_t8_for_any_end_of_worker_0_the_job_ends_and_its_code_runs_at_most_once(running, returned, steps):
    """O1, O5, T8: no history hangs, no pod is created once a pod had the result, and no server ever again."""
    cluster = running({**SPEC, "workers": {"replicas": 1}})
    fields = {} if returned is None else {"returned": returned}
    said = {"result": "Succeeded", "step": 9, "checkpoint": "file:///ckpt/9", **fields}
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps(said))
    had = returned == 1
    cluster.settle()
    for step in steps:
        if cluster.status["phase"] in ("Succeeded", "Failed"):
            break
        living = [name for name in cluster.living() if "-worker-0-" in name]
        worker = living[0] if living else None
        if worker and step == "run":
            cluster.run(worker)
        if worker and step in ("exit0", "exit1", "kill"):
            cluster.run(worker)
            message = {"exit0": RETURNED, "exit1": json.dumps(RAISED), "kill": ""}[step]
            cluster.end(worker, {"exit0": 0, "exit1": 1, "kill": 137}[step], message)
            had = had or step != "kill"
        if worker and step == "delete":
            cluster.delete(worker)
        if worker and step == "evict":
            cluster.disrupt(worker, "EvictionByEvictionAPI")
        if worker and step == "vanish":
            cluster.vanish(worker)
        if step == "bury":
            cluster.bury()
        if step == "restart":
            cluster.restart_operator()
        if step == "wait":
            cluster.tick(7)
        before = len([a for a in cluster.created if "-worker-0-" in a])
        todo = cluster.plan()
        assert all(a.role == WORKER for a in todo.actions if isinstance(a, CreatePod))
        cluster.apply(todo)
        cluster.settle()
        if had:
            assert len([a for a in cluster.created if "-worker-0-" in a]) == before
    cluster.tick(101)
    cluster.settle()
    assert cluster.status["phase"] in ("Succeeded", "Failed")
    if cluster.status["phase"] == "Failed":
        assert "file:///ckpt/9" in cluster.condition("Failed")["message"]


GROUP_LOST = json.dumps(
    {**json.loads(RETURNED), "reason": "GroupLost", "message": "pod 1 of worker 0 is lost: no answer"}
)


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_loses_a_pod_after_training_fails_with_the_cause(running, comes):
    """Each kubelet reports its own pod, so the pod that has the cause may be seen last. A lost node is not
    charged."""
    spec = SPEC | {"workers": {"replicas": 1, "podsPerRank": 2}}
    cluster = running(spec)
    cluster.train()
    cluster.settle()
    first, other = (name for name in cluster.pods if "-worker-0-" in name)
    cluster.end(first, contract.GROUP_LOST_EXIT, GROUP_LOST)
    todo = cluster.plan()
    assert not todo.deaths
    assert not any(isinstance(action, CreatePod) for action in todo.actions)
    cluster.apply(todo)
    if comes:
        cluster.end(other, 1, json.dumps(RAISED))
    cluster.tick(6)
    todo = cluster.plan()
    said = json.dumps([todo.status["conditions"], [event.message for event in todo.events]])
    assert "before it had the result" not in said
    assert ("KeyError" if comes else "pod 1 of worker 0 is lost") in said
