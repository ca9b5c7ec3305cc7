"""Keeps the position of a shard, with which the next link to the coordinator begins. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    Lost,
    Norm,
    NormRequest,
    Position,
    Reject,
    Rollback,
    Save,
    Staged,
    Written,
)

from ..._coordination import MODES, Message, Mode, Report

__all__ = ["ShardPosition"]

WRITTEN_KEPT: Final = 8
_Key = tuple[int, int, int, int]


def _key(gradient: GradientId) -> _Key:
    return gradient.term, gradient.rank, gradient.incarnation, gradient.attempt


class ShardPosition:
    """The reports that a coordinator may need again, and the state that its successor needs. Not thread-safe."""

    def __init__(self, mode: Mode) -> None:
        """`mode` is the job's update mode."""
        self._mode = MODES[mode]
        self._term = self._version = 0
        self._held: dict[_Key, Staged] = {}
        self._written: deque[Written] = deque(maxlen=WRITTEN_KEPT)
        self._begun = 0  # the newest term that it received
        self._saves = 0  # the newest version of the term that it was requested to store
        # With standbys: the state for the next coordinator, if there is one.
        self._last: Commit | None = None
        self._requests: dict[int, NormRequest] = {}  # by round, not answered yet
        self._prepared: tuple[Contribution, ...] = ()

    def inherit(self, term: int, version: int, last: Commit | None, prepared: Sequence[Contribution]) -> None:
        """The server was its shard's standby, and continues at this position."""
        self._term, self._version, self._last, self._prepared = term, version, last, tuple(prepared)

    def started(self, term: int, version: int) -> None:
        """The shard is at the beginning of a term."""
        self._term, self._version = term, version

    def reported(self, report: Report) -> None:
        """The shard reports this to the coordinator, if there is a link."""
        match report:
            case Staged():
                if report.id.term == self._term:
                    self._held[_key(report.id)] = report
            case Lost():
                self._held.pop(_key(report.id), None)
            case Norm():
                requested = self._requests.pop(report.round, None)
                if requested is not None:
                    self._prepared = tuple(requested.contributions)
            case Written():
                self._written.append(report)
            case Applied():
                self._version = max(self._version, report.version)

    def received(self, message: Message) -> None:
        """The coordinator has sent this."""
        match message:
            case NormRequest():
                if message.replicate:
                    self._requests[message.round] = message
            case Commit():
                self._committed(message)
            case Reject():
                self._held.pop(_key(message.id), None)
            case Save():
                self._saves = max(self._saves, message.version)
            case Rollback() if message.term > self._term:  # else the shard reports again that it has `started`
                self._begun = max(self._begun, message.term)
                self._held.clear()
                self._written.clear()
                # No term is recorded until the shard has `started`: after a break meanwhile, it comes again.
                self._term = self._version = 0
                self._last, self._requests, self._prepared, self._saves = None, {}, (), 0

    def _committed(self, commit: Commit) -> None:
        if self._last is None or commit.version > self._last.version:
            self._last = commit
        if commit.checkpoint:
            self._saves = max(self._saves, commit.version + 1)
        # A request from before it was answered or withdrawn.
        for number, request in list(self._requests.items()):
            if request.version <= commit.version:
                del self._requests[number]
        for contribution in commit.contributions:
            self._held.pop(_key(contribution.id), None)
        for key, staged in list(self._held.items()):
            if self._mode.used_up(staged.id.version, commit.version + 1):
                del self._held[key]

    @property
    def storing(self) -> bool:
        """Whether the shard has not reported the newest version that it was requested to store."""
        return self._saves > max((written.version for written in self._written), default=0)

    def message(self, link: int) -> Position:
        """Returns the first message of a link.

        Args:
            link: the number of the link, from the coordinator.
        """
        return Position(
            term=self._term,
            version=self._version,
            last=self._last,
            prepared=self._prepared,
            begun=self._begun,
            link=link,
            saves=self._saves,
        )

    def reports(self) -> list[Report]:
        """Returns the reports that follow the first message of a link."""
        return [*self._held.values(), Applied(version=self._version), *self._written]
