"""O2, O3, T6: when a shard's standby becomes its active server, and that each death is counted once."""

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
        in_sync={int(shard[-1]): incarnation for shard, incarnation in in_sync.items()},
    )


def selected(cluster, shard: int) -> str:
    service = next(s for n, s in cluster.services.items() if f"-ps-{shard}-" in n)
    return service["spec"]["selector"][contract.LABEL_INCARNATION]


def active_of(cluster, name: str) -> str:
    env = cluster.pods[name]["spec"]["containers"][0]["env"]
    return next(item["value"] for item in env if item["name"] == contract.ENV_ACTIVE)


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
    assert active_of(training, training.named(SERVER, 0, 3)) == "2"
    assert [(d.index, d.incarnation, d.charged) for d in training.deaths] == [(0, 1, True)]
    assert training.status["roles"]["ParameterServer"]["restarts"] == 1


def test_when_both_die_both_are_replaced(training):
    for incarnation in (1, 2):
        training.end(training.named(SERVER, 0, incarnation), 137)
    training.settle()
    assert training.status["active"][FIRST] == 3
    assert training.status["incarnations"][FIRST] == 4
    assert selected(training, 0) == "3"


def both_die(training) -> str:
    """End the active server, and its successor before the new standby runs. Returns the name of the standby's pod."""
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    assert training.status["active"][FIRST] == 2
    training.end(training.named(SERVER, 0, 2), 137)
    training.settle()
    return training.named(SERVER, 0, 3)


def test_o2_a_standby_that_starts_is_waited_for_and_takes_over(training):
    """It was deleted, and another two pods were created: with load, both needed twice the time."""
    standby = both_die(training)
    assert training.status["active"][FIRST] == 2
    assert training.plan().requeue_after is not None
    training.tick(3)
    training.run(standby, ready=False)
    training.settle()
    assert training.status["active"][FIRST] == 3
    assert selected(training, 0) == "3"
    assert training.status["incarnations"][FIRST] == 4, "the new standby"
    assert [(d.incarnation, d.charged) for d in training.deaths] == [(1, True), (2, True)]


@pytest.mark.parametrize("case", ["pending", "no place", "its clock"])
def test_t8_a_standby_that_does_not_start_is_not_waited_for(training, case):
    standby = both_die(training)
    if case == "no place":
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
        training.pods[standby]["status"]["conditions"] = [condition]
    elif case == "its clock":
        training.pods[standby]["metadata"]["creationTimestamp"] = "2099-01-01T00:00:00Z"
    else:
        training.tick(11)
    training.settle()
    assert training.status["active"][FIRST] == 4
    assert selected(training, 0) == "4"


def test_a_deleted_server_is_succeeded_while_it_still_ends(training):
    """T6: it may run for its whole grace period, and the promotion does not wait for that."""
    answer(training, shard_0=2, shard_1=2)
    training.delete(training.named(SERVER, 1, 1), 60)
    training.settle()
    assert training.status["active"][SECOND] == 2
    assert training.status["roles"]["ParameterServer"]["restarts"] == 0


def test_an_operator_that_dies_after_the_status_ends_what_was_begun(training):
    """O2, O5: the status is written first; the patch and the new pods follow from it."""
    training.end(training.named(SERVER, 0, 1), 137)
    todo = training.plan()
    training.write(todo)
    training.restart_operator()
    training.settle()
    assert selected(training, 0) == "2"
    assert training.status["active"][FIRST] == 2
    assert len(training.deaths) <= 1
    assert training.status["roles"]["ParameterServer"]["restarts"] == 1


def test_a_server_that_stops_stores_first_if_its_standby_does_not_hold_everything(training):
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


def test_a_server_that_stops_is_replaced_immediately_by_a_standby_in_sync(training):
    answer(training, shard_0=2, shard_1=2)
    training.delete(training.named(SERVER, 0, 1), 60)
    training.settle()
    assert training.status["active"][FIRST] == 2


@pytest.mark.parametrize("seconds", [10, 60])
def test_nothing_waits_for_a_checkpoint_of_a_server_that_answers_no_more_or_has_had_its_time(training, seconds):
    """T8."""
    answer(training, shard_1=2)
    training.delete(training.named(SERVER, 0, 1), 60)
    if seconds < 20:
        training.silence(training.named(SERVER, 0, 1))
    for _ in range(seconds // 2):
        training.settle()
        assert training.status["active"][FIRST] == 1
        training.tick(2)
    training.tick(2)
    training.settle()
    assert training.status["active"][FIRST] == 2


def test_a_server_of_a_lost_node_is_not_waited_for(training):
    answer(training, shard_1=2)
    training.disrupt(training.named(SERVER, 0, 1), "DeletionByTaintManager")
    training.settle()
    assert training.status["active"][FIRST] == 2


def test_a_standby_that_hangs_is_replaced_and_never_promoted(training):
    """T8: its server has continued without it; a promotion would lose updates of the shard."""
    answer(training, shard_0=2, shard_1=2)
    name = training.named(SERVER, 0, 2)
    identity = uid(training, name)
    training.silence(name)
    training.tick(8)
    training.run(name, ready=False)
    training.settle()
    assert training.status["incarnations"][FIRST] == 2
    training.tick(3)
    assert DeletePod(name, identity, 1, "Stalled") in training.plan().actions
    training.settle()
    assert training.status["incarnations"][FIRST] == 3
    assert training.status["active"][FIRST] == 1
    assert [(d.cause, d.incarnation, d.charged) for d in training.deaths] == [("Stalled", 2, True)]


def test_a_server_whose_standby_hangs_is_replaced_as_if_it_had_none(training):
    answer(training, shard_0=2, shard_1=2)
    standby = training.named(SERVER, 0, 2)
    training.silence(standby)
    training.tick(11)
    training.run(standby, ready=False)
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    assert training.status["active"][FIRST] > 2


def test_o5_a_standby_that_does_not_answer_is_not_promoted_until_it_does(training):
    """It was stopped, or is starved, and not yet called hung: the operator calls again."""
    answer(training, shard_0=2, shard_1=2)
    training.silence(training.named(SERVER, 0, 2))
    training.tick(2)
    training.end(training.named(SERVER, 0, 1), 137)
    for _ in range(5):
        training.settle()
        assert training.status["active"][FIRST] == 1
        assert training.plan().requeue_after is not None
        training.tick(2)
    training.speak(training.named(SERVER, 0, 2))
    training.settle()
    assert training.status["active"][FIRST] == 2
    assert [(d.incarnation, d.charged) for d in training.deaths] == [(1, True)]


def test_o5_an_operator_that_took_over_calls_a_standby_before_it_promotes_it(training):
    answer(training, shard_0=2, shard_1=2)
    training.restart_operator()
    training.called = False
    training.end(training.named(SERVER, 0, 1), 137)
    training.settle()
    assert training.status["active"][FIRST] == 1
    training.called = True
    training.settle()
    assert training.status["active"][FIRST] == 2


def test_t8_a_standby_that_never_answers_is_given_up_after_a_minute(training):
    answer(training, shard_0=2, shard_1=2)
    training.silence(training.named(SERVER, 0, 2))
    training.end(training.named(SERVER, 0, 1), 137)
    training.tick(59)
    training.settle()
    assert training.status["active"][FIRST] == 1
    training.tick(2)
    training.settle()
    assert training.status["active"][FIRST] > 2
