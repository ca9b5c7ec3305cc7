"""Ends TCP connections of gRPC from outside.

A server of gRPC cannot close the connection of one peer: a caller without a token would stay connected (T8). But the
sockets belong to this process: a reset of a socket ends every call on it immediately, both ways.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

__all__ = [
    "NO_LINGER",
    "Address",
    "Connection",
    "connection_of",
    "listening_socket",
    "peer_address",
    "received_bytes",
    "reserve_descriptors",
    "reset",
    "reset_one",
    "reset_peers",
    "socket_address",
    "socket_descriptors",
]

Address: TypeAlias = tuple[str, int]
Connection: TypeAlias = tuple[Address, Address]
"""(own address, peer's address)."""

# Closing sends a reset. Without it, a peer whose data is not read any more waits forever for room to send.
NO_LINGER: Final = struct.pack("ii", 1, 0)


# tcpi_bytes_received in struct tcp_info of Linux (include/uapi/linux/tcp.h): a u64 at byte 128.
_TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = struct.Struct("=128xQ")


class _Spare:
    """A descriptor for reading sockets when the process has no free one, as in a flood of connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._number = os.dup(self._null)

    @contextlib.contextmanager
    def duplicate(self, number: int) -> Iterator[socket.socket]:
        """The socket of a descriptor, which stays open until this ends."""
        with self._lock:
            os.dup2(number, self._number, inheritable=False)
            try:
                sock = socket.socket(fileno=self._number)
                try:
                    yield sock
                finally:
                    sock.detach()
            finally:
                os.dup2(self._null, self._number, inheritable=False)


_spares: list[_Spare] = []


def reserve_descriptors() -> None:
    """From now on, the functions of this module work even while the process can open no further file."""
    if not _spares:
        _spares.append(_Spare())


def reset(wanted: Callable[[Connection], bool]) -> int:
    """Shuts down the TCP connections of this process that are `wanted`; returns how many there were."""
    count = 0
    for number, _ in socket_descriptors():
        connection = connection_of(number)
        if connection is not None and wanted(connection):
            count += reset_one(number, connection)
    return count


def reset_peers(port: int | None, wanted: Callable[[Address], bool]) -> int:
    """Calls `reset` by the peer's address, for the connections whose local port is `port`, or for all if it is None."""
    return reset(lambda connection: port in (None, connection[0][1]) and wanted(connection[1]))


def socket_descriptors() -> Iterator[tuple[int, int]]:
    """Yields the number and the inode of every open socket of this process."""
    names: Iterable[str] | range
    try:
        names = os.listdir("/dev/fd")  # noqa: PTH208  # Linux and macOS; a Path for each would cost more
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        names = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # all of them are in use
    for name in names:
        try:
            status = os.fstat(int(name))
        except (OSError, ValueError):
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino


def connection_of(number: int) -> Connection | None:
    """Returns the TCP connection of a descriptor, or None if it is not a connected TCP socket."""
    with contextlib.suppress(OSError), _duplicate(number) as sock:  # a listening socket has no peer
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            return socket_address(sock.getsockname()), socket_address(sock.getpeername())
    return None


def reset_one(number: int, connection: Connection) -> bool:
    """Close a connection, if the descriptor still belongs to it."""
    with contextlib.suppress(OSError), _duplicate(number) as sock:
        if (socket_address(sock.getsockname()), socket_address(sock.getpeername())) == connection:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def received_bytes(number: int) -> int:
    """Returns the bytes received on a connection since it was opened; 0 where the system does not report them."""
    if not sys.platform.startswith("linux"):
        return 0
    with contextlib.suppress(OSError), _duplicate(number) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES:
            received: int = _RECEIVED.unpack(info)[0]
            return received
    return 0


def peer_address(peer: str) -> Address:
    """Returns the address of ``ipv4:127.0.0.1:4242`` or ``ipv6:%5Bfe80::1%252%5D:4242``, as gRPC writes a peer."""
    host, _, port = peer.partition(":")[2].rpartition(":")
    host = unquote(host).strip("[]").removeprefix("::ffff:")
    return (host, int(port)) if port.isdigit() else (peer, 0)


@contextlib.contextmanager
def _duplicate(number: int) -> Iterator[socket.socket]:
    """The same socket, even if the number is closed or reused meanwhile."""
    try:
        copy = os.dup(number)
    except OSError as error:
        if error.errno != errno.EMFILE or not _spares:
            raise
        with _spares[0].duplicate(number) as sock:
            yield sock
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # the number is another kind of file by now
        os.close(copy)
        raise
    with sock:
        yield sock


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens for TCP connections, and waits without limit.

    Args:
        host: address to bind. ``0.0.0.0`` and ``::`` mean all addresses, of IPv4 and of IPv6, as they do in gRPC.
        port: 0 for any.

    Raises:
        OSError: the address cannot be bound.
    """
    every = host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()  # noqa: S104  # it only recognises them
    family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
    sock = socket.create_server(("::" if every else host, port), family=family, backlog=1024, dualstack_ipv6=every)
    sock.settimeout(None)  # a script may have called `socket.setdefaulttimeout`
    return sock


def socket_address(name: tuple[Any, ...]) -> Address:
    """Returns the address of a socket, with the number of its interface if it is link-local, as gRPC writes it.

    Args:
        name: what `getsockname` or `getpeername` returned.
    """
    host, port, scope = name[0].removeprefix("::ffff:"), name[1], name[3] if len(name) > 3 else 0
    return (f"{host.partition('%')[0]}%{scope}" if scope else host), port
