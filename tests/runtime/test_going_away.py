"""A server that is about to end still accepts connections, and sends GOAWAY on each immediately.

gRPC itself retries a call on such a connection, without a pause, while it treats the channel as ready. One thread is
then permanently busy, and the process uses all memory.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from between import LONG

# https://www.rfc-editor.org/rfc/rfc9113#section-6.5 and 6.8: no settings; no stream was or will be looked at.
SETTINGS = struct.pack(">I", 0)[1:] + bytes((4, 0)) + struct.pack(">I", 0)
GOAWAY = struct.pack(">I", 8)[1:] + bytes((7, 0)) + struct.pack(">III", 0, 0, 0)


@pytest.fixture
def going_away() -> Iterator[str]:
    """The address of a server that never takes a call."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            taken.append(connection)
            try:
                connection.sendall(SETTINGS + GOAWAY)
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in taken:
            connection.close()


@pytest.mark.parametrize("dials", ["control", "data", "operator"])
def test_a_server_that_is_going_away_costs_its_callers_no_memory(dials: str, going_away: str) -> None:
    """T8, O1: calls to the server end, and are not repeated forever."""
    dialer = [sys.executable, str(Path(__file__).with_name("dialer.py")), dials, going_away]
    ran = subprocess.run(dialer, capture_output=True, text=True, timeout=LONG, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
