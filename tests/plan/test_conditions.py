"""What the conditions, the phase and the counters of a job say."""

from __future__ import annotations

from backstay_spec import contract

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
