"""T7, T8: when checkpoints are written, and how a job ends: the pure coordinator."""

from __future__ import annotations

import pytest

from backstay._coordination import (
    Coordinator,
    CoordinatorState,
    Finished,
    Intervals,
    Rules,
    Send,
    ServerPosition,
)
from backstay_rpc.control_pb2 import Applied, Commit, GradientId, GradientInfo, Save, Staged, Written


def staged(rank: int, version: int, *, attempt: int = 1, incarnation: int = 0, finite: bool = True) -> Staged:
    gradient = GradientId(
        term=1, version=version, rank=rank, key_step=version, incarnation=incarnation, attempt=attempt
    )
    return Staged(id=gradient, info=GradientInfo(finite=finite, examples=2, loss=0.5))


def commits(decisions: list[object]) -> list[Commit]:
    return [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Commit)]


def test_the_last_version_is_stored_again_until_it_is_or_the_job_fails() -> None:
    """T8: the wait for the evaluation has a limit too."""
    rules = Rules(mode="Sync", shards=1, steps=1, stores=True, evaluates=True)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    assert commits(job.report(0, 0, staged(0, 0)))[0].checkpoint
    job.report(1, 0, Written(term=1, version=1, error="disk full"))
    assert job.tick(1.5) == []
    (again,) = job.tick(2)
    assert again.message == Save(term=1, version=1)
    (failed,) = job.report(3, 0, Written(term=1, version=1, error="disk full"))
    assert failed.error == "shard 0: disk full; it is the last version: the job fails unless it is stored within 600 s"
    assert job.tick(4) == []
    (again,) = job.tick(5)
    (write,) = job.report(13, 0, Written(term=1, version=1))
    assert job.manifest(13, write, "the-uri") == []
    assert write.version == 1
    assert job.tick(600) == []
    done, finished = job.tick(613)
    assert done.message.checkpoint == "the-uri"
    assert finished.reason == ""

    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    job.report(0, 0, staged(0, 0))
    job.report(1, 0, Written(term=1, version=1, error="disk full"))
    failed = job.tick(601)[-1]
    assert failed.reason == "CheckpointFailed"
    assert "disk full" in failed.why


def test_a_history_that_starts_at_its_end_ends_immediately() -> None:
    """T7: AlreadyComplete."""
    rules = Rules(mode="Sync", shards=1, steps=5, stores=True, evaluates=True)
    job = Coordinator(rules, CoordinatorState(term=2, version=7, world=1), checkpoint="uri")
    assert job.start(0)[-1] == Finished(7)


def test_a_job_of_no_steps_ends_with_the_initial_parameters() -> None:
    """Each server begins, because no checkpoint has the result. A server that is replaced after the end does not."""
    rules = Rules(mode="Sync", shards=2, steps=0)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    job.start(0)
    for shard in range(2):
        begin, done = job.hello(0, ServerPosition(shard, 0, 0))
        assert begin == Send(shard, job.start_of_term)
        assert (done.message.version, done.message.failed, done.message.already_complete) == (0, "", False)
    job = Coordinator(Rules(mode="Sync", shards=1, steps=1), CoordinatorState(term=1, version=0, world=1))
    assert job.report(0, 0, staged(0, 0))
    assert job.report(0, 0, Applied(version=1)) == []
    assert job.finished is not None
    (done,) = job.hello(1, ServerPosition(0, 0, 0))
    assert done.message.version == 1


def test_t7_a_manifest_of_a_term_that_has_ended_does_not_stand_for_one_of_the_next() -> None:
    """It is stored slowly, while the next term reaches the same version."""
    rules = Rules(mode="Sync", shards=1, steps=100, stores=True)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1), intervals=Intervals(every_steps=1))
    job.report(1, 0, staged(0, 0))
    (old,) = job.report(2, 0, Written(term=1, version=1))
    job.restart(3, CoordinatorState(term=2, version=0, world=1), "")
    again = staged(0, 0)
    again.id.term = 2
    job.report(4, 0, again)
    assert job.manifest(5, old, "old") == []
    assert job.checkpoint == ""
    (new,) = job.report(6, 0, Written(term=2, version=1))
    job.manifest(7, new, "new")
    assert job.checkpoint == "new"


def test_t8_a_job_that_has_ended_does_not_begin_again() -> None:
    """A server is lost while the last manifest is being stored."""
    job = Coordinator(Rules(mode="Sync", shards=1, steps=1, stores=True), CoordinatorState(term=1, version=0, world=1))
    job.report(1, 0, staged(0, 0))
    (write,) = job.report(2, 0, Written(term=1, version=1))
    assert any(isinstance(decision, Finished) for decision in job.manifest(3, write, "uri"))
    assert job.restart(4, CoordinatorState(term=2, version=0, world=1), "") == []
    assert job.finished is not None


def test_seconds_and_stopping_make_checkpoints() -> None:
    rules = Rules(mode="Sync", shards=1, steps=100, stores=True)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1), intervals=Intervals(every_seconds=10))
    assert not commits(job.report(9, 0, staged(0, 0)))[0].checkpoint
    assert commits(job.report(10, 0, staged(0, 1)))[0].checkpoint
    assert not commits(job.report(30, 0, staged(0, 2)))[0].checkpoint  # one at a time
    (order,) = job.report(31, 0, Written(term=1, version=2))
    job.manifest(31, order, "two")
    assert [d.message for d in job.save(32)] == [Save(term=1, version=3)]
    assert job.save(32) == []
    assert job.checkpoint == "two"


@pytest.mark.parametrize("lost_updates", [0, 1, 2])
@pytest.mark.parametrize("requested", ["never", "by a commit", "by a save"])
def test_t8_a_shard_without_the_newest_commits_gets_each_request_for_a_checkpoint_once(
    lost_updates: int, requested: str
) -> None:
    """A link may break before commits and the `Save` that follows them. One checkpoint is written at a time."""
    rules = Rules(mode="Sync", shards=2, steps=100, stores=True)
    every = Intervals(every_steps=2) if requested == "by a commit" else None
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1), intervals=every)
    for shard in (0, 1):
        job.hello(0, ServerPosition(shard, 1, 0, saves=0))
    for version in (0, 1):
        for shard in (0, 1):
            job.report(1, shard, staged(0, version))
        job.report(1, 0, Applied(version=version + 1))
    if requested == "by a save":
        job.save(1)
    linked = job.hello(2, ServerPosition(1, 1, 2 - lost_updates, saves=0))
    received = [decision.message for decision in linked if isinstance(decision, Send)]
    saves = [message.version for message in received if isinstance(message, Save)]
    saves += [message.version + 1 for message in received if isinstance(message, Commit) and message.checkpoint]
    assert saves == ([] if requested == "never" else [2])
    assert not any(isinstance(d.message, Save) for d in job.hello(3, ServerPosition(1, 1, 2 - lost_updates, saves=2)))


def test_the_state_survives_a_manifest() -> None:
    state = CoordinatorState(term=3, version=9, world=2, key_steps={0: 4, 1: 5}, non_finite_run=1, redone=7)
    assert CoordinatorState.from_json(state.to_json()) == state
    with pytest.raises(ValueError, match="keySteps"):
        CoordinatorState.from_json({"term": 1, "version": 2, "world": 3})
