"""O2, O3, T6: which of a shard's two servers serves, when that changes, and that each death is counted once."""

from __future__ import annotations

import pytest

from backstay_spec import contract
from backstay_spec.actions import DeletePod, PatchService

SERVER = contract.ROLE_SERVER
SPEC = {"parameterServers": {"replicas": 2, "standbys": 1}, "workers": {"replicas": 1}}
FIRST, SECOND = "parameter-server-0", "parameter-server-1"


@pytest.fixture
def training(running):
    cluster = running(SPEC)
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.settle()
    return cluster


def uid(cluster, name: str) -> str:
    return cluster.pods[name]["metadata"]["uid"]


def answer(cluster, **in_sync: int) -> None:
    """Every server answers; `shard_0=2`: incarnation 2 holds all that shard 0's server does."""
    cluster.answer(
        step=7,
        reached=frozenset({0, 1}),
        heard={uid(cluster, name): cluster.now for name in cluster.living() if "-ps-" in name},
        in_sync={int(shard[-1]): incarnation for shard, incarnation in in_sync.items()},
    )


def everybody(cluster):
    """When each server answered: now, also those that are told to stop."""
    return {uid(cluster, name): cluster.now for name in cluster.pods if "-ps-" in name}


def said_of(progress):
    return {name: getattr(progress, name) for name in ("step", "reached", "in_sync")}


def selected(cluster, shard: int) -> str:
    service = next(s for n, s in cluster.services.items() if f"-ps-{shard}-" in n)
    return service["spec"]["selector"][contract.LABEL_INCARNATION]


def said(cluster, name: str) -> str:
    env = cluster.pods[name]["spec"]["containers"][0]["env"]
    return next(item["value"] for item in env if item["name"] == contract.ENV_ACTIVE)


def test_each_shard_has_two_servers_and_the_service_leads_to_one(training):
    assert training.status["incarnations"] | {"worker-0": 1} == {FIRST: 2, SECOND: 2, "worker-0": 1}
    assert training.status["active"] == {FIRST: 1, SECOND: 1}
    assert (selected(training, 0), selected(training, 1)) == ("1", "1")
    assert said(training, training.named(SERVER, 0, 2)) == "1"
    assert training.status["roles"]["ParameterServer"]["desired"] == 4
    assert training.status["roles"]["ParameterServer"]["ready"] == 4


def test_the_standby_serves_when_the_active_server_dies_and_a_new_standby_is_made(training):
    training.end(training.named(SERVER, 0, 1), 137)
    todo = training.plan()
    assert todo.status is not None
    assert todo.status["active"][FIRST] == 2
    patched = [action for action in todo.actions if isinstance(action, PatchService)]
    assert [action.patch[1]["value"] for action in patched] == ["2"]
    assert todo.actions.index(patched[0]) == 0, "nobody waits for the new standby"
    training.settle()
    assert selected(training, 0) == "2"
    assert training.status["incarnations"][FIRST] == 3
    assert said(training, training.named(SERVER, 0, 3)) == "2"
    assert [(d.index, d.incarnation, d.charged) for d in training.deaths] == [(0, 1, True)]
    assert training.status["roles"]["ParameterServer"]["restarts"] == 1


def test_a_standby_that_dies_is_replaced_and_nothing_else_changes(training):
    training.end(training.named(SERVER, 1, 2), 137)
    training.settle()
    assert training.status["active"] == {FIRST: 1, SECOND: 1}
    assert training.status["incarnations"][SECOND] == 3
    assert selected(training, 1) == "1"
    assert [(d.index, d.incarnation) for d in training.deaths] == [(1, 2)]


def test_when_both_die_both_are_replaced(training):
    for incarnation in (1, 2):
        training.end(training.named(SERVER, 0, incarnation), 137)
    training.settle()
    assert training.status["active"][FIRST] == 3
    assert training.status["incarnations"][FIRST] == 4
    assert selected(training, 0) == "3"


def test_a_standby_that_does_not_run_yet_is_not_promoted(training):
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    assert training.status["active"][FIRST] == 2
    training.end(training.named(SERVER, 0, 2), 137)  # the new standby, 3, is still Pending
    training.settle()
    assert training.status["active"][FIRST] == 4
    assert selected(training, 0) == "4"


def test_a_deleted_server_is_succeeded_while_it_still_ends(training):
    """T6: it may run for its whole grace period: nobody waits for that."""
    training.delete(training.named(SERVER, 1, 1), 60)
    training.settle()
    assert training.status["active"][SECOND] == 2
    assert training.status["roles"]["ParameterServer"]["restarts"] == 0


def test_an_operator_that_dies_after_the_status_ends_what_was_begun(training):
    """O2, O5: the status is written first; the patch and the births follow from it."""
    training.end(training.named(SERVER, 0, 1), 137)
    todo = training.plan()
    training.write_status(todo)
    training.restart_operator()
    training.settle()
    assert selected(training, 0) == "2"
    assert training.status["active"][FIRST] == 2
    assert len(training.deaths) <= 1
    assert training.status["roles"]["ParameterServer"]["restarts"] == 1


def test_a_server_told_to_stop_stores_first_if_its_standby_does_not_hold_everything(training):
    """T6, O5: its checkpoint is what the standby would start from."""
    answer(training, shard_1=2)
    name = training.named(SERVER, 0, 1)
    training.delete(name, 60)
    training.settle()
    assert training.status["active"][FIRST] == 1
    training.tick(2)
    training.end(name, 143)
    training.settle()
    assert training.status["active"][FIRST] == 2
    assert [d.incarnation for d in training.deaths] == [1]


def test_a_server_told_to_stop_is_succeeded_at_once_by_a_standby_that_holds_everything(training):
    answer(training, shard_0=2, shard_1=2)
    training.delete(training.named(SERVER, 0, 1), 60)
    training.settle()
    assert training.status["active"][FIRST] == 2


@pytest.mark.parametrize("seconds", [10, 60])
def test_nobody_waits_for_a_checkpoint_of_a_server_that_answers_no_more_or_has_had_its_time(training, seconds):
    """T8."""
    answer(training, shard_1=2)
    training.delete(training.named(SERVER, 0, 1), 60)
    for _ in range(seconds // 2):
        training.settle()
        assert training.status["active"][FIRST] == 1
        training.tick(2)
        if seconds > 20:
            training.answer(**said_of(training.progress), heard=everybody(training))
    training.tick(2)
    training.settle()
    assert training.status["active"][FIRST] == 2


def test_a_server_of_a_lost_node_is_not_waited_for(training):
    answer(training, shard_1=2)
    training.disrupt(training.named(SERVER, 0, 1), "DeletionByTaintManager")
    training.settle()
    assert training.status["active"][FIRST] == 2


def test_a_standby_that_hangs_is_replaced_and_never_promoted(training):
    """T8: its server has gone on without it; a promotion would be the end of the shard."""
    answer(training, shard_0=2, shard_1=2)
    name = training.named(SERVER, 0, 2)
    identity, heard = uid(training, name), training.now
    training.tick(8)
    training.run(name, ready=False)
    training.answer(**said_of(training.progress), heard=everybody(training) | {identity: heard})
    training.settle()
    assert training.status["incarnations"][FIRST] == 2
    training.tick(3)
    assert DeletePod(name, identity, 1, "Stalled") in training.plan().actions
    training.settle()
    assert training.status["incarnations"][FIRST] == 3
    assert training.status["active"][FIRST] == 1
    assert [(d.cause, d.incarnation, d.charged) for d in training.deaths] == [("Stalled", 2, True)]


def test_a_standby_whose_node_is_cut_off_pays_for_nothing(training):
    """O4: the node controller takes Ready back before it evicts; ContainersReady is left as the kubelet set it."""
    answer(training, shard_0=2, shard_1=2)
    name = training.named(SERVER, 0, 2)
    identity, heard = uid(training, name), training.now
    training.tick(45)
    training.run(name, ready=False)
    training.pods[name]["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    training.answer(**said_of(training.progress), heard=everybody(training) | {identity: heard})
    training.settle()
    assert [(d.cause, d.incarnation, d.charged) for d in training.deaths] == [("NodeLost", 2, False)]
    assert training.status["incarnations"][FIRST] == 3


def test_a_server_whose_standby_hangs_is_replaced_as_if_it_had_none(training):
    answer(training, shard_0=2, shard_1=2)
    standby = training.named(SERVER, 0, 2)
    heard = everybody(training)
    training.tick(11)
    training.run(standby, ready=False)
    heard = everybody(training) | {uid(training, standby): heard[uid(training, standby)]}
    training.answer(step=7, reached=frozenset({0, 1}), heard=heard)
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    assert training.status["active"][FIRST] > 2


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


def test_the_status_says_which_shards_would_lose_updates(training):
    answer(training, shard_1=2)
    training.settle()
    said = training.condition("StandbysInSync")
    assert (said["status"], said["reason"]) == ("False", "Filling")
    assert said["message"] == "without a standby that holds all of it: shard 0"
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


def test_a_job_without_standbys_has_no_such_condition(running):
    cluster = running({"parameterServers": {"replicas": 1}})
    assert "StandbysInSync" not in {c["type"] for c in cluster.status["conditions"]}
