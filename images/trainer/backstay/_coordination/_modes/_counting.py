"""Defines the numbers of contributions, batches and samples in which the update modes differ (`Counting`)."""

from __future__ import annotations

from typing import Protocol

from .._state import CoordinatorState, Rules, Samples

__all__ = ["Counting", "held_by_shard"]


class Counting(Protocol):
    """Counts contributions, batches and samples. For histories, the memory of shards and the start of a server."""

    def quorum(self, backups: int | str, world: int) -> int:
        """Return the fewest contributions of an update, with `world` ranks in force and `update.backups`."""

    def spare(self, backups: int | str, world: int) -> int:
        """Return how many ranks may be slow or dead without delaying an update."""

    def ordered(self, backups: int | str, world: int) -> bool:
        """Return whether `Choosing.gathers` adds gradients in the order of their ranks, and so must have low ranks."""

    def next_offset(self, state: CoordinatorState, world: int, batches: int) -> int:
        """Return `BatchKey.offset` from the version of `state` on, if `world` ranks are in force from there on.

        `BatchKey.number` must then exceed every number that was used in the previous world.

        Args:
            batches: how many batches, and so steps, each contribution takes from there on.
        """

    def account(self, first: Samples, state: CoordinatorState) -> Samples:
        """Return the account of samples with which a run continues at `state`.

        Args:
            first: number of the run's first epoch.
        """


def held_by_shard(mode: Counting, rules: Rules, world: int) -> int:
    """Return how many contributions a shard holds at the same time with `world` ranks, unless there are fewer ranks."""
    return rules.held + mode.spare(rules.backups, world)
