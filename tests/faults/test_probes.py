"""A kubelet's probe of a stopped process times out. When the process continues, this is not an error of the process."""

from __future__ import annotations

import errno
import socket
import struct
import threading

import pytest

from backstay._roles._metrics import HttpPort, Metrics


def test_a_probe_that_went_away_leaves_nothing_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    asked, gone = threading.Event(), threading.Event()
    handlers: list[threading.Thread] = []

    def ready() -> bool:
        handlers.append(threading.current_thread())
        asked.set()
        return gone.wait(60)

    port = HttpPort(Metrics("job", "Worker", 0), ready, bind="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as probe:
            probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            assert asked.wait(60)
            # Closed with a reset, so that the first byte of the answer fails.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.set()
        handlers[0].join(60)
        assert not handlers[0].is_alive()
    finally:
        port.close()
    assert capfd.readouterr().err == ""


def test_a_probe_by_ipv6_is_answered_by_a_pod_that_binds_all_addresses() -> None:
    port = HttpPort(Metrics("job", "Worker", 0), lambda: True, bind="0.0.0.0", port=0)
    try:
        for host in ("127.0.0.1", "::1"):
            try:
                probe = socket.create_connection((host, port.port), 30)
            except OSError as error:
                if host == "::1" and error.errno == errno.EADDRNOTAVAIL:
                    pytest.skip("this machine has no IPv6 on its loopback interface")
                raise
            with probe:
                probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert b" 200 " in probe.recv(100)
    finally:
        port.close()
