"""Nothing waits forever for the other end of a data stream (T8). A data port listens where a pod is reached."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backstay._process import listening_socket
from backstay._transport import frames
from backstay._transport._streams._tcp import ClientStream, PortTaken
from backstay._transport._tensors._server import DataServer
from backstay._update import ALL_AVERAGED
from backstay.errors import JobFailed, PeerLost, Refused
from backstay_rpc.control_pb2 import (
    Done,
)

from .pushes import BIG, SMALL, Make, commit_alone, push_of, values


def test_cancel_ends_a_wait(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    """T8: the error contains the watchdog's message."""
    shard = make_shard((BIG,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    client.cancel("no heartbeat for 10 s")
    with pytest.raises(PeerLost, match="shard 0: no heartbeat for 10 s"):
        waiting.result(kit.wait)
    with pytest.raises(PeerLost, match="no heartbeat"):
        client.exchange_all(None, 0, [shard.buffers()])


def test_cancel_ends_a_push_to_a_server_that_is_stopped(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T8: a client does not notice that its peer was paused; its write must end when the watchdog cancels it."""
    shard = make_shard((5 * BIG,))
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("stopping_server.py")), kit.token, kit.certificates],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        shard.server = SimpleNamespace(port=int(process.stdout.readline()))
        client = dial(shard)
        waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        client.cancel("no heartbeat for 10 s")
        with pytest.raises(PeerLost, match="no heartbeat"):
            waiting.result(kit.wait)
    finally:
        process.kill()
        process.communicate()


def test_closing_the_server_ends_idle_waiting_and_stuck_streams(
    kit: SimpleNamespace, make_shard: Make, dial: Make, stream: Make, background: Any
) -> None:
    """T8: one between two exchanges, one that waits for a version, one that is written to and does not read."""
    shard = make_shard((20 * BIG,), serve=True)
    idle, waits, stuck = dial(shard), dial(shard, rank=1), stream(shard, 2)
    idle.exchange_all(None, 0, [shard.buffers()])
    waiting = background(lambda: waits.exchange_all(push_of(kit, shard, 1.0, rank=1), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    stuck.write(frames.pull(0))
    assert stuck.read()[0].WhichOneof("kind") == "params_begin"
    shard.runtime.close()
    assert shard.server.close(kit.wait)
    with pytest.raises(PeerLost):
        waiting.result(kit.wait)
    with pytest.raises(PeerLost):
        idle.exchange_all(None, 0, [shard.buffers()])
    with pytest.raises(PeerLost):
        dial(shard).exchange_all(None, 0, [shard.buffers()])


def test_a_cut_connection_is_a_lost_peer(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    """T1, T8: the complete gradient stays; only the worker's stream ends."""
    shard = make_shard((BIG,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    assert shard.server.disconnect(lambda hello: hello.peer.index == 0) == 1
    with pytest.raises(PeerLost):
        waiting.result(kit.wait)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    shard.coordination.wait_for("applied")
    assert shard.coordination.of("lost") == []


def test_cut_anywhere_a_gradient_counts_whole_or_not_at_all(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T1, T3: connections are cut at any point of an exchange. A staged gradient is applied once, others are lost."""
    shard = make_shard((3 * BIG,), serve=True)
    shard.coordination.decide = commit_alone(kit, shard)
    for attempt in range(12):
        client, into = dial(shard), shard.buffers()
        push = push_of(kit, shard, 1.0, version=shard.runtime.version, attempt=attempt)
        running = background(lambda c=client, p=push, i=into: c.exchange_all(p, 0, [i]))
        if attempt % 2:
            shard.coordination.wait_reported(push.id, running.done)
        shard.server.disconnect(lambda hello: True)
        client.cancel("cut")
        # Refused: two before it are not decided yet.
        with contextlib.suppress(PeerLost, Refused):
            assert running.result(kit.wait).version > push.id.version
    into = shard.buffers()
    pulled = dial(shard).exchange_all(None, 1, [into])
    assert values(shard, into) == [float(pulled.version)]
    assert shard.engine.applied[: pulled.version] == [[1.0]] * pulled.version
    assert not shard.coordination.of("failed")


def test_a_server_that_is_not_there(kit: SimpleNamespace, stack: ExitStack) -> None:
    """T8."""
    with socket.socket() as sock:  # bound and not listening: no other process gets the port
        sock.bind(("127.0.0.1", 0))

        def read() -> None:
            end = ClientStream(f"127.0.0.1:{sock.getsockname()[1]}", kit.hello(0), kit.credentials)
            stack.callback(end.close)
            end.read()

        with pytest.raises(PeerLost, match=r"127\.0\.0\.1:\d+"):
            read()


def test_a_process_that_fails_ends_while_a_client_is_connected(kit: SimpleNamespace, stack: ExitStack) -> None:
    """T8: a server that raises without closing anything, with an idle client."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forgetful_server.py")), kit.token, kit.certificates],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        end = ClientStream(f"127.0.0.1:{int(process.stdout.readline())}", kit.hello(0), kit.credentials)
        stack.callback(end.close)
        assert end.read()[0].WhichOneof("kind") == "abandon"
        process.communicate("go on", timeout=kit.wait)
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()


def test_ipv6(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((SMALL,))
    try:
        server = DataServer(shard.runtime, host="::1", port=0, credentials=kit.credentials)
    except PortTaken:
        pytest.skip("this machine has no IPv6 on its loopback interface")
    try:
        end = ClientStream(f"[::1]:{server.port}", kit.hello(0), kit.credentials)
        end.write(frames.pull(0))
        assert end.read()[0].params_begin.version == 0
        assert server.disconnect(lambda hello: True) == 1
        end.close()
    finally:
        server.close()


def test_all_addresses_are_those_of_ipv4_and_of_ipv6(kit: SimpleNamespace, make_shard: Make) -> None:
    """A pod binds ``0.0.0.0``, even where pods have addresses of IPv6 only."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 on its loopback interface")
    server = DataServer(make_shard((SMALL,)).runtime, host="0.0.0.0", port=0, credentials=kit.credentials)
    try:
        for host in ("127.0.0.1", "[::1]"):
            end = ClientStream(f"{host}:{server.port}", kit.hello(0), kit.credentials)
            end.write(frames.pull(0))
            assert end.read()[0].params_begin.version == 0
            end.close()
    finally:
        server.close()


def test_a_port_does_not_have_the_timeout_that_a_script_has_set() -> None:
    socket.setdefaulttimeout(0.01)
    try:
        with listening_socket("127.0.0.1", 0) as listening:
            assert listening.gettimeout() is None
    finally:
        socket.setdefaulttimeout(None)


def test_a_failed_job_states_the_reason(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    shard = make_shard((SMALL,), serve=True)
    client = dial(shard)
    waiting = background(lambda: client.exchange_all(push_of(kit, shard, 1.0), 0, [shard.buffers()]))
    shard.coordination.wait_for("staged")
    shard.runtime.deliver(Done(failed="three updates in a row were not finite", reason="NonFiniteGradients"))
    with pytest.raises(JobFailed, match="three updates in a row") as failed:
        waiting.result(kit.wait)
    assert failed.value.reason == "NonFiniteGradients"


def test_the_average_of_the_parameters_is_sent_for_the_last_version_only(
    kit: SimpleNamespace, make_shard: Make, dial: Make
) -> None:
    """T4, O7: an earlier one would change while it is sent. A refused pull ends one stream, and nothing else."""
    shard = make_shard((3 * BIG, 5), serve=True)
    shard.engine.has_average = True
    shard.engine.values = [np.arange(value.size, dtype=value.dtype) for value in shard.engine.values]
    into = shard.buffers()
    with pytest.raises(Refused, match="exists for the last version only"):
        dial(shard).exchange_all(None, 0, [into], ALL_AVERAGED)
    shard.runtime.deliver(Done(version=0))
    assert dial(shard).exchange_all(None, 0, [into], ALL_AVERAGED).done
    for block, value in zip(into, shard.engine.values, strict=True):
        np.testing.assert_array_equal(block.view(value.dtype), value / 2)
    shard.engine.has_average = False
    with pytest.raises(Refused, match="training has no average"):
        dial(shard).exchange_all(None, 0, [into], ALL_AVERAGED)
