"""Mistakes in `evaluate` cost the metrics, and not the trained job (O10)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import backstay
from backstay import testing

STEPS = 3
KIND = "TEST_EVALUATE"


def _exits() -> dict[str, float]:
    sys.exit(0)


def _ends() -> dict[str, float]:
    os._exit(0)


MISTAKES: dict[str, Callable[[], dict[str, float]]] = {
    "exit": _exits,
    "end": _ends,
    "name": lambda: {"accuracy\udcff": 1.0},
    "nan": lambda: {"accuracy": float("nan")},
}
LOGGED = {
    "exit": "evaluate called sys.exit(0)",
    "end": "2 pods have ended while they evaluated this step",
    "name": "must be 1 to 200 printable characters",
    "nan": "evaluate returned NaN or infinity for accuracy at step",
}


def without_evaluate(**more: Any) -> None:
    backstay.train(
        init=lambda key: {"w": jnp.zeros(2)},
        loss=lambda params, batch: jnp.sum((params["w"] - batch) ** 2),
        batches=lambda key: jnp.ones(2),
        optimizer=optax.sgd(0.1),
        steps=STEPS,
        **more,
    )


def script() -> None:
    without_evaluate(evaluate=lambda params: MISTAKES[os.environ[KIND]]())


@pytest.mark.parametrize(
    ("kind", "evaluator"), [("exit", False), ("end", False), ("end", True), ("name", False), ("nan", True)]
)
def test_o10_a_mistake_in_evaluate_costs_only_the_metrics(kind: str, evaluator: bool) -> None:
    job = testing.run(script, evaluator=evaluator, checkpoint_every=STEPS, env={KIND: kind})
    assert job.result.step == STEPS
    assert not [value for value in job.result.metrics.values() if math.isfinite(value)]
    assert LOGGED[kind] in job.logs["parameter-server-0-1-0"]


def test_o10_evaluate_ends_the_process_of_a_run_that_finds_its_training_complete(tmp_path: object) -> None:
    """The servers leave. Exit code 0 then means what it means after training: the script has ended in order."""
    testing.run(script, checkpoint_every=STEPS, env={KIND: "exit"}, folder=str(tmp_path))
    assert testing.run(script, checkpoint_every=STEPS, env={KIND: "end"}, folder=str(tmp_path)).succeeded


def test_an_evaluator_without_evaluate_fails_the_job() -> None:
    """Only the evaluator failed, and the job succeeded without a best checkpoint, and without a word.

    The job ends with the first of these pods. So each of them is started alone in `tests/runtime/test_jobs.py`.
    """
    job = testing.run(without_evaluate, evaluator=True, checkpoint_every=STEPS, check=False, max_restarts=0)
    said = "this job has an evaluator, but train was called without evaluate: pass evaluate, or remove spec.evaluator"
    assert not job.succeeded
    refused = {name.rpartition("-")[0].rpartition("-")[0] for name, log in job.logs.items() if said in log}
    assert refused & {"parameter-server-0", "worker-0"}
