"""The rank that the next update waits for is reported, with its activity, within 30 s."""

from __future__ import annotations

from backstay._coordination import CoordinatorState
from backstay._report._job import UpdateWaits
from backstay._report._metrics import PodMetrics
from backstay_rpc.control_pb2 import (
    Commit,
    Contribution,
    Doing,
    GradientId,
    HeartbeatRequest,
    Peer,
    Staged,
)
from backstay_spec.job_report import UpdateWait


def beat(rank: int, **more: object) -> HeartbeatRequest:
    return HeartbeatRequest(peer=Peer(role="worker", index=rank, incarnation=1), **more)  # type: ignore[arg-type]


def staged(rank: int, version: int) -> Staged:
    return Staged(id=GradientId(term=1, version=version, rank=rank, incarnation=1, attempt=1))


def commit(version: int, ranks: range) -> Commit:
    return Commit(
        term=1, version=version, world=4, contributions=[Contribution(id=staged(r, version).id) for r in ranks]
    )


def test_the_missing_ranks_are_named_with_what_they_do() -> None:
    waits = UpdateWaits(2, lambda world: world - 1, PodMetrics("job", "ParameterServer", 0), lambda: 0.0)
    waits.restarted(0.0, CoordinatorState(term=1, version=0, world=4))
    for rank in range(4):
        for shard in range(2):
            waits.staged(10.0 + rank, shard, staged(rank, 0))
    waits.updated(12.0, commit(0, range(3)))
    waits.staged(13.0, 0, staged(0, 1))
    waits.staged(13.0, 1, staged(0, 1))
    waits.staged(13.0, 0, staged(1, 1))
    waits.beat(41.0, beat(1, doing=Doing(point="exchange", seconds=28.0)))
    waits.beat(41.0, beat(2, doing=Doing(point="batch_wait", step=1, has_step=True, seconds=27.0, member=3)))
    waits.beat(15.0, beat(3))
    report = waits.report(42.0)
    assert report.waits_for == (
        "worker 1 has not reached server 1; pod 3 of worker 2 waits for its input batch, for 28 s; "
        "worker 3 has sent no heartbeat for 27 s (2 of these 3 contributions are needed)"
    )
    assert [(entry.rank, entry.part, entry.updates) for entry in report.waited_for] == [(2, "send", 1)]
    assert waits.now(42.0) == UpdateWait(seconds=30.0, text=report.waits_for)


def test_a_short_wait_is_not_worth_a_message() -> None:
    waits = UpdateWaits(1, lambda world: world, PodMetrics("job", "ParameterServer", 0), lambda: 0.0)
    report = waits.report(1.0)
    assert report.waits_for == ""
    waits.restarted(0.0, CoordinatorState(term=1, version=0, world=2))
    report = waits.report(19.0)
    assert report.waits_for == ""
    report = waits.report(20.0)
    assert report.waits_for == "worker 0 has not joined; worker 1 has not joined"


def test_asynchronous_jobs_name_the_rank_that_is_slower_and_no_update_that_waits_for_it() -> None:
    waits = UpdateWaits(1, lambda world: 1, PodMetrics("job", "ParameterServer", 0), lambda: 0.0, sync=False)
    waits.restarted(0.0, CoordinatorState(term=1, version=0, world=2))
    for rank, seconds in ((0, 0.5), (1, 1.5)):
        waits.beat(0.0, beat(rank, parts={"data": seconds}))
    for version, (when, rank) in enumerate([(1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0), (6, 1)]):
        waits.staged(when, 0, staged(rank, version))
        waits.updated(when, commit(version, range(rank, rank + 1)))
    assert [(one.rank, one.part, one.seconds) for one in waits.report(6.0).waited_for] == [(1, "data", 2.0)]
    report = waits.report(40.0)
    assert [(one.rank, one.part) for one in report.waited_for] == [(1, "data")]
    assert report.waits_for.endswith("(1 of these 4 contributions are needed)")


def test_o10_after_the_last_update_the_end_of_the_job_is_described() -> None:
    """No rank is missing then: the job stores and evaluates its result."""
    waits = UpdateWaits(
        1, lambda world: world, PodMetrics("job", "ParameterServer", 0), lambda: 0.0, ends_at=lambda state: 20
    )
    waits.restarted(0.0, CoordinatorState(term=1, version=19, world=4))
    last = commit(19, range(4))
    last.final = True
    waits.updated(10.0, last)
    waits.beat(27.0, beat(0, doing=Doing(point="evaluate", step=20, has_step=True, seconds=17.0)))
    waits.beat(27.0, beat(1))
    report = waits.report(40.0)
    assert (report.waits_for, report.ending) == ("", "trained to step 20; worker 0 evaluates, for 30 s")
    assert waits.now(40.0) == UpdateWait(seconds=30.0, text=report.ending, over=True)
    waits.beat(41.0, beat(0))
    assert "the servers store the last checkpoint" in waits.now(41.0).text
    waits.restarted(50.0, CoordinatorState(term=2, version=10, world=4))
    assert not waits.now(50.0).over, "a rollback: there are updates again"
    waits.restarted(60.0, CoordinatorState(term=2, version=20, world=4))
    assert waits.now(60.0).over, "a server that took over after the last update"
