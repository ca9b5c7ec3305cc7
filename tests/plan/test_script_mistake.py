"""O4: after the first update, mistakes of the script fail the job, and every other exception is charged to a budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backstay_spec import contract

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER


def says(reason: str = "KeyError", at: str = "train.py:12", **more: Any) -> str:
    return json.dumps({"reason": reason, "message": "'x'", "at": at, "traceback": f"  {at}\n{reason}: 'x'", **more})


@pytest.fixture
def training(make_cluster: Any) -> Any:
    """A job that has made updates, with a number of workers."""

    def start(workers: int = 3, step: int = 50, **update: Any) -> Any:
        cluster = make_cluster(
            {"parameterServers": {"replicas": 1}, "workers": {"replicas": workers}, "update": update}
        )
        cluster.settle()
        cluster.run_all()
        cluster.tick(5)
        cluster.answer(term=1, step=step, contributed=dict.fromkeys(range(workers), 1))
        cluster.settle()
        return cluster

    return start


def crash(cluster: Any, rank: int, message: str, incarnation: int = 1) -> None:
    cluster.end(cluster.named(WORKER, rank, incarnation), 1, message)
    cluster.settle()


def again(cluster: Any, rank: int, incarnation: int, message: str, **answered: Any) -> None:
    """The replacement of a worker runs and crashes, and then the servers answer."""
    cluster.tick(60)
    cluster.settle()
    cluster.run(cluster.named(WORKER, rank, incarnation))
    cluster.settle()
    crash(cluster, rank, message, incarnation)
    cluster.tick(2)
    cluster.answer(term=1, step=50, **answered)
    cluster.settle()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("reason", ["BatchesEnded", "EmptyBatch"])
def test_o4_batches_that_ended_or_have_no_rows_in_one_worker_fail_the_job_immediately(
    training: Any, workers: int, trained: bool, reason: str
) -> None:
    cluster = training(workers, step=50 if trained else 0)
    crash(cluster, 0, says(reason, result="Refused"))
    failed = cluster.condition("Failed")
    assert failed["reason"] == reason
    assert failed["message"].startswith("worker 0: 'x'")
    assert not cluster.living()


def test_o4_the_same_exception_in_all_workers_fails_a_job_that_has_trained(training: Any) -> None:
    cluster = training(3)
    for rank in (2, 0):
        crash(cluster, rank, says())
        assert cluster.status["phase"] != "Failed"
    crash(cluster, 1, says())
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert failed["message"].startswith("KeyError: 'x' (train.py:12): raised by all 3 workers after the first update")


@pytest.mark.parametrize(
    "last",
    [says(at="train.py:13"), says("TypeError"), says(transient=True), says("ConnectionResetError"), "no exception"],
)
def test_o4_other_exceptions_after_the_first_update_are_charged(training: Any, last: str) -> None:
    cluster = training(3)
    for rank, message in enumerate([says(), says(), last]):
        crash(cluster, rank, message)
    assert cluster.status["phase"] != "Failed"
    assert cluster.status["roles"]["Worker"]["restarts"] == 3


def test_o4_after_the_first_update_a_last_line_does_not_fail_the_job(training: Any) -> None:
    """Native code may end the process of each worker after the same line of progress."""
    cluster = training(3)
    for incarnation in (1, 2):
        for rank in range(3):
            crash(cluster, rank, f"step {rank}{incarnation}/100  loss 0.5", incarnation)
        cluster.tick(60)
        cluster.settle()
    assert cluster.status["phase"] != "Failed"


def test_o4_one_worker_that_never_contributes_again_fails_the_job(training: Any) -> None:
    """A transform raises for one sample, which every replacement of the worker reads again."""
    cluster = training(3)
    crash(cluster, 1, says())
    again(cluster, 1, 2, says(), contributed={0: 1, 1: 1, 2: 1})
    assert cluster.status["phase"] != "Failed"
    again(cluster, 1, 3, says(), contributed={0: 1, 1: 1, 2: 1})
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert "raised by worker 1 again and again, without a contribution between" in failed["message"]


@pytest.mark.parametrize("case", ["the same", "another line", "served"])
def test_o4_a_server_that_never_serves_again_fails_a_job_that_has_trained(training: Any, case: str) -> None:
    """The transform raises in each replacement, which was charged up to `maxRestarts`. No update is made without it."""
    cluster = training(2)
    cluster.end(cluster.named(SERVER, 0, 1), 137)
    for incarnation in (2, 3, 4):
        assert cluster.status["phase"] != "Failed"
        cluster.tick(60)
        cluster.settle()
        if case == "served" and incarnation == 4:
            cluster.run(cluster.named(SERVER, 0, incarnation))
            cluster.tick(5)
            cluster.settle()
        at = "train.py:13" if case == "another line" and incarnation == 4 else "train.py:12"
        cluster.end(cluster.named(SERVER, 0, incarnation), 1, says(at=at))
        cluster.settle()
    if case != "the same":
        assert cluster.status["phase"] != "Failed"
        return
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert "KeyError: 'x' (train.py:12): raised by parameter server 0 again and again" in failed["message"]


@pytest.mark.parametrize("worked", [False, True])
def test_o4_one_worker_that_always_crashes_fails_the_job_before_the_first_update_too(
    make_cluster: Any, *, worked: bool
) -> None:
    """It took six crashes, and 40 s."""
    cluster = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 3}})
    cluster.settle()
    if worked:
        cluster.run_all()
        cluster.tick(5)
        cluster.answer(term=1, step=0, contributed=dict.fromkeys(range(3), 0))
        cluster.settle()
    crash(cluster, 1, says())
    cluster.tick(3)
    cluster.settle()
    for incarnation in (2, 3):
        assert cluster.status["phase"] != "Failed"
        if worked:
            cluster.run(cluster.named(WORKER, 1, incarnation))
            cluster.settle()
        crash(cluster, 1, says(), incarnation)
        cluster.tick(3)
        cluster.settle()
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert "raised by worker 1 again and again, without a contribution between" in failed["message"]


@pytest.mark.parametrize("case", ["contributed", "backups", "async", "another line"])
def test_o4_a_worker_that_crashes_is_charged_where_its_replacement_may_help(training: Any, case: str) -> None:
    update = {"backups": {"backups": 1}, "async": {"mode": "Async"}}.get(case, {})
    cluster = training(3, **update)
    crash(cluster, 1, says())
    again(cluster, 1, 2, says(), contributed={1: 2 if case == "contributed" else 1})
    again(
        cluster,
        1,
        3,
        says(at="train.py:13") if case == "another line" else says(),
        contributed={1: 2 if case == "contributed" else 1},
    )
    assert cluster.status["phase"] != "Failed"
