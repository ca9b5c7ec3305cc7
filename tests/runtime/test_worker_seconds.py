"""A worker's time is divided without a gap, and what a rollback discards moves to `redone`."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._roles._worker_reports import WorkerReports
from backstay._roles._worker_seconds import WorkerSeconds, process_age
from backstay_rpc.control_pb2 import HeartbeatRequest, Peer, ProgressReply
from backstay_rpc.control_pb2 import WorkerSeconds as Reported
from backstay_spec.goodput import MEASURED

CALLS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.sampled_from(["starting", "data", "computed", "exchanged", "reconnecting", "abandoned", "rolled back"]),
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
    for passed, call, sent, answered, applied_at in calls:
        worker.now += passed
        match call:
            case "computed":
                worker.seconds.computed()
            case "exchanged":
                worker.seconds.exchanged(sent, answered, applied_at=applied_at)
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


def test_a_computation_belongs_to_what_became_of_it() -> None:
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
    born = psutil.Process().create_time()
    least = time.time() - born
    age = process_age()
    assert least - 2 <= age <= time.time() - born + 2, "psutil takes the system's start in whole seconds"
