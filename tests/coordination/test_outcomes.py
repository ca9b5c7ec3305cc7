"""T2, T9: every contribution that no update uses is counted, once, by its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from backstay._coordination import Coordinator, CoordinatorState, Counted, Decision, Rules
from backstay_rpc.control_pb2 import GradientId, GradientInfo, Lost, Norm, Staged


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
    assert outcomes([*job.report(0.0, 0, staged(0)), *job.report(0.0, 0, staged(1))]) == {"applied": 2}


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
