"""`batches` must be a function of its key, and give each rank another batch. The job names both mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay._coordination import SAME_UPDATES, SameLosses
from backstay._data import BatchKey, CheckedBatches

KEY = BatchKey(0, 0, 2, 7)
NAN = np.array([1.0, np.nan])


def from_iterator(items: Iterator[Any]) -> Any:
    return lambda key: next(items)


@pytest.mark.parametrize(
    ("make", "impure"),
    [
        (lambda: lambda key: {"x": np.full(3, key.step), "y": NAN}, False),
        (lambda: lambda key: jax.random.key(key.seed), False),
        (lambda: lambda key: jax.random.normal(jax.random.key(key.seed), (3,)), False),
        (lambda: lambda key: key.rng.normal(size=3), False),
        (lambda: backstay.from_dataset(np.arange(8.0), batch_size=2), False),
        (lambda: from_iterator(np.full(3, n) for n in itertools.count()), True),
        (lambda: from_iterator(np.zeros(n) for n in itertools.count(1)), True),
        (lambda: from_iterator(np.zeros(3, kind) for kind in ("f4", "f8")), True),
        (lambda: from_iterator([1.0] * n for n in (1, 2)), True),
    ],
)
def test_the_first_key_is_passed_twice_and_the_batches_are_compared(make: Any, impure: bool) -> None:
    checked = CheckedBatches(make())
    assert not checked.impure
    checked(KEY)
    assert checked.impure is impure


def test_only_the_first_key_is_passed_twice() -> None:
    keys: list[BatchKey] = []
    checked = CheckedBatches(lambda key: keys.append(key) or 0)
    other = BatchKey(1, 0, 2, 7)
    checked(KEY), checked(other), checked(KEY)
    assert keys == [KEY, KEY, other, KEY]


def test_one_process_names_a_function_that_is_not_one_of_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    backstay.train(
        init=lambda key: jnp.zeros(2),
        loss=lambda params, batch: ((params - batch) ** 2).mean(),
        batches=lambda key: generator.normal(size=2).astype(np.float32),
        optimizer=optax.sgd(0.1),
        steps=3,
    )
    assert capsys.readouterr().err.count("ImpureBatches: batches returned two different batches") == 1


UPDATE = st.tuples(st.sampled_from([0.5, 0.25, 0.125]), st.integers(1, 3), st.integers(0, 9).map(lambda n: n == 0))


@given(st.lists(UPDATE, max_size=15), st.integers(0, SAME_UPDATES + 5), st.lists(UPDATE, max_size=5))
def test_the_losses_of_all_ranks_must_be_equal_and_change_in_many_updates(before: Any, equal: int, after: Any) -> None:
    """It agrees with the definition over updates of several ranks in a row, each with one loss that differs from the
    last."""
    same, in_a_row, last, expected = SameLosses(), 0, None, False
    for loss, ranks, differs in [*before, *((1.0 / (n + 9), 2, False) for n in range(equal)), *after]:
        losses = [loss] * ranks
        if differs:
            losses[0] = 3 * loss
        same.update(losses)
        if ranks > 1:
            in_a_row = 0 if differs or loss == last else in_a_row + 1
            last = None if differs else loss
        expected = expected or in_a_row >= SAME_UPDATES
    assert same.found is expected


def test_a_loss_that_does_not_change_is_not_a_mistake() -> None:
    same = SameLosses()
    assert not any(same.update([0.0, 0.0]) for _ in range(3 * SAME_UPDATES))


def test_the_mistake_is_named_once() -> None:
    same = SameLosses()
    assert sum(same.update([1.0 / (n + 1)] * 3) for n in range(3 * SAME_UPDATES)) == 1
