"""T9: every sample is used once in an epoch while workers join and leave, and the account of an epoch is correct."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay import BatchKey, from_dataset
from backstay._coordination import MODES, Coordinator, CoordinatorState, EpochEnded, Rules, Samples, Updated, after
from backstay_rpc.control_pb2 import Commit, GradientId, GradientInfo, Staged


def staged(rank: int, version: int, term: int, *, key_step: int | None = None, finite: bool = True) -> Staged:
    key_step = version if key_step is None else key_step
    gradient = GradientId(term=term, version=version, rank=rank, key_step=key_step, attempt=1)
    return Staged(id=gradient, info=GradientInfo(finite=finite, examples=1))


class Run:
    """A Sync job of one shard whose workers draw batches of a data set; the used samples are recorded."""

    def __init__(self, seed: int, size: int, batch: int, world: int, backups: int, batches: int = 1) -> None:
        self.random = Random(seed)
        self.batches = from_dataset(np.arange(size), batch_size=batch, shuffle=False)
        self.rules = Rules(mode="Sync", shards=1, steps=10**6, backups=backups, max_non_finite=10**6, batches=batches)
        self.job = Coordinator(self.rules, CoordinatorState(1, 0, world, samples=Samples(size, batch)))
        self.used: list[tuple[int, np.ndarray[Any, Any]]] = []  # (version, samples) of the history in force
        self.computed: Counter[int] = Counter()
        self.ended: dict[int, EpochEnded] = {}
        self.mirror = self.job.state.copy()
        self.stored = self.job.state.copy().to_json()

    def update(self, *, finite: bool = True, desired: int | None = None) -> None:
        state = self.job.state.copy()
        decisions = [] if desired is None else list(self.job.configure(0.0, desired))
        for rank in range(6):
            if self.random.random() < 0.5:
                self.job.joined(0.0, rank, 0)
        ranks = list(range(state.world))
        self.random.shuffle(ranks)
        for rank in ranks:
            decisions += self.job.report(0.0, 0, staged(rank, state.version, state.term, finite=finite))
        [updated] = [decision for decision in decisions if isinstance(decision, Updated)]
        if not updated.commit.skip:
            for contribution in updated.commit.contributions:
                for step in range(state.version * state.batches, (state.version + 1) * state.batches):
                    key = BatchKey(step, contribution.id.rank, state.world, 0, state.offset, state.batches)
                    drawn = self.batches.indices(key)
                    self.used.append((state.version, self.batches.places(key)[1] * self.batches.size + drawn))
        for ended in updated.ended:
            self.ended[ended.epoch] = ended
        self.mirror = after(self.mirror, updated.commit)
        assert self.mirror.samples == self.job.state.samples, "a standby has the same account"

    def store(self) -> None:
        self.stored = self.job.state.copy().to_json()

    def roll_back(self, batches: int | None = None) -> int:
        """Go back to the stored state; returns how many updates are redone.

        Args:
            batches: local steps of an update from there on, as another run that continues the job sets them.
        """
        state, before = CoordinatorState.from_json(self.stored), self.job.state
        state.term = before.term + 1
        if batches is not None:
            self.rules = replace(self.rules, batches=batches)
            self.job = Coordinator(self.rules, self.job.state)
        self.job.restart(0.0, state, "uri")
        self.used = [one for one in self.used if one[0] < state.version]
        self.mirror = self.job.state.copy()
        return before.version - state.version

    def samples(self) -> Counter[int]:
        """Returns how often each sample of each epoch was used, in the history in force."""
        return Counter(np.concatenate([drawn for _, drawn in self.used] or [np.empty(0, np.int64)]).tolist())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(3, 40),
    batch=st.integers(1, 3),
    world=st.integers(1, 5),
    backups=st.sampled_from([0, 0, 1, 2]),
    batches=st.sampled_from([1, 1, 2, 5]),
)
def test_t9_each_sample_once_an_epoch_over_changes_of_the_world_and_rollbacks(
    seed: int, size: int, batch: int, world: int, backups: int, batches: int
) -> None:
    """Without local steps, and with any number of them, which another run of the job may change."""
    run = Run(seed, size, batch, world, backups, batches)
    skipped = False
    for _ in range(40):
        match run.random.randrange(9):
            case 0:
                run.update(desired=run.random.randint(1, 6))
            case 1:
                run.store()
            case 2:
                run.roll_back()
            case 3 if backups:
                run.update(finite=False)
                skipped = True
            case 4:
                run.roll_back(run.random.randint(1, 4))
            case _:
                run.update()
    counts = run.samples()
    assert set(counts.values()) <= {1}, "no sample of an epoch is used twice"
    account = run.job.state.samples
    assert account is not None
    per_epoch = Counter(number // size for number in counts)
    assert per_epoch[account.epoch] == account.used
    for epoch in range(account.epoch):
        report = run.ended[epoch]
        assert (report.size, report.used + report.dropped) == (size, size)
        assert per_epoch[epoch] == report.used
        assert report.dropped == 0 or backups or skipped
    if not backups and not skipped:
        position = account.epoch * size + account.used
        assert sorted(counts) == list(range(position)), (
            "without backups the history uses a prefix of the epochs, no hole in it"
        )
        assert all(per_epoch[epoch] == size for epoch in range(account.epoch))


def test_t9_the_account_counts_dropped_and_repeated_samples() -> None:
    """With two ranks, one of them a backup, half is dropped. Then two updates are lost, and made again."""
    run = Run(seed=0, size=20, batch=2, world=2, backups=1)
    run.update()
    run.store()
    run.update()
    run.update()
    assert run.roll_back() == 2
    for _ in range(4):
        run.update()
    assert run.ended == {0: EpochEnded(epoch=0, size=20, used=10, dropped=10, repeated=8)}
    assert str(run.ended[0]) == "epoch 0 has ended: 20 samples: 10 used, 10 dropped, 8 repeated"


def test_t9_with_local_steps_ranks_that_leave_drop_no_samples() -> None:
    """The ranks that stay draw the batches of the last contribution of rank 2, which is in no update."""
    run = Run(seed=0, size=1000, batch=1, world=3, backups=0, batches=4)
    run.update()
    run.update(desired=2)
    assert run.job.state.samples == Samples(1000, 1, used=12 + 8)
    run.update(desired=3)
    while run.job.state.world < 3:
        run.update()
    run.update()
    assert run.job.state.samples == Samples(1000, 1, used=len(run.samples()))
    assert run.samples() == Counter(range(len(run.samples())))


def test_t9_another_number_of_local_steps_continues_with_the_next_batch() -> None:
    """A run continues a checkpoint of another run, which made more local steps, or none."""
    run = Run(seed=1, size=1000, batch=1, world=2, backups=0, batches=4)
    for _ in range(3):
        run.update()
    run.store()
    stored = CoordinatorState.from_json(run.stored)
    stored.term += 1
    again = Run(seed=1, size=1000, batch=1, world=2, backups=0, batches=3)
    again.job.restart(0.0, stored, "uri")
    assert [world.version for world in again.job.state.worlds] == [0, 3]
    again.mirror = again.job.state.copy()
    for _ in range(2):
        again.update()
    numbers = run.samples() + again.samples()
    assert sum(numbers.values()) == len(numbers) == 2 * (3 * 4 + 2 * 3)
    assert again.job.state.samples == Samples(1000, 1, used=36)


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (1, 3)])
def test_t9_an_async_account_continues_with_another_number_of_local_steps(first: int, second: int) -> None:
    """The account neither skips an epoch nor counts one twice."""
    state = CoordinatorState(1, 0, 1, samples=Samples(size=10, batch=1, sync=False))
    ended: list[EpochEnded] = []
    made = 0
    for batches in (first, second, first):
        job = Coordinator(Rules(mode="Async", shards=1, steps=100, batches=batches), state)
        mirror = job.state.copy()
        for version in range(state.version, state.version + 7):
            for decision in job.report(0.0, 0, staged(0, version, 1)):
                if isinstance(decision, Updated):
                    mirror, made = after(mirror, decision.commit), made + batches
                    ended += decision.ended
            account = job.state.samples
            assert account is not None
            assert mirror.samples == account, "a standby has the same account"
            assert (account.epoch, account.used) == divmod(made, 10)
        state = CoordinatorState.from_json(job.state.to_json())
    assert ended == [EpochEnded(epoch, 10, 10, 0, 0) for epoch in range(made // 10)]


@pytest.mark.parametrize("counts", [(1, 1), (3, 3), (3, 2), (2, 5)])
@pytest.mark.parametrize("world", [1, 3])
def test_t9_an_async_account_continues_after_updates_in_sync_mode(counts: tuple[int, int], world: int) -> None:
    """Even where a run in Sync mode took another number of local steps before."""
    state = CoordinatorState(1, 0, world, samples=Samples(size=10, batch=1))
    used, ended = 0, list[EpochEnded]()

    def update(mode: str, batches: int, ranks: int, updates: int) -> CoordinatorState:
        nonlocal used
        begun = state.copy()
        begun.samples = MODES[mode].account(Samples(10, 1), begun)
        job = Coordinator(Rules(mode=mode, shards=1, steps=100, batches=batches), begun)
        for version in range(job.state.version, job.state.version + updates):
            for rank in range(ranks):
                step = job.state.key_steps.get(rank, 0)
                for decision in job.report(0.0, 0, staged(rank, version, job.state.term, key_step=step)):
                    ended.extend(decision.ended if isinstance(decision, Updated) else ())
            used += batches * ranks
        assert job.state.samples is not None
        assert (job.state.samples.epoch, job.state.samples.used) == divmod(used, 10)
        return CoordinatorState.from_json(job.state.to_json())

    for batches in counts:
        state = update("Sync", batches, world, 4)
    state = update("Async", counts[0], 1, 5)
    assert [one.epoch for one in ended] == list(range(used // 10)), "no epoch is counted twice or left out"


def test_t9_an_async_account_counts_updates_and_batches_that_a_change_of_the_world_leaves_out() -> None:
    rules = Rules(mode="Async", shards=1, steps=100)
    job = Coordinator(rules, CoordinatorState(1, 0, 2, samples=Samples(size=10, batch=2, sync=False)))
    ended: list[EpochEnded] = []
    for rank, step in [(0, 0), (0, 1), (1, 0), (0, 2)]:
        job.report(0.0, 0, staged(rank, job.state.version, 1, key_step=step))
    assert job.state.samples == Samples(10, 2, False, used=8)
    job.joined(0.0, 0, 0)
    job.joined(0.0, 1, 0)
    job.configure(0.0, 1)
    for decision in job.report(0.0, 0, staged(0, job.state.version, 1, key_step=3)):
        ended += decision.ended if isinstance(decision, Updated) else ()
    # Rank 0 is at step 4 and rank 1 at step 1: numbers continue above step 4 of both.
    assert ended == [EpochEnded(epoch=0, size=10, used=10, dropped=2 * (1 + 4), repeated=0)]


@pytest.mark.parametrize("data", [None, 3, {}, {"size": 0}, {"size": 3, "batch": "x"}])
def test_an_invalid_account_is_ignored(data: Any) -> None:
    assert Samples.from_json(data) is None


def test_an_account_is_part_of_the_manifest() -> None:
    state = CoordinatorState(1, 0, 2, samples=Samples(10, 2, used=4))
    assert CoordinatorState.from_json(state.to_json()).samples == state.samples
    assert CoordinatorState.from_json(CoordinatorState(1, 0, 2).to_json()).samples is None
    commit = Commit(version=0, term=1, world=2, contributions=[])
    assert after(CoordinatorState(1, 0, 2), commit).samples is None
