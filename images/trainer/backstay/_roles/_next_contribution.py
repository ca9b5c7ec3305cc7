"""The contribution that a worker of an Async job computes while its previous one is in flight (`update.overlap`)."""

from __future__ import annotations

from .._compute import ComputedContribution
from .._data import BatchKey
from .._transport import Pulled

__all__ = ["NextContribution"]


class NextContribution:
    """One contribution that was started early, from the parameters before the exchange of its predecessor.

    It belongs to one key of one term. If another key is due, it is dropped: its predecessor was refused, the world
    changed, or training went back. Each key that is due then is computed from newer parameters.
    """

    def __init__(self) -> None:
        self._next: tuple[int, ComputedContribution, Pulled] | None = None

    def keep(self, term: int, contribution: ComputedContribution, at: Pulled) -> None:
        """A contribution was started.

        Args:
            term: the term of the contribution's parameters.
            contribution: the contribution, which may still be in computation.
            at: the answer that brought its parameters. Its staleness counts from the version of `at`.
        """
        self._next = term, contribution, at

    def take(self, term: int, key: BatchKey) -> tuple[ComputedContribution, Pulled] | None:
        """Returns the contribution of `key`, which is due, and what it was computed from, or None if it was not
        started."""
        found, self._next = self._next, None
        if found is None or (found[0], found[1].key) != (term, key):
            return None
        return found[1:]
