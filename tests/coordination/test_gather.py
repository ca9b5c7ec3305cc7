"""T1, T4: which contributions the shards add up before an update is decided, and what happens when they leave it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import Coordinator, CoordinatorState, Rules, Send, ServerPosition
from backstay_rpc.control_pb2 import Commit, Gather, GradientId, GradientInfo, NormRequest, Reject, RejectReason, Staged


def coordinator_of(world: int, *, held: int = 4, **more: object) -> Coordinator:
    rules = Rules(mode="Sync", shards=2, steps=10, held=held, **more)  # type: ignore[arg-type]
    return Coordinator(rules, CoordinatorState(term=1, version=0, world=world))


def staged(rank: int, *, attempt: int = 1, incarnation: int = 0, examples: int = 1, version: int = 0) -> Staged:
    gradient = GradientId(
        term=1, version=version, rank=rank, key_step=version, incarnation=incarnation, attempt=attempt
    )
    return Staged(id=gradient, info=GradientInfo(finite=True, examples=examples))


def hand_in(coordinator: Coordinator, rank: int, **more: int) -> list[object]:
    """To both shards. Returns the messages."""
    decisions = [d for shard in (0, 1) for d in coordinator.report(0.0, shard, staged(rank, **more))]
    return [d.message for d in decisions if isinstance(d, Send)]


def ranks_of(message: Gather | Commit) -> list[int]:
    return [contribution.id.rank for contribution in message.contributions]


@pytest.mark.parametrize("seed", range(4))
def test_t4_without_backups_ranks_are_added_in_their_order(seed: int) -> None:
    order = list(range(10))
    Random(seed).shuffle(order)
    coordinator = coordinator_of(10)
    messages = [message for rank in order for message in hand_in(coordinator, rank, examples=1 + rank)]
    *gathers, commit = messages
    assert sorted((gather.index, ranks_of(gather)) for gather in gathers) == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])]
    assert ranks_of(commit) == list(range(10))


def test_with_backups_the_first_ones_are_added_as_they_come() -> None:
    """T2: all that are complete before the decision are part of the update."""
    coordinator = coordinator_of(12, backups=3)
    messages = [message for rank in (11, 3, 9, 1, 0, 8, 10, 2, 4) for message in hand_in(coordinator, rank)]
    *gathers, commit = messages
    assert [(gather.index, ranks_of(gather)) for gather in gathers] == [(0, [1, 3, 9, 11]), (1, [0, 2, 8, 10])]
    assert ranks_of(commit) == [0, 1, 2, 3, 4, 8, 9, 10, 11]


def test_few_ranks_are_not_added_up_before_the_decision() -> None:
    coordinator = coordinator_of(8, held=8)
    (commit,) = [message for rank in range(8) for message in hand_in(coordinator, rank)]
    assert isinstance(commit, Commit)


def test_t1_all_that_are_added_up_are_used_when_the_grace_becomes_shorter() -> None:
    """A sum cannot be divided again."""
    coordinator = coordinator_of(16, backups=6, grace=60.0)
    *_, first = [message for rank in range(16) for message in hand_in(coordinator, rank)]
    assert isinstance(first, Commit)
    messages = [message for rank in range(12) for message in hand_in(coordinator, rank, version=1)]
    gathered = [rank for message in messages for rank in ranks_of(message)]
    (commit,) = [d.message for d in coordinator.set_grace(1.0, 0.0) if isinstance(d, Send)]
    assert ranks_of(commit) == gathered == list(range(12))


@given(st.data())
def test_t1_every_sum_is_part_of_the_next_commit(data: st.DataObject) -> None:
    """A shard that adds up what it is sent can always carry out the commit: the same ranks with the same weights."""
    world, backups = data.draw(st.integers(5, 24)), data.draw(st.integers(0, 8))
    weighting = data.draw(st.sampled_from(["Equal", "Examples"]))
    standbys = data.draw(st.booleans())
    coordinator = coordinator_of(world, held=1, backups=backups, weighting=weighting, grace=5.0, replicates=standbys)
    examples = data.draw(st.sampled_from([(8, 8), (8, 9)]))
    attempts, sums = dict.fromkeys(range(world), 0), {}  # by identity
    for now in range(data.draw(st.integers(20, 80))):
        event = data.draw(st.sampled_from(["push"] * 12 + ["again", "world", "grace", "link", "tick"]))
        if event in ("push", "again"):
            rank = data.draw(st.integers(0, world - 1))
            attempts[rank] += event == "again" or not attempts[rank]
            one = staged(rank, attempt=attempts[rank], examples=data.draw(st.sampled_from(examples)))
            out = [d for shard in (0, 1) for d in coordinator.report(now, shard, one)]
        elif event == "world":
            out = coordinator.configure(now, data.draw(st.integers(1, world)))
        elif event == "grace":
            out = coordinator.set_grace(now, data.draw(st.sampled_from([0.0, 5.0, None])))
        elif event == "link":
            out = coordinator.hello(now, ServerPosition(1, 1, 0))
        else:
            out = coordinator.tick(now)
        for message in [d.message for d in out if isinstance(d, Send)]:
            if isinstance(message, Reject) and str(message.id) in sums:
                attempts[message.id.rank] += 1
                sums = {}
            elif isinstance(message, Gather):
                sums |= {str(one.id): (message.index, one.weight) for one in message.contributions}
            elif isinstance(message, Commit | NormRequest):
                used = {str(one.id): one.weight for one in message.contributions}
                assert {name: used.get(name) for name in sums} == {name: weight for name, (_, weight) in sums.items()}
                assert sorted(index for index, _ in sums.values()) == [n // 4 for n in range(len(sums))]
                return


def test_weights_of_a_sum_are_the_numbers_of_examples() -> None:
    coordinator = coordinator_of(5, weighting="Examples")
    *_, gather, commit = [m for rank in range(5) for m in hand_in(coordinator, rank, examples=8 + rank % 2)]
    assert [one.weight for one in gather.contributions] == [8, 9, 8, 9]
    assert [one.weight for one in commit.contributions] == [8, 9, 8, 9, 8]
    coordinator = coordinator_of(5, weighting="Examples")
    gather, commit = [m for rank in range(5) for m in hand_in(coordinator, rank, examples=8)]
    assert [one.weight for one in gather.contributions] == [8] * 4
    assert [one.weight for one in commit.contributions] == [8] * 5


def test_t3_a_contribution_that_is_added_up_stays_when_a_link_breaks() -> None:
    """The worker of the contribution is replaced meanwhile, and sends again."""
    coordinator = coordinator_of(5)
    (gather,) = [message for rank in range(4) for message in hand_in(coordinator, rank)]
    again = coordinator.hello(0.0, ServerPosition(1, 1, 0))
    assert gather in [d.message for d in again if isinstance(d, Send)], "the shard may not have received it"
    coordinator.joined(0.0, 2, 1)
    (refused,) = {m.reason for m in hand_in(coordinator, 2, incarnation=1) if isinstance(m, Reject)}
    assert refused == RejectReason.DUPLICATE
    (commit,) = hand_in(coordinator, 4)
    assert [one.id.incarnation for one in commit.contributions] == [0] * 5


def test_a_smaller_world_takes_back_what_is_added_up() -> None:
    """A sum may have contributions of ranks that leave: T1 has no part of it."""
    coordinator = coordinator_of(9)
    (gather,) = [message for rank in (4, 5, 6, 7) for message in hand_in(coordinator, rank)]
    rejects = [d.message for d in coordinator.configure(0.0, 6) if isinstance(d, Send)]
    assert [(message.id.rank, message.reason) for message in rejects] == [
        (rank, RejectReason.ABANDONED) for rank in (4, 5, 6, 7)
    ]
    messages = [message for rank in range(6) for message in hand_in(coordinator, rank, attempt=2)]
    again, commit = messages
    assert again.round != gather.round
    assert ranks_of(again) == [0, 1, 2, 3]
    assert ranks_of(commit) == [0, 1, 2, 3, 4, 5]


def test_t3_with_standbys_a_lost_server_takes_back_what_is_added_up() -> None:
    """The standby of the lost server does not have the sums."""
    coordinator = coordinator_of(5, replicates=True)
    for shard in (0, 1):
        coordinator.hello(0.0, ServerPosition(shard, 1, 0, incarnation=1))
    (gather,) = [message for rank in range(4) for message in hand_in(coordinator, rank)]
    decisions = coordinator.hello(0.0, ServerPosition(1, 1, 0, incarnation=2))
    rejects = [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Reject)]
    assert [message.id.rank for message in rejects] == [0, 1, 2, 3]
    (again,) = [message for rank in range(4) for message in hand_in(coordinator, rank, attempt=2)]
    assert again.round != gather.round
    assert [one.id.attempt for one in again.contributions] == [2] * 4


def test_t8_with_standbys_a_newer_attempt_takes_back_what_is_added_up() -> None:
    """The worker may have detected the death of a server before the coordinator."""
    coordinator = coordinator_of(5, replicates=True)
    for rank in range(4):
        hand_in(coordinator, rank)
    messages = hand_in(coordinator, 0, attempt=2)
    rejected = [message.id.rank for message in messages if isinstance(message, Reject)]
    assert rejected == [0, 1, 2, 3]
    for rank in (1, 2, 3):
        messages += hand_in(coordinator, rank, attempt=2)
    (gather,) = [message for message in messages if isinstance(message, Gather)]
    assert [one.id.attempt for one in gather.contributions] == [2] * 4
