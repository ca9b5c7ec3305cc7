"""T8: a pod that is hung is replaced; one that is loading, or that only the operator cannot reach, is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from backstay_spec import contract
from backstay_spec.actions import DeletePod
from backstay_spec.causes import Cause
from backstay_spec.observed import Silence, Stalled

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
ONE_SERVER = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}
SPEC = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 1}}


@pytest.fixture
def training(running):
    cluster = running(SPEC)
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.settle()
    return cluster


def contact_of(cluster, name, *, age=0, calls=9, long_calls=1, **reports):
    """Returns a round of calls in which this pod did not answer."""
    found = cluster.contact()
    uid = cluster.pods[name]["metadata"]["uid"]
    silence = Silence(cluster.now - timedelta(seconds=60), calls, long_calls)
    return replace(found, taken=cluster.now - timedelta(seconds=age), silent={uid: silence}, **reports)


@pytest.mark.parametrize(
    ("round_of_calls", "hung"),
    [
        ({}, True),
        ({"age": 6}, False),  # the operator was paused, or is late: it calls again before it judges
        ({"calls": 3}, False),
        ({"long_calls": 0}, False),  # it answers, though late: it is starved
        ({"calls": 149, "long_calls": 0}, False),
        ({"calls": 150, "long_calls": 0}, True),
        ({"reachable": frozenset({1})}, False),  # a worker has its answers: only the operator cannot reach it
        ({"reachable": frozenset({0})}, True),
    ],
)
def test_o5_what_proves_that_a_server_is_hung(training, round_of_calls, hung):
    cluster, name = training, training.named(SERVER, 1)
    cluster.run(name, ready=False)
    found = contact_of(cluster, name, **round_of_calls)
    cluster.contact = lambda: found
    assert any(isinstance(a, DeletePod) and a.name == name for a in cluster.plan().actions) is hung


@pytest.mark.parametrize(
    ("round_of_calls", "cause"),
    [
        ({}, None),  # without a witness the operator or the node may be the cause
        ({"unreachable": frozenset({1})}, "Unresponsive"),
        ({"calls": 149}, None),
        ({"calls": 150}, "Unresponsive"),
    ],
)
def test_o5_when_no_server_answers_a_witness_must_confirm_it(training, round_of_calls, cause):
    cluster, name = training, training.named(SERVER, 1)
    cluster.run(name, ready=False)
    found = contact_of(cluster, name, **round_of_calls)
    other = cluster.pods[cluster.named(SERVER, 0)]["metadata"]["uid"]
    found = replace(found, silent={**found.silent, other: Silence(cluster.now, 9, 1)})
    cluster.contact = lambda: found
    deaths = cluster.plan().deaths
    assert [(d.index, d.cause, d.charged) for d in deaths] == ([] if cause is None else [(1, cause, False)])


def test_o5_the_only_server_is_charged_where_a_worker_confirms_that_it_hangs(running):
    cluster = running(ONE_SERVER)
    name = cluster.named(SERVER, 0)
    cluster.run(name, ready=False)
    found = contact_of(cluster, name)
    cluster.contact = lambda: found
    assert not cluster.plan().deaths
    confirmed = replace(found, unreachable=frozenset({0}))
    cluster.contact = lambda: confirmed
    assert [(d.cause, d.charged) for d in cluster.plan().deaths] == [("Stalled", True)]


@pytest.fixture
def out_of_touch(training):
    """A worker that was Ready and is not any more: the cluster, and the pod's name."""
    name = training.named(WORKER, 0)
    training.tick(10)
    training.run(name, ready=False)
    return training, name


def test_a_hung_worker_is_killed_replaced_and_charged(running):
    cluster = running(ONE_SERVER)
    name = cluster.named(WORKER, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no gradient for 300 s"),))
    assert DeletePod(name, cluster.pods[name]["metadata"]["uid"], 1, "Stalled") in cluster.plan().actions
    cluster.settle()
    assert [(d.cause, d.charged) for d in cluster.deaths] == [("Stalled", True)]
    assert cluster.named(WORKER, 1) != name
    cluster.settle()
    assert len(cluster.deaths) == 1, "the old answer is about the old incarnation"


@pytest.mark.parametrize("unanswered", [True, False])
def test_o5_a_worker_without_heartbeats_is_hung_if_it_answers_no_call(running, unanswered):
    """On a starved node heartbeats are late; a worker that answers the operator's health request is not replaced."""
    cluster = running(ONE_SERVER)
    name = cluster.named(WORKER, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no heartbeat for 11 s"),))
    found = cluster.contact()
    uids = {cluster.pods[name]["metadata"]["uid"]} if unanswered else set()
    cluster.contact = lambda: replace(found, taken=cluster.now, hung_workers=frozenset(uids))
    assert [d.cause for d in cluster.plan().deaths] == (["Stalled"] if unanswered else [])
    cluster.contact = lambda: replace(found, taken=cluster.now - timedelta(seconds=6), hung_workers=frozenset(uids))
    assert not cluster.plan().deaths, "the operator was paused, or is late: it asks again"


def test_a_hung_worker_does_not_outlive_an_operator_that_forgot_to_kill_it(running):
    """The operator dies after the status that counts the death, before the delete: the old incarnation still
    goes."""
    cluster = running(ONE_SERVER)
    name = cluster.named(WORKER, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no gradient for 300 s"),))
    cluster.write(cluster.plan())
    cluster.restart_operator()
    cluster.settle()
    cluster.bury()
    assert name not in cluster.pods
    assert [d.cause for d in cluster.deaths] == ["Stalled"]
    assert cluster.status["incarnations"]["worker-1"] == 3


@pytest.mark.parametrize("role", [SERVER, WORKER])
def test_t8_a_pod_that_runs_and_never_joins_fails_a_job_that_has_not_trained(make_cluster, role):
    """T8: a script that hangs at import. The wait ends at `pendingDeadlineSeconds`, and the pod is named."""
    cluster = make_cluster(ONE_SERVER | {"runPolicy": {"pendingDeadlineSeconds": 100}})
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
    """T8: the others may train on, so it costs a restart and not the job; one that joined stays."""
    cluster = running(ONE_SERVER | {"runPolicy": {"pendingDeadlineSeconds": 100}})
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
    assert cluster.status["phase"] == "Starting", "no worker is ready"
    assert "deletionTimestamp" in cluster.pods[silent]["metadata"]
    assert "deletionTimestamp" not in cluster.pods[cluster.named(WORKER, 0)]["metadata"]
    assert [death.cause for death in cluster.deaths] == [Cause.CRASHED, Cause.STALLED]


def test_a_server_that_answers_neither_kubelet_nor_operator_is_replaced_and_charged(training):
    cluster, name = training, training.named(SERVER, 1)
    uid = cluster.pods[name]["metadata"]["uid"]
    cluster.silence(name)
    cluster.tick(8)
    cluster.run(name, ready=False)
    todo = cluster.plan()
    assert not [a for a in todo.actions if isinstance(a, DeletePod)]
    cluster.tick(3)
    assert DeletePod(name, uid, 1, "Stalled") in cluster.plan().actions
    cluster.settle()
    assert [(d.cause, d.index, d.charged) for d in cluster.deaths] == [("Stalled", 1, True)]
    assert cluster.named(SERVER, 1) != name
    assert "has not answered for 11 s" in dict(cluster.events)["Stalled"]


def test_a_server_that_loads_is_not_ready_but_answers(training):
    """Going back to a checkpoint may take minutes."""
    cluster, name = training, training.named(SERVER, 1)
    cluster.run(name, ready=False)
    for _ in range(40):
        cluster.tick(5)
        cluster.answer(step=7, reached=frozenset({0, 1}))
        cluster.settle()
    assert cluster.named(SERVER, 1) == name
    assert not cluster.deaths


def test_a_server_that_only_the_operator_cannot_reach_is_left_alone(training):
    """O5: a network between operator and pods that is down must not end what trains."""
    cluster = training
    names = [cluster.named(SERVER, shard) for shard in (0, 1)]
    cluster.silence(*names)
    for _ in range(40):
        cluster.tick(5)  # the last answer becomes older and older
        cluster.settle()
    assert [cluster.named(SERVER, shard) for shard in (0, 1)] == names
    assert not cluster.deaths


def test_a_server_that_never_answered_gets_no_longer_deadline(training):
    """T8: it was Ready for a second; the others answer, and it never has."""
    cluster, name = training, training.named(SERVER, 1)
    uid = cluster.pods[name]["metadata"]["uid"]
    cluster.silence(name, ever_answered=False)
    cluster.tick(8)
    cluster.run(name, ready=False)
    cluster.tick(1)
    assert not [a for a in cluster.plan().actions if isinstance(a, DeletePod)], "it is called for 9 s"
    cluster.tick(2)
    assert DeletePod(name, uid, 1, "Stalled") in cluster.plan().actions
    cluster.settle()
    assert [(d.cause, d.index, d.charged) for d in cluster.deaths] == [("Stalled", 1, True)]


def test_a_new_operator_calls_before_it_judges(training):
    """O5: how long the kubelet has found it unready says nothing; unanswered calls of this operator do."""
    cluster, name = training, training.named(SERVER, 0)
    cluster.run(name, ready=False)
    cluster.tick(600)
    cluster.restart_operator()
    cluster.called = False
    cluster.settle()
    cluster.called = True
    cluster.silence(name, ever_answered=False)
    cluster.tick(9)
    cluster.settle()
    assert cluster.named(SERVER, 0) == name
    cluster.tick(2)
    cluster.settle()
    assert cluster.named(SERVER, 0) != name
    assert [d.cause for d in cluster.deaths] == ["Stalled"]


def test_a_server_whose_node_is_cut_off_pays_for_nothing(training):
    """O4: the node controller takes Ready back before it evicts; ContainersReady is left as the kubelet set it."""
    cluster, name = training, training.named(SERVER, 1)
    cluster.silence(name)
    cluster.tick(45)
    cluster.run(name, ready=False)
    cluster.pods[name]["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    cluster.answer(step=7, reached=frozenset({0}))
    cluster.settle()
    assert [(d.cause, d.index, d.charged) for d in cluster.deaths] == [("NodeLost", 1, False)]


@pytest.mark.parametrize("beats", [False, True])
def test_a_worker_that_the_coordinator_does_not_miss_is_replaced(out_of_touch, beats):
    """T8: the worker became silent together with the coordinator, and the new coordinator never received a heartbeat
    from it, so it cannot report it. Or the worker is alive, and does not find one of the servers."""
    cluster, name = out_of_touch
    uid = cluster.pods[name]["metadata"]["uid"]
    limit = cluster.job.spec.workers.stall_seconds if beats else 30

    def deleted():
        cluster.answer(
            step=7,
            reached=frozenset({0, 1}),
            contributed={0: 1},
            beating={0: 1} if beats else {},
        )
        return DeletePod(name, uid, 1, "Stalled") in cluster.plan().actions

    assert not deleted()
    assert timedelta(seconds=29) < cluster.plan().requeue_after <= timedelta(seconds=30)
    cluster.tick(limit - 1)
    assert not deleted()
    cluster.tick(1)
    assert deleted()
    cluster.settle()
    assert [(d.cause, d.index, d.charged) for d in cluster.deaths] == [("Stalled", 0, True)]
    assert cluster.named(WORKER, 0) != name


@pytest.mark.parametrize("case", ["hangs", "early", "beats", "answers", "earlier", "other"])
def test_t8_a_worker_that_answers_no_call_after_a_promotion_is_replaced_after_the_limit_of_silence(running, case):
    """The new coordinator has no heartbeat from it, and it left a health request of the operator unanswered. A
    worker that holds the interpreter's lock does the same: it has `stallSeconds`."""
    cluster = running(SPEC | {"workers": {"replicas": 1, "stallSeconds": 14}})
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.settle()
    name = cluster.named(WORKER, 0)
    cluster.tick(10)
    cluster.run(name, ready=False)
    if case != "early":
        cluster.tick(14)
    uid = cluster.pods[name]["metadata"]["uid"]
    beating = {0: 1} if case == "beats" else {}
    cluster.answer(step=7, reached=frozenset({1} if case == "other" else {0, 1}), contributed={0: 1}, beating=beating)
    if case == "earlier":
        cluster.run(name)
        cluster.tick(1)
        cluster.run(name, ready=False)
    found = cluster.contact()
    hung = frozenset() if case == "answers" else frozenset({uid})
    cluster.contact = lambda: replace(found, taken=cluster.now, hung_workers=hung)
    assert (DeletePod(name, uid, 1, "Stalled") in cluster.plan().actions) == (case == "hangs")


def test_a_worker_whose_script_continues_after_training_is_left_alone(out_of_touch):
    cluster, name = out_of_touch
    for _ in range(10):
        cluster.tick(5)
        cluster.answer(step=7, reached=frozenset({0, 1}), done=True)
        cluster.settle()
    assert cluster.named(WORKER, 0) == name
    assert not cluster.deaths


def test_reports_from_before_a_worker_could_be_missed_do_not_count_against_it(out_of_touch):
    cluster, name = out_of_touch
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.tick(30)
    cluster.settle()
    assert cluster.named(WORKER, 0) == name
    assert not cluster.deaths


def test_a_worker_that_waits_for_a_server_that_is_not_there_is_not_replaced(out_of_touch):
    cluster, name = out_of_touch
    cluster.run(cluster.named(SERVER, 1), ready=False)
    for _ in range(100):
        cluster.tick(5)
        cluster.answer(step=7, reached=frozenset({0, 1}))
        cluster.settle()
    assert cluster.named(WORKER, 0) == name
    cluster.run(cluster.named(SERVER, 1))
    cluster.tick(cluster.job.spec.workers.stall_seconds - 1)
    cluster.answer(step=7, reached=frozenset({0, 1}), beating={0: 1})
    cluster.settle()
    assert not cluster.deaths
