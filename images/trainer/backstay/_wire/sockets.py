"""Ends connections of a gRPC server from outside.

Arrow Flight's server can neither end a call nor stop while one is open: a handler that waits for the next frame of an
idle client, or writes to a stopped one, would wait for ever (T8), and a fenced pod would stay connected (T6). But the
sockets are this process's own: shutting one down ends every call on it at once, both ways.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

__all__ = ["Address", "shut_down"]

Address: TypeAlias = tuple[str, int]


def shut_down(port: int | None, wanted: Callable[[Address], bool]) -> int:
    """Shuts down the TCP connections of this process whose own port is `port`: those that a server accepted.

    Args:
        port: the port that the server listens on; None for any, so those that this process opened too.
        wanted: decides by the address of the other end.

    Returns:
        How many there were.
    """
    count = 0
    for entry in list(Path("/dev/fd").iterdir()):  # Linux and macOS
        try:
            # A duplicate stays the same socket whatever happens to the number meanwhile.
            copy = os.dup(int(entry.name))
        except (OSError, ValueError):
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                continue
            with socket.socket(fileno=os.dup(copy)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if port is not None and sock.getsockname()[1] != port:
                    continue
                host, peer_port = sock.getpeername()[:2]
                if wanted((host.removeprefix("::ffff:"), peer_port)):
                    # A reset, once gRPC closes it: a peer whose data nobody reads any more would otherwise wait for room.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # the listening socket has no peer; another may just have been closed
            continue
        finally:
            with contextlib.suppress(OSError):
                os.close(copy)
    return count
