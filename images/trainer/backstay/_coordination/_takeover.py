"""A pure function of a server's position and the coordinator's history that returns how the server continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from backstay_rpc.control_pb2 import Commit, Contribution, GradientInfo

from ._decisions import Restart
from ._history import UpdateHistory
from ._succession import Succession

__all__ = ["Adopt", "Begin", "Replay", "ServerPosition", "Takeover", "Wait", "takeover"]


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """Where the server of a shard is when it connects.

    Attributes:
        shard: its shard.
        term, version: the version of the parameters that it holds; (0, 0): it has no state yet.
        incarnation: its incarnation.
        last: the newest commit of the term that it received, applied or not; None in a job without standbys.
        prepared: the contributions whose mean it holds for `version`; only in a job with standbys.
        begun: the newest term that it received, though it may hold nothing of that term yet.
        saves: the newest version of the term that it was requested to store, 0 for none; None: not known.
    """

    shard: int
    term: int
    version: int
    incarnation: int = 0
    last: Commit | None = None
    prepared: tuple[Contribution, ...] = ()
    begun: int = 0
    saves: int | None = None

    @property
    def reached(self) -> int:
        """The version that it has once it has applied all that it received."""
        return max(self.version, 0 if self.last is None else self.last.version + 1)


@dataclass(frozen=True, slots=True)
class Adopt:
    """The previous coordinator sent this commit to the shard. It becomes part of the history; then ask again."""

    commit: Commit
    infos: tuple[GradientInfo, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The server continues this history, and receives what it has missed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The server begins the term, at the version where the term began."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The job has ended, or a new term is being prepared: the server receives what ends or begins it."""


Takeover: TypeAlias = Adopt | Replay | Begin | Restart | Wait


def takeover(position: ServerPosition, history: UpdateHistory, succession: Succession, *, ended: bool) -> Takeover:
    """Returns what follows when a server connects. Changes nothing.

    Args:
        position: where the server is.
        history: the decisions of this term.
        succession: the state that this coordinator took over.
        ended: whether the job has ended.
    """
    current = position.term == history.state.term
    if current and succession.replicates and not history.lost and not ended:
        if position.reached > history.state.version:
            infos = succession.adopts(position.last)
            if position.last is None or infos is None:
                return Restart(position.shard)  # it has an update that no other server can make again
            return Adopt(position.last, infos)
        if not history.holds_next(position.version, position.prepared):
            return Restart(position.shard)
    if current and history.replays_from(position.version):
        return Replay()
    if ended or history.lost:
        return Wait()
    if history.state.version != history.start.version or succession.has_continued(position.term, position.version):
        # Gradients are not stored: a lost shard can be read only from a checkpoint, and then all shards go back.
        return Restart(position.shard)
    return Begin()
