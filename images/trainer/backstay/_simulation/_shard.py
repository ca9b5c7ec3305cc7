"""A shard that keeps the messages of the protocol and no parameters. It asserts T1 and T3 for each message."""

from __future__ import annotations

from collections import deque

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Done,
    Gather,
    GradientId,
    GradientInfo,
    Norm,
    NormRequest,
    Reject,
    Rollback,
    Save,
    Staged,
    Written,
)

from .._coordination import Message, Mode, Report

__all__ = ["SimShard", "key_of"]


def key_of(gradient: GradientId) -> bytes:
    """Returns the identity of a gradient, as a key."""
    return gradient.SerializeToString(deterministic=True)


class SimShard:
    """One shard and its link. Messages wait in `inbox`, and reports wait in `outbox`.

    Attributes:
        term, version: what the shard has reached; a term of 0 has no state.
        staged: the complete gradients that no message has decided about.
        rejected: the rejections of this term.
        history: the commits of this term.
        used: the gradients that commits of this term named.
        sums: the keys in `staged` that are added up.
        connected: whether the link is open. A server that lost its state has none.
    """

    def __init__(self, index: int, mode: Mode) -> None:
        self.index, self._mode = index, mode
        self.lose_all()

    def lose_all(self) -> None:
        """The server dies, and a new one without state takes its place."""
        self.term = self.version = 0
        self.staged: dict[bytes, Staged] = {}
        self.rejected: dict[bytes, Reject] = {}
        self.history: list[Commit] = []
        self.used: set[bytes] = set()
        self.sums: set[bytes] = set()
        self.round = 0
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Report] = deque()
        self.connected = False
        self.done: Done | None = None
        self.written: list[Written] = []

    def receive(self) -> None:
        """Process the next message of the coordinator, if there is one."""
        if not self.inbox:
            return
        message = self.inbox.popleft()
        match message:
            case Rollback():
                self.term, self.version = message.term, message.version
                self.staged.clear()
                self.rejected.clear()
                self.used.clear()
                self.sums.clear()
                self.history = []
                self.outbox.clear()
            case Commit():
                self._commit(message)
            case Save():
                assert message.version == self.version
                self._write()
            case Gather():
                self._gather(message)
            case NormRequest():
                assert all(key_of(c.id) in self.staged for c in message.contributions)
                assert self.sums <= {key_of(c.id) for c in message.contributions}, "T1: all that is added up"
                self.outbox.append(Norm(term=message.term, version=message.version, sum_of_squares=4.0))
            case Reject():
                key = key_of(message.id)
                assert key not in self.used, "an applied gradient is never rejected"
                self.staged.pop(key, None)
                if key in self.sums:
                    self.sums.clear()
                self.rejected[key] = message
            case Done():
                self.done = message

    def _commit(self, message: Commit) -> None:
        assert message.term == self.term
        if message.version < self.version:
            return  # replayed
        assert message.version == self.version, "commits come without gaps"
        assert self.sums <= {key_of(c.id) for c in message.contributions}, "T1: all that is added up"
        self.sums.clear()
        for contribution in message.contributions:
            key = key_of(contribution.id)
            assert key in self.staged, "a shard holds the gradients that a commit names"
            assert key not in self.used, "T3"
            self.used.add(key)
            del self.staged[key]
        if self._mode == "Sync":
            for key, staged in list(self.staged.items()):
                if staged.id.version <= message.version:
                    del self.staged[key]
        self.version += 1
        self.history.append(message)
        self.outbox.append(Applied(version=self.version))
        if message.checkpoint:
            self._write()

    def _gather(self, message: Gather) -> None:
        if (message.term, message.version) != (self.term, self.version):
            return
        if message.round != self.round:
            self.sums.clear()
            self.round = message.round
        keys = {key_of(contribution.id) for contribution in message.contributions}
        assert keys <= self.staged.keys(), "a shard holds the gradients that it adds up"
        assert keys <= self.sums or not keys & self.sums, "T3: each is added up once"
        assert len(keys) == 4
        self.sums |= keys

    def _write(self) -> None:
        self.written.append(Written(term=self.term, version=self.version))
        self.outbox.append(self.written[-1])

    def push(self, gradient: GradientId, info: GradientInfo) -> None:
        """A worker pushes all of a gradient. The shard ignores what it has, and what no update can use."""
        key = key_of(gradient)
        stale = self._mode == "Sync" and self.version > gradient.version
        if gradient.term != self.term or key in self.used or key in self.staged or key in self.rejected or stale:
            return
        staged = Staged(id=gradient, info=info)
        self.staged[key] = staged
        if self.connected:
            self.outbox.append(staged)

    def open_link(self) -> None:
        """The link opens again, and what an earlier link carried is lost."""
        self.connected = True
        self.inbox.clear()
        self.outbox.clear()

    def report_all(self) -> None:
        """Report again what the shard holds and has reached, after the coordinator has its position."""
        self.outbox.extend(self.staged.values())
        self.outbox.append(Applied(version=self.version))
        self.outbox.extend(self.written)

    def answers(self, gradient: GradientId) -> bool:
        """Returns whether this shard's parameters answer the push of `gradient`."""
        return key_of(gradient) in self.used or (self._mode == "Sync" and self.version > gradient.version)
