"""`UpdateMode`: everything in which synchronous and asynchronous updates differ, as one object per mode.

The coordinator, the shards and their links call this object. No other module compares the name of a mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from backstay_rpc.control_pb2 import Contribution, GradientId, RejectReason, Staged

from ._samples import Samples
from ._state import CoordinatorState, Mode, Rules

__all__ = ["UpdateMode", "held_by_shard"]


class UpdateMode(Protocol):
    """One mode. Stateless: its decisions depend on its arguments only."""

    name: Mode

    # ---- Queries of the coordinator ----

    def accept(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        """Whether a gradient of this term, from a rank of the world, can become part of an update.

        Returns:
            Why it cannot; `REJECT_UNSPECIFIED`: it can.
        """

    def choose(
        self,
        state: CoordinatorState,
        rules: Rules,
        complete: Sequence[Staged],
        desired_world: int,
        *,
        more: bool,
        gathered: int = 0,
    ) -> tuple[Contribution, ...] | None:
        """The contributions of the next update in order of rank; None while there are too few.

        Args:
            complete: the complete gradients of distinct ranks of the world, in order of completion. `accept` accepts
                each of them.
            desired_world: the number of ranks that the operator requests. If it is below the world in force, only the
                ranks that stay contribute.
            more: whether all that are complete contribute, and not only the first that are enough.
            gathered: how many of the first ones are gathered. They contribute, with the weights that they have there.
        """

    def gathers(
        self,
        state: CoordinatorState,
        rules: Rules,
        waiting: Sequence[Staged],
        gathered: int,
        desired_world: int,
    ) -> list[tuple[int, tuple[Contribution, ...]]]:
        """The complete gradients that shards can add up now, because the next update has all of them.

        Args:
            waiting: the complete gradients that are not gathered, as in `choose`.
            gathered: the number of gathered gradients.

        Returns:
            The place of each sum among the sums of the update, and its contributions in order of rank.
        """

    def ordered(self, backups: int | str, world: int) -> bool:
        """Whether `gathers` adds the gradients in the order of their ranks, and so must have those of low ranks."""

    def spare(self, backups: int | str, world: int) -> int:
        """How many ranks may be slow or dead without delaying an update."""

    def divisor(self, weights: Sequence[float]) -> float:
        """The number that the weighted sum of an update's gradients is divided by."""

    def quorum(self, backups: int | str, world: int) -> int:
        """The fewest contributions of an update, with `world` ranks in force and `update.backups`."""

    def settle(self, state: CoordinatorState, rules: Rules, gradient: GradientId) -> RejectReason:
        """Decide about an accepted gradient that a decision did not use; `state` is the state after the decision.

        Returns:
            Why the gradient is refused now; `REJECT_UNSPECIFIED`: it is still accepted.
        """

    def commit_rejects(self, state: CoordinatorState, gradient: GradientId, reason: RejectReason) -> bool:
        """Whether a commit shows the shards that this gradient is refused, so that they need no `Reject`."""

    def rejects_applied(self) -> bool:
        """Whether a shard that reports a gradient again, after it applied its commit, needs a `Reject`."""

    def next_offset(self, state: CoordinatorState, world: int, batches: int) -> int:
        """`BatchKey.offset` from the version of `state` on, if `world` ranks are in force from there on.

        `BatchKey.number` must then exceed every number that was used in the previous world.

        Args:
            batches: how many batches, and so steps, each contribution takes from there on.
        """

    def owed_since(
        self, joined: float, handed_in: float | None, handed_version: int, version: int, version_since: float
    ) -> float | None:
        """Since when a worker has been able to compute the gradient that it owes; None: it owes none.

        Args:
            joined: when the worker joined.
            handed_in: when its last gradient arrived; None: there was none.
            handed_version: the version at which that gradient was computed.
            version: the newest version, decided at `version_since`.
        """

    # ---- Queries of shard 0's server and of `train` ----

    def waits_for_ranks(self) -> bool:
        """Whether updates wait for gradients of particular ranks, so that a rank can delay them."""

    def uses_older_versions(self) -> bool:
        """Whether an update may use contributions that were computed from older versions of the parameters."""

    def account(self, first: Samples, state: CoordinatorState) -> Samples:
        """The account of samples with which a run continues at `state`.

        Args:
            first: number of the run's first epoch.
        """

    # ---- Queries of a shard, its link and a worker ----

    def behind(self, versions: Mapping[int, int]) -> Sequence[int]:
        """The shards from which a worker pulls again before it computes with these answers.

        Args:
            versions: the version in each shard's newest answer.
        """

    def exchanged(self, key_step: int, gradient_version: int, version: int) -> Iterable[int]:
        """The numbers (`GradientId.key_step`) of contributions whose fragments `version`, the answer to a push, brings.

        Args:
            key_step, gradient_version: the push's `key_step` and version.
        """

    def used_up(self, gradient_version: int, version: int) -> bool:
        """Whether a gradient computed at `gradient_version` is of no use to a shard that has begun `version`."""

    def answered_by(self, outcome: RejectReason, gradient_version: int, version: int) -> bool:
        """Whether parameters of `version` answer the push of a gradient that no update has used.

        Args:
            outcome: why the gradient was refused; `REJECT_UNSPECIFIED`: nothing is decided about it.
        """


def held_by_shard(mode: UpdateMode, rules: Rules, world: int) -> int:
    """How many contributions a shard holds at the same time with `world` ranks, unless there are fewer ranks."""
    return rules.held + mode.spare(rules.backups, world)
