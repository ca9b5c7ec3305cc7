"""The streams of a simulated worker to the shards. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from backstay_rpc.control_pb2 import Commit, GradientId, GradientInfo, RejectReason

from ..._coordination import used_in
from .._clock import SharedWork

__all__ = ["PartOnWay", "StreamOwner"]

_NONE: Final = RejectReason.REJECT_UNSPECIFIED
_LATE: Final = RejectReason.LATE


class StreamOwner(Protocol):
    """The worker at the other end of a stream.

    Attributes:
        rank, incarnation: its identity.
    """

    rank: int
    incarnation: int

    def lost_server(self, part: PartOnWay) -> None:
        """The stream broke, or the server refused it."""

    def answered(self, part: PartOnWay) -> None:
        """All of the answer has arrived."""


@dataclass(slots=True, eq=False)
class PartOnWay:
    """A worker's stream to one shard, which sends a part of a contribution or only requests parameters.

    Attributes:
        worker: the sender.
        shard: the number of the shard.
        gradient: the contribution; None: parameters are requested only.
        min_version: the version to wait for, without a contribution.
        flow: what is being transferred or computed for it.
        is_sent, complete, finished, applied, outcome, next_key_step: as in `backstay._shard`'s gradients.
        answered: when the answer began to arrive.
        version, world, term: the version, world and term of the answer.
        done: whether the answer ends training.
    """

    worker: StreamOwner
    shard: int
    gradient: GradientId | None
    min_version: int = 0
    info: GradientInfo | None = None
    key: tuple[int, ...] = ()
    flow: tuple[Any, SharedWork] | None = None
    is_open: bool = True
    is_waiting: bool = False
    has_memory: bool = False
    complete: bool = False
    finished: bool = False
    applied: int | None = None
    outcome: RejectReason = _NONE
    next_key_step: int = 0
    pushed: float = 0.0
    answered: float = 0.0
    version: int = -1
    world: int = 0
    term: int = 0
    done: bool = False
    ask: bool = False

    def stop(self) -> None:
        """End the transfer that is in progress."""
        if self.flow is not None:
            self.flow[0].remove(self.flow[1])
            self.flow = None

    def name_outcome(self, newest: Commit | None) -> None:
        """Set the outcome in an answer, as the shard's runtime does.

        Args:
            newest: the commit that made the version of the answer, if the shard has it.
        """
        gradient = self.gradient
        if gradient is None:
            who = self.worker.rank, self.worker.incarnation
        else:
            who = gradient.rank, gradient.incarnation
            self.outcome = self.outcome or (_LATE if self.applied is None else _NONE)
            if not self.outcome:
                return
        if used := used_in(newest, who, None if gradient is None else gradient.key_step):
            self.outcome, self.next_key_step = used
