"""The effect of each fault on a process, at the step in the script and at no other."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from between import LONG

from backstay import _faults, _instrument
from backstay._checkpoint import PosixFolder
from backstay._faults import Injector, parse
from backstay._process import Environment
from backstay._transport import Cover, Refusal
from backstay.errors import CheckpointError, ConfigurationError
from backstay_rpc.control_pb2 import Frame, PushBegin
from backstay_spec import contract
from backstay_spec.runtime import CheckpointConfig, RuntimeConfig

VARIABLES = {
    contract.ENV_ROLE: "worker",
    contract.ENV_INDEX: "1",
    contract.ENV_INCARNATION: "1",
    contract.ENV_SERVERS: "127.0.0.1:1",
    contract.ENV_TOKEN: "t",
    contract.ENV_CONFIG: RuntimeConfig(shards=1, workers=2).model_dump_json(),
}
CHILD = """
import os, sys
from backstay import _faults, _instrument
from backstay._process import Environment
_faults.install(Environment.read(os.environ), os.environ)
for step in range(int(sys.argv[1])):
    _instrument.reach("compute", step)
    print("computed", step, flush=True)
"""


@pytest.fixture
def install():
    """Take a script in this process, for one test."""

    def one(script: str, **more: str) -> None:
        variables = {**VARIABLES, **more, _faults.ENV_FAULTS: script}
        environment = Environment.read(variables)
        assert environment is not None
        _faults.install(environment, variables)

    yield one
    one("")


def child(script: str, steps: int) -> subprocess.Popen[str]:
    environment = {**os.environ, **VARIABLES, _faults.ENV_FAULTS: script}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(steps)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("script", "status"), [("kill worker/1 @3", -signal.SIGKILL), ("exit worker/1 @3 137", 137)])
def test_a_process_ends_at_its_step(script: str, status: int) -> None:
    process = child(script, 6)
    try:
        out, err = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == status
    assert out.split("\n")[:-1] == ["computed 0", "computed 1", "computed 2"]
    assert f"fault injected at step 3: {script}" in err


def test_a_stopped_process_is_stopped_completely_and_continued_by_its_helper() -> None:
    """The kernel reports that the process stopped, and only its own helper continues it."""
    process = child("stop worker/1 @2 1s", 4)  # long enough for this process to get a processor meanwhile
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        out, _ = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 0
    assert out.split("\n")[:-1] == [f"computed {step}" for step in range(4)]


def test_each_fault_happens_once_and_never_before_its_step(install, capfd: pytest.CaptureFixture[str]) -> None:
    install("delay worker/1 @5 0.001s; delay worker/2 @0 9s; delay worker/1#2 @0 9s; delay worker/1 @6 push 0.001s")
    for step in (0, 4, 7, 8):  # a worker that was late passes over steps: the next one is meant
        _instrument.reach("compute", step)
    assert capfd.readouterr().err == "fault injected at step 7: delay worker/1 @5 0.001s\n"
    _instrument.reach("push", 8)
    assert "delay worker/1 @6 push" in capfd.readouterr().err


def test_a_fault_is_reported_as_a_fact(install) -> None:
    facts: list[tuple[str, dict[str, object]]] = []
    install("delay worker/1 @5 push 0.001s")
    _instrument.report_to(lambda point, notes: facts.append((point, notes)))
    try:
        _instrument.reach("push", 7)
    finally:
        _instrument.report_to(None)
    assert facts == [("fault", {"action": "delay", "role": "worker", "where": "push", "step": 7})]


def test_a_script_that_cannot_be_understood_fails_the_pod(install) -> None:
    with pytest.raises(ConfigurationError, match="'boom' is not an action"):
        install("boom worker/1 @3")


def test_cut_ends_the_connections_that_this_process_opened_too(install) -> None:
    install("cut worker/1 @1")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.settimeout(LONG)
            _instrument.reach("compute", 0)
            theirs.sendall(b"x")
            assert ours.recv(1) == b"x"
            _instrument.reach("compute", 1)
            assert ours.recv(1) == b""


def test_a_full_disk_fails_the_checkpoint_and_leaves_nothing_behind(install, tmp_path: Path) -> None:
    folder = PosixFolder(tmp_path / "ckpt")
    config = RuntimeConfig(shards=1, workers=2, checkpoint=CheckpointConfig(uri="/c", every_steps=5))
    role = {
        contract.ENV_ROLE: "parameter-server",
        contract.ENV_INDEX: "0",
        contract.ENV_CONFIG: config.model_dump_json(),
    }
    install("fill server/0 @5 1000s", **role)
    _instrument.reach("applied", 4)
    folder.write("a", b"1")
    _instrument.reach("applied", 5)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
        folder.write("b", b"2")
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["a"]


def test_a_corrupt_frame_is_one_that_the_rules_of_the_stream_refuse() -> None:
    injector = Injector(parse("corrupt worker/1 @2"), "worker", 1, 1)
    frame = Frame(push_begin=PushBegin(bytes=4096))
    assert injector.alter("frame", frame) is frame
    injector.reach("compute", 2)
    end = Frame()
    end.end.bytes = 1
    assert injector.alter("frame", end) is end
    damaged = injector.alter("frame", frame)
    with pytest.raises(Refusal):
        Cover([4096]).announce(damaged.push_begin.bytes)
    Cover([4096]).announce(frame.push_begin.bytes)
    assert injector.alter("frame", frame) is frame


def test_nan_makes_the_parameters_of_one_contribution_not_finite() -> None:
    """Arrays of dtypes with NaN change, and integers stay. The next contribution is computed from valid parameters."""
    injector = Injector(parse("nan worker/1 @3"), contract.ROLE_WORKER, 1, 1)
    params = [jnp.ones(2), jnp.ones(2, jnp.bfloat16), np.ones(2, np.float32), jnp.int32(4)]
    injector.reach("compute", 2)
    assert injector.alter("params", params) is params
    injector.reach("compute", 3)
    altered = injector.alter("params", params)
    assert [leaf.dtype for leaf in altered] == [leaf.dtype for leaf in params]
    assert [bool(jnp.isnan(leaf).all()) for leaf in altered] == [True, True, True, False]
    assert injector.alter("params", params) is params
