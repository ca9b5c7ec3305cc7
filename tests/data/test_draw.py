"""`batches` that ends (O4): an error with the remedy, in one process and in the threads that prepare batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import BatchKey
from backstay._data import Prefetcher
from backstay._process import describe
from backstay.errors import BatchesEnded
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
    assert failure.at.endswith("test_draw.py:25")
