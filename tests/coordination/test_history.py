"""In `UpdateHistory` alone, pending decisions can be withdrawn, and commits cannot (T3, T6)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import MODES, CoordinatorState, Rules
from backstay._coordination._history import Pending, UpdateHistory, start_of
from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo, Norm, NormRequest

SHARDS = 2
FINITE, NOT_FINITE = GradientInfo(finite=True), GradientInfo(finite=False)


def history(*, steps: int = 100, **rules: object) -> UpdateHistory:
    made = Rules(mode="Sync", shards=SHARDS, steps=steps, **rules)  # type: ignore[arg-type]
    state = CoordinatorState(term=1, version=0, world=2)
    return UpdateHistory(made, MODES["Sync"], state, start_of(state, ""))


def contribution(history: UpdateHistory, rank: int = 0, attempt: int = 1) -> Contribution:
    version = history.state.version
    gradient = GradientId(term=1, version=version, rank=rank, key_step=version, incarnation=1, attempt=attempt)
    return Contribution(id=gradient, weight=1.0)


def decide(history: UpdateHistory, attempt: int = 1, info: GradientInfo = FINITE) -> Pending:
    return history.decide((contribution(history, attempt=attempt),), (info,), world=history.state.world)


def answer(history: UpdateHistory, pending: Pending, shard: int, squares: float = 1.0) -> None:
    commit = pending.commit
    history.answer(shard, Norm(term=commit.term, version=commit.version, sum_of_squares=squares, round=pending.round))


def test_without_standbys_and_clipping_a_decision_is_a_commit_immediately() -> None:
    made = history()
    pending = decide(made)
    assert made.release() == [pending]
    assert (made.state.version, made.certain) == (1, made.state)


@given(st.lists(st.sampled_from(["decide", "answer 0", "answer 1", "take back"]), max_size=40))
def test_t6_commits_are_in_order_and_no_withdrawn_decision_becomes_one(steps: list[str]) -> None:
    """With standbys. A withdrawn decision is made again with another attempt, and under another round."""
    made = history(replicates=True)
    released: list[Commit] = []
    decided = 0
    withdrawn: list[Pending] = []
    for step in steps:
        match step.split():
            case ["decide"]:
                decided += 1
                decide(made, attempt=decided)
            case ["answer", shard]:
                for old in withdrawn:  # an answer that was on its way counts for nothing
                    answer(made, old, int(shard))
                if made.pending:
                    due = next((p for p in made.pending if int(shard) not in p.norms), made.pending[-1])
                    answer(made, due, int(shard))
            case _:
                taken = made.take_back()
                withdrawn += taken
                assert made.state.version == made.certain.version == len(released)
                assert all(made.used_by(c.id) is None for p in taken for c in p.commit.contributions)
        released += [pending.commit for pending in made.release()]
        assert [commit.version for commit in released] == list(range(len(released)))
        assert made.certain.version == len(released)
        assert made.state.version == len(released) + len(made.pending)
    attempts = {commit.contributions[0].id.attempt for commit in released}
    assert not attempts & {pending.commit.contributions[0].id.attempt for pending in withdrawn}
    assert all(made.used_by(commit.contributions[0].id) == commit.version for commit in released)


@given(st.lists(st.floats(0.0, 1e6), min_size=SHARDS, max_size=SHARDS), st.permutations(range(SHARDS)))
def test_t4_the_clip_factor_is_the_same_in_any_order_of_answers(squares: list[float], order: list[int]) -> None:
    made = history(clip_norm=2.0)
    pending = decide(made)
    for shard in order:
        assert made.release() == []
        answer(made, pending, shard, squares[shard])
    assert made.release() == [pending]
    norm = math.sqrt(squares[0] + squares[1])  # the power 0.5 may differ in the last bit
    assert pending.norm == norm
    assert pending.commit.clip_factor == (1.0 if norm <= 2.0 else 2.0 / norm)


def test_an_update_that_is_skipped_is_not_clipped_and_the_next_one_waits_for_its_turn() -> None:
    made = history(clip_norm=2.0)
    clipped, skipped = decide(made), decide(made, info=NOT_FINITE)
    assert made.release() == []  # the skipped one needs no answers, but is not the first
    assert (skipped.commit.skip, made.state.non_finite_run) == (True, 1)
    for shard in range(SHARDS):
        answer(made, clipped, shard, 100.0)
    assert made.release() == [clipped, skipped]
    assert (clipped.commit.clip_factor, skipped.commit.clip_factor) == (2.0 / 200**0.5, 1.0)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_t3_a_shard_gets_exactly_the_messages_that_it_missed(first: int, second: int, open_: int) -> None:
    made = history(replicates=True)
    for _ in range(6):
        pending = decide(made)
        for shard in range(SHARDS):
            answer(made, pending, shard)
        made.release()
    for _ in range(open_):
        decide(made)
    made.applied(0, first)
    made.applied(1, second)
    behind = min(first, second)
    for version in range(behind, 7):
        assert made.replays_from(version)
        messages = made.replay(1, version)
        versions = [message.version for message in messages]
        assert versions == list(range(version, 6 + open_))
        kinds: Iterator[type] = (type(message) for message in messages)
        assert list(kinds) == [Commit] * (6 - version) + [NormRequest] * open_
    if behind > 0:
        assert not made.replays_from(behind - 1)
        assert made.state_at(1, behind - 1) is None
    assert made.state_at(2, 6) is None


@pytest.mark.parametrize("early", [False, True])
def test_the_last_decision_is_final_and_a_withdrawn_end_is_open_again(early: bool) -> None:
    made = history(steps=3, replicates=True)
    decide(made)
    if early:
        made.stop_early()
    assert made.last_version == (2 if early else 3)
    last = decide(made)
    assert (last.commit.final, made.over) == (early, early)
    made.take_back()
    assert (made.state.version, made.over) == (0, False)
    assert made.last_version == (2 if early else 3), "the request to stop early is older than the decision"
