"""The active server's side of replication to its standby (see docs/internals/standby.md).

The stream carries the input of an update and not its result: the mean gradient, once for each version, and the commit.
Both servers run the same compiled update on the same bits, so they stay equal bit for bit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from backstay_rpc.control_pb2 import (
    Commit,
    Contribution,
    Frame,
    GradientInfo,
    Hello,
    ReplicaArray,
    ReplicaState,
)
from backstay_rpc.control_pb2 import Replica as ReplicaFrame
from backstay_rpc.refusals import RefusalCode

from .. import _instrument
from .._timeouts import Timeouts
from .._transport import CHUNK_BYTES, Engine, Refusal, ServerStream, frames, kind_of
from .._watchdog import at_most
from ..errors import PeerLost
from ._operand import WHOLE, Hold, Operand, PreparedMean

__all__ = ["Replica", "Replication"]

_LOG = logging.getLogger(__name__)

BACKLOG: Final = 8
"""How many items a standby may be behind while it is filled; then training waits for it."""

GLANCE: Final = 0.25
"""Seconds after which a wait for a standby looks at the clock. A longer gap is a pause of this process."""

HELD: Final = Frame(replica=ReplicaFrame(held=True))
_ALIVE: Final = Frame(replica=ReplicaFrame(alive=True))


Item = Callable[[], Iterator[tuple[Frame, Sequence[np.ndarray]]]]


class Replica:
    """One standby's stream. Items are sent one at a time: the next one when the standby holds the previous one."""

    def __init__(self, incarnation: int, timeouts: Timeouts) -> None:
        self.incarnation = incarnation
        self._times = timeouts
        self.in_sync = False
        self._queue: deque[Item] = deque()
        self._put = self._held = self._sent = 0  # items, items, frames
        self._changed = threading.Condition()
        self.ended_at: float | None = None
        self.closed_by_peer = False
        self._began = time.monotonic()
        self._filled = 0.0  # seconds that it took to fill it
        self._answers: deque[float] = deque(maxlen=64)  # seconds until it held each of the newest items
        self._pinged = 0  # messages without an item that it has answered
        self._cut: Callable[[], object] = lambda: None  # ends its stream, in which this process may wait

    def put(self, item: Item) -> int:
        """Queue an item; returns the number to wait for."""
        with self._changed:
            self._queue.append(item)
            self._put += 1
            self._changed.notify_all()
            return self._put

    def wait(self, number: int) -> bool:
        """Wait until the standby holds it, or, while filled, is not too far behind. Returns False if it is lost."""
        with self._changed:
            while True:
                due = number if self.in_sync else number - BACKLOG
                if self.ended_at is not None or self._held >= due:
                    return self.ended_at is None
                self._end_unless_it_moves(self.patience())

    def _watch_filling(self) -> None:
        """Disconnect a standby that stops while it is filled. No update may wait for it: the job may be slow."""
        with self._changed:
            while self.ended_at is None and not self.in_sync:
                if self._held < self._put:
                    self._end_unless_it_moves(self._times.held)
                else:
                    self._changed.wait()

    def _end_unless_it_moves(self, patience: float) -> None:
        """Wait for the next progress of the standby, and disconnect it after this time without any."""
        if not self._moves(patience):
            _LOG.warning("the standby (incarnation %d) did not answer for %.1f s", self.incarnation, patience)
            self.end()

    def patience(self) -> float:
        """Returns how long a standby may need for one message.

        A standby that is in sync is given up as soon as a longer wait costs more than to fill it again (0069).
        """
        if not self.in_sync:
            return self._times.held
        slowest = max(self._answers, default=self._times.held)
        return min(self._times.held, max(self._times.held_least, self._filled, 10 * slowest))

    def _moves(self, patience: float) -> bool:
        """Returns whether the standby holds another item, was sent another frame, or is lost, within this time."""
        before = self._held, self._sent
        while patience > 0:
            began = time.monotonic()
            # A state, or the mean of a large shard, may take long to send. While bytes are sent, the standby is alive.
            if self._changed.wait_for(
                lambda: self.ended_at is not None or (self._held, self._sent) != before, min(GLANCE, patience)
            ):
                return True
            patience -= min(time.monotonic() - began, 2 * GLANCE)
        return False

    def _over(self) -> bool:
        return self.ended_at is not None

    def end(self, *, closed_by_peer: bool = False) -> None:
        """Send nothing more."""
        with self._changed:
            if self.ended_at is None:
                self.ended_at = time.monotonic()
                self.closed_by_peer = closed_by_peer
            self._queue.clear()
            self._changed.notify_all()
            cut = self._cut
        cut()

    def run(self, stream: ServerStream) -> None:
        """Send until it ends."""
        with self._changed:
            self._cut = stream.cut
        threading.Thread(target=self._watch_filling, name=f"backstay-fill-{self.incarnation}", daemon=True).start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self.ended_at is not None, self._times.replica_beat)
                    if self.ended_at is not None:
                        return
                    item = self._queue.popleft() if self._queue else None
                if item is None:
                    stream.write(_ALIVE)
                    with at_most(self._times.held, partial(self._overdue, self._pinged)):
                        if not self._answered(stream):
                            return
                    with self._changed:
                        self._pinged += 1
                        self._changed.notify_all()
                    continue
                for frame, body in item():
                    if self._over():
                        return  # what it sends may be used again by now, so the end of it must not follow
                    stream.write(frame, *body)
                    with self._changed:
                        self._sent += 1
                        self._changed.notify_all()
                item = None  # it holds the mean
                asked = time.monotonic()
                if not self._answered(stream):
                    return
                with self._changed:
                    self._held += 1
                    if self.in_sync:
                        self._answers.append(time.monotonic() - asked)
                    if not self._queue and self._held == self._put and self._put > 0 and not self.in_sync:
                        self.in_sync, self._filled = True, time.monotonic() - self._began
                        _instrument.report("in_sync", incarnation=self.incarnation)
                        _LOG.info("the standby (incarnation %d) holds the same state", self.incarnation)
                    self._changed.notify_all()
        except (PeerLost, Refusal) as error:
            _LOG.debug("the standby's stream: %s", error)
        finally:
            self.end(closed_by_peer=True)

    def _overdue(self, pinged: int) -> None:
        """A message without an item was not answered in time. The first look finds out whether this process was paused,
        with the answer in its socket."""
        with self._changed:
            if self._changed.wait_for(lambda: self._pinged > pinged or self.ended_at is not None, 2 * GLANCE):
                return
        _LOG.warning("the standby (incarnation %d) did not answer for %.1f s", self.incarnation, self._times.held)
        self.end()

    @staticmethod
    def _answered(stream: ServerStream) -> bool:
        answer = stream.read()
        if answer is None:
            return False
        frame, body = answer
        if kind_of(frame) != "replica" or not frame.replica.held or body is not None:
            raise Refusal(RefusalCode.INVALID, "a standby answers with `held` and nothing else")
        return True


class Replication:
    """Sends a shard's state and updates to its standbys, one at a time; see `Standbys`. Thread-safe."""

    def __init__(
        self,
        digest: bytes,
        *,
        incarnation: int,
        admitted: Callable[[], None],
        standby_lost: Callable[[float, bool], None],
        coordinator: Callable[[ReplicaState], bool],
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            digest: the partition's digest.
            incarnation: this server's incarnation.
            admitted: called when a standby waits to be filled (`joining`).
            standby_lost: ``standby_lost(when, closed)``, called when the standby was lost. Returns when it is certain
                that the operator did not promote it; raises when it did.
            coordinator: adds the coordinator's state for shard 0's standby; False: the coordinator has left the
                history.
            timeouts: None for the usual ones.
        """
        self._digest, self._incarnation = digest, incarnation
        self._times = timeouts or Timeouts()
        self._admitted, self._standby_lost, self._coordinator = admitted, standby_lost, coordinator
        self._lock = threading.Lock()
        self._joining: Replica | None = None
        self._current: Replica | None = None
        self._stopped = False

    @property
    def in_sync(self) -> bool:
        """Whether no standby is still behind."""
        current = self._current
        return current is None or current.in_sync

    @property
    def standby(self) -> int:
        """The incarnation of the standby that holds the whole state, or 0 if none does."""
        current = self._current
        return current.incarnation if current is not None and current.in_sync and current.ended_at is None else 0

    def serve(self, hello: Hello, stream: ServerStream) -> None:
        """Serve a standby's stream until it ends."""
        if hello.partition_digest != self._digest or hello.expected_incarnation != self._incarnation:
            stream.write(frames.refused(Refusal(RefusalCode.MOVED, "expected another incarnation or partition")))
            return
        replica = Replica(hello.peer.incarnation, self._times)
        with self._lock:
            if self._stopped:
                return
            newest = max(other.incarnation for other in (self._joining, self._current, replica) if other is not None)
            if replica.incarnation < newest:
                stream.write(frames.refused(Refusal(RefusalCode.REPLACED, f"incarnation {newest} has replaced it")))
                return
            if self._joining is not None:
                self._joining.end()
            self._joining = replica
        self._admitted()
        replica.run(stream)

    @property
    def dialled(self) -> bool:
        """Whether a standby waits to be filled. Neither it nor an earlier standby was promoted when it connected."""
        joining = self._joining
        return joining is not None and joining.ended_at is None

    def joining(self) -> Replica | None:
        """Returns a standby to be filled now, returned once."""
        with self._lock:
            replica, self._joining = self._joining, None
            return replica if replica is not None and replica.ended_at is None else None

    def prepare(
        self,
        engine: Engine,
        version: int,
        contributions: Sequence[Contribution],
        gradients: Sequence[Sequence[np.ndarray]],
        infos: Sequence[GradientInfo],
        divisor: float,
    ) -> PreparedMean:
        """See `Standbys`. A separate program computes the mean, even when no standby is connected.

        In an update that contains the mean, the compiler might round differently.
        """
        return PreparedMean.of(engine, version, contributions, gradients, infos, divisor, copy=not self.in_sync)

    def fill(self, replica: Replica, state: ReplicaState, snapshot: Any, prepared: Operand | None) -> None:
        """See `Standbys`."""
        before, self._current = self._current, None
        if before is not None:
            before.end()  # no need to wait: a standby that connects was not promoted
        if not self._coordinator(state):
            replica.end()  # it connects again
            return
        entries = snapshot.entries
        replica.put(lambda: _state_frames(state, entries))
        if prepared is not None:
            assert isinstance(prepared, PreparedMean)
            replica.put(prepared.kept().frames)
        self._current = replica
        _LOG.info("sending the state of version %d to the standby (incarnation %d)", state.version, replica.incarnation)

    def send_prepared(self, prepared: Operand) -> Hold:
        """See `Standbys`."""
        assert isinstance(prepared, PreparedMean)
        return self._send(prepared.frames)

    def send_commit(self, commit: Commit) -> Hold:
        """See `Standbys`."""
        return self._send(lambda: iter([(Frame(replica=ReplicaFrame(commit=commit)), ())]))

    def end(self) -> None:
        """The state that the standbys hold is void: they connect again."""
        with self._lock:
            for replica in (self._joining, self._current):
                if replica is not None:
                    replica.end()
            self._current = None

    def stop(self) -> None:
        """Stop permanently."""
        self._stopped = True
        self.end()

    def _send(self, item: Item) -> Hold:
        replica = self._current
        if replica is None:
            return _nothing
        number = replica.put(item)

        def hold() -> None:
            if not replica.wait(number):
                self._settle(replica)

        return hold

    def _settle(self, replica: Replica) -> None:
        """The standby is lost. Continue without it as soon as it is certain that the operator did not promote it."""
        if self._current is replica:
            if replica.in_sync and not self._stopped:
                assert replica.ended_at is not None
                self._standby_lost(replica.ended_at, replica.closed_by_peer)
            self._current = None


def _nothing() -> None:
    pass


def _state_frames(state: ReplicaState, entries: Sequence[Any]) -> Iterator[tuple[Frame, Sequence[np.ndarray]]]:
    yield Frame(replica=ReplicaFrame(state=state)), ()
    for entry in entries:
        data = entry.value.view(np.uint8)
        for at in range(0, data.nbytes, CHUNK_BYTES):
            array = ReplicaArray(key=entry.key, start=entry.start, stop=entry.stop, offset=at)
            yield Frame(replica=ReplicaFrame(array=array)), (data[at : at + CHUNK_BYTES],)
    yield WHOLE, ()
