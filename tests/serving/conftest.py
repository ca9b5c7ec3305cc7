"""Checkpoints of a small model, and processes that serve them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from between import LONG, put, until

from backstay._checkpoint import CheckpointStore, Claim, JobIdentity, Manifest, ManifestLeaf, Origin, describe_structure
from backstay._update import Entry, leaf_names
from backstay.testing import Forker
from backstay_spec.manifests_pod import GRPC_LOG

HISTORY = "00000000000000aa"


def origin_of(job: str = "digits", history: str = HISTORY) -> Origin:
    return Origin(history=history, job=JobIdentity(namespace="default", name=job, uid="1"), seed=0)


def store_version(folder: Path, step: int, params: Any, *, state: Any = None, term: int = 1, **of: str) -> Manifest:
    """Store a whole checkpoint; `of` has the job and the history."""
    store, origin = CheckpointStore(str(folder)), origin_of(**of)

    def leaves(prefix: str, tree: Any) -> tuple[list[Entry], tuple[ManifestLeaf, ...]]:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        names = leaf_names(path for path, _ in flat)
        named = [(name, np.asarray(leaf)) for name, (_, leaf) in zip(names, flat, strict=True)]
        return (
            [Entry(f"{prefix}/{path}", 0, array.size, array.reshape(-1)) for path, array in named],
            tuple(ManifestLeaf(path=path, shape=array.shape, dtype=array.dtype.name) for path, array in named),
        )

    entries, specs = leaves("params", params)
    of_state, state_specs = leaves("state", state)
    file = store.write_shard(
        entries + of_state, history=origin.history, version=step, term=term, shard=0, shards=1, incarnation=0
    )
    more = {} if state is None else {"state_structure": describe_structure(state), "state_leaves": state_specs}
    return store.write_manifest(
        Manifest(
            origin=origin,
            lease=term,
            version=step,
            term=term,
            incarnation=0,
            shards=1,
            leaves=specs,
            structure=describe_structure(params),
            files=(file,),
            state={
                "term": term,
                "version": step,
                "world": 1,
                "keySteps": {},
                "nonFiniteRun": 0,
                "redone": 0,
                "worlds": [{"version": 0, "world": 1, "offset": 0}],
            },
            **more,
        )
    )


def roll_back(folder: Path, base: Manifest, term: int) -> None:
    """Begin a term at an older checkpoint: newer ones of older terms leave the history (T6)."""
    CheckpointStore(str(folder)).write_claim(
        Claim(origin=base.origin, lease=term, term=term, incarnation=0, base=base.name)
    )


SCRIPT = """
import jax.numpy as jnp
import backstay

def predict(params, state, x):
    # Each output has the value of the checkpoint: two outputs that differ would mix two versions.
    value = params["value"]
    return {"value": jnp.broadcast_to(value, (len(x), 1)), "sum": x.sum(-1) * 0 + value[0], "echo": x}

if __name__ == "__main__":
    backstay.serve(predict, example=jnp.zeros(2), batch=16, name="small")
"""


def params_of(step: int) -> dict[str, Any]:
    """Returns the parameters of `SCRIPT` at a step, which show the step."""
    return {"value": np.full(1, step, np.float32)}


class ServingProcess:
    """A process of a script that calls `backstay.serve`.

    Attributes:
        log: the file with its output.
    """

    def __init__(self, forker: Forker, script: Path, checkpoint: Path, log: Path, **variables: str) -> None:
        self.log = log
        environment = {
            **forker.environ,
            "BACKSTAY_SERVE_CHECKPOINT": str(checkpoint),
            "BACKSTAY_SERVE_HTTP_PORT": "0",
            "BACKSTAY_SERVE_GRPC_PORT": "0",
            "BACKSTAY_SERVE_DRAIN_SECONDS": "0",
            **variables,
        }
        self._http = int(variables.get("BACKSTAY_SERVE_HTTP_PORT", "0"))
        self.process = forker.start([sys.executable, str(script)], environment, log)

    def close(self) -> None:
        """Kill the process if it runs."""
        self.process.kill()
        self.process.wait(LONG)

    def wait_for(self, text: str) -> str:
        """Returns the first line that has `text`. Fails when the process ends without it."""

        assert self.log.is_file(), "what is read must have an end"

        def found() -> str | None:
            ended = self.process.poll() is not None
            output = self.log.read_text()
            lines = output.splitlines() if ended else output.split("\n")[:-1]  # the last one may be half a line
            line = next((line for line in lines if text in line), None)
            assert line is not None or not ended, f"no line with {text!r} in\n{output}"
            return line

        line = until(found, f"a line has {text!r}")
        assert line is not None
        return line

    def port(self, protocol: str) -> int:
        """Returns the port of HTTP or gRPC, once the process listens."""
        if protocol == "HTTP" and self._http:
            return self._http
        found = re.search(rf"{protocol} on port (\d+)", self.wait_for("listening on"))
        assert found is not None
        return int(found[1])

    def call(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Returns the status of one request, and its JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port("HTTP"), timeout=LONG)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(content) if content[:1] == b"{" else content

    def infer(self, rows: list[list[float]], **more: Any) -> tuple[int, Any]:
        """Returns the answer to a request for the model of `SCRIPT`."""
        request = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [len(rows), 2], "data": rows}], **more}
        return self.call("POST", "/v2/models/small/infer", json.dumps(request).encode())

    def until_served(self, step: int) -> None:
        """Wait until the process answers requests with a step."""
        self.wait_for(f"step {step} is served")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(LONG)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A script that serves a model whose answers show the step of their checkpoint."""
    script = tmp_path / "serve.py"
    put(script, SCRIPT)
    return script


@pytest.fixture(scope="session")
def forker(compiled: Path) -> Iterator[Forker]:
    """Forks the serving processes. Those of `backstay serve` in test_examples.py import JAX themselves."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    made = Forker(
        {**environment, "JAX_COMPILATION_CACHE_DIR": str(compiled), **GRPC_LOG}, more=["backstay._serving._serve"]
    )
    yield made
    made.close()


@pytest.fixture
def start(forker: Forker, tmp_path: Path) -> Iterator[Callable[..., ServingProcess]]:
    """Starts serving processes, which end with the test."""
    started: list[ServingProcess] = []

    def begin(script: Path, checkpoint: Path, log: Path | None = None, **variables: Any) -> ServingProcess:
        log = log or tmp_path / f"log-{len(started)}"
        started.append(ServingProcess(forker, script, checkpoint, log, **variables))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture(scope="session")
def store() -> Callable[..., Manifest]:
    """Stores a checkpoint, as `store_version` does."""
    return store_version


@pytest.fixture(scope="session")
def rollback() -> Callable[..., None]:
    """Begins a term at an older checkpoint, as `roll_back` does."""
    return roll_back


@pytest.fixture(scope="session")
def value_of() -> Callable[[int], dict[str, Any]]:
    """Returns the parameters at a step, as `params_of` does."""
    return params_of


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Waits until a condition holds, and fails when it never does."""

    return until


class Curl:
    """The installed curl."""

    def run(self, *arguments: str) -> str:
        """Returns the body of the answer to a request."""
        done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def curl() -> Curl:
    """Sends requests with curl."""
    return Curl()
