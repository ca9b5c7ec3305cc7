"""A job whose workers make local steps, of real processes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
from between import put

import backstay
from backstay import testing


def test_t4_local_steps_are_the_plain_loop_though_a_worker_dies_between_two_of_them(job, tmp_path: Path) -> None:
    """T1, T3, T4, T7: model state, random keys, clipped; the inner state is fresh after each update."""
    uri = str(tmp_path / "checkpoints")
    tiny = job(1, 2, checkpoint={"uri": uri, "every_steps": 2})
    local = json.dumps({"count": 3, "inner_state": "reset"})
    tiny.environment = {"X64": "1", "CLIP": "0.5", "STEPS": "6", "STATE": "1", "LOCAL": local}
    server = tiny.server(0)
    stays = tiny.worker(0)
    dies = tiny.worker(1, HOLD_AT="10")  # the second local step of the fourth update
    tiny.wait_for(dies, "step 3/6  local step 9")
    dies.process.send_signal(signal.SIGKILL)
    comes = tiny.worker(1, 1)
    assert [pod.wait() for pod in (stays, comes, server)] == [0, 0, 0]
    for pod in (stays, comes):
        assert_same(tiny, pod)
    assert "step 6/6  local step 18" in server.output()
    assert "could not be stored" not in server.output()
    stored = backstay.load(uri)
    assert stored.step == 6
    for index, leaf in enumerate(jax.tree.leaves((stored.params, stored.state))):
        np.testing.assert_allclose(leaf, tiny.reference()[str(index)], rtol=1e-9, atol=1e-12)


def test_t4_steps_while_a_contribution_travels_are_those_of_the_plain_loop(job) -> None:
    """However long a contribution travels, the same steps are made before the answer is mixed in. No batch is requested
    twice, except the first, which shows whether `batches` is a function of its key."""
    tiny = job(1, 2)
    local = json.dumps({"count": 3, "overlap": 2})
    tiny.environment = {"X64": "1", "STEPS": "6", "STATE": "1", "LOCAL": local, "SAY_BATCHES": "1"}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0, 0, 0]
    assert_same(tiny, tiny.pods[1])
    for worker in tiny.pods[1:]:
        assert [int(step) for step in re.findall(r"batch (\d+)", worker.output())] == [0, *range(6 * 3)]


def test_the_local_steps_of_the_first_contribution_count_as_compiling(job) -> None:
    """This includes the time between two of its batches, in which JAX compiles. That time was counted as goodput."""
    tiny = job(1, 1)
    tiny.environment = {"STEPS": "1", "LOCAL": json.dumps({"count": 3})}
    server, worker = tiny.server(0), tiny.worker(0)
    assert [server.wait(), worker.wait()] == [0, 0]
    [seconds] = re.findall(r"seconds of this worker: (.*)", worker.output())
    assert "compiling" in seconds
    assert "applied" not in seconds


def assert_same(tiny: Any, pod: Any) -> None:
    for name, value in tiny.reference().items():
        if name.isdigit():
            np.testing.assert_allclose(tiny.params(pod)[name], value, rtol=1e-9, atol=1e-12)


def test_t4_fragments_over_two_shards_are_the_plain_loop(job) -> None:
    """Only one fragment travels in an update, in both directions; the result is the whole model."""
    tiny = job(2, 2, wire={"gradients": "Int4", "parameters": "BFloat16"})
    local = json.dumps({"count": 4, "fragments": 2})
    tiny.environment = {"X64": "1", "STEPS": "7", "WIDTH": "600", "LOCAL": local, "WIRE": "Int4,BFloat16"}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0] * 4
    assert_same(tiny, tiny.pods[2])


COUNTING = """
import jax.numpy as jnp, optax, backstay

# Each local step adds 1 to each parameter.
backstay.train(
    init=lambda key: {"a": {"w": jnp.zeros(3)}, "b": {"w": jnp.zeros(3)}},
    loss=lambda params, batch: -jnp.sum(params["a"]["w"]) - jnp.sum(params["b"]["w"]),
    batches=lambda key: (),
    optimizer=optax.sgd(1.0),
    local=backstay.LocalSteps(2, optax.sgd(1.0), fragments=2),
    steps=6,
)
"""


def test_t4_a_worker_keeps_its_fragments_though_a_server_dies(tmp_path: Path) -> None:
    """The standby has the update whose answer was lost. The worker keeps its own values of the other fragment."""
    script = tmp_path / "train.py"
    put(script, COUNTING)
    result = testing.run(script, servers=2, standbys=1, faults="kill server/1 @3", silent=60)
    assert [death.slot for death in result.deaths] == ["server/1"]
    # The last updates exchanged the first fragment after 5 steps, and the second one after 6.
    assert sorted(float(layer["w"][0]) for layer in result.params.values()) == [5.0, 6.0]
