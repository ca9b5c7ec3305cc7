"""Defines everything in which synchronous and asynchronous updates differ, as one object per mode.

Each caller names only its own protocol: the coordinator `Choosing`; shards, their links and workers `Answering`;
histories and the memory of shards `Counting`; liveness and reports `Waiting`. No other module compares the name of a
mode (decision 0080).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged

from .._state import CoordinatorState, Rules
from ._counting import Counting
from ._world import effective_world

__all__ = ["Answering", "Candidates", "Choosing", "Contributor", "UpdateMode", "Waiting"]


class Candidates(NamedTuple):
    """The gradients that a decision can use, and the facts that the choice depends on.

    Attributes:
        state: the newest decided state.
        rules: the settings of the job.
        gathered, waiting: the complete gradients of distinct ranks of the world that are gathered, and the others, each
            in order of completion. `Choosing.accept` accepts each of them.
        desired_world: the number of ranks that the operator requests. If it is below the world in force, only the
            ranks that stay contribute.
    """

    state: CoordinatorState
    rules: Rules
    gathered: Collection[Staged]
    waiting: Collection[Staged]
    desired_world: int

    @property
    def total(self) -> int:
        """The number of complete gradients."""
        return len(self.gathered) + len(self.waiting)

    @property
    def complete(self) -> Iterator[Staged]:
        """All complete gradients, first those that are gathered."""
        return chain(self.gathered, self.waiting)

    @property
    def world(self) -> int:
        """The number of ranks that the update waits for."""
        return effective_world(self.state.world, self.desired_world)


class Choosing(Protocol):
    """Decides which gradients make the next update, for the coordinator."""

    def accept(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        """Decide whether a gradient of this term, from a rank of the world, can become part of an update.

        Returns:
            Why it cannot; `REJECT_UNSPECIFIED`: it can.
        """

    def choose(self, candidates: Candidates, *, more: bool) -> tuple[Contribution, ...] | None:
        """Return the contributions of the next update in order of rank; None while there are too few.

        Those that are gathered contribute, with the weights that they have there.

        Args:
            more: whether all that are complete contribute, and not only the first that are enough.
        """

    def gathers(self, candidates: Candidates) -> list[tuple[int, tuple[Contribution, ...]]]:
        """Return the complete gradients that shards can add up now, because the next update has all of them.

        Returns:
            The place of each sum among the sums of the update, and its contributions in order of rank. Empty where a
            shard holds the gradients of all ranks at the same time.
        """

    def settle(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        """Decide about an accepted gradient that a decision did not use; `state` is the state after the decision.

        Returns:
            Why the gradient is refused now; `REJECT_UNSPECIFIED`: it is still accepted.
        """

    def commit_rejects(self, state: CoordinatorState, gradient: GradientId, reason: RejectReason) -> bool:
        """Return whether a commit shows the shards that this gradient is refused, so that they need no `Reject`."""

    def rejects_applied(self) -> bool:
        """Return whether a shard that reports a gradient again, after it applied its commit, needs a `Reject`."""


class Answering(Protocol):
    """Decides what an update does to gradients and which answers end an exchange, for shards and workers."""

    def divisor(self, weights: Sequence[float]) -> float:
        """Return the number that the weighted sum of an update's gradients is divided by."""

    def used_up(self, gradient_version: int, version: int) -> bool:
        """Return whether a gradient of `gradient_version` is of no use to a shard that has begun `version`."""

    def answered_by(self, outcome: RejectReason, gradient_version: int, version: int) -> bool:
        """Return whether parameters of `version` answer the push of a gradient that no update has used.

        Args:
            outcome: why the gradient was refused; `REJECT_UNSPECIFIED`: nothing is decided about it.
        """

    def exchanged(self, key_step: int, gradient_version: int, version: int) -> Iterable[int]:
        """Return the numbers (`GradientId.key_step`) of contributions whose fragments an answer of `version` brings.

        Args:
            key_step, gradient_version: `key_step` and version of the push that is answered.
        """

    def behind(self, versions: Mapping[int, int]) -> Sequence[int]:
        """Return the shards from which a worker pulls again before it computes with these answers.

        Args:
            versions: the version in each shard's newest answer.
        """


@dataclass(frozen=True, slots=True)
class Contributor:
    """A worker that contributes gradients.

    Attributes:
        joined: when the worker joined.
        handed_in: when its last gradient arrived; None: there was none.
        handed_version: the version at which that gradient was computed.
    """

    joined: float
    handed_in: float | None
    handed_version: int


class Waiting(Protocol):
    """Decides whether updates and ranks wait for each other, for `Liveness`, reports and `train`."""

    def owed_since(self, worker: Contributor, version: int, decided: float) -> float | None:
        """Return since when a worker has been able to compute the gradient that it owes, or None if it owes none.

        Args:
            version: the newest version.
            decided: when the newest version was decided.
        """

    def waits_for_ranks(self) -> bool:
        """Return whether updates wait for gradients of particular ranks, so that a rank can delay them."""

    def uses_older_versions(self) -> bool:
        """Return whether an update may use contributions computed from older versions of the parameters."""


class UpdateMode(Choosing, Answering, Counting, Waiting, Protocol):
    """One mode. Stateless: its decisions depend on its arguments only."""
