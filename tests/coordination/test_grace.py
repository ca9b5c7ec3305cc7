"""T1, T2, T4: how long an update waits after its quorum, for which ranks, and how its contributions are weighted."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._coordination import Coordinator, CoordinatorState, Rules, Send, ServerPosition, Updated
from backstay._coordination._modes._grace import best_wait, replay
from backstay_rpc.control_pb2 import Commit, GradientId, GradientInfo, Lost, Staged


def coordinator_of(world: int, **more: object) -> Coordinator:
    """At version 1, with ranks that have all contributed before: so an update waits for each of them."""
    rules = Rules(**{"mode": "Sync", "shards": 1, "steps": 1000, "backups": 2, "grace": 1.0, **more})
    coordinator = Coordinator(rules, CoordinatorState(term=1, version=1, world=world))
    coordinator.hello(0.0, ServerPosition(0, 1, 1))
    for rank in range(world):
        coordinator.report(0.0, 0, Lost(id=gradient(rank, 0)))
    return coordinator


def gradient(rank: int, version: int, incarnation: int = 0) -> GradientId:
    return GradientId(
        term=1, version=version, rank=rank, key_step=version, incarnation=incarnation, attempt=version + 1
    )


def staged(rank: int, version: int, examples: int = 1, incarnation: int = 0) -> Staged:
    return Staged(id=gradient(rank, version, incarnation), info=GradientInfo(finite=True, examples=examples))


def hand_in(
    coordinator: Coordinator, now: float, rank: int, version: int, *, examples: int = 1, incarnation: int = 0
) -> list[Commit]:
    return commits(coordinator.report(now, 0, staged(rank, version, examples, incarnation)))


def commits(decisions: list[object]) -> list[Commit]:
    return [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Commit)]


def ranks(commit: Commit) -> list[int]:
    return [contribution.id.rank for contribution in commit.contributions]


def test_t2_an_update_waits_for_the_grace_and_no_longer() -> None:
    coordinator = coordinator_of(5)
    assert hand_in(coordinator, 10.0, 4, 1) == []
    assert hand_in(coordinator, 10.1, 0, 1) == []
    assert coordinator.wakes_at is None
    assert hand_in(coordinator, 10.2, 2, 1) == [], "the quorum is complete: the grace begins"
    assert coordinator.wakes_at == 11.2
    assert hand_in(coordinator, 10.5, 1, 1) == []
    assert commits(coordinator.tick(11.1)) == []
    (commit,) = commits(coordinator.tick(11.2))
    assert ranks(commit) == [0, 1, 2, 4], "all that came, in order of rank"
    assert coordinator.wakes_at is None


def test_a_job_that_failed_wakes_at_no_time() -> None:
    """Otherwise the thread that sleeps until then does not sleep."""
    coordinator = coordinator_of(5)
    for rank in (4, 0, 2):
        hand_in(coordinator, 10.0, rank, 1)
    assert coordinator.wakes_at is not None
    coordinator.fail(10.1, "X", "why")
    assert coordinator.wakes_at is None


def test_t2_an_update_with_every_contribution_does_not_wait() -> None:
    coordinator = coordinator_of(4)
    for rank in range(3):
        assert hand_in(coordinator, 1.0, rank, 1) == []
    (commit,) = hand_in(coordinator, 1.5, 3, 1)
    assert ranks(commit) == [0, 1, 2, 3]


def test_t1_without_grace_an_update_has_exactly_the_first_quorum() -> None:
    coordinator = coordinator_of(4, grace=0.0)
    assert hand_in(coordinator, 1.0, 3, 1) == []
    (commit,) = hand_in(coordinator, 1.0, 1, 1)
    assert ranks(commit) == [1, 3]
    assert coordinator.wakes_at is None


@pytest.mark.parametrize("how", ["disconnected", "replaced", "silent", "left", "known before"])
def test_t2_a_rank_that_is_known_to_be_dead_is_not_waited_for(how: str) -> None:
    coordinator = coordinator_of(4)
    if how == "known before":
        coordinator.disconnected(0.5, 3, 0)
    for rank in range(2):
        assert hand_in(coordinator, 1.0, rank, 1) == []
    decided = hand_in(coordinator, 1.1, 2, 1)
    if how != "known before":
        assert decided == []
        report = {
            "disconnected": lambda: coordinator.disconnected(1.2, 3, 0),
            "replaced": lambda: coordinator.joined(1.2, 3, 1),
            "silent": lambda: coordinator.silent(1.2, {3}),
            "left": lambda: coordinator.left(1.2, 3, 0),
        }
        decided = commits(report[how]())
    (commit,) = decided
    assert ranks(commit) == [0, 1, 2]


def test_t2_a_replacement_is_waited_for_once_it_has_contributed() -> None:
    """Before that, it may be compiling."""
    coordinator = coordinator_of(3)
    coordinator.joined(0.5, 2, 1)
    assert hand_in(coordinator, 1.0, 0, 1) == []
    assert ranks(*hand_in(coordinator, 1.0, 1, 1)) == [0, 1]
    assert hand_in(coordinator, 2.0, 2, 2, incarnation=1) == []
    assert hand_in(coordinator, 2.0, 0, 2) == []
    assert ranks(*hand_in(coordinator, 2.1, 1, 2)) == [0, 1, 2]
    assert hand_in(coordinator, 3.0, 0, 3) == []
    assert hand_in(coordinator, 3.0, 1, 3) == [], "rank 2 is expected now"
    assert coordinator.disconnected(3.1, 2, 0) == [], "that was its predecessor's stream"


def test_a_grace_that_changes_counts_for_the_update_that_waits() -> None:
    coordinator = coordinator_of(4)
    for rank in range(3):
        hand_in(coordinator, 1.0, rank, 1)
    assert coordinator.set_grace(1.1, 5.0) == []
    assert coordinator.wakes_at == 6.0
    assert ranks(*commits(coordinator.set_grace(1.2, 0.1))) == [0, 1, 2]


# ---- Weights ----


def test_t1_equal_numbers_of_examples_weigh_exactly_one() -> None:
    """So the mean is that of `Equal`, bit for bit."""
    coordinator = coordinator_of(7, backups=0, weighting="Examples")
    (commit,) = [c for rank in range(7) for c in hand_in(coordinator, 1.0, rank, 1, examples=49)]
    assert [contribution.weight for contribution in commit.contributions] == [1.0] * 7


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9), st.sampled_from(["Equal", "Examples"]))
def test_t1_weights_are_shares_of_the_examples(examples: list[int], weighting: str) -> None:
    world = len(examples)
    coordinator = coordinator_of(world, backups=0, weighting=weighting)
    (commit,) = [c for rank in range(world) for c in hand_in(coordinator, 1.0, rank, 1, examples=examples[rank])]
    weights = [contribution.weight for contribution in commit.contributions]
    total = sum(examples)
    if weighting == "Equal" or len(set(examples)) == 1:
        assert weights == [1.0] * world
    else:
        assert [weight / sum(weights) for weight in weights] == pytest.approx(
            [own / total for own in examples], rel=1e-12
        )


# ---- Auto ----


def test_auto_waits_for_a_rank_with_a_short_delay_and_not_for_one_with_a_long_delay() -> None:
    steady = {rank: [1.0] * 8 for rank in range(3)}
    little = best_wait({**steady, 3: [1.1] * 8}, 3)
    assert little.wait == pytest.approx(0.1)
    assert little.per_second == pytest.approx(4 / 1.1)
    assert best_wait({**steady, 3: [1.9] * 8}, 3).wait == 0.0, "3 a second without it, 2.1 with it"
    assert best_wait({**steady, 3: [5.0] * 8}, 3).wait == 0.0


def test_auto_has_no_estimate_before_it_has_seen_enough() -> None:
    assert best_wait({}, 1).per_second is None
    assert best_wait({0: [1.0] * 8, 1: [1.0]}, 2).per_second is None


DURATIONS = st.dictionaries(
    st.integers(0, 7), st.lists(st.floats(0.001, 100.0), min_size=3, max_size=16), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(durations=DURATIONS, data=st.data())
def test_auto_chooses_no_more_than_a_median_step_and_nothing_worse_than_no_wait(durations, data) -> None:
    quorum = data.draw(st.integers(1, len(durations)))
    choice = best_wait(durations, quorum)
    assert choice.per_second is not None
    assert 0.0 <= choice.wait <= median(seconds for of_rank in durations.values() for seconds in of_rank)
    assert choice.per_second == replay(durations, quorum, choice.wait) >= replay(durations, quorum, 0.0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 6), data=st.data())
def test_the_estimate_is_what_a_job_with_that_grace_does(seed: int, ranks: int, data: st.DataObject) -> None:
    """A simulated job with these durations, decided by the coordinator, applies as many contributions a second."""
    random = Random(seed)  # no two contributions come at the same time
    durations = {rank: [random.uniform(0.1, 10.0) for _ in range(random.randint(3, 16))] for rank in range(ranks)}
    quorum, wait = data.draw(st.integers(1, ranks)), random.choice([0.0, 0.3, 2.0, 9.0])
    coordinator = coordinator_of(ranks, backups=ranks - quorum, grace=wait)
    drawn = dict.fromkeys(range(ranks), 0)

    def begin(rank: int, now: float, version: int) -> None:
        seconds = durations[rank]
        computing[rank] = now + seconds[drawn[rank] % len(seconds)], version
        drawn[rank] += 1

    computing: dict[int, tuple[float, int]] = {}  # when it ends, and at which version
    for rank in range(ranks):
        begin(rank, 0.0, 1)
    applied, updates, now = 0, 0, 0.0
    while updates < 16:
        rank = min(computing, key=lambda each: computing[each], default=-1)
        now, version = computing.get(rank, (float("inf"), 0))
        if coordinator.wakes_at is not None and coordinator.wakes_at < now:
            now = coordinator.wakes_at
            decided = commits(coordinator.tick(now))
        elif version < coordinator.state.version:
            coordinator.report(now, 0, Lost(id=gradient(rank, version)))
            begin(rank, now, coordinator.state.version)
            continue
        else:
            del computing[rank]
            decided = hand_in(coordinator, now, rank, version)
        for commit in decided:
            updates += 1
            applied += len(commit.contributions)
            for contribution in commit.contributions:
                begin(contribution.id.rank, now, commit.version + 1)
    assert applied / now == pytest.approx(replay(durations, quorum, wait), rel=1e-9)


@pytest.mark.parametrize("late", [Lost, Staged])
def test_auto_is_chosen_from_the_observed_durations(late: type) -> None:
    """Rank 3 takes 1.1 s where the others take 1: after a few updates without it, they wait for it. It came after the
    shard had the commit (`Lost`), or after the decision and before the shard had the commit (`Staged`)."""
    coordinator = coordinator_of(4, backups=1, grace=None)
    now = 0.0
    for version in range(1, 40):
        begin = now
        said: list[object] = []
        for rank in range(3):
            now = begin + 1.0
            said += coordinator.report(now, 0, staged(rank, version))
        now = begin + 1.1
        if commits(said):
            coordinator.report(now, 0, late(id=gradient(3, version)))
        else:
            said = coordinator.report(now, 0, staged(3, version))
        (updated,) = [decision for decision in said if isinstance(decision, Updated)]
    assert ranks(updated.commit) == [0, 1, 2, 3]
    assert 0.05 <= updated.grace.wait <= 0.15
    assert updated.grace.per_second is not None
