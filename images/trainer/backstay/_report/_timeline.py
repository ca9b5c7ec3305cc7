"""Keeps the newest spans of all pods of a job on shard 0's server, for `backstay trace` and for storing at a death."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from backstay_rpc.control_pb2 import Peer, Timeline

from .._checkpoint import PosixFolder, Records, record_name
from .._process import HANGS, output_end, stacks
from .._transport import Link, Outbox
from ._black_box import BlackBox

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._process import Environment
    from ._http import HttpPort

__all__ = ["SpanCollector", "Tracing"]

_AFTER: Final = 5.0
"""Seconds after the death of a pod until the timeline is stored: it has the start of the replacement then."""

_SOONEST: Final = 60.0
"""Seconds between two timelines that are stored because pods died."""

_CLOSE: Final = 5.0

_COPIES: Final = 8
"""Messages about this server, one a second, that wait for the heartbeat of the worker that keeps them."""

_SILENT: Final = 6.0
"""Seconds after which another worker keeps them."""

_LARGEST: Final = 1 << 20
"""Bytes of one message that are kept. A pod sends a tenth of it."""


class SpanCollector:
    """Keeps the newest messages with spans, and does not read them. Thread-safe."""

    def __init__(
        self,
        server: Peer,
        capacity: int,
        *,
        job: str,
        namespace: str,
        uid: str,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            server: this server.
            capacity: bytes that are kept; 0: nothing is.
        """
        self._server, self._capacity = server, capacity
        self._job, self._namespace, self._uid = job, namespace, uid
        self._clock, self._unix_clock = clock, unix_clock
        self._lock = threading.Lock()
        self._kept: deque[tuple[str, bytes]] = deque()  # by the name of the slot, such as worker-3
        self._size = self._dropped = 0

    def add(self, peer: Peer, spans: bytes) -> None:
        """Keep a serialized `Spans` of `peer`; the oldest ones make room."""
        if not spans or not self._capacity:
            return
        with self._lock:
            if len(spans) > min(_LARGEST, self._capacity):
                self._dropped += len(spans)
                return
            self._kept.append((f"{peer.role}-{peer.index}", spans))
            self._size += len(spans)
            while self._size > self._capacity:
                oldest = self._kept.popleft()[1]
                self._size -= len(oldest)
                self._dropped += len(oldest)

    def spans(self, slot: str) -> list[bytes]:
        """Returns the messages of the pods of a slot, such as ``worker-3``."""
        with self._lock:
            return [spans for name, spans in self._kept if name == slot]

    def timeline(self) -> bytes:
        """Returns a serialized `Timeline`."""
        with self._lock:
            kept, dropped = [spans for _, spans in self._kept], self._dropped
        return Timeline(
            job=self._job,
            namespace=self._namespace,
            uid=self._uid,
            server=self._server,
            clock=self._clock(),
            unix_seconds=self._unix_clock(),
            spans=kept,
            dropped=dropped,
        ).SerializeToString()


class Tracing:
    """A server's part in the timeline. It sends its spans to shard 0's server, which keeps those of all pods. They are
    stored when a pod dies and when the job ends. Thread-safe.
    """

    def __init__(
        self,
        environment: Environment,
        peer: Peer,
        store: CheckpointStore | None,
        link: Link | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            peer: this server.
            store: the checkpoint store; None: the job stores no checkpoints.
            link: the link to shard 0; None: this is shard 0.
        """
        self._outbox, self._peer, self._link = Outbox(peer, clock=clock, unix_clock=unix_clock), peer, link
        self._clock, self._unix_clock = clock, unix_clock
        self._uid = environment.short_uid
        self._collector = SpanCollector(
            peer,
            environment.config.trace_megabytes << 20,
            job=environment.job,
            namespace=environment.namespace,
            uid=environment.uid,
            clock=clock,
            unix_clock=unix_clock,
        )
        folders = [store.folder] if store is not None else []
        if environment.keep is not None:
            folders.append(PosixFolder(environment.keep))
        self._keeps = link is None and environment.config.trace_megabytes > 0
        self.records = Records(folders)
        self.black_box = BlackBox(environment, self.records, self._collector.spans, clock=clock, unix_clock=unix_clock)
        self._lock = threading.Lock()
        self._copies: deque[bytes] = deque(maxlen=_COPIES)  # of the messages about this server
        self._keeper, self._copied = -1, clock() - _SILENT
        self._incarnations: dict[str, int] = {f"{peer.role}-{peer.index}": 1}
        self._due: float | None = None
        self._stored = -_SOONEST
        self._ticked = clock()
        self._ending = False

    def serve(self, port: HttpPort) -> None:
        """Show the timeline on the page `/trace`."""
        if self._link is None:
            port.trace = self.timeline

    def timeline(self) -> bytes:
        """Returns a serialized `Timeline`, up to now."""
        self._own()
        return self._collector.timeline()

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """Keep the spans of another pod: a serialized `Spans`."""
        self._collector.add(peer, spans)

    def copies(self, rank: int) -> list[bytes]:
        """Returns the messages about this server since the last call, for the heartbeat of the worker `rank`. One
        worker keeps them for the next server; another one takes its place when it is silent.
        """
        with self._lock:
            now = self._clock()
            if not self._copies or (rank != self._keeper and now - self._copied < _SILENT):
                return []
            self._keeper, self._copied = rank, now
            copies = list(self._copies)
            self._copies.clear()
        return copies

    def replaced(self, incarnations: Mapping[str, int]) -> None:
        """Take the newest incarnations, such as ``{"worker-3": 2}``, of which a newer one means that a pod died."""
        with self._lock:
            died = any(number > self._incarnations.get(name, max(number, 1)) for name, number in incarnations.items())
            self._incarnations.update(incarnations)
            if died and self._due is None:
                self._due = max(self._clock() + _AFTER, self._stored + _SOONEST)

    def ending(self) -> None:
        """The server ends: from now on its main thread waits for others, and `tick` is not called."""
        self._ending = True

    def tick(self) -> None:
        """Call it about once a second, in the main thread."""
        self._ticked = self._clock()
        self._own()
        if self._link is None:
            self.black_box.tick()
        with self._lock:
            is_due = self._due is not None and self._clock() >= self._due
            if is_due:
                self._due, self._stored = None, self._clock()
        if is_due:
            self._store()

    def leaving(self) -> None:
        """Send the last spans to shard 0's server. Call it before the link is closed, from the main thread."""
        if self._link is not None:
            self._own()

    def close(self) -> None:
        """Store the end of the job."""
        self._own()
        if self._link is None:
            self.black_box.tick(every=True)
            self.black_box.leaves()
        self._store()
        self.records.close(_CLOSE)

    def stopping(self) -> None:
        """If the main thread hangs, store its stack. Called when this server receives SIGTERM."""
        if self._ending or self._clock() - self._ticked < HANGS:
            return
        name = f"{self._peer.role}-{self._peer.index}-{self._peer.incarnation}-{self._uid}-stacks"
        found = {"slot": f"{self._peer.role}-{self._peer.index}", "stacks": stacks(), "output": output_end()}
        self.records.put("report", record_name("report", self._unix_clock(), name), json.dumps(found, indent=1).encode)

    def _own(self) -> None:
        if self._link is not None:
            self._link.send_spans(self._outbox.take)
        elif (spans := self._outbox.take(0)) is not None:
            message = spans.SerializeToString()
            self._collector.add(self._peer, message)
            with self._lock:
                self._copies.append(message)

    def _store(self) -> None:
        if self._keeps:
            name = record_name("trace", self._unix_clock(), f"{self._uid}-{self._peer.incarnation}")
            # Made in the thread that writes: copies of the timeline do not wait in memory.
            self.records.put("trace", name, lambda: gzip.compress(self._collector.timeline(), 1))
