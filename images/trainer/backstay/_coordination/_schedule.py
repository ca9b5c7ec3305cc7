"""When a version is written as a checkpoint, and whether all shards have written it (T7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay_rpc.control_pb2 import File, Written

__all__ = ["InFlight", "Intervals", "Schedule"]


@dataclass(frozen=True)
class Intervals:
    """A checkpoint is due after `every_steps` updates, or `every_seconds` since the last began. None means never."""

    every_steps: int | None = None
    every_seconds: float | None = None


@dataclass
class InFlight:
    """A checkpoint that shards are writing."""

    began: float
    term: int
    state: Mapping[str, Any]
    files: dict[int, tuple[File, ...]] = field(default_factory=dict)


class Schedule:
    """One checkpoint is written at a time, except that the last version and a stopping server do not wait."""

    def __init__(self, intervals: Intervals, shards: int, now: float) -> None:
        self.intervals = intervals
        self._shards = shards
        self._began = now
        self._in_flight: dict[int, InFlight] = {}
        self._owed = False

    @property
    def versions(self) -> frozenset[int]:
        """The versions that shards are writing."""
        return frozenset(self._in_flight)

    def in_flight(self, version: int) -> bool:
        """Returns whether shards are writing this version."""
        return version in self._in_flight

    def due(self, now: float, version: int) -> bool:
        """Returns whether the update that makes `version` is to be stored."""
        if self._in_flight:
            return False
        if self._owed:
            return True
        steps, seconds = self.intervals.every_steps, self.intervals.every_seconds
        if steps is not None and version % steps == 0:
            return True
        return seconds is not None and now - self._began >= seconds

    def begin(self, now: float, term: int, version: int, state: Mapping[str, Any]) -> None:
        """Shards received the order to write `version`."""
        self._began = now
        self._owed = False
        self._in_flight[version] = InFlight(now, term, state)

    def written(self, shard: int, written: Written) -> InFlight | None:
        """A shard's files are stored. Returns the checkpoint after the last shard. A second call changes nothing."""
        flight = self._in_flight.get(written.version)
        if flight is None or flight.term != written.term or shard in flight.files:
            return None
        flight.files[shard] = tuple(written.files)
        return flight if len(flight.files) == self._shards else None

    def waited_for(self, shard: int) -> list[int]:
        """Returns the versions in flight of which `shard` has not stored its files."""
        return [version for version, flight in self._in_flight.items() if shard not in flight.files]

    def overdue(self, now: float, seconds: float) -> list[int]:
        """Returns the versions that have been in flight for at least this time."""
        return [version for version, flight in self._in_flight.items() if now - flight.began >= seconds]

    def end(self, version: int) -> None:
        """The manifest of `version` is stored, or the checkpoint was abandoned."""
        self._in_flight.pop(version, None)

    def give_up(self, version: int) -> None:
        """The server that was writing `version` ended, and the storage works: the next update is due."""
        self.end(version)
        self._owed = True

    def since(self, now: float) -> float:
        """Returns the seconds since a checkpoint was begun."""
        return now - self._began

    def resume(self, now: float, since: float, *, version: int, newest: int) -> None:
        """Continue another schedule at `version`: a checkpoint that it began and did not store is due immediately.

        Args:
            since: the other schedule's `since`.
            newest: the version that is stored.
        """
        self._began = now - since
        steps = self.intervals.every_steps
        self._owed = steps is not None and version - version % steps > newest

    def reset(self, now: float) -> None:
        """A new term began."""
        self._in_flight.clear()
        self._owed = False
        self._began = now
