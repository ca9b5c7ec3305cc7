"""Closes the connections to a port whose peer does not prove that it belongs to the job (O7, T8).

gRPC accepts connections from any host. It cannot bound their number, their slowness, or the bytes that they send before
a handler gets the call. The guard watches the sockets from outside gRPC. A connection is proven by its first call with
the job's token. Without such a call, the guard closes it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from backstay_rpc.limits import CONTROL_STRANGERS, MAX_REFUSED, MAX_UNPROVEN_BYTES

from ._sockets import (
    Address,
    Connection,
    connection_of,
    peer_address,
    received_bytes,
    reserve_descriptors,
    reset_one,
    reset_peers,
    socket_descriptors,
)

__all__ = ["ConnectionGuard", "Warnings"]

_LOG = logging.getLogger(__name__)

SCAN_SECONDS: Final = 0.1
"""The time between two scans of the sockets. gRPC keeps the bytes that unauthenticated callers send in this time."""

LATE_SECONDS: Final = 3 * SCAN_SECONDS
"""A longer time between two scans shows that this process got no processor: it may not have handled a call yet."""

MAX_LATE_LOOKS: Final = 3
"""The number of late scans that excuse a connection that has sent too much."""

CROWDED_SECONDS: Final = 3.0
"""With more strangers than the limit, the guard closes each one that is older than this."""

SCAN_SHARE: Final = 0.1
"""The share of a processor for scans, because of which the next scan comes later with thousands of sockets."""

WARN_SECONDS: Final = 60.0
_MAX_HOSTS: Final = 1024


class Warnings:
    """Logs what a host did: immediately, then at most every `WARN_SECONDS`, with the number of times. Thread-safe."""

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            what: the port, for the message, such as ``the control port``.
        """
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self._warned_at: dict[tuple[str, str], float] = {}
        self._since: Counter[tuple[str, str]] = Counter()

    def add(self, host: str, deed: str, count: int = 1) -> None:
        """Record that `host` did `deed`, such as ``a call without the token was refused``."""
        key, now = (host, deed), self._clock()
        with self._lock:
            if len(self._warned_at) >= _MAX_HOSTS and key not in self._warned_at:
                key = ("many hosts", deed)
            self._since[key] += count
            if now - self._warned_at.get(key, -WARN_SECONDS) < WARN_SECONDS:
                return
            self._warned_at[key] = now
            times = self._since.pop(key)
            for old in [other for other, at in self._warned_at.items() if now - at >= 2 * WARN_SECONDS]:
                del self._warned_at[old]
        _LOG.warning("%s: %s, from %s (%d times)", self._what, deed, key[0], times)


@dataclass
class _Unproven:
    """An accepted connection without a call with the token yet."""

    inode: int
    connection: Connection
    scans: int = 0
    late_looks: int = 0  # late scans while it had sent too much


class Sockets:
    """The sockets of this process. One thread scans them every `SCAN_SECONDS`, for all guards."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._guards: list[ConnectionGuard] = []
        self._known: dict[int, Connection | None] = {}  # by inode; None: not connected
        self._thread: threading.Thread | None = None
        self._clock = clock
        self._scanned = clock()

    def add(self, guard: ConnectionGuard) -> None:
        """From now on `guard` is notified of connections to its port."""
        reserve_descriptors()
        with self._lock:
            self._guards.append(guard)
            for inode, connection in self._known.items():
                if connection is not None and connection[0][1] == guard.port:
                    guard.begin(inode, connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="backstay-guard", daemon=True)
                self._thread.start()

    def remove(self, guard: ConnectionGuard) -> None:
        """Stop notifying `guard`."""
        with self._lock:
            self._guards.remove(guard)

    def scan(self, guards: Sequence[ConnectionGuard]) -> None:
        """Scan once, and notify these guards."""
        now = self._clock()
        late, self._scanned = now - self._scanned >= LATE_SECONDS, now
        # By inode: another thread may hold a duplicate of a descriptor for a moment, which is the same connection.
        numbers = {inode: number for number, inode in socket_descriptors()}
        ended = [self._known.pop(inode) for inode in self._known.keys() - numbers.keys()]
        begun = {inode: connection_of(numbers[inode]) for inode in numbers.keys() - self._known.keys()}
        # A descriptor that was closed meanwhile, and may be another socket by now, is read again.
        begun = {inode: connection for inode, connection in begun.items() if _inode(numbers[inode]) == inode}
        self._known |= begun
        for guard in guards:
            for connection in ended:
                if connection is not None and connection[0][1] == guard.port:
                    guard.end(connection)
            for inode, connection in begun.items():
                if connection is not None and connection[0][1] == guard.port:
                    guard.begin(inode, connection)
            guard.scanned(numbers, late=late)

    def _run(self) -> None:
        spent = 0.0
        while True:
            time.sleep(max(SCAN_SECONDS, spent / SCAN_SHARE))
            began = time.thread_time()
            with self._lock:
                guards = list(self._guards)
                if not guards:
                    self._thread = None
                    return
                try:
                    self.scan(guards)
                except OSError as error:  # such as too many open files: the next scan may find fewer
                    _LOG.debug("a scan of the connections failed: %s", error)
            spent = time.thread_time() - began


def _inode(number: int) -> int:
    try:
        return os.fstat(number).st_ino
    except OSError:
        return -1


_SOCKETS: Final = Sockets()


class ConnectionGuard:
    """Watches the connections to one port of this process. Thread-safe."""

    def __init__(self, port: int, what: str, *, grace: float) -> None:
        """
        Args:
            port: the port that is guarded, of this process.
            what: the name of the port in warnings, such as ``the control port``.
            grace: how long a connection may stay without a call with the token, in seconds. It is counted in scans, so
                that a process that was stopped grants each peer the same.
        """
        self.warnings = Warnings(what)
        self.port = port
        self._grace_scans = max(2, round(grace / SCAN_SECONDS))
        self._crowded_scans = min(self._grace_scans, round(CROWDED_SECONDS / SCAN_SECONDS))
        self._lock = threading.Lock()
        self._proven: dict[str, Address] = {}  # by the peer's name in gRPC
        self._names: dict[Address, str] = {}  # of the proven
        self._refused: Counter[Address] = Counter()
        self._unproven: dict[Address, _Unproven] = {}

    def start(self) -> None:
        """Watch until `close`."""
        _SOCKETS.add(self)

    def close(self) -> None:
        """Stop watching."""
        _SOCKETS.remove(self)

    def prove(self, peer: str) -> None:
        """A call with the token came from `peer`, as gRPC writes it."""
        if peer not in self._proven:
            address = peer_address(peer)
            with self._lock:
                self._proven[peer] = address
                self._names[address] = peer

    def refuse(self, peer: str) -> None:
        """A call without the token came from `peer`. After `MAX_REFUSED` of them the connection is closed."""
        address = peer_address(peer)
        self.warnings.add(address[0], "a call without this job's token was refused")
        with self._lock:
            self._refused[address] += 1
            if self._refused[address] < MAX_REFUSED:
                return
            del self._refused[address]
        self.warnings.add(address[0], f"a connection is closed after {MAX_REFUSED} calls without the token")
        reset_peers(self.port, address.__eq__)

    # ---- Called by `Sockets`, one at a time ----

    def begin(self, inode: int, connection: Connection) -> None:
        """A connection was accepted."""
        self._unproven[connection[1]] = _Unproven(inode, connection)

    def end(self, connection: Connection) -> None:
        """A connection has ended: its address proves nothing any more."""
        address = connection[1]
        self._unproven.pop(address, None)
        with self._lock:
            self._proven.pop(self._names.pop(address, ""), None)
            self._refused.pop(address, None)

    def scanned(self, numbers: Mapping[int, int], *, late: bool = False) -> None:
        """Close the connections that are due.

        Args:
            numbers: the descriptors of this process's sockets, by inode.
            late: this scan comes late. The number of received bytes is ignored then: gRPC reads bytes before Python
                handles the call that they begin with.
        """
        for address in [address for address in self._unproven if address in self._names]:
            del self._unproven[address]
        per_host = Counter(address[0] for address in self._unproven)
        for address, found in list(self._unproven.items()):
            found.scans += 1
            number = numbers.get(found.inode)
            if number is None:
                continue
            why = self._why(found, number, per_host, late)
            if why and address not in self._names and reset_one(number, found.connection):
                del self._unproven[address]
                self.warnings.add(address[0], f"a connection was closed: {why}")

    def _why(self, found: _Unproven, number: int, per_host: Counter[str], late: bool) -> str:
        """Returns the reason why this connection has to be closed, or an empty text if it may stay open."""
        if found.scans >= self._grace_scans:
            return f"no call with this job's token arrived within {self._grace_scans * SCAN_SECONDS:.0f} s"
        if found.scans >= self._crowded_scans and per_host[found.connection[1][0]] > CONTROL_STRANGERS.of_host:
            return (
                f"its host has more than {CONTROL_STRANGERS.of_host} connections without a call with this job's token"
            )
        if found.scans >= self._crowded_scans and len(self._unproven) > CONTROL_STRANGERS.in_all:
            return f"more than {CONTROL_STRANGERS.in_all} connections have no call with this job's token"
        if received_bytes(number) > MAX_UNPROVEN_BYTES:
            found.late_looks += late
            if late and found.late_looks <= MAX_LATE_LOOKS:
                return ""
            return f"more than {MAX_UNPROVEN_BYTES >> 10} KiB came before a call with this job's token"
        return ""
