"""A worker that makes gradients without values, and pushes each one to every shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backstay_rpc.control_pb2 import GradientId, RejectReason

from .._coordination import Mode
from ._shard import SimShard, key_of

__all__ = ["SimWorker"]


@dataclass
class SimWorker:
    """One rank.

    Attributes:
        current: the gradient that the worker exchanges; None: the next step computes one.
        to_push: the shards that have not received it.
    """

    rank: int
    mode: Mode
    incarnation: int = 0
    attempt: int = 0
    key_step: int = 0
    current: GradientId | None = None
    to_push: list[int] = field(default_factory=list)
    alive: bool = True

    def replace(self) -> None:
        """A new pod takes the rank."""
        self.alive = True
        self.incarnation += 1
        self.attempt = 0
        self.current, self.to_push = None, []

    def compute(self, term: int, version: int, shards: int) -> GradientId:
        """Begin a gradient at this version."""
        self.attempt += 1
        self.current = GradientId(
            term=term,
            version=version,
            rank=self.rank,
            key_step=version if self.mode == "Sync" else self.key_step,
            incarnation=self.incarnation,
            attempt=self.attempt,
        )
        self.to_push = list(range(shards))
        return self.current

    def look(self, shards: Sequence[SimShard]) -> None:
        """Wait for the answer of every shard. A replaced server has lost the gradient, so send it again."""
        gradient = self.current
        assert gradient is not None
        key = key_of(gradient)
        rejects = [shard.rejected[key] for shard in shards if key in shard.rejected]
        if rejects:
            self.current = None
            if rejects[0].reason in {RejectReason.DUPLICATE, RejectReason.OUT_OF_ORDER}:
                self.key_step = rejects[0].next_key_step
            return
        unanswered = [shard for shard in shards if not shard.answers(gradient)]
        if unanswered:
            self.to_push = [shard.index for shard in unanswered if key not in shard.staged]
        else:
            self.current = None
            self.key_step = gradient.key_step + 1
