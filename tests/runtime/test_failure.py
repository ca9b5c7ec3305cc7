"""The termination message describes an exception of the script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from between import LONG

import backstay
from backstay import testing
from backstay._process._failure import describe
from backstay.errors import JobFailed


def test_a_missing_file_names_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods of a YAML file run in its folder, and not in the one in which `backstay run` was called."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as relative:
        open("data/x.npy")  # noqa: SIM115, PTH123  # as a script does it
    assert describe(relative.value).message == (
        f"[Errno 2] No such file or directory: 'data/x.npy'; the current folder is {tmp_path}"
    )
    with pytest.raises(FileNotFoundError) as absolute:
        Path("/no/such").read_text()
    assert describe(absolute.value).message == "[Errno 2] No such file or directory: '/no/such'"
    assert describe(FileNotFoundError()).message == "FileNotFoundError"


def test_the_loss_of_another_pod_after_training_keeps_the_result_in_the_message(tmp_path: Path) -> None:
    """It is written by another thread. The exception that follows from the loss does not replace it."""
    script = """
import sys, threading
from pathlib import Path
from backstay._process import end_now, write_termination
path = Path(sys.argv[1])
write_termination(path, {"result": "Trained", "step": 9})
threading.Thread(target=end_now, args=(path, {"reason": "GroupLost"}, 81)).start()
while True:
    write_termination(path, {"result": "Trained", "step": 9})
"""
    path = tmp_path / "message"
    assert subprocess.run([sys.executable, "-c", script, path], timeout=LONG, check=False).returncode == 81
    assert json.loads(path.read_bytes()) == {"result": "Trained", "step": 9, "reason": "GroupLost"}


def refuses(count):
    if int(count) >= 2:
        raise ValueError("no value for step 2\nexpected: a number")
    return np.float32(0.1)


def update(updates, state, params=None):
    factor = jax.pure_callback(refuses, jax.ShapeDtypeStruct((), jnp.float32), state)
    return jax.tree.map(lambda leaf: -factor * leaf, updates), state + 1


def script():
    backstay.train(
        init=lambda key: {"w": jnp.ones(4)},
        loss=lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        batches=lambda key: np.ones((2, 4), np.float32),
        optimizer=optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update),
        steps=8,
    )


LINE = refuses.__code__.co_firstlineno + 2


def test_o4_an_exception_in_a_callback_of_jax_has_the_place_in_the_script() -> None:
    """The runtime raises another error, in which frames of the script are text only."""
    with pytest.raises(Exception, match="no value for step 2") as raised:
        jax.jit(update)({"w": jnp.ones(4)}, jnp.int32(2))[0]["w"].block_until_ready()
    found = describe(raised.value)
    assert (found.reason, found.message) == ("ValueError", "no value for step 2")
    assert found.at.endswith(f"test_failure.py:{LINE}")


def test_o4_a_transform_that_raises_on_a_server_fails_the_job_with_the_line_of_the_script() -> None:
    with pytest.raises(JobFailed, match=rf"ValueError: no value for step 2 \(\S*test_failure\.py:{LINE}\)") as raised:
        testing.run(script, servers=2)
    assert raised.value.reason == "ScriptFailed"
