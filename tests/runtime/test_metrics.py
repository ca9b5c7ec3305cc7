"""The metrics that each role exports, with bounded labels, and the HTTP port of a pod."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from typing import get_args

import pytest

from backstay._roles._metrics import HttpPort, Metrics, metric_names
from backstay_spec.types_status import Role


@pytest.mark.parametrize("role", get_args(Role))
def test_a_pod_exports_its_roles_metrics_only(role: Role) -> None:
    page = Metrics("job", role, 1).page().decode()
    mine = {name for name in metric_names() if f"\n{name}{{" in page}
    assert mine <= metric_names(role, 1)
    shared = {"backstay_step"}
    for other in set(get_args(Role)) - {role}:
        assert mine & metric_names(other, 1) == shared
    assert "_created" not in page
    lines = [line for line in page.splitlines() if line.startswith("backstay_")]
    assert len(lines) < 60, role  # a thousand workers are a thousand times that
    labels = f'index="1",role="{role}",training_job="job"'
    assert f"backstay_step{{{labels}}} 0.0" in lines


def test_only_shard_0_exports_the_series_of_the_job() -> None:
    assert "backstay_updates_total" in metric_names("ParameterServer", 0)
    assert "backstay_updates_total" not in metric_names("ParameterServer", 1)


def test_a_script_cannot_make_series_without_end() -> None:
    metrics = Metrics("job", "ParameterServer", 0)
    for number in range(200):
        metrics.train(f"name{number}").set(number)
        metrics.evaluation("x" * 1000 + str(number)).set(number)
    metrics.train("name3").set(-1)
    page = metrics.page().decode()
    assert page.count("\nbackstay_train_metric{") == 50
    assert 'name="name3",role="ParameterServer",training_job="job"} -1.0' in page
    assert page.count("\nbackstay_evaluation{") <= 50
    assert "x" * 101 not in page


def test_of_many_stragglers_the_slowest_are_exported() -> None:
    metrics = Metrics("job", "ParameterServer", 0)
    metrics.stragglers({rank: float(rank) for rank in range(100)})
    page = metrics.page().decode()
    assert page.count("\nbackstay_straggler_delay_seconds{") == 16
    assert 'rank="99"' in page
    assert 'rank="83"' not in page
    metrics.stragglers({3: 1.0})
    assert metrics.page().decode().count("\nbackstay_straggler_delay_seconds{") == 1


def test_a_probe_that_went_away_leaves_nothing_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """A probe of a stopped process times out. When the process continues, this is not an error of the process."""
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
