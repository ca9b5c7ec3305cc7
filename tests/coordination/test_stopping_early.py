"""An early end is an update that is final: it is stored, survives the coordinator, and is not undone."""

from __future__ import annotations

from backstay._coordination import Coordinator, CoordinatorState, Rules, after
from backstay._coordination._decisions import Finished, Send
from backstay_rpc.control_pb2 import Commit, File, GradientId, GradientInfo, Staged, Written


def staged(version: int) -> Staged:
    gradient = GradientId(term=1, version=version, rank=0, key_step=version, attempt=1)
    return Staged(id=gradient, info=GradientInfo(finite=True, examples=1))


def commits(decisions: list[object]) -> list[Commit]:
    return [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Commit)]


def test_the_next_update_is_the_last_one_and_is_stored() -> None:
    job = Coordinator(Rules(mode="Sync", shards=1, steps=100, stores=True), CoordinatorState(1, 0, 1))
    job.report(0.0, 0, staged(0))
    mirror = job.state.copy()
    job.stop_early(0.0)
    job.stop_early(0.0)
    (commit,) = commits(job.report(0.0, 0, staged(1)))
    assert (commit.version, commit.final, commit.checkpoint) == (1, True, True)
    assert job.over
    assert after(mirror, commit).last == job.state.last == 2
    saved = job.state.copy().to_json()
    (order,) = job.report(1.0, 0, Written(term=1, version=2, files=[File(name="f")]))
    decisions = job.manifest(1.0, order, "uri")
    assert [(d.version, d.reason) for d in decisions if isinstance(d, Finished)] == [(2, "")]
    state = CoordinatorState.from_json(saved)
    state.term = 2
    again = Coordinator(Rules(mode="Sync", shards=1, steps=100, stores=True), state, checkpoint="uri")
    assert again.over
    assert any(isinstance(decision, Finished) for decision in again.start(0.0))


def test_an_end_that_was_not_reached_is_not_kept_and_a_late_one_changes_nothing() -> None:
    """A rollback before the final update was stored withdraws the early end with the evaluation that requested it."""
    job = Coordinator(Rules(mode="Sync", shards=1, steps=3), CoordinatorState(1, 0, 1))
    job.stop_early(0.0)
    state = CoordinatorState(2, 0, 1)
    job.restart(0.0, state, "")
    assert not job.over
    assert job.last_version == 3
    done = Coordinator(Rules(mode="Sync", shards=1, steps=1), CoordinatorState(1, 1, 1))
    done.stop_early(0.0)
    assert done.last_version == 1
