"""O2, O4: each shard has a standby; it is replaced, charged and reported."""

from __future__ import annotations

import pytest

from backstay_spec import contract

SERVER = contract.ROLE_SERVER
SPEC = {"parameterServers": {"replicas": 2, "standbys": 1}, "workers": {"replicas": 1}}
FIRST, SECOND = "parameter-server-0", "parameter-server-1"


@pytest.fixture
def training(running):
    cluster = running(SPEC)
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.settle()
    return cluster


def answer(cluster, **in_sync: int) -> None:
    """Every server answers; `shard_0=2`: incarnation 2 holds all that shard 0's server does."""
    cluster.answer(
        step=7,
        reached=frozenset({0, 1}),
        in_sync={int(shard[-1]): incarnation for shard, incarnation in in_sync.items()},
    )


def selected(cluster, shard: int) -> str:
    service = next(s for n, s in cluster.services.items() if f"-ps-{shard}-" in n)
    return service["spec"]["selector"][contract.LABEL_INCARNATION]


def active_of(cluster, name: str) -> str:
    env = cluster.pods[name]["spec"]["containers"][0]["env"]
    return next(item["value"] for item in env if item["name"] == contract.ENV_ACTIVE)


def test_each_shard_has_two_servers_and_the_service_leads_to_one(training):
    assert training.status["incarnations"] | {"worker-0": 1} == {FIRST: 2, SECOND: 2, "worker-0": 1}
    assert training.status["active"] == {FIRST: 1, SECOND: 1}
    assert (selected(training, 0), selected(training, 1)) == ("1", "1")
    assert active_of(training, training.named(SERVER, 0, 2)) == "1"
    assert training.status["roles"]["ParameterServer"]["desired"] == 4
    assert training.status["roles"]["ParameterServer"]["ready"] == 4


def test_a_standby_that_dies_is_replaced_and_nothing_else_changes(training):
    training.end(training.named(SERVER, 1, 2), 137)
    training.settle()
    assert training.status["active"] == {FIRST: 1, SECOND: 1}
    assert training.status["incarnations"][SECOND] == 3
    assert selected(training, 1) == "1"
    assert [(d.index, d.incarnation) for d in training.deaths] == [(1, 2)]


def test_a_standby_whose_node_is_cut_off_pays_for_nothing(training):
    """O4: the node controller takes Ready back before it evicts; ContainersReady is left as the kubelet set it."""
    answer(training, shard_0=2, shard_1=2)
    name = training.named(SERVER, 0, 2)
    training.silence(name)
    training.tick(45)
    training.run(name, ready=False)
    training.pods[name]["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    training.settle()
    assert [(d.cause, d.incarnation, d.charged) for d in training.deaths] == [("NodeLost", 2, False)]
    assert training.status["incarnations"][FIRST] == 3


def test_a_standby_that_crashes_before_it_was_filled_backs_off(training):
    """O4: or a script that fails in standbys alone would spend the servers' budget within a minute."""
    waits = []
    for _ in range(4):
        newest = training.status["incarnations"][FIRST]
        if newest > 2:
            training.run(training.named(SERVER, 0, newest), ready=False)
            training.tick(1)
            training.end(training.named(SERVER, 0, newest), 1)
        else:
            training.end(training.named(SERVER, 0, newest), 1)  # it was ready: no wait
        training.settle()
        waits.append(0)
        while training.status["incarnations"][FIRST] == newest:
            training.tick(0.5)
            waits[-1] += 0.5
            training.settle()
    assert waits[0] == 0
    assert [round(w) for w in waits[1:]] == [1, 2, 4]
    assert training.status["active"][FIRST] == 1
    assert training.status["roles"]["ParameterServer"]["restarts"] == 4
    newest = training.status["incarnations"][FIRST]
    training.run(training.named(SERVER, 0, newest))
    training.tick(1)
    training.run(training.named(SERVER, 0, newest))
    training.settle()
    assert "parameter-server-0/standby" not in training.status.get("backoff", {})


def test_a_spent_budget_ends_the_standbys_and_not_the_job(running):
    training = running({**SPEC, "parameterServers": {**SPEC["parameterServers"], "maxRestarts": 1}})
    for incarnation in (2, 3):
        training.run(training.named(SERVER, 0, incarnation))
        training.tick(2)
        training.run(training.named(SERVER, 0, incarnation))
        training.end(training.named(SERVER, 0, incarnation), 1)
        training.settle()
    assert training.status["phase"] == "Running"
    assert training.status["incarnations"][FIRST] == 3
    answer(training, shard_1=2)
    training.settle()
    assert training.condition("StandbysInSync")["reason"] == "BudgetSpent"
    assert "shard 0 (spec.parameterServers.maxRestarts is used up)" in training.condition("StandbysInSync")["message"]


def test_a_standby_that_cannot_be_started_fails_no_job(training):
    training.end(training.named(SERVER, 0, 2), 137)
    training.settle()
    name = training.named(SERVER, 0, 3)
    training.wait(name, "ImagePullBackOff", "no such image")
    training.tick(3600)
    answer(training, shard_1=2)
    training.settle()
    assert training.status["phase"] == "Running"
    said = training.condition("StandbysInSync")
    assert (said["status"], said["reason"]) == ("False", "ImagePullFailed")
    assert "shard 0; the standby of parameter server 0: " in said["message"]


def test_a_standby_that_is_never_filled_is_replaced_in_the_end(training):
    """T8."""
    training.end(training.named(SERVER, 0, 2), 137)
    training.settle()
    training.run(training.named(SERVER, 0, 3), ready=False)
    training.tick(599)
    training.settle()
    assert training.status["incarnations"][FIRST] == 3
    training.tick(2)
    training.settle()
    assert [d.cause for d in training.deaths] == ["Crashed", "Stalled"]


def test_the_status_states_which_shards_would_lose_updates(training):
    answer(training, shard_1=2)
    training.settle()
    said = training.condition("StandbysInSync")
    assert (said["status"], said["reason"]) == ("False", "Filling")
    assert said["message"] == "no standby in sync: shard 0"
    answer(training, shard_0=2, shard_1=2)
    training.settle()
    assert training.condition("StandbysInSync")["status"] == "True"
    training.answer(step=8, reached=frozenset({1}))
    training.settle()
    assert training.condition("StandbysInSync")["status"] == "True", "one server that was not reached says nothing"
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    answer(training, shard_1=2)
    training.settle()
    assert training.condition("StandbysInSync")["status"] == "False"


def test_a_suspended_job_has_no_standby_in_sync(training):
    answer(training, shard_0=2, shard_1=2)
    training.settle()
    training.edit(runPolicy={"suspend": True})
    for _ in range(3):
        training.settle()
        training.bury()
    said = training.condition("StandbysInSync")
    assert (said["status"], said["reason"]) == ("False", "Suspended")
    training.edit(runPolicy={"suspend": False})
    training.settle()
    assert training.condition("StandbysInSync")["reason"] != "Suspended"


def test_a_job_without_standbys_has_no_such_condition(running):
    cluster = running({"parameterServers": {"replicas": 1}})
    assert "StandbysInSync" not in {c["type"] for c in cluster.status["conditions"]}
