"""Ends TCP connections of gRPC from outside.

gRPC and Arrow Flight leave waits without an end (T8). A Flight server can neither end a call nor stop while one is
open. A client's write to a peer that is stopped does not return, not even when the call is cancelled. And a pod that
was fenced would stay connected (T6). But the sockets are this process's own: resetting one ends every call on it at
once, both ways.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

__all__ = ["Address", "Connection", "connections", "reset", "shut_down"]

Address: TypeAlias = tuple[str, int]
Connection: TypeAlias = tuple[Address, Address]
"""(own address, the other end's)."""

# Closing sends a reset. Without it a peer whose data nobody reads any more waits for room that never comes.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


def connections() -> set[Connection]:
    """All TCP connections of this process."""
    return {connection for _, connection in _sockets()}


def reset(wanted: Callable[[Connection], bool]) -> int:
    """Shuts down the TCP connections of this process that are `wanted`; returns how many there were."""
    count = 0
    for sock, connection in _sockets():
        if wanted(connection):
            with contextlib.suppress(OSError):  # it was just closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def shut_down(port: int | None, wanted: Callable[[Address], bool]) -> int:
    """`reset` by the address of the other end, of the connections whose own port is `port` (None: of all)."""
    return reset(lambda connection: port in (None, connection[0][1]) and wanted(connection[1]))


def _sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """Every connected TCP socket of this process, as a duplicate that is closed afterwards."""
    for entry in list(Path("/dev/fd").iterdir()):  # Linux and macOS
        try:
            # A duplicate stays the same socket whatever happens to the number meanwhile.
            copy = os.dup(int(entry.name))
        except (OSError, ValueError):
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=copy) as sock:  # a listening socket has no peer
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock, (_address(sock.getsockname()), _address(sock.getpeername()))


def _address(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
