"""Changes of the number of workers: commits change the world, updates do not wait for leaving ranks, T9 holds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay._coordination._decisions import Send
from backstay_rpc.control_pb2 import Commit, GradientId, GradientInfo, Rollback, Staged
from backstay_spec.quorum import quorum_of


def staged(rank: int, version: int, key_step: int | None = None, attempt: int = 1) -> Staged:
    key_step = version if key_step is None else key_step
    gradient = GradientId(term=1, version=version, rank=rank, key_step=key_step, attempt=attempt)
    return Staged(id=gradient, info=GradientInfo(finite=True, examples=1))


def commits(decisions: list[object]) -> list[Commit]:
    return [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Commit)]


def job_of(world: int, **rules: object) -> Coordinator:
    made = Rules(**{"mode": "Sync", "shards": 1, "steps": 1000, **rules})  # type: ignore[arg-type]
    return Coordinator(made, CoordinatorState(term=1, version=0, world=world))


def test_scaling_down_to_the_living_ranks_frees_a_job_whose_others_are_dead() -> None:
    """T1, T8: 0 and 1 have contributed, 2 and 3 never will; the smaller world does not need them."""
    job = job_of(4)
    job.report(0, 0, staged(0, 0))
    job.report(0, 0, staged(1, 0))
    (commit,) = commits(job.configure(1.0, 2))
    assert [c.id.rank for c in commit.contributions] == [0, 1]
    assert commit.world == 2
    assert [(w.version, w.world) for w in job.state.worlds] == [(0, 4), (1, 2)]


def test_the_ranks_that_stay_make_the_update_in_any_order_of_arrival() -> None:
    """The history defines the ranks of an update, which are those of the smaller of the worlds around it (T1)."""
    job = job_of(4, backups=1)
    job.report(0, 0, staged(3, 0))
    job.report(0, 0, staged(2, 0))
    assert commits(job.configure(0.0, 2)) == []
    (commit,) = commits(job.report(0, 0, staged(1, 0)))
    assert [c.id.rank for c in commit.contributions] == [1]


def test_a_request_that_is_withdrawn_changes_nothing() -> None:
    job = job_of(3)
    job.report(0, 0, staged(0, 0))
    assert job.configure(0.0, 2) == []
    assert job.configure(0.0, 3) == []
    assert commits(job.report(0, 0, staged(1, 0))) == []
    (commit,) = commits(job.report(0, 0, staged(2, 0)))
    assert commit.world == 3
    assert len(job.state.worlds) == 1


def test_a_shard_that_starts_receives_the_world_and_its_offset() -> None:
    """A replaced server answers with the same batch numbers as its predecessor."""
    job = job_of(4)
    job.configure(0.0, 2)
    for rank in (0, 1):
        job.report(0, 0, staged(rank, 0))
    saved = CoordinatorState.from_json(job.state.to_json())
    saved.term = 2
    (sent,) = (d.message for d in job.restart(0.0, saved, "uri") if isinstance(d, Send))
    assert sent == Rollback(term=2, version=1, checkpoint="uri", world=2, offset=0)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    world=st.integers(1, 5),
    backups=st.sampled_from([0, 1, "50%"]),
    batches=st.sampled_from([1, 4]),
)
def test_t1_each_update_is_of_the_ranks_that_stay_and_no_batch_is_drawn_twice(
    seed: int, world: int, backups: int | str, batches: int
) -> None:
    """T1, T9: Sync. The numbers of the ranks that make the updates follow one another, each once and none left out."""
    random = Random(seed)
    job = job_of(world, backups=backups, batches=batches)
    at = CoordinatorState(term=1, version=0, world=world)  # the state that workers received with the version
    offset, drawn = 0, []
    desired = world
    for _ in range(25):
        version = job.state.version
        decided: list[Commit] = []
        ranks = list(range(at.world))
        random.shuffle(ranks)
        dead: list[int] = []
        while not decided:
            if random.random() < 0.15:
                desired = random.randint(1, 6)
                decided = commits(job.configure(0.0, desired))
            elif random.random() < 0.3:
                job.joined(0.0, random.randrange(6), 0)
            elif ranks:
                rank = ranks.pop()
                if rank < min(at.world, desired) or random.random() < 0.7:  # those that leave may be dead
                    decided = commits(job.report(0.0, 0, staged(rank, version)))
                else:
                    dead.append(rank)
            else:  # ranks that died while leaving are requested again
                assert dead, "no rank is left to wait for"
                ranks, dead = dead, []
        (commit,) = decided
        used = [c.id.rank for c in commit.contributions]
        smaller = min(at.world, desired)
        steps = range(version * batches, (version + 1) * batches)
        drawn += [BatchKey(s, r, at.world, 0, offset, batches).number for r in range(smaller) for s in steps]
        assert len(used) == quorum_of(backups, smaller)
        assert max(used) < smaller
        assert commit.world <= max(desired, at.world)
        if desired < at.world:
            assert commit.world == desired
        at.world, offset = commit.world, commit.offset
    assert sorted(drawn) == list(range(len(drawn))), "each number once, none left out"


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), world=st.integers(1, 4), batches=st.sampled_from([1, 4]))
def test_t3_async_ranks_never_draw_a_number_twice_over_changes(seed: int, world: int, batches: int) -> None:
    """Each rank has one gradient under way, drawn in the world that was in force when it began."""
    random = Random(seed)
    job = job_of(world, mode="Async", batches=batches)
    for rank in range(5):
        job.joined(0.0, rank, 0)
    sent = (world, 0)
    under_way: dict[int, tuple[int, list[int]]] = {}
    numbers: list[int] = []
    for _ in range(120):
        if random.random() < 0.1:
            job.configure(0.0, random.randint(1, 5))
        rank = random.randrange(sent[0])
        key_step = job.state.key_steps.get(rank, 0)
        if rank not in under_way:
            steps = range(key_step * batches, (key_step + 1) * batches)
            found = [BatchKey(step, rank, sent[0], 0, sent[1], batches).number for step in steps]
            assert min(found) >= 0
            under_way[rank] = (key_step, found)
            continue
        key_step, found = under_way.pop(rank)
        for commit in commits(job.report(0.0, 0, staged(rank, job.state.version, key_step))):
            numbers += found
            sent = (commit.world, commit.offset)
        under_way = {r: drawn for r, drawn in under_way.items() if r < sent[0]}
    assert len(numbers) == len(set(numbers))


def test_a_history_that_does_not_end_with_its_world_is_refused() -> None:
    """T7: a manifest that contradicts itself."""
    data = CoordinatorState(term=1, version=4, world=3).to_json()
    with pytest.raises(ValueError, match="worlds ends with 3, not 2"):
        CoordinatorState.from_json({**data, "world": 2})
