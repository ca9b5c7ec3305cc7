"""The benchmarks of text train the model of examples/bytes, which may change without them."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax

import backstay

TEXT = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "scripts" / "text.py"))


def test_the_batches_of_the_benchmarks_fit_the_examples_model() -> None:
    module = TEXT["example"]("tiny")
    batch = TEXT["batches_of"](module)(backstay.BatchKey(step=0, rank=0, world=1, seed=0))
    assert batch.shape == (8, 33)
    params = jax.eval_shape(module.init, jax.random.key(0))
    assert jax.eval_shape(module.loss, params, batch)[0].shape == ()
