"""A worker's time is divided without a gap, and what a rollback discards moves to `redone`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from between import LONG
from hypothesis import given
from hypothesis import strategies as st

from backstay._report._job import WorkerReports
from backstay._report._overlap import OverlapTimer
from backstay._report._worker_seconds import WorkerSeconds, process_age
from backstay_rpc.control_pb2 import HeartbeatRequest, Peer, ProgressReply
from backstay_rpc.control_pb2 import WorkerSeconds as Reported
from backstay_spec.goodput import MEASURED

CALLS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.sampled_from(
            [
                "starting",
                "data",
                "computed",
                "began next",
                "exchanged",
                "reconnecting",
                "applied",
                "abandoned",
                "rolled back",
            ]
        ),
        st.floats(-1, 200),
        st.floats(-1, 200),
        st.floats(-1, 200),
        st.one_of(st.none(), st.integers(0, 30)),
    )
)


class Worker:
    def __init__(self, age: float = 0.0) -> None:
        self.now = 50.0
        self.seconds = WorkerSeconds(lambda: self.now, age)

    def named(self) -> dict[str, float]:
        return {part: value for part, value in zip(MEASURED, self.seconds.report().seconds, strict=True) if value}

    def step(self, applied_at: int | None, *, computes: float = 4, exchanges: float = 3) -> None:
        self.seconds.ended("data")
        self.now += computes
        self.seconds.computed()
        self.now += exchanges
        self.seconds.exchanged(0.5, 2, applied_at=applied_at)


@given(CALLS, st.floats(0, 1000))
def test_the_parts_of_a_workers_time_add_up_to_its_age(calls: list[tuple[Any, ...]], age: float) -> None:
    worker = Worker(age)
    saved = 0
    for passed, call, sent, answered, beside, applied_at in calls:
        worker.now += passed
        match call:
            case "computed":
                worker.seconds.computed()
            case "exchanged":
                worker.seconds.exchanged(sent, answered, applied_at=applied_at, beside=beside)
            case "began next":
                worker.seconds.began_next()
            case "applied":
                worker.seconds.applied(applied_at or 0)
            case "abandoned":
                worker.seconds.abandoned()
            case "rolled back":
                worker.seconds.rolled_back(applied_at or 0)
            case part:
                worker.seconds.ended(part)
        saved = applied_at or saved
        found = worker.seconds.report(saved)
        assert min(found.seconds) >= -1e-9
        assert sum(found.seconds) == pytest.approx(worker.now - 50 + age, abs=1e-6)
        assert -1e-9 <= found.unsaved <= found.seconds[MEASURED.index("applied")] + 1e-6
    assert sum(worker.seconds.rounded) == pytest.approx(worker.now - 50 + age, abs=0.02)


@given(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(-1, 9))
def test_computing_beside_an_exchange_takes_its_time_from_the_beginning(
    send: float, wait: float, receive: float, beside: float
) -> None:
    worker = Worker()
    worker.seconds.ended("data")
    ends = send, send + wait, send + wait + receive
    worker.now += ends[-1]
    worker.seconds.exchanged(send, send + wait, applied_at=1, beside=beside)
    found = worker.named()
    computed = min(max(0.0, beside), ends[-1])
    left = [max(0.0, end - max(computed, begin)) for begin, end in zip((0.0, *ends), ends, strict=False)]
    wanted = {"computing": computed, "send": left[0], "wait": left[1], "receive": left[2]}
    assert {part: found.get(part, 0.0) for part in wanted} == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("used", [True, False])
def test_what_was_computed_beside_an_exchange_belongs_to_the_next_contribution(used: bool) -> None:
    worker = Worker()
    worker.seconds.ended("data")
    worker.now += 4
    worker.seconds.computed()
    worker.now += 1
    worker.seconds.began_next()
    worker.now += 8
    assert worker.named() == {"computing": 5, "wait": 8}
    worker.seconds.exchanged(1, 6, applied_at=1, beside=5)
    assert worker.named() == {"applied": 4, "computing": 6, "wait": 1, "receive": 2}
    if not used:
        worker.seconds.abandoned()
    worker.now += 3
    worker.seconds.computed()
    worker.now += 1
    worker.seconds.exchanged(1, 1, applied_at=2)
    outcome = {"applied": 13} if used else {"applied": 7, "dropped": 6}
    assert worker.named() == outcome | {"send": 1, "wait": 1, "receive": 2}


def test_it_is_noted_when_a_computation_beside_an_exchange_ends() -> None:
    now = [10.0]
    beside, goes = OverlapTimer(lambda: now[0]), threading.Event()
    assert beside.seconds(10, 20) == 0, "there is none"

    def ends(wait: Callable[[], object]) -> None:
        beside.begin(wait)
        assert beside._ended is not None
        beside._ended.exception(60)

    def fail() -> None:
        raise ValueError

    try:
        beside.begin(lambda: goes.wait(LONG))
        assert beside.seconds(10, 13) == 3, "it still runs"
        assert beside.seconds(10, 13) == 0, "each counts once"
        goes.set()
        for wait in (goes.wait, fail):
            now[0] = 10.0
            ends(wait)
            now[0] = 16.0
            assert beside.seconds(4, 13) == 6
            ends(wait)
            assert beside.seconds(4, 13) == 9, "it ended after the exchange"
            ends(wait)
            assert beside.seconds(17, 20) == 0, "it ended before the exchange"
    finally:
        goes.set()
        beside.close()


def test_a_computation_is_counted_by_its_outcome() -> None:
    worker = Worker()
    worker.step(1)
    worker.step(None)
    assert worker.named() == {"send": 1, "wait": 3, "receive": 2, "applied": 4, "dropped": 4}


def test_what_is_being_done_counts_as_what_it_most_likely_is() -> None:
    worker = Worker()
    worker.now += 1
    assert worker.named() == {"starting": 1}
    worker.seconds.ended("starting")
    worker.seconds.ended("data")
    worker.now += 2
    assert worker.named() == {"starting": 1, "computing": 2}
    worker.seconds.computed()
    worker.now += 3
    assert worker.named() == {"starting": 1, "computing": 2, "wait": 3}


def test_a_worker_that_ends_before_the_last_update_was_not_ending() -> None:
    waiting, done = Worker(), Worker()
    waiting.now += 50
    assert waiting.named() == {"starting": 50}
    done.seconds.ended("checkpoint")
    done.now += 2
    assert done.named() == {"ending": 2}


def test_an_update_whose_answer_was_lost_counts_as_applied() -> None:
    worker = Worker()
    worker.step(1)
    worker.seconds.ended("data")
    worker.now += 4
    worker.seconds.computed()
    worker.now += 3
    worker.seconds.ended("reconnecting")
    worker.seconds.applied(2)
    assert (worker.named()["applied"], worker.named()["reconnecting"]) == (8, 3)
    assert "dropped" not in worker.named()
    worker.seconds.rolled_back(1)
    assert (worker.named()["applied"], worker.named()["redone"]) == (4, 4)


def test_a_rollback_discards_what_was_applied_after_its_version() -> None:
    worker = Worker()
    for version in range(1, 11):
        worker.step(version)
    assert worker.seconds.report(6).unsaved == 16
    worker.seconds.rolled_back(6)
    assert (worker.named()["applied"], worker.named()["redone"]) == (24, 16)
    worker.step(7)
    worker.seconds.rolled_back(6)
    assert (worker.named()["applied"], worker.named()["redone"]) == (24, 20)


def test_of_many_versions_some_are_remembered() -> None:
    """A job without checkpoints may lose all of its updates."""
    worker = Worker()
    for version in range(1, 20_001):
        worker.step(version, computes=1, exchanges=0)
    assert len(worker.seconds._versions) < 5000
    worker.seconds.rolled_back(10_000)
    assert worker.named()["redone"] == pytest.approx(10_000, rel=0.01)
    worker.seconds.rolled_back(0)
    assert worker.named()["redone"] == 20_000


def test_shard_0_keeps_the_newest_reports_of_two_incarnations_of_each_rank() -> None:
    reports = WorkerReports()
    for now, (rank, incarnation, seconds) in enumerate(
        [(0, 1, 1.0), (0, 2, 2.0), (1, 1, 3.0), (0, 3, 4.0), (0, 3, 5.0)]
    ):
        peer = Peer(role="worker", index=rank, incarnation=incarnation)
        reports.beat(now, HeartbeatRequest(peer=peer, worker_seconds=Reported(seconds=[seconds])))
    reports.beat(9.0, HeartbeatRequest(peer=Peer(role="evaluator")))
    reply = ProgressReply()
    reports.fill(10.0, reply)
    assert {(one.rank, one.incarnation): (list(one.seconds), one.ago) for one in reply.worker_seconds} == {
        (0, 2): ([2.0], 9.0),
        (0, 3): ([5.0], 6.0),
        (1, 1): ([3.0], 8.0),
    }


def test_the_age_of_this_process_is_known() -> None:
    created = psutil.Process().create_time()
    least = time.time() - created
    age = process_age()
    assert least - 2 <= age <= time.time() - created + 2, "psutil takes the system's start in whole seconds"
