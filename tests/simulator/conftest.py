"""Gives the simulator's tests jobs and assumptions."""

from __future__ import annotations

from typing import Any

import pytest

from backstay._simulator import Assumptions
from backstay_spec.types import TrainingJob


def job_of(
    workers: int = 4,
    servers: int = 2,
    standbys: int = 0,
    every_steps: int | None = 20,
    pods_per_rank: int = 1,
    **update: Any,
) -> TrainingJob:
    """Returns a TrainingJob; `every_steps` of None stores nothing."""
    spec: dict[str, Any] = {
        "image": "train:1",
        "command": ["python", "train.py"],
        "parameterServers": {"replicas": servers, "standbys": standbys, "maxRestarts": 1000},
        "workers": {"replicas": workers, "podsPerRank": pods_per_rank, "maxRestarts": 1000},
        "update": update,
    }
    if every_steps is not None:
        spec["checkpoint"] = {"uri": "s3://bucket/folder", "everySteps": every_steps}
    return TrainingJob.model_validate({"metadata": {"name": "simulated", "namespace": "lab"}, "spec": spec})


def assume(steps: int | None = 100, **fields: Any) -> Assumptions:
    """Assumptions with short steps and a small model."""
    step = {"seconds": 0.2, **fields.pop("step", {})}
    return Assumptions.model_validate({"steps": steps, "step": step, "model": {"bytes": 1e6}, **fields})


@pytest.fixture
def exact() -> dict[str, Any]:
    """Assumptions under which nothing takes time but computation."""
    costs = {
        "contributionSeconds": 0,
        "updateSeconds": 0,
        "answerSeconds": 0,
        "exchangeSeconds": 0,
        "receiveBytesPerSecond": 1e30,
        "addBytesPerSecond": 1e30,
        "applyBytesPerSecond": 1e30,
        "sendBytesPerSecond": 1e30,
    }
    return {
        "step": {"seconds": 0.2, "sigma": 0, "machineSigma": 0},
        "model": {"bytes": 1e6},
        "costs": costs,
        "network": {"gigabitsPerSecond": 1e9, "latencySeconds": 0},
    }
