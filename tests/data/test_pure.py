"""`batches` must be a function of its key, and give each rank another batch. The job names both mistakes."""

from __future__ import annotations

import itertools
import re
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


BYTES = [np.array([200, i], "uint8") if i % 8 < 4 else np.array([300, i], "uint16") for i in range(24)]
LATER = [{"y": 1 if i < 12 else 0.5} for i in range(24)]
SHORTER = [{"y": np.zeros(2 if i < 12 else 3)} for i in range(24)]
OTHERS = [{"x" if i < 12 else "y": i} for i in range(24)]


@pytest.mark.parametrize(
    ("samples", "step", "text"),
    [
        (BYTES, 0, r"has uint8 of shape \(2,\) at its only array, and one of the first batch uint16 of shape \(2,\)"),
        (LATER, 1, r"has float64 of shape \(\) at \['y'\], and one of the first batch int64 of shape \(\)"),
        (SHORTER, 1, r"has float64 of shape \(3,\) at \['y'\], and one of the first batch float64 of shape \(2,\)"),
        (OTHERS, 1, r"the rows of this pod are PyTreeDef.*'y'.*, and the first batch is PyTreeDef.*'x'"),
    ],
)
def test_the_rows_of_the_pods_of_a_rank_have_the_form_of_the_first_batch(samples: Any, step: int, text: str) -> None:
    """NumPy chose the dtype from the samples of each pod, so the pods of a rank computed different programs."""
    halves = [slice(0, 4), slice(4, 8)]
    pods = [CheckedBatches(backstay.from_dataset(samples, batch_size=8, shuffle=False)) for _ in halves]
    found = []
    for key in (BatchKey(0, 0, 1), BatchKey(1, 0, 1)):
        for pod, half in zip(pods, halves, strict=True):
            try:
                pod.rows(key, half)
            except backstay.BackstayError as error:
                found.append((key.step, str(error)))
    assert found[0][0] == step
    assert re.search(rf"in the batch of step {step}, .*{text}", found[0][1])


def test_the_rows_of_two_pods_are_the_batch_of_one() -> None:
    data = backstay.from_dataset({"x": np.arange(80.0).reshape(40, 2), "y": np.arange(40)}, batch_size=8)
    pods = CheckedBatches(data), CheckedBatches(data)
    for step in range(7):  # over the end of an epoch
        key = BatchKey(step, 0, 1)
        first, second = (pod.rows(key, rows) for pod, rows in zip(pods, (slice(0, 4), slice(4, 8)), strict=True))
        jax.tree.map(
            lambda whole, *parts: np.testing.assert_array_equal(whole, np.concatenate(parts)), data(key), first, second
        )
