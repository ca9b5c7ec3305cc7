"""O2, O3, T6: which of a shard's two servers serves, when that changes, and that each death is counted once."""

from __future__ import annotations

import pytest

from backstay_spec import contract
from backstay_spec.actions import PatchService

SERVER = contract.ROLE_SERVER
SPEC = {"parameterServers": {"replicas": 2, "standbys": 1}, "workers": {"replicas": 1}}
FIRST, SECOND = "parameter-server-0", "parameter-server-1"


@pytest.fixture
def training(running):
    cluster = running(SPEC)
    cluster.answer(step=7, reached=frozenset({0, 1}))
    cluster.settle()
    return cluster


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
