"""The conditions, the phase and the counters of a job."""

from __future__ import annotations

import pytest

from backstay_spec import contract
from backstay_spec.job_report import CheckpointStatus

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


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


def test_a_checkpoint_that_cannot_be_written_is_reported_until_one_is_written(running):
    cluster = running(TWO_SERVERS)
    cluster.answer(step=7, checkpoint_error="no space left on device")
    cluster.settle()
    assert cluster.condition("Checkpointing")["reason"] == "WriteFailed"
    assert cluster.events[-1] == ("CheckpointFailed", "no space left on device")
    cluster.restart_operator()
    cluster.settle()
    assert cluster.condition("Checkpointing")["reason"] == "WriteFailed"
    cluster.answer(step=8, checkpoint=CheckpointStatus(step=8, uri="file:///ckpt/8"))
    cluster.settle()
    assert cluster.condition("Checkpointing")["status"] == "True"


def test_a_job_that_stores_nothing_reports_it(running):
    cluster = running()
    assert cluster.condition("Checkpointing")["reason"] == "NotConfigured"
    assert [e for e, _ in cluster.events] == ["NotConfigured", "Running"]


def test_a_pod_that_waits_for_a_volume_states_where_the_reason_is(make_cluster):
    """O4: the kubelet reports a missing ConfigMap only in the pod's events."""
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


TRAINING_SPEC = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


def train(cluster, step, **fields):
    """All servers answer and report `step`."""
    cluster.answer(step=step, reached=frozenset({0, 1}), examples_per_second=48.5, **fields)
    cluster.settle()


def test_training_is_false_while_no_update_is_applied(running):
    """The phase and the conditions follow what trains: servers that are gone for minutes are not Running."""
    cluster = running(TRAINING_SPEC)
    assert cluster.condition("Training")["reason"] == "NotStarted"
    train(cluster, 71)
    train(cluster, 76)
    cluster.tick(10)
    train(cluster, 77)
    assert (cluster.status["phase"], cluster.condition("Training")["status"]) == ("Running", "True")
    assert cluster.status["examplesPerSecond"] == 48.5
    for shard in (0, 1):
        cluster.run(cluster.named(SERVER, shard), ready=False)
    cluster.settle()
    assert cluster.status["phase"] == "Running", "the newest update is a moment old"
    cluster.tick(10)
    cluster.settle()
    said = cluster.condition("Training")
    assert (said["status"], said["reason"]) == ("False", "ServersNotReady")
    assert said["message"] == (
        "no update since 2026-03-01T12:00:20Z (step 77): not ready: parameter server 0, parameter server 1"
    )
    assert cluster.condition("Running")["status"] == "False"
    assert cluster.status["phase"] == "Starting"
    assert cluster.status["examplesPerSecond"] == 0
    assert ("TrainingInterrupted", said["message"]) in cluster.events
    for shard in (0, 1):
        cluster.run(cluster.named(SERVER, shard))
    train(cluster, 78)
    assert (cluster.status["phase"], cluster.condition("Training")["status"]) == ("Running", "True")
    assert cluster.status["examplesPerSecond"] == 48.5


def test_training_is_false_where_all_pods_are_ready_and_nothing_is_updated(running):
    """It has the time that its own updates take: 5 of them, and 30 s at least."""
    cluster = running(TRAINING_SPEC)
    train(cluster, 1)
    cluster.tick(20)
    train(cluster, 2)
    cluster.tick(99)
    train(cluster, 2)
    assert cluster.condition("Training")["status"] == "True"
    cluster.tick(1)
    assert cluster.plan().status is not None
    cluster.settle()
    said = cluster.condition("Training")
    assert (said["status"], said["reason"]) == ("False", "NoUpdate")
    assert cluster.status["phase"] == "Running", "every pod runs and is ready"
    assert cluster.status["examplesPerSecond"] == 0


def test_a_step_by_itself_does_not_change_a_condition(running):
    cluster = running(TRAINING_SPEC)
    train(cluster, 1)
    cluster.tick(11)
    train(cluster, 2)
    before = cluster.condition("Training")
    cluster.tick(11)
    train(cluster, 3)
    assert cluster.condition("Training") == before


def test_a_new_operator_does_not_report_an_interruption(running):
    cluster = running(TRAINING_SPEC)
    train(cluster, 5)
    cluster.tick(40)
    cluster.restart_operator()
    cluster.settle()
    assert cluster.condition("Training")["status"] == "True"


@pytest.fixture(params=[False, True], ids=["no update", "a server is not ready"])
def interrupted(running, request):
    cluster = running(TRAINING_SPEC)
    train(cluster, 5)
    cluster.tick(40)
    if request.param:
        cluster.run(cluster.named(SERVER, 1), ready=False)
    train(cluster, 5)
    assert cluster.condition("Training")["reason"] == ("ServersNotReady" if request.param else "NoUpdate")
    return cluster


def test_a_new_operator_does_not_take_its_first_report_for_an_update(interrupted):
    cluster = interrupted
    before, events = cluster.condition("Training"), len(cluster.events)
    cluster.restart_operator()
    for seconds in (1, 5, 5, 5, 10, 10):
        cluster.tick(seconds)
        train(cluster, 5, waits_for="worker 1 computes")
        found = cluster.condition("Training")
        assert (found["status"], found["lastTransitionTime"]) == ("False", before["lastTransitionTime"])
        assert found["message"].partition(": ")[0] == before["message"].partition(": ")[0]
        if seconds == 10:
            cluster.run(cluster.named(SERVER, 1))
    assert found["message"].endswith("worker 1 computes")
    assert "TrainingInterrupted" not in {reason for reason, _ in cluster.events[events:]}
    train(cluster, 6)
    assert cluster.condition("Training")["status"] == "True"


def test_a_new_operator_finds_an_update_that_came_while_there_was_none(interrupted):
    """The first plan may be before the first report."""
    cluster = interrupted
    since = cluster.condition("Training")["message"].partition(": ")[0]
    assert since.startswith("no update since 2026")
    cluster.restart_operator()
    cluster.settle()
    assert cluster.condition("Training")["message"].startswith(since)
    train(cluster, 5)
    assert cluster.condition("Training")["message"].startswith(since)
    cluster.restart_operator()
    cluster.run(cluster.named(SERVER, 1))
    train(cluster, 9)
    for _ in range(2):
        assert cluster.condition("Training")["status"] == "True"
        cluster.tick(20)
        train(cluster, 9)


@pytest.mark.parametrize("waits", ["worker 0 has sent no heartbeat for {} s", "worker 0 computes, for {} s (1 of 2)"])
def test_o8_a_job_without_updates_does_not_write_its_status_again_and_again(running, waits):
    cluster = running(TRAINING_SPEC)
    train(cluster, 5)
    cluster.tick(60)
    train(cluster, 5, waits_for=waits.format(60))
    assert cluster.condition("Training")["message"].endswith(waits.replace(",", "").replace(" for {} s", ""))
    before = cluster.writes
    for seconds in range(62, 90, 2):
        cluster.tick(2)
        train(cluster, 5, waits_for=waits.format(seconds))
    assert cluster.writes == before


def test_a_rate_is_not_shown_after_the_end(running):
    cluster = running(TRAINING_SPEC)
    train(cluster, 5)
    cluster.complete()
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert "examplesPerSecond" not in cluster.status
    assert cluster.condition("Training")["reason"] == "Finished"


def test_pods_ready_counts_standbys(running):
    cluster = running({**TRAINING_SPEC, "parameterServers": {"replicas": 2, "standbys": 1}})
    assert cluster.condition("PodsReady")["message"] == "6 of 6 pods are ready"
    cluster.run(cluster.named(SERVER, 1, 2), ready=False)
    cluster.settle()
    assert cluster.condition("PodsReady")["message"] == "5 of 6 pods are ready"
    assert cluster.condition("PodsReady")["status"] == "False"


def test_a_standby_that_ends_with_its_server_has_an_event(running):
    """Both servers of a shard are replaced: the standby hangs when its server dies, and is deleted by the
    way."""
    cluster = running({**TRAINING_SPEC, "parameterServers": {"replicas": 2, "standbys": 1}})
    train(cluster, 5)
    server, standby = cluster.named(SERVER, 0, 1), cluster.named(SERVER, 0, 2)
    cluster.silence(standby)
    cluster.tick(70)
    cluster.end(server, 137)
    cluster.settle()
    assert standby not in cluster.living()
    assert any(standby in message for _, message in cluster.events), cluster.events


def test_o10_after_the_last_update_nothing_is_interrupted(running):
    """An evaluation may take minutes, and the servers leave before their pods are observed to end."""
    cluster = running(TRAINING_SPEC)
    train(cluster, 19, coordinator=1)
    for seconds in (10, 20, 70):
        cluster.tick(20)
        text = f"trained to step 20; worker 0 evaluates, for {seconds} s"
        train(cluster, 20, coordinator=1, ending=text)
        said = cluster.condition("Training")
        assert (said["status"], said["reason"]) == ("False", "Ending")
        assert said["message"] == "trained to step 20; worker 0 evaluates"
    cluster.memory.progress = None
    cluster.run(cluster.named(SERVER, 1), ready=False)
    cluster.tick(20)
    cluster.settle()
    assert (cluster.status["phase"], cluster.condition("Training")["reason"]) == ("Running", "Ending")
    assert "TrainingInterrupted" not in {reason for reason, _ in cluster.events}


def test_o10_a_lost_server_after_the_last_update_is_an_interruption(running):
    """The last update may be lost with it."""
    cluster = running(TRAINING_SPEC)
    train(cluster, 20, coordinator=1, ending="trained to step 20; worker 0 evaluates, for 1 s")
    cluster.end(cluster.named(SERVER, 0), 137)
    cluster.memory.progress = None
    cluster.settle()
    cluster.tick(20)
    cluster.settle()
    assert cluster.condition("Training")["reason"] == "ServersNotReady"
