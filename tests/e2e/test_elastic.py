"""Workers added and removed while a job trains: real processes, scaled as kubectl and autoscalers do it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import BatchKey
from backstay._checkpoint import CheckpointStore
from backstay._coordination import CoordinatorState

pytestmark = pytest.mark.e2e

Submit = Callable[..., str]
SCRIPT = Path(__file__).parent / "scripts" / "tiny.py"


def replayed(state: CoordinatorState, settings: dict[str, Any]) -> Any:
    """Returns the plain loop with the worlds of the manifest, where each update has the smaller world of the two around
    it."""
    params = settings["init"](jax.random.key(settings["seed"]))
    optimizer = settings["optimizer"]
    memory = optimizer.init(params)
    gradient = jax.jit(jax.grad(settings["loss"], has_aux=True))

    @jax.jit
    def update(gradients: list[Any], memory: Any, params: Any) -> Any:
        mean = jax.tree.map(lambda *parts: jnp.stack(parts).mean(0), *gradients)
        updates, memory = optimizer.update(mean, memory, params)
        return optax.apply_updates(params, updates), memory

    for version in range(state.version):
        now = [world for world in state.worlds if world.version <= version][-1]
        after = [world for world in state.worlds if world.version <= version + 1][-1]
        keys = [
            BatchKey(step=version, rank=rank, world=now.world, seed=settings["seed"], offset=now.offset)
            for rank in range(min(now.world, after.world))
        ]
        params, memory = update([gradient(params, settings["batches"](key))[0] for key in keys], memory, params)
    return params


def test_t4_scaled_up_and_down_while_it_trains_and_the_manifest_allows_to_repeat_it(
    cluster: Any, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 -> 4 -> 1 workers, no pod is restarted, nothing is charged, and the result is that of the worlds (T1, T4,
    O4)."""
    # Slow until the last change has been seen, so that the job cannot end before; then fast.
    gate = tmp_path / "gate"
    environment = {"BEHAVE": "numbers", "PAUSE": "1", "STEPS": "300", "GATE": str(gate)}
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 2},
        "checkpoint": {"uri": str(tmp_path / "ckpt"), "everySteps": 100},
    }
    name = submit(spec, env=environment)

    def scale(replicas: int) -> None:
        cluster.patch(f"{name}/scale", [{"op": "replace", "path": "/spec/replicas", "value": replicas}])

    def world() -> int:
        found: int = cluster.job(name).get("status", {}).get("world", 0)
        return found

    def workers() -> set[str]:
        return {pod["metadata"]["name"] for pod in cluster.pods(name) if "-worker-" in pod["metadata"]["name"]}

    cluster.wait(f"{name} trains", lambda: cluster.job(name).get("status", {}).get("step", 0) > 0)
    first = workers()
    scale(4)
    cluster.wait("four ranks are in force", lambda: world() == 4)
    assert len(workers()) == 4
    assert first < workers(), "those that lived go on"
    scale(1)
    cluster.wait("three pods are gone", lambda: len(workers()) == 1)
    assert world() == 1, "not before the smaller world was in force"
    gate.touch()
    status = cluster.wait_for_end(name)
    assert status["step"] == 300
    assert not cluster.deaths_with_cause(name), cluster.describe(name)
    assert {role.get("disruptions", 0) for role in status["roles"].values()} == {0}
    dead = {slot for slot, _, _ in cluster.deaths(name)}
    assert {number for slot, number in status["incarnations"].items() if slot not in dead} == {1}

    manifest = CheckpointStore(str(tmp_path / "ckpt")).newest().manifest
    assert manifest is not None
    state = CoordinatorState.from_json(manifest.state)
    assert state.worlds[0].world == 2
    assert state.worlds[-1].world == 1
    assert max(w.world for w in state.worlds) == 4
    for key, value in {**environment, "PAUSE": "0"}.items():
        monkeypatch.setenv(key, value)
    expected = replayed(state, runpy.run_path(str(SCRIPT))["SETTINGS"])
    stored = backstay.load(str(tmp_path / "ckpt")).params
    for ours, theirs in zip(jax.tree.leaves(stored), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=1e-3)
