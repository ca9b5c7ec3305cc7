"""Keeps another server ready to replace a shard's server; `NoStandbys` in a job without standbys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backstay_rpc.control_pb2 import Commit, Contribution, GradientInfo, ReplicaState

from .._transport import Engine
from ._operand import Gathered, Hold, Operand

if TYPE_CHECKING:
    from ._replication import Replica

__all__ = ["NoStandbys", "Standbys"]


class Standbys(Protocol):
    """A shard's standbys, as its apply thread uses them."""

    def prepare(
        self,
        engine: Engine,
        version: int,
        contributions: Sequence[Contribution],
        gradients: Sequence[Sequence[np.ndarray]],
        infos: Sequence[GradientInfo],
        divisor: float,
    ) -> Operand:
        """Returns the operand of the update of `version`.

        Args:
            gradients, infos: the gradients and the infos of the contributions, in the same order.
            divisor: the divisor of the weighted sum.
        """

    def send_prepared(self, prepared: Operand) -> Hold:
        """Send what `prepare` returned."""

    def send_commit(self, commit: Commit) -> Hold:
        """Send a commit."""

    def joining(self) -> Replica | None:
        """Returns a standby to be filled now. Returned once."""

    def fill(self, replica: Replica, state: ReplicaState, snapshot: Any, prepared: Operand | None) -> None:
        """Send `replica` the present state, and all later items."""

    def end(self) -> None:
        """The state that the standbys hold is void: they connect again."""

    def stop(self) -> None:
        """Stop permanently."""


class NoStandbys:
    """See `Standbys`."""

    def prepare(
        self,
        engine: Engine,
        version: int,
        contributions: Sequence[Contribution],
        gradients: Sequence[Sequence[np.ndarray]],
        infos: Sequence[GradientInfo],
        divisor: float,
    ) -> Operand:
        del engine, infos
        return Gathered(version, contributions, gradients, divisor)

    def send_prepared(self, prepared: Operand) -> Hold:
        del prepared
        return _nothing

    def send_commit(self, commit: Commit) -> Hold:
        del commit
        return _nothing

    def joining(self) -> Replica | None:
        return None

    def fill(self, replica: Replica, state: ReplicaState, snapshot: Any, prepared: Operand | None) -> None:
        raise AssertionError("no standby ever joins")

    def end(self) -> None:
        pass

    def stop(self) -> None:
        pass


def _nothing() -> None:
    pass
