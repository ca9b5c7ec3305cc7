"""`batches` that ends, or returns no rows (O4): an error with the remedy, in one process and in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import BatchKey
from backstay._compute import examples_of
from backstay._data import Prefetcher
from backstay._data._draw import draw
from backstay._process import describe
from backstay.errors import BatchesEnded, EmptyBatch
from backstay.testing import train_local


def ends(after: int = 3) -> Callable[[BatchKey], Any]:
    iterator = iter([np.ones((2, 2), np.float32)] * after)

    def batches(key: BatchKey) -> Any:
        return next(iterator)

    return batches


def arguments(batches: Any) -> dict[str, Any]:
    return {
        "init": lambda _: {"w": jnp.ones(2)},
        "loss": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        "batches": batches,
        "optimizer": optax.sgd(0.1),
        "steps": 10,
    }


@pytest.mark.parametrize("train", [backstay.train, train_local])
def test_o4_an_iterator_that_ends_is_an_error_with_the_remedy_in_one_process(train: Any) -> None:
    """`train` uses a batch to check that `batches` is a function of its key."""
    with pytest.raises(BatchesEnded, match=r"step [23] of rank 0: its iterator has ended.*backstay\.from_iterator"):
        train(**arguments(ends()))


def test_o4_an_iterator_that_ends_in_a_thread_keeps_the_line_of_the_script() -> None:
    prefetcher = Prefetcher(ends(1))
    key = BatchKey(step=0, rank=1, world=2)
    prefetcher.get(key)
    with pytest.raises(BatchesEnded, match="step 1 of rank 1") as raised:
        prefetcher.get(BatchKey(step=1, rank=1, world=2))
    prefetcher.close()
    failure = describe(raised.value)
    assert failure.reason == "BatchesEnded"
    assert failure.at.endswith("test_draw.py:27")


def test_a_requested_batch_is_drawn_even_after_the_last_step() -> None:
    prefetcher = Prefetcher(lambda key: key.step)
    try:
        for step, last in ((3, 1), (0, -1)):
            assert prefetcher.get(BatchKey(step=step, rank=0, world=1, seed=0), last=last) == step
    finally:
        prefetcher.close()


EMPTY = [
    pytest.param(np.ones((0, 2), np.float32), id="array"),
    pytest.param({"x": np.ones((0, 2)), "y": np.ones(0), "scale": 2.0}, id="dict"),
    pytest.param((jnp.ones((0, 2)), [np.zeros(0, np.int32)]), id="tuple"),
]


@pytest.mark.parametrize("batch", EMPTY)
def test_o4_a_batch_without_rows_is_an_error_with_the_step_the_rank_and_the_shape(batch: Any) -> None:
    with pytest.raises(
        EmptyBatch, match=r"batch of step 5 of rank 1 has no rows: batch\S* has the shape \(0.*from_data"
    ):
        draw(lambda _: batch, BatchKey(step=5, rank=1, world=2))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"ids": np.zeros((0, 2)), "x": np.ones((4, 2))}, id="one array without rows"),
        pytest.param({"scale": 2.0}, id="numbers"),
        pytest.param(None, id="nothing"),
    ],
)
def test_a_batch_with_one_array_that_has_rows_or_without_arrays_is_valid(batch: Any) -> None:
    assert draw(lambda _: batch, BatchKey(step=0, rank=0, world=1)) is batch


def test_the_examples_of_a_batch_are_those_of_its_first_array_with_rows() -> None:
    """With `weighting: Examples`, 0 examples would remove the contribution from its update."""
    assert examples_of({"ids": np.zeros((0, 2)), "x": np.ones((4, 2))}) == 4


@pytest.mark.parametrize("train", [backstay.train, train_local])
@pytest.mark.parametrize("local", [None, backstay.LocalSteps(count=3, optimizer=optax.sgd(0.1))])
def test_o4_a_batch_without_rows_ends_training_in_one_process(train: Any, local: Any) -> None:
    """The gradient of a mean over 0 rows is 0, and not NaN: training would reach its last step with nothing learned."""

    def batches(key: BatchKey) -> Any:
        return np.ones((2 if key.step < 4 else 0, 2), np.float32)

    with pytest.raises(EmptyBatch, match="the batch of step 4 of rank 0 has no rows"):
        train(**arguments(batches), local=local)
