"""Blame names the rank that an update waited for, with the part of its step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination._observation import AsyncBlame, Blame, Charge


def update(blame: Blame, version: int, ends: dict[int, float], *, shards: int = 1, late: float = 0.0) -> Charge | None:
    """Returns the charge of an update.

    Each rank's contribution is complete at its time, and on the last shard `late` seconds later.
    """
    for rank, when in ends.items():
        for shard in range(shards):
            blame.staged(when + (late if shard == shards - 1 else 0.0), shard, rank, (1, version), 1, version)
    return blame.updated(max(ends.values()) + late, 1, version, ends)


def test_the_rank_that_completes_the_set_is_charged_with_its_delay_after_the_previous_one() -> None:
    blame = Blame(1, now=0.0)
    blame.parts(0, {"data": 0.1, "compute": 1.0})
    blame.parts(1, {"data": 0.1, "compute": 1.1})
    blame.parts(2, {"data": 9.0, "compute": 1.0})
    assert update(blame, 0, {0: 10.0, 1: 11.0, 2: 19.0}) == Charge(2, None, "data", 8.0)
    blame.parts(2, {"data": 0.1, "compute": 1.0})
    blame.parts(1, {"data": 0.1, "compute": 5.0})
    assert update(blame, 1, {0: 30.0, 1: 35.0, 2: 31.0}) == Charge(1, None, "compute", 4.0)
    worst = blame.worst(40.0)
    assert [(one.rank, one.part, one.seconds, one.updates) for one in worst] == [
        (2, "data", 8.0, 1),
        (1, "compute", 4.0, 1),
    ]
    assert blame.worst(320.0)[0].rank == 1, "the window is 5 minutes"
    assert blame.worst(400.0) == []


def test_a_rank_whose_parts_are_like_the_others_is_slow_in_sending() -> None:
    blame = Blame(1, now=0.0)
    for rank in range(3):
        blame.parts(rank, {"compute": 1.0})
    assert update(blame, 0, {0: 1.0, 1: 1.1, 2: 4.0}) == Charge(2, None, "send", pytest.approx(2.9))


def test_a_shard_that_receives_later_than_the_others_is_charged() -> None:
    blame = Blame(3, now=0.0)
    charge = update(blame, 0, {0: 1.0, 1: 1.0}, shards=3, late=0.0)
    assert charge == Charge(1, None, "send", 0.0)
    for shard, when in ((0, 2.0), (1, 2.0), (2, 2.0)):
        blame.staged(when, shard, 0, (1, 1), 1, 1)
    for shard, when in ((0, 2.1), (1, 9.0), (2, 2.2)):
        blame.staged(when, shard, 1, (1, 1), 1, 1)
    assert blame.updated(9.0, 1, 1, (0, 1)) == Charge(1, 1, "send", 7.0)


def test_what_the_next_update_waits_for_names_ranks_and_shards() -> None:
    blame = Blame(2, now=0.0)
    update(blame, 0, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, shards=2)
    for shard in (0, 1):
        blame.staged(2.0, shard, 0, (1, 1), 1, 1)
    blame.staged(2.0, 0, 1, (1, 1), 1, 1)
    waiting = blame.waiting(31.0, 1, 1, world=4, quorum=3)
    assert (waiting.seconds, waiting.missing, waiting.shards, waiting.needed) == (30.0, (1, 2, 3), {1: (1,)}, 2)
    assert blame.waiting(31.0, 2, 1, world=2, quorum=2).missing == (0, 1), "another term"


def test_an_attempt_that_was_abandoned_and_an_older_update_count_for_nothing() -> None:
    blame = Blame(2, now=0.0)
    blame.staged(1.0, 0, 0, (1, 5), 1, 1)
    blame.staged(2.0, 1, 0, (1, 5), 1, 2)  # sent again after the stream to shard 0 broke
    assert blame.waiting(3.0, 1, 5, world=1, quorum=1).shards == {0: (0,)}
    blame.staged(4.0, 0, 0, (1, 5), 1, 1)
    assert blame.waiting(5.0, 1, 5, world=1, quorum=1).missing == (0,)
    blame.staged(6.0, 0, 0, (1, 5), 1, 2)
    blame.staged(7.0, 0, 1, (1, 4), 1, 9)
    assert blame.updated(8.0, 1, 5, (0,)) == Charge(0, 0, "send", 6.0)
    blame.restarted(9.0)
    assert blame.waiting(10.0, 2, 3, world=1, quorum=1).seconds == 1.0


@given(st.lists(st.dictionaries(st.integers(0, 4), st.floats(0, 10), min_size=1, max_size=5), min_size=1, max_size=30))
def test_the_charges_never_add_up_to_more_than_the_time(rounds: list[dict[int, float]]) -> None:
    blame, now = Blame(1, now=0.0), 0.0
    for version, delays in enumerate(rounds):
        charge = update(blame, version, {rank: now + delay for rank, delay in delays.items()})
        assert charge is not None
        assert 0 <= charge.seconds <= max(delays.values()) + 1e-9
        now += max(delays.values())
    assert sum(one.seconds for one in blame.worst(now, 100)) <= now + 1e-6


def test_an_asynchronous_rank_is_charged_with_what_it_takes_beyond_the_median() -> None:
    """Ranks 0 to 3 need 1 s for a contribution; rank 4 needs 3 s, because it waits for its batches."""
    blame = AsyncBlame(2, now=0.0)
    for rank in range(5):
        blame.parts(rank, {"data": 2.5 if rank == 4 else 0.5, "compute": 0.5})
    applied = [(second * (3.0 if rank == 4 else 1.0), rank) for second in range(1, 31) for rank in range(5)]
    for number, (when, rank) in enumerate(sorted(one for one in applied if one[0] <= 30.0)):
        blame.updated(when, 1, number, [rank])
    assert [(one.rank, one.part, one.seconds, one.updates) for one in blame.worst(30.0)] == [
        (4, "data", pytest.approx(18.0), 9)
    ]
    waiting = blame.waiting(55.0, 1, 130, 5, 1)
    assert (waiting.seconds, waiting.missing, waiting.needed) == (25.0, (0, 1, 2, 3, 4), 1)


def test_an_asynchronous_rank_is_not_charged_with_its_replacement_or_a_rollback() -> None:
    blame = AsyncBlame(1, now=0.0)
    for when in range(1, 5):
        for rank in range(3):
            blame.staged(float(when), 0, rank, (1, 0), 1, when)
            assert blame.updated(float(when), 1, 0, [rank]) is None
    blame.staged(40.0, 0, 2, (1, 0), 2, 1)
    blame.staged(41.0, 0, 2, (1, 0), 2, 2)
    for rank in range(2):
        blame.updated(5.0, 1, 0, [rank])
    assert blame.updated(40.0, 1, 0, [2]) is None
    blame.restarted(50.0)
    assert blame.updated(90.0, 1, 0, [2]) is None
    assert blame.worst(90.0) == []


def test_a_rank_that_trains_alone_is_never_slow() -> None:
    blame = AsyncBlame(1, now=0.0)
    for version in range(5):
        assert blame.updated(float(version * version), 1, version, [0]) is None
