"""T9 holds with local steps, for real steps of workers, a real coordinator, and servers that add contributions up.

The gradient of a batch is -1 for each of its samples, and the inner optimizer subtracts it. So a parameter counts how
often its sample was used. Each fragment has a parameter for each sample.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay import BatchKey, LocalSteps, from_dataset
from backstay._compute import LocalProgram, LocalTraining
from backstay._coordination import Coordinator, CoordinatorState, Rules, Samples, Updated
from backstay._update import Objective, Selection, describe
from backstay_rpc.control_pb2 import GradientId, GradientInfo, Staged

SIZE, BATCH, COUNT, UPDATES = 4000, 2, 4, 30


def loss(params: Any, batch: Any) -> Any:
    return -sum(jnp.sum(layer[batch]) for layer in params["layers"])


class Job:
    """A Sync job of one shard whose workers make local steps.

    Attributes:
        servers: the leaves that the servers hold; leaf `f` belongs to fragment `f`.
        used: the worker and the batches of each contribution, by version. A worker has another number after a rollback.
    """

    def __init__(self, program: LocalProgram, local: LocalSteps, world: int) -> None:
        self._program, self._local = program, local
        rules = Rules(mode="Sync", shards=1, steps=UPDATES, batches=local.batches)
        self.coordinator = Coordinator(rules, CoordinatorState(1, 0, world, samples=Samples(SIZE, BATCH)))
        self._data = from_dataset(np.arange(SIZE), batch_size=BATCH, shuffle=False)
        self.servers = [np.zeros(SIZE, np.float32) for _ in range(local.fragments)]
        self.used: dict[int, list[tuple[int, list[int]]]] = {}
        self._workers: dict[int, tuple[int, LocalTraining]] = {}
        self._received: dict[int, Selection] = {}  # by rank; absent: it requests the whole model
        self._drawn: dict[int, list[BatchKey]] = defaultdict(list)
        self._numbers = count()
        self.store()

    @property
    def state(self) -> CoordinatorState:
        return self.coordinator.state

    def replace(self, rank: int) -> None:
        """The worker died, and another process continues."""
        self._workers.pop(rank, None)
        self._received.pop(rank, None)

    def store(self) -> None:
        self._stored = self.state.to_json(), [leaf.copy() for leaf in self.servers]

    def roll_back(self) -> None:
        state = CoordinatorState.from_json(self._stored[0])
        state.term = self.state.term + 1
        self.coordinator.restart(0.0, state, "uri")
        self.servers = [leaf.copy() for leaf in self._stored[1]]
        self.used = {version: made for version, made in self.used.items() if version < state.version}
        self._received.clear()
        self._workers = {rank: (next(self._numbers), training) for rank, (_, training) in self._workers.items()}

    def update(self, desired: int | None = None) -> None:
        state = self.state.copy()
        made = {rank: self._contribute(rank, state) for rank in range(state.world)}
        decisions = [] if desired is None else list(self.coordinator.configure(0.0, desired))
        for rank in range(6):
            self.coordinator.joined(0.0, rank, 0)
        for rank in made:
            identity = GradientId(term=state.term, version=state.version, rank=rank, key_step=state.version, attempt=1)
            decisions += self.coordinator.report(
                0.0, 0, Staged(id=identity, info=GradientInfo(finite=True, examples=1))
            )
        [updated] = [decision for decision in decisions if isinstance(decision, Updated)]
        fragment = state.version % self._local.fragments
        self.used[state.version] = []
        for contribution in updated.commit.contributions:
            worker, difference, numbers = made[contribution.id.rank]
            self.servers[fragment] = self.servers[fragment] - difference[fragment]
            self.used[state.version].append((worker, numbers))
        for rank in [rank for rank in self._workers if rank >= self.state.world]:
            self.replace(rank)
        self._received = dict.fromkeys(self._workers, Selection(frozenset({fragment})))

    def _contribute(self, rank: int, state: CoordinatorState) -> tuple[int, list[Any], list[int]]:
        if rank not in self._workers:
            self._workers[rank] = next(self._numbers), LocalTraining(self._program, UPDATES)
        worker, training = self._workers[rank]
        key = BatchKey(state.version, rank, state.world, 0, state.offset)

        def batch_of(key: BatchKey) -> Any:
            self._drawn[worker].append(key)
            return self._data(key)

        made = training.contribute(self.servers, key, batch_of, self._received.get(rank))
        assert made.finite
        of = {
            drawn.number
            for drawn in self._drawn[worker]
            if (drawn.step // drawn.batches, drawn.world, drawn.offset) == (key.step, key.world, key.offset)
        }
        assert len(of) == self._local.batches
        return worker, [np.asarray(leaf) for leaf in made.leaves], sorted(of)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (2, 2), (1, 3)])
def test_t9_each_sample_once_though_workers_die_and_the_world_changes(fragments: int, overlap: int) -> None:
    """A worker sends the steps of all updates since the last turn of a fragment. A worker that leaves keeps the rest.

    With `overlap`, the parameters of the worker and of the servers are mixed: only the batches are compared.
    """
    local = LocalSteps(COUNT, optax.sgd(1.0), fragments=fragments, overlap=overlap)
    tree = describe({"layers": [jnp.zeros(SIZE) for _ in range(fragments)]})
    program = LocalProgram(Objective(loss, tree), local)
    random = Random(fragments + 10 * overlap)
    job = Job(program, local, world=3)
    while job.state.version < UPDATES:
        match random.randrange(8):
            case 0 | 1:
                job.update(random.randint(1, 5))
            case 2:
                job.replace(random.randrange(job.state.world))
            case 3 if job.state.term < 3:
                job.roll_back()
            case 4:
                job.store()
            case _:
                job.update()
    assert len(job.state.worlds) > 4
    assert job.state.term > 1
    numbers = [number for made in job.used.values() for _, drawn in made for number in drawn]
    assert sorted(numbers) == list(range(len(numbers))), "each batch once, none left out"
    account = job.state.samples
    assert account is not None
    assert (account.used, account.dropped) == (len(numbers) * BATCH, 0)
    if not overlap:
        for fragment, counted in enumerate(job.servers):
            expected = np.zeros(SIZE, np.float32)
            for version, made in job.used.items():
                for worker, drawn in made:
                    turns = (turn for turn in range(version, UPDATES) if turn % fragments == fragment)
                    if any(worker == other for turn in turns for other, _ in job.used[turn]):
                        expected[(np.array(drawn)[:, None] * BATCH + np.arange(BATCH)).ravel()] += 1
            assert expected.max() == 1
            np.testing.assert_array_equal(counted, expected)
