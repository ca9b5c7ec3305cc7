"""The decisions of the coordinator; its caller carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from backstay_rpc.control_pb2 import Commit, File, GradientId, GradientInfo, RejectReason

from ._modes import NO_WAIT, Choice
from ._shard_messages import Message
from ._state import EpochEnded

__all__ = [
    "OUTCOME_OF",
    "CheckpointFailed",
    "Counted",
    "Decision",
    "Finished",
    "Outcome",
    "Redone",
    "Restart",
    "Send",
    "Updated",
    "WriteManifest",
]


class Outcome(StrEnum):
    """The outcome of a gradient; the values are those of a metric's label."""

    APPLIED = "applied"
    NON_FINITE = "non_finite"
    SKIPPED = "skipped"  # another contribution to the same update is not finite
    LATE = "late"
    DUPLICATE = "duplicate"
    STALE = "stale"
    OLD_TERM = "old_term"
    OLD_INCARNATION = "old_incarnation"
    NOT_IN_WORLD = "not_in_world"
    ABANDONED = "abandoned"
    OUT_OF_ORDER = "out_of_order"


OUTCOME_OF = {
    RejectReason.LATE: Outcome.LATE,
    RejectReason.DUPLICATE: Outcome.DUPLICATE,
    RejectReason.STALE: Outcome.STALE,
    RejectReason.OLD_TERM: Outcome.OLD_TERM,
    RejectReason.OLD_INCARNATION: Outcome.OLD_INCARNATION,
    RejectReason.NOT_IN_WORLD: Outcome.NOT_IN_WORLD,
    RejectReason.ABANDONED: Outcome.ABANDONED,
    RejectReason.OUT_OF_ORDER: Outcome.OUT_OF_ORDER,
    RejectReason.SKIPPED: Outcome.SKIPPED,
}


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one shard, or to all (`shard` is None). Each shard gets its messages in the order of decisions."""

    shard: int | None
    message: Message


@dataclass(frozen=True, slots=True)
class Counted:
    """The outcome of one gradient, counted once. `staleness` is in versions, of applied gradients."""

    id: GradientId
    outcome: Outcome
    info: GradientInfo
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """An update was decided.

    Attributes:
        infos: the infos of the update's contributions, in order of rank.
        adopted: the previous coordinator decided it, and has most likely reported it.
        ended: the accounts of the epochs that ended with it.
        grace: how long the next update waits for more contributions than its quorum.
        norm: the norm of the mean gradient before clipping; None: not computed.
    """

    commit: Commit
    infos: tuple[GradientInfo, ...]
    adopted: bool = False
    ended: tuple[EpochEnded, ...] = ()
    grace: Choice = NO_WAIT
    norm: float | None = None


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Every shard has written: store the manifest, then call `Coordinator.manifest`. `files` is by shard."""

    term: int
    version: int
    state: Mapping[str, Any]
    files: tuple[tuple[File, ...], ...]


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written; training continues."""

    version: int
    error: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A shard lost its part of this history, so the caller finds the newest checkpoint and calls
    `Coordinator.restart`."""

    shard: int


@dataclass(frozen=True, slots=True)
class Redone:
    """Updates that workers had, and that this history lacks because it begins at a checkpoint. They are made again."""

    updates: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The job has ended. With `reason` (one CamelCase word) it failed, and `why` says how."""

    version: int
    reason: str = ""
    why: str = ""


Decision: TypeAlias = Send | Counted | Updated | WriteManifest | CheckpointFailed | Restart | Redone | Finished
