"""A decision that no shard was told as a commit yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_rpc.control_pb2 import Commit, GradientInfo

from ._decisions import Counted
from ._samples import EpochEnded
from ._state import CoordinatorState

__all__ = ["Pending"]


@dataclass
class Pending:
    """A commit that is decided and waits for norms."""

    commit: Commit
    infos: tuple[GradientInfo, ...]
    norms: dict[int, float] = field(default_factory=dict)
    needs_norm: bool = False
    round: int = 0
    before: CoordinatorState | None = None  # with standbys: what taking it back restores
    counted: tuple[Counted, ...] = ()  # told once it is certain
    ended: tuple[EpochEnded, ...] = ()
