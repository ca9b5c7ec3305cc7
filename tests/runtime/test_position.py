"""The next link of a shard begins with what a coordinator may need again, and with nothing else (T3)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._transport._control._position import WRITTEN_KEPT, ShardPosition
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    Lost,
    Norm,
    NormRequest,
    Position,
    Reject,
    Rollback,
    Save,
    ShardFailed,
    Staged,
    Written,
)


def gradient(rank: int, version: int = 0, attempt: int = 0, term: int = 1) -> GradientId:
    return GradientId(term=term, version=version, rank=rank, key_step=version, incarnation=1, attempt=attempt)


def commit(version: int, *ids: GradientId, **more: Any) -> Commit:
    return Commit(term=1, version=version, contributions=[Contribution(id=each, weight=1.0) for each in ids], **more)


def position(mode: Any = "Sync", term: int = 1, version: int = 0) -> ShardPosition:
    found = ShardPosition(mode)
    found.started(term, version)
    return found


def held(of: ShardPosition) -> list[GradientId]:
    return [report.id for report in of.reports() if isinstance(report, Staged)]


RANKS, VERSIONS = st.integers(0, 3), st.integers(0, 4)
IDS = st.builds(gradient, RANKS, VERSIONS, st.integers(0, 1), st.integers(1, 2))
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda id_: Staged(id=id_), IDS),
        st.builds(lambda id_: Lost(id=id_), IDS),
        st.builds(lambda id_: Reject(id=id_), IDS),
        st.builds(lambda version, ids: commit(version, *ids), VERSIONS, st.lists(IDS, max_size=2)),
        st.builds(lambda version: Applied(version=version), VERSIONS),
    ),
    max_size=30,
)


@given(EVENTS, st.sampled_from(["Sync", "Async"]))
def test_t3_a_contribution_is_reported_again_until_it_is_decided(events: list[Any], mode: str) -> None:
    """Against a model that looks back over all events."""
    of = position(mode)
    for event in events:
        (of.reported if isinstance(event, Staged | Lost | Applied) else of.received)(event)

    expected = []
    for number, event in enumerate(events):
        if not isinstance(event, Staged) or event.id.term != 1:
            continue
        later = events[number + 1 :]
        decided = any(isinstance(each, Lost | Reject) and same(each.id, event.id) for each in later) or any(
            isinstance(each, Commit)
            and (
                any(same(part.id, event.id) for part in each.contributions)
                or (mode == "Sync" and event.id.version <= each.version)
            )
            for each in later
        )
        repeated = any(isinstance(each, Staged) and same(each.id, event.id) for each in later)
        if not decided and not repeated:
            expected.append(event.id)
    assert sorted(map(str, held(of))) == sorted(map(str, expected))
    assert len(held(of)) == len({(each.rank, each.attempt) for each in held(of)})
    applied = [each.version for each in events if isinstance(each, Applied)]
    assert of.message(7).version == max(applied, default=0)
    assert of.message(7).link == 7


def same(one: GradientId, other: GradientId) -> bool:
    return (one.term, one.rank, one.attempt) == (other.term, other.rank, other.attempt)


@given(EVENTS)
def test_t6_a_rollback_leaves_nothing_of_the_previous_term(events: list[Any]) -> None:
    of = position()
    for event in events:
        (of.reported if isinstance(event, Staged | Lost | Applied) else of.received)(event)
    of.reported(Written(term=1, version=3))
    of.received(Save(term=1, version=4))
    of.received(Rollback(term=3, version=5))
    assert of.reports() == [Applied(version=0)]
    assert of.message(1) == Position(begun=3, link=1)
    assert not of.storing
    of.reported(Staged(id=gradient(0)))  # of the previous term, on its way
    assert held(of) == []
    of.started(3, 5)
    of.reported(Staged(id=gradient(0, 5, term=3)))
    of.received(Rollback(term=3, version=5))  # a repetition
    assert held(of) == [gradient(0, 5, term=3)]
    assert (of.message(1).term, of.message(1).version) == (3, 5)


def test_the_prepared_mean_is_that_of_the_newest_answered_request() -> None:
    of, parts = position(), [Contribution(id=gradient(0), weight=1.0)]
    of.received(NormRequest(round=1, version=0, contributions=parts, replicate=True))
    of.received(NormRequest(round=2, version=0, contributions=parts))  # without a standby it is not kept
    of.reported(Norm(round=2))
    assert not of.message(0).prepared
    of.reported(Norm(round=1))
    assert list(of.message(0).prepared) == parts


def test_a_request_that_a_commit_has_decided_is_forgotten() -> None:
    of = position()
    of.received(NormRequest(round=1, version=0, contributions=[Contribution(id=gradient(0))], replicate=True))
    of.received(commit(0, gradient(0)))
    of.reported(Norm(round=1))
    assert not of.message(0).prepared


def test_the_newest_commit_is_kept_for_the_next_coordinator() -> None:
    of = position()
    for version in (0, 2, 1):
        of.received(commit(version))
    assert of.message(0).last.version == 2


@pytest.mark.parametrize("order", [Save(term=1, version=5), commit(4, checkpoint=True)])
def test_a_shard_stores_until_it_reports_the_version(order: Any) -> None:
    of = position()
    assert not of.storing
    of.received(order)
    assert of.storing
    of.reported(Written(term=1, version=4))
    assert of.storing
    of.reported(Written(term=1, version=5, error="the disk is full"))
    assert not of.storing
    assert of.message(0).saves == 5


def test_the_newest_written_checkpoints_are_reported_again() -> None:
    of = position()
    for version in range(WRITTEN_KEPT + 3):
        of.reported(Written(term=1, version=version))
    again = [report.version for report in of.reports() if isinstance(report, Written)]
    assert again == list(range(3, WRITTEN_KEPT + 3))


def test_a_promoted_standby_continues_at_its_position() -> None:
    of, parts = ShardPosition("Sync"), [Contribution(id=gradient(1, 6, term=2), weight=0.5)]
    of.inherit(2, 7, commit(6), parts)
    of.reported(ShardFailed(why="nothing of it is kept"))
    assert of.message(4) == Position(term=2, version=7, last=commit(6), prepared=parts, link=4)
    assert of.reports() == [Applied(version=7)]
