"""Local steps against a loop that was written from the documentation alone (T4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from backstay import testing
from backstay._update import enable_x64

from . import outside


def check(case: outside.Case, params: Any, world: int, sets: Sequence[Sequence[int]], **more: Any) -> None:
    with enable_x64():
        want = outside.expected(case, world, sets, **more)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["frozen", "not finite"])
def test_t4_a_job_with_local_steps_is_an_outside_loop(name: str) -> None:
    """T4: 2 workers, 3 servers; outer optimizers that divide or freeze the model, and a batch that is not finite."""
    job = testing.run(outside.train, workers=2, servers=3, env={"CASE": name})
    sets = [update.ranks for update in job.updates]
    assert set(sets) == {(0, 1)}
    assert [update.step for update in job.updates if update.skipped] == ([2] if outside.JOBS[name].bad else [])
    check(outside.JOBS[name], job.params, 2, sets)


def test_t1_t4_weights_and_backups_are_those_of_an_outside_loop() -> None:
    """T1, T4: each update has the weighted mean of the contributions that the coordinator chose."""
    job = testing.run(
        outside.train, workers=4, servers=2, backups=2, grace=None, weighting="Examples", env={"CASE": "backups"}
    )
    assert all(len(update.ranks) >= 2 for update in job.updates)
    check(outside.BACKUPS["backups"], job.params, 4, [update.ranks for update in job.updates], by_examples=True)


@pytest.mark.parametrize("name", outside.ONE_PROCESS)
def test_t4_local_steps_in_one_process_are_an_outside_loop(name: str) -> None:
    """T4: the loop that jobs are compared with, of two ranks."""
    case = outside.ONE_PROCESS[name]
    with enable_x64():
        result = testing.train_local(**outside.arguments(case), world=2)
    check(case, result.params, 2, [(0, 1)] * case.updates)
