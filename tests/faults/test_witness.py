"""The counts of bench/_witness.py are tested: lost, doubled and partial gradients are found, and nothing else is."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

WITNESS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "_witness.py"))
count_applied, Applied = WITNESS["count_applied"], WITNESS["Applied"]
places = st.tuples(st.integers(0, 19), st.integers(0, 3))


def whole(quorum: int) -> np.ndarray:
    """20 synchronous updates of 4 ranks, of which `quorum` count in turn."""
    count = np.zeros((20, 4), np.float32)
    for step in range(20):
        for rank in range(quorum):
            count[step, (step + rank) % 4] = 1
    return count


@given(st.integers(1, 4))
def test_a_history_without_faults_is_clean(quorum: int) -> None:
    assert count_applied(whole(quorum), steps=20, quorum=quorum) == Applied(0, 0)


@given(st.integers(1, 4), places)
def test_t1_t3_a_changed_place_of_a_synchronous_history_is_counted(quorum: int, place: tuple[int, int]) -> None:
    count = whole(quorum)
    if count[place]:
        count[place] = 0
        assert count_applied(count, steps=20, quorum=quorum) == Applied(1, 0)
        count[place] = 2
        assert count_applied(count, steps=20, quorum=quorum) == Applied(0, 1)
    else:
        count[place] = 1
        assert count_applied(count, steps=20, quorum=quorum) == Applied(0, 1)


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), places)
def test_t3_a_changed_place_of_an_asynchronous_history_is_counted(counts: list[int], place: tuple[int, int]) -> None:
    count = np.zeros((20, 4), np.float32)
    for rank, times in enumerate(counts):
        count[:times, rank] = 1
    steps = sum(counts)
    assert count_applied(count, steps=steps, quorum=None) == Applied(0, 0)
    count[place] += 1
    found = count_applied(count, steps=steps, quorum=None)
    assert found.twice == 1
    if count[place] == 1:
        return
    count[place] = 0
    assert count_applied(count, steps=steps, quorum=None).lost == 1


def test_t1_a_gradient_in_part_is_an_error() -> None:
    count = whole(2)
    count[3, 3] = 0.5
    with pytest.raises(ValueError, match="applied in part"):
        count_applied(count, steps=20, quorum=2)


@given(st.integers(1, 4), st.integers(0, 19), st.integers(0, 3))
def test_t1_with_grace_an_update_may_have_more_gradients(quorum: int, step: int, rank: int) -> None:
    count = whole(quorum)
    count[step] = quorum / 4
    assert count_applied(count, steps=20, quorum=quorum, grace=True) == Applied(0, 0)
    count[step, rank] *= 2
    assert count_applied(count, steps=20, quorum=quorum, grace=True) == Applied(0, 1)
    count = whole(quorum)
    count[step] = 0
    assert count_applied(count, steps=20, quorum=quorum, grace=True) == Applied(quorum, 0)
