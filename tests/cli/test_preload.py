"""The imports of `backstay run` before the first pod starts, and that forked pods may begin with them."""

from __future__ import annotations

import json
import sys

import pytest
from between import put

from backstay_client.code.sources import of_script
from backstay_client.embedded.preload import PREFIXES, TRAINER, imports_of, preload
from backstay_cluster.kubelet.forkable import Program, Sensitive, unsafe_reason
from backstay_cluster.kubelet.node import python_environment
from backstay_cluster.kubelet.preload import Preload, without_gpu
from backstay_cluster.kubelet.runtime import ProcessRuntime

SCRIPT = """
import json
import yaml, nearby
from sklearn.datasets import load_digits
import package.inner
import no_such_distribution
import mpi4py
from . import relative
from yaml import *
try:
    import pandas
except ImportError:
    pandas = None
if __name__ == "__main__":
    import rich
def later():
    import pygments
"""


def test_imports_of_a_script_are_those_of_installed_distributions(tmp_path):
    """Not the standard library's, not the user's own, not what connects at import, not what may never run."""
    put(tmp_path / "train.py", SCRIPT)
    put(tmp_path / "nearby.py", "import rich.text, train\n")
    (tmp_path / "package").mkdir()
    put(tmp_path / "package/__init__.py", "import aiohttp\n")
    put(tmp_path / "yaml.py", "import typer\n")  # the user's own, which hides the installed one
    assert sorted(imports_of(tmp_path / "train.py")) == [
        "aiohttp",
        "rich.text",
        "sklearn.datasets",
        "sklearn.datasets.load_digits",
        "typer",
    ]


@pytest.mark.parametrize("text", ["def (", "\0", None])
def test_a_script_that_cannot_be_read_adds_nothing(tmp_path, text):
    if text is not None:
        put(tmp_path / "train.py", text)
    job = {"spec": {"command": ["python", "train.py"], "workingDir": str(tmp_path)}}
    assert preload(job) == preload()
    assert preload({"spec": {"command": ["sh", "-c", "x"], "workingDir": "/"}}) == preload()


def test_what_the_script_of_a_job_imports_is_imported_once(tmp_path):
    put(tmp_path / "train.py", "from sklearn.datasets import load_digits\n")
    job = {"spec": {"command": ["python", "train.py"], "workingDir": str(tmp_path)}}
    assert "sklearn.datasets" in json.loads(preload(job))["modules"]


def test_variables_of_the_job_that_take_effect_at_an_import_are_set_before_it():
    """With JAX_PLATFORMS in `spec.env` every pod would differ from the preloaded process, and none would be forked."""
    env = [
        {"name": "JAX_PLATFORMS", "value": "tpu"},
        {"name": "XLA_FLAGS", "value": "--x=$(POD_IP)"},
        {"name": "JAX_TRACEBACK_FILTERING", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "STEPS", "value": "3"},
    ]
    job = {"spec": {"command": ["python", "train.py"], "workingDir": "/", "env": env}}
    before = json.loads(preload())["started_with"]
    assert without_gpu().items() <= before.items(), "as in a pod without a GPU"
    assert json.loads(preload(job))["started_with"] == {**before, "JAX_PLATFORMS": "tpu"}
    assert json.loads(preload(environ={"JAX_PLATFORMS": "tpu"}))["started_with"] == {**before, "JAX_PLATFORMS": "tpu"}


# The expression for `sys.modules` is indirect: a script that reads it is not forked.
LOOKS = """
import os, sys
loaded = vars(sys)["modules"]
before = set(loaded)
threads = len(os.listdir("/proc/self/task"))
import threading
import jax, numpy
from jax._src import xla_bridge
print(threads, threading.active_count(), xla_bridge.backends_are_initialized(), sep=",", end=" ")
print(numpy.random.random(), end=" ")
import backstay
from backstay._roles import Evaluator, Server, Standby, Worker
backstay.train, backstay.from_dataset
print(",".join(sorted(set(loaded) - before)) or "-")
import jax.numpy as jnp, grpc
assert float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64)))) == 64.0**3
assert numpy.linalg.norm(numpy.ones((300, 300)) @ numpy.ones((300, 300))) > 0
from backstay._transport import ClientStream, Listener
from backstay_rpc.credentials import Credentials
from backstay_rpc.control_pb2 import Frame, Hello, Pull
listener = Listener("127.0.0.1", 0, Credentials("token"), lambda hello, stream: stream.write(stream.read()[0]))
stream = ClientStream(f"127.0.0.1:{listener.bound}", Hello(), Credentials("token"))
stream.write(Frame(pull=Pull()))
stream.read()
print("answered", end=" ")
stream.close(); listener.close()
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    try:
        channel.unary_unary("/no/method")(b"", timeout=60)
    except grpc.RpcError as error:
        print(error.code().name)
server.stop(None)
"""


async def test_the_trainer_works_in_a_forked_process(tmp_path, capfd):
    """Nothing that it imports is left to import; no thread, backend or random number is shared; JAX, BLAS, data
    streams and gRPC work after the fork, in two processes. A variable that is the script's own changes nothing."""
    put(tmp_path / "looks.py", 'import os; os.environ.get("A_NAME", "")\n' + LOOKS)
    environ = {**python_environment(), "A_NAME": "x"}
    wanted = Preload(**json.loads(preload()))
    runtime = ProcessRuntime(preload=wanted, base_env=environ)
    outputs = []
    try:
        for number in range(2):
            output = tmp_path / f"{number}.log"
            with output.open("wb") as log:
                process = await runtime.start(
                    f"{number:032x}",
                    ["python", "looks.py"],
                    {**environ, **wanted.started_with, "BACKSTAY_ROLE": "worker", "CUDA_VISIBLE_DEVICES": ""},
                    str(tmp_path),
                    log.fileno(),
                )
            assert await process.exited == 0, output.read_text()
            lines = output.read_text().splitlines()
            said = [line for line in lines if "chttp2_transport" not in line]  # gRPC's own log
            outputs.append(" ".join(said).split())
    finally:
        await runtime.close()
    noted = capfd.readouterr().err
    assert "executed, not forked" not in noted
    assert "not preloaded" not in noted
    assert [words[0] for words in outputs] == ["1,1,False"] * 2
    assert outputs[0][1] != outputs[1][1], "both drew the same random number"
    assert [words[2:] for words in outputs] == [["-", "answered", "UNIMPLEMENTED"]] * 2


@pytest.mark.parametrize(("line", "forked"), [("", True), ("import os; os.environ['XLA_FLAGS'] = ''\n", False)])
def test_a_submitted_script_is_forked(tmp_path, line, forked):
    """Unless it changes the environment. The program that starts it adds a finder to the import system."""
    put(tmp_path / "train.py", "import inside\n")
    put(tmp_path / "inside.py", line)
    folder = tmp_path / "volume"
    folder.mkdir()
    for name, content in of_script(tmp_path / "train.py").files.items():
        put(folder / name, content)
    program = Program(sys.executable, (), str(folder), file=str(folder / "backstay_entry.py"))
    reason = unsafe_reason(program, Sensitive((), PREFIXES), json.loads(preload())["finders"])
    assert (reason is None) == forked, reason


def test_every_module_of_the_list_exists():
    """A name that is not installed is skipped without a word, so a module that moved would silently cost its
    time."""
    from importlib.util import find_spec

    assert [name for name in TRAINER if find_spec(name) is None] == []
