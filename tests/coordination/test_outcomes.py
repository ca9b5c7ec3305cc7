"""T2, T9: every contribution that no update uses is counted, once, by its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from backstay._coordination import Coordinator, CoordinatorState, Counted, Decision, Rules, Send
from backstay_rpc.control_pb2 import (
    Examine,
    GradientId,
    GradientInfo,
    Lost,
    Norm,
    Occupied,
    Reject,
    RejectReason,
    Staged,
)


def gradient(rank: int, version: int = 0, attempt: int = 1) -> GradientId:
    return GradientId(term=1, version=version, rank=rank, key_step=version, incarnation=1, attempt=attempt)


def staged(rank: int, *, finite: bool = True, version: int = 0) -> Staged:
    return Staged(id=gradient(rank, version), info=GradientInfo(finite=finite, examples=4))


def outcomes(decisions: Iterable[Decision]) -> Counter[str]:
    return Counter(str(one.outcome) for one in decisions if isinstance(one, Counted))


def coordinator(world: int, **rules: object) -> Coordinator:
    given = Rules(mode="Sync", shards=1, steps=10, **rules)  # type: ignore[arg-type]
    return Coordinator(given, CoordinatorState(term=1, version=0, world=world))


def test_a_contribution_that_is_sent_after_its_update_is_late() -> None:
    """The shard does not keep it, and reports it as lost."""
    job = coordinator(3, backups=1)
    assert outcomes([*job.report(0.0, 0, staged(0)), *job.report(0.0, 0, staged(1))]) == {"applied": 2}
    assert outcomes(job.report(1.0, 0, Lost(id=gradient(2)))) == {"late": 1}
    assert outcomes(job.report(1.0, 0, Lost(id=gradient(2)))) == {}


def test_a_contribution_that_was_complete_on_shard_0_is_counted_once() -> None:
    job = Coordinator(Rules(mode="Sync", shards=2, steps=10, backups=1), CoordinatorState(term=1, version=0, world=2))
    job.report(0.0, 0, staged(1))
    job.report(0.0, 0, staged(0))
    assert outcomes(job.report(0.0, 1, staged(0))) == {"applied": 1, "late": 1}
    assert outcomes(job.report(0.0, 1, Lost(id=gradient(1)))) == {}
    assert outcomes(job.report(0.0, 0, Lost(id=gradient(1)))) == {}


def test_a_broken_stream_is_not_late_while_its_update_is_open() -> None:
    job = coordinator(2)
    assert outcomes(job.report(0.0, 0, Lost(id=gradient(1)))) == {}
    again = Staged(id=gradient(1, attempt=2), info=GradientInfo(finite=True))
    assert outcomes([*job.report(0.0, 0, staged(0)), *job.report(0.0, 0, again)]) == {"applied": 2}


def refusals(decisions: Iterable[Decision]) -> list[tuple[int | None, int, str]]:
    """(shard, rank, reason) of each refusal."""
    return [
        (one.shard, one.message.id.rank, RejectReason.Name(one.message.reason))
        for one in decisions
        if isinstance(one, Send) and isinstance(one.message, Reject)
    ]


@pytest.mark.parametrize("first", ["staged", "lost"])
def test_t8_a_contribution_of_which_one_shard_lost_a_part_is_refused_on_all(first: str) -> None:
    """No update can have it, and the memory of its other parts may be waited for."""
    job = Coordinator(Rules(mode="Async", shards=3, steps=10), CoordinatorState(term=1, version=0, world=2))
    lost = Lost(id=gradient(1))
    if first == "staged":
        assert job.report(0.0, 0, staged(1)) == []
        decisions = job.report(0.0, 1, lost)
        assert refusals(decisions) == [(None, 1, "ABANDONED")]
        assert outcomes(decisions) == {"abandoned": 1}
    else:
        assert job.report(0.0, 1, lost) == []
        assert refusals(job.report(0.0, 0, staged(1))) == [(None, 1, "ABANDONED")]
    assert refusals(job.report(0.0, 2, staged(1))) == [(None, 1, "ABANDONED")], "a part that arrives later"
    assert job.report(0.0, 1, lost) == []
    again = Staged(id=gradient(1, attempt=2), info=GradientInfo(finite=True))
    decisions = [decision for shard in range(3) for decision in job.report(0.0, shard, again)]
    assert outcomes(decisions) == {"applied": 1}


def test_t8_the_shards_that_lack_a_part_are_examined_while_others_wait() -> None:
    job = Coordinator(Rules(mode="Async", shards=3, steps=10), CoordinatorState(term=1, version=0, world=3))
    for shard in (0, 2):
        job.report(0.0, shard, staged(1))
    ids = [gradient(1), gradient(2)]
    assert job.report(0.0, 0, Occupied(ids=ids)) == [Send(1, Examine(id=gradient(1)))], "nobody has reported rank 2"
    job.report(0.0, 1, staged(1))
    assert job.report(0.0, 0, Occupied(ids=ids)) == []


def test_with_standbys_nothing_is_late_before_the_update_is_certain() -> None:
    job = coordinator(2, backups=1, replicates=True)
    job.report(0.0, 0, staged(0))
    assert outcomes(job.report(0.0, 0, Lost(id=gradient(1)))) == {}
    job.report(0.0, 0, Norm(term=1, version=0, round=1))
    assert outcomes(job.report(0.0, 0, Lost(id=gradient(1)))) == {"late": 1}


def test_an_async_contribution_that_was_lost_is_not_late() -> None:
    job = Coordinator(Rules(mode="Async", shards=1, steps=10), CoordinatorState(term=1, version=5, world=2))
    assert outcomes(job.report(0.0, 0, Lost(id=gradient(1, version=2)))) == {}


def test_what_a_skipped_update_contains_is_not_applied() -> None:
    job = coordinator(2)
    decisions = [*job.report(0.0, 0, staged(0)), *job.report(0.0, 0, staged(1, finite=False))]
    assert outcomes(decisions) == {"skipped": 1, "non_finite": 1}
