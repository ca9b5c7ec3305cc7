"""The arguments of a batch. With them, a replaced worker computes exactly the batch of its predecessor (T4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jax

__all__ = ["BatchKey"]


@dataclass(frozen=True)
class BatchKey:
    """The identity of one batch. `batches(key)` must be a pure function of it.

    Attributes:
        step: the version of the parameters in Sync mode; the number of this rank's previous gradients in Async mode.
            With local steps, the number of previous local steps: ``version * batches + i`` in Sync mode, the rank's own
            count in Async mode.
        rank: this worker's index, ``0 <= rank < world``.
        world: the current number of ranks.
        seed: the job's seed.
        offset: 0 until the world changes; then a value that keeps `number` unique. It may be negative.
        batches: how many batches each contribution takes: 1, or with local steps the local steps of an update.
    """

    step: int
    rank: int
    world: int
    seed: int = 0
    offset: int = 0
    batches: int = 1

    @property
    def number(self) -> int:
        """The number of this batch among the batches of all ranks, 0 or more.

        Without local steps it is ``offset + step * world + rank``. With local steps, the batches of a contribution have
        successive numbers: for ``step = version * batches + i`` it is
        ``offset + (version * world + rank) * batches + i``.

        No two batches of a job have the same number, even when the number of ranks changes. In Sync mode, the numbers
        have no gaps.
        """
        contribution, place = divmod(self.step, self.batches)
        return self.offset + (contribution * self.world + self.rank) * self.batches + place

    @cached_property
    def rng(self) -> np.random.Generator:
        """A generator of random numbers that depends on (seed, step, rank) only; it starts again with each key."""
        return np.random.default_rng(np.random.SeedSequence(entropy=self.seed, spawn_key=(self.step, self.rank)))

    @cached_property
    def key(self) -> jax.Array:
        """A JAX PRNG key that depends on (seed, step, rank) only."""
        import jax

        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.step), self.rank)
