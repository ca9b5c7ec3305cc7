"""The order in which the coordinator's decisions are carried out, and which links receive each of them. Pure.

The caller reports an event, and then takes the decisions one at a time. A link may report the next event from inside
the delivery of a message. Its decisions follow those that were made before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backstay_rpc.control_pb2 import Staged

from ._coordinator import Coordinator
from ._decisions import (
    CheckpointFailed,
    Counted,
    Decision,
    Finished,
    Redone,
    Restart,
    Send,
    Updated,
    WriteManifest,
)
from ._shard_messages import Report, ShardSink
from ._state import CoordinatorState
from ._takeover import ServerPosition

__all__ = ["Due", "Observer", "Sequencer", "carry_out"]


class Observer(Protocol):
    """Receives the events for metrics, logs and progress. Decisions in order; `staged` from any thread.

    `restarted` gets the URI of the checkpoint from which the history continues, and the Unix time when that was stored;
    empty and 0: it begins again.
    """

    def staged(self, now: float, shard: int, staged: Staged) -> None: ...
    def counted(self, now: float, counted: Counted) -> None: ...
    def updated(self, now: float, updated: Updated) -> None: ...
    def restarted(self, now: float, state: CoordinatorState, checkpoint: str, stored_at: float) -> None: ...
    def redo(self, now: float, updates: int) -> None: ...
    def checkpoint_stored(self, now: float, order: WriteManifest, uri: str) -> None: ...
    def checkpoint_failed(self, now: float, failed: CheckpointFailed) -> None: ...
    def finished(self, now: float, finished: Finished) -> None: ...


@dataclass(frozen=True, slots=True)
class Due:
    """A decision that is to be carried out.

    Attributes:
        now: when the coordinator made it.
        links: the shards that were linked then. A shard that links later gets the missed messages after its hello.
    """

    now: float
    decision: Decision
    links: Sequence[tuple[int, ShardSink]]


class Sequencer:
    """One coordinator, the links of its shards and its decisions in order. Not thread-safe.

    Attributes:
        coordinator: changed by events only, whose decisions go to `add`.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._links: dict[int, ShardSink] = {}
        self._early: dict[int, list[Report]] = {}
        self._outbox: deque[Due] = deque()
        self._taking = False

    # ---- Links ----

    def attach(self, now: float, sink: ShardSink, position: ServerPosition) -> None:
        """A shard's server is connected: `sink` gets all later messages, and first those that it has missed."""
        self._links[position.shard] = sink
        self.add(now, self.coordinator.hello(now, position))
        for report in self._early.pop(position.shard, ()):
            self.add(now, self.coordinator.report(now, position.shard, report))

    def detach(self, shard: int, sink: ShardSink) -> None:
        """The connection broke. Nothing happens when another has replaced it."""
        if self._links.get(shard) is sink:
            del self._links[shard]

    def is_current(self, shard: int, sink: ShardSink | None) -> bool:
        """Returns whether reports of this link count; None is a shard in the coordinator's process.

        A report from a replaced link is ignored: a server that was only paused may still report after its replacement
        (T6).
        """
        return sink is None or self._links.get(shard) is sink

    def report(self, now: float, shard: int, report: Report, sink: ShardSink | None = None) -> None:
        """A shard's report; `sink` is the link on which it arrived, as in `is_current`.

        A shard of this process may report before it is attached: a server that takes over serves workers before it
        gives its position. The coordinator receives such reports after that position, and drops what it has left (T8).
        """
        if sink is None and shard not in self._links:
            self._early.setdefault(shard, []).append(report)
        elif self.is_current(shard, sink):
            self.add(now, self.coordinator.report(now, shard, report))

    @property
    def linked(self) -> frozenset[int]:
        """The shards that have a link."""
        return frozenset(self._links)

    # ---- Decisions ----

    def add(self, now: float, decisions: Iterable[Decision]) -> None:
        """Decisions of an event, which follow the earlier ones."""
        links: Sequence[tuple[int, ShardSink]] | None = None
        for decision in decisions:
            links = list(self._links.items()) if links is None else links
            self._outbox.append(Due(now, decision, links))

    def begin(self) -> bool:
        """Returns whether the caller has to take the decisions now; otherwise there are none, or another caller does.

        The caller calls `take` until it returns None.
        """
        if self._taking or not self._outbox:
            return False
        self._taking = True
        return True

    def take(self) -> Due | None:
        """Returns the next decision, or None if there is none, and another caller may `begin`."""
        if self._outbox:
            return self._outbox.popleft()
        self._taking = False
        return None


def carry_out(due: Due, observer: Observer) -> WriteManifest | Restart | None:
    """Deliver a message, or report an event.

    Returns:
        The decision, if the storage has to carry it out; that takes long.
    """
    now = due.now
    match due.decision:
        case Send(shard, message):
            for index, sink in due.links:
                if shard is None or shard == index:
                    sink.deliver(message)
        case Counted() as counted:
            observer.counted(now, counted)
        case Updated() as updated:
            observer.updated(now, updated)
        case CheckpointFailed() as failed:
            observer.checkpoint_failed(now, failed)
        case Redone(updates):
            observer.redo(now, updates)
        case Finished() as finished:
            observer.finished(now, finished)
        case WriteManifest() | Restart() as slow:
            return slow
    return None
