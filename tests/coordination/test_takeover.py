"""`takeover` covers all positions of servers that connect, in a small history (T6, T8)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import MODES, CoordinatorState, Rules, ServerPosition
from backstay._coordination._decisions import Restart
from backstay._coordination._history import UpdateHistory, start_of
from backstay._coordination._succession import Succession
from backstay._coordination._takeover import Adopt, Begin, Replay, Wait, takeover
from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo, Norm

TERM = 3
START = 4
INFO = GradientInfo(finite=True)


def contributions(version: int) -> tuple[Contribution, ...]:
    return (Contribution(id=GradientId(term=TERM, version=version, key_step=version, attempt=1), weight=1.0),)


def commit(version: int) -> Commit:
    return Commit(term=TERM, version=version, contributions=contributions(version), world=1)


def history_of(rules: Rules, decided: int, *, pending: bool = False) -> UpdateHistory:
    """Returns a term that began at version `START`, with decisions that no shard has applied."""
    state = CoordinatorState(term=TERM, version=START, world=1)
    history = UpdateHistory(rules, MODES["Sync"], state, start_of(state, "a checkpoint"))
    for version in range(START, START + decided):
        entry = history.decide(contributions(version), (INFO,), world=1)
        if rules.replicates and not (pending and version == START + decided - 1):
            for shard in range(rules.shards):
                history.answer(shard, Norm(term=TERM, version=version, round=entry.round))
        history.release()
    return history


def observed(history: UpdateHistory, succession: Succession) -> Any:
    """Returns all that `takeover` may read, to hold that it changes nothing."""
    return copy.deepcopy(
        (history.state.to_json(), list(history.pending), history.stores, vars(succession)["_prepared"])
    )


@given(
    replicates=st.booleans(),
    decided=st.integers(0, 3),
    pending=st.booleans(),
    lost=st.booleans(),
    ended=st.booleans(),
    term=st.integers(0, TERM + 1),
    version=st.integers(0, START + 4),
    prepared=st.booleans(),
    last=st.booleans(),
)
def test_t6_a_server_continues_only_what_it_can_reach(
    replicates: bool,
    decided: int,
    pending: bool,
    lost: bool,
    ended: bool,
    term: int,
    version: int,
    prepared: bool,
    last: bool,
) -> None:
    """A server never continues another term, nor from a version whose commits are gone, nor beyond the history."""
    rules = Rules(mode="Sync", shards=2, steps=100, replicates=replicates)
    history = history_of(rules, decided, pending=pending)
    history.lost = lost
    succession = Succession(rules, history)
    succession.connected(1, 1, term)
    position = ServerPosition(
        1,
        term,
        version,
        last=commit(version) if last and replicates else None,
        prepared=contributions(version) if prepared else (),
    )
    before = observed(history, succession)
    result = takeover(position, history, succession, ended=ended)
    assert observed(history, succession) == before
    match result:
        case Replay():
            assert term == TERM
            assert START <= version <= history.state.version
        case Begin():
            assert not lost
            assert not ended
            assert history.state.version == START, "the shard would lack updates"
            assert (term, version) <= (TERM, START)
        case Restart(shard):
            assert shard == 1
            assert not lost, "a new term is being prepared already"
            assert not ended
        case Wait():
            assert lost or ended
        case Adopt():
            pytest.fail("this coordinator took over no prepared decision")


def taken_over(prepared: tuple[Contribution, ...]) -> tuple[UpdateHistory, Succession]:
    """Returns a coordinator that continues at version `START`, whose previous one had prepared the next decision."""
    rules = Rules(mode="Sync", shards=2, steps=100, replicates=True)
    history = history_of(rules, 0)
    succession = Succession(rules, history)
    succession.resume(prepared, (INFO,), (0, -1))
    return history, succession


def test_t6_a_commit_that_a_shard_received_is_adopted_once() -> None:
    history, succession = taken_over(contributions(START))
    received = commit(START)
    position = ServerPosition(1, TERM, START, last=received, prepared=contributions(START))
    assert takeover(position, history, succession, ended=False) == Adopt(received, (INFO,))
    succession.decided()
    history.adopt(received)
    assert takeover(position, history, succession, ended=False) == Replay()
    applied = ServerPosition(0, TERM, START + 1, last=received)
    assert takeover(applied, history, succession, ended=False) == Replay()


@pytest.mark.parametrize("prepared", [(), contributions(START + 1)])
def test_t6_another_commit_than_the_prepared_one_begins_a_new_term(prepared: tuple[Contribution, ...]) -> None:
    history, succession = taken_over(prepared)
    position = ServerPosition(1, TERM, START + 1, last=commit(START))
    assert takeover(position, history, succession, ended=False) == Restart(1)


def test_t6_a_server_without_the_mean_of_a_commit_begins_a_new_term() -> None:
    """It was given up as a standby, and lacks the mean of an update that another shard has applied."""
    rules = Rules(mode="Sync", shards=2, steps=100, replicates=True)
    history = history_of(rules, 1)
    succession = Succession(rules, history)
    lacking = ServerPosition(1, TERM, START)
    assert takeover(lacking, history, succession, ended=False) == Restart(1)
    holding = ServerPosition(1, TERM, START, prepared=contributions(START))
    assert takeover(holding, history, succession, ended=False) == Replay()
