"""The metrics that each role exports, with bounded labels, and the HTTP port of a pod."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
from between import LONG, until

from backstay._process import Bounds
from backstay._report._http import HttpPort
from backstay._report._metrics import PodMetrics, metric_names
from backstay_rpc.limits import MAX_HEAD_BYTES
from backstay_spec.types_status import Role


@pytest.mark.parametrize("role", get_args(Role))
def test_a_pod_exports_its_roles_metrics_only(role: Role) -> None:
    page = PodMetrics("job", role, 1).page().decode()
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
    metrics = PodMetrics("job", "ParameterServer", 0)
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
    metrics = PodMetrics("job", "ParameterServer", 0)
    labels = {"training_job": "job", "role": "ParameterServer", "index": "0"}
    metrics.stragglers({rank: float(rank) for rank in range(100)})
    page = metrics.page().decode()
    assert page.count("\nbackstay_straggler_delay_seconds{") == 16
    assert metrics.registry.get_sample_value("backstay_stragglers", labels) == 100
    assert 'rank="99"' in page
    assert 'rank="83"' not in page
    metrics.stragglers({3: 1.0})
    assert metrics.page().decode().count("\nbackstay_straggler_delay_seconds{") == 1
    assert metrics.registry.get_sample_value("backstay_stragglers", labels) == 1


def test_a_probe_that_went_away_leaves_nothing_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """A probe of a stopped process times out. When the process continues, this is not an error of the process."""
    asked, gone = threading.Event(), threading.Event()

    def ready() -> bool:
        asked.set()
        return gone.wait(LONG)

    port = HttpPort(PodMetrics("job", "Worker", 0), ready, bind="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as probe:
            probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            assert asked.wait(LONG)
            # Closed with a reset, so that the first byte of the answer fails.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.set()
        # The next probe has its answer after the first one.
        with socket.create_connection(("127.0.0.1", port.port)) as probe:
            probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            assert b" 200 " in probe.recv(100)
    finally:
        port.close()
    assert capfd.readouterr().err == ""


def test_a_probe_by_ipv6_is_answered_by_a_pod_that_binds_all_addresses() -> None:
    port = HttpPort(PodMetrics("job", "Worker", 0), lambda: True, bind="0.0.0.0", port=0)
    try:
        for host in ("127.0.0.1", "::1"):
            try:
                probe = socket.create_connection((host, port.port), LONG)
            except OSError as error:
                if host == "::1" and error.errno == errno.EADDRNOTAVAIL:
                    pytest.skip("this machine has no IPv6 on its loopback interface")
                raise
            with probe:
                probe.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert b" 200 " in probe.recv(100)
    finally:
        port.close()


# ---- Callers that break the rules (O7, T8)

REQUEST = b"GET /readyz HTTP/1.1\r\nhost: probe\r\n\r\n"


@pytest.fixture
def ports() -> Iterator[Callable[..., HttpPort]]:
    made: list[HttpPort] = []

    def make(**bounds: float) -> HttpPort:
        made.append(
            HttpPort(
                PodMetrics("job", "ParameterServer", 0),
                lambda: True,
                bind="127.0.0.1",
                port=0,
                bounds=Bounds(**{"in_all": 64, "of_host": 16, "seconds": 3600.0, **bounds}),  # type: ignore[arg-type]
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def strangers() -> Iterator[Callable[[HttpPort, int, int], list[socket.socket]]]:
    made: list[socket.socket] = []

    def connect(port: HttpPort, count: int, hosts: int) -> list[socket.socket]:
        for number in range(count):
            source = f"127.8.{number % hosts // 250}.{1 + number % hosts % 250}", 0
            made.append(socket.create_connection(("127.0.0.1", port.port), LONG, source_address=source))
            with contextlib.suppress(OSError):
                made[-1].sendall(REQUEST[: 1 + number % (len(REQUEST) - 1)])
        return made[-count:]

    yield connect
    for each in made:
        each.close()


def probed(port: HttpPort) -> bytes:
    """Returns the answer to a whole request."""
    with socket.create_connection(("127.0.0.1", port.port), LONG) as probe:
        probe.sendall(REQUEST)
        answer = b""
        while data := probe.recv(1000):
            answer += data
    return answer


def closed(stranger: socket.socket) -> bool:
    """Returns whether the port has closed this connection. Waits for it."""
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("hosts", [1, 400])
def test_o7_slow_strangers_hold_no_thread_and_keep_no_probe_out(
    ports: Callable[..., HttpPort], strangers: Callable[..., list[socket.socket]], hosts: int
) -> None:
    """T8: the oldest of the callers that never end their request is closed, even when each has its own address."""
    port = ports()
    before = threading.active_count()
    found = strangers(port, 400, hosts)
    assert b" 200 OK" in probed(port)
    assert threading.active_count() < before + 10  # and not 400
    assert len(port.callers) <= (16 if hosts == 1 else 64) + 1
    assert all(closed(stranger) for stranger in found[:300])
    assert b" 200 OK" in probed(port)


def test_t8_a_request_that_never_ends_is_closed(
    ports: Callable[..., HttpPort], strangers: Callable[..., list[socket.socket]]
) -> None:
    """O7: its time is bounded, however often it sends a byte."""
    port = ports(seconds=1.0)
    (slow,) = strangers(port, 1, 1)
    with contextlib.suppress(OSError):  # a reset or a broken pipe ends it
        until(lambda: slow.sendall(b"x"))
    until(lambda: b" 200 OK" in probed(port), ignoring=(OSError,))


def test_o7_a_request_with_a_long_head_is_refused(ports: Callable[..., HttpPort]) -> None:
    port = ports()
    with socket.create_connection(("127.0.0.1", port.port), LONG) as stranger:
        stranger.sendall(b"GET /metrics HTTP/1.1\r\n" + b"a" * (MAX_HEAD_BYTES + 1000))
        assert b" 431 " in stranger.recv(100)
    assert b" 200 OK" in probed(port)


@pytest.mark.parametrize("request_line", [b"POST /metrics HTTP/1.1", b"GET", b"\xff\xfe / HTTP/1.1", b"GET / SMTP"])
def test_o7_other_requests_are_refused(ports: Callable[..., HttpPort], request_line: bytes) -> None:
    port = ports()
    with socket.create_connection(("127.0.0.1", port.port), LONG) as stranger:
        stranger.sendall(request_line + b"\r\n\r\n")
        assert b" 400 " in stranger.recv(100)
    assert b" 200 OK" in probed(port)


def test_o7_a_caller_that_does_not_read_a_long_page_is_closed(
    ports: Callable[..., HttpPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8: the next caller gets the page."""
    monkeypatch.setattr("backstay._process._callers.SLOWEST_BYTES", 1 << 40)
    port = ports(seconds=4.0)
    port.trace = lambda: bytes(16 << 20)
    stranger = socket.socket()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with stranger:
        stranger.connect(("127.0.0.1", port.port))
        stranger.sendall(b"GET /trace HTTP/1.1\r\n\r\n")
        stranger.recv(1)
        with socket.create_connection(("127.0.0.1", port.port), LONG) as reader:
            reader.sendall(b"GET /trace HTTP/1.1\r\n\r\n")
            size = 0
            while data := reader.recv(1 << 20):
                size += len(data)
            assert size > 16 << 20


def test_t8_health_is_answered_while_a_page_is_made(ports: Callable[..., HttpPort]) -> None:
    """O7: strangers that read large pages do not delay a probe."""
    port, entered, leave = ports(), threading.Event(), threading.Event()

    def slow() -> dict[str, int]:
        entered.set()
        leave.wait(LONG)
        return {}

    port.status = slow
    try:
        with socket.create_connection(("127.0.0.1", port.port), LONG) as stranger:
            stranger.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            assert entered.wait(LONG)
            assert b" 200 OK" in probed(port)
    finally:
        leave.set()


def test_t8_a_client_that_sends_nothing_more_gets_its_answer(ports: Callable[..., HttpPort]) -> None:
    port = ports()
    with socket.create_connection(("127.0.0.1", port.port), LONG) as client:
        client.sendall(b"GET /metrics HTTP/1.0\n\n")
        client.shutdown(socket.SHUT_WR)
        assert b" 200 OK" in client.recv(1000)
