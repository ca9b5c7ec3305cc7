"""A killed pod of a rank of several costs the rank a restart, and the training nothing (T4)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import backstay
from backstay.testing import train_local

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "scripts" / "tiny.py"


def test_t4_o4_a_pod_of_a_rank_dies_and_its_rank_is_replaced(
    cluster: Any, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 2, "podsPerRank": 2},
        "checkpoint": {"uri": str(tmp_path / "ckpt"), "everySteps": 15},
    }
    name = submit(spec, env={"BEHAVE": "suicide", "OF_MEMBER": "1"})
    status = cluster.wait_for_end(name)
    assert status["step"] == 40
    assert status["roles"]["Worker"]["restarts"] == 1, "the other pod of the rank is not charged"
    assert status["roles"]["Worker"]["disruptions"] == 0
    assert status["incarnations"]["worker-1"] == 2
    assert status["incarnations"]["worker-0"] == 1
    died = [event for event in cluster.events(name) if event["reason"] == "Crashed"]
    assert len(died) == 1
    assert f"(pod {name}-worker-1-1-1-" in died[0]["message"]
    monkeypatch.setenv("STEPS", "40")
    settings = runpy.run_path(str(SCRIPT))["SETTINGS"]
    wanted = train_local(**{**settings, "evaluate": None}, world=2).params
    stored = backstay.load(str(tmp_path / "ckpt"))
    for got, value in zip(jax.tree.leaves(stored.params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(value), rtol=1e-4, atol=1e-5)
    assert status["metrics"]["norm"] == pytest.approx(float(np.linalg.norm(wanted["w"])), rel=1e-4)
