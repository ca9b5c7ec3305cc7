"""The witness of the chaos run is itself judged: whatever is lost, doubled or torn, it says so, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

WITNESS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "_witness.py"))
hear, Heard = WITNESS["hear"], WITNESS["Heard"]
places = st.tuples(st.integers(0, 19), st.integers(0, 3))


def whole(quorum: int) -> np.ndarray:
    """20 synchronous updates of 4 ranks, of which the first `quorum` count, turn by turn."""
    count = np.zeros((20, 4), np.float32)
    for step in range(20):
        for rank in range(quorum):
            count[step, (step + rank) % 4] = 1
    return count


@given(st.integers(1, 4))
def test_a_history_without_faults_is_clean(quorum: int) -> None:
    assert hear(whole(quorum), steps=20, quorum=quorum) == Heard(0, 0)


@given(st.integers(1, 4), places)
def test_t1_t3_a_changed_place_of_a_synchronous_history_is_heard(quorum: int, place: tuple[int, int]) -> None:
    count = whole(quorum)
    if count[place]:
        count[place] = 0
        assert hear(count, steps=20, quorum=quorum) == Heard(1, 0)
        count[place] = 2
        assert hear(count, steps=20, quorum=quorum) == Heard(0, 1)
    else:
        count[place] = 1
        assert hear(count, steps=20, quorum=quorum) == Heard(0, 1)


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), places)
def test_t3_a_changed_place_of_an_asynchronous_history_is_heard(counts: list[int], place: tuple[int, int]) -> None:
    count = np.zeros((20, 4), np.float32)
    for rank, times in enumerate(counts):
        count[:times, rank] = 1
    steps = sum(counts)
    assert hear(count, steps=steps, quorum=None) == Heard(0, 0)
    count[place] += 1
    heard = hear(count, steps=steps, quorum=None)
    assert heard.twice == 1
    if count[place] == 1:
        return
    count[place] = 0
    assert hear(count, steps=steps, quorum=None).lost == 1


def test_t1_a_gradient_in_part_is_no_number() -> None:
    count = whole(2)
    count[3, 3] = 0.5
    with pytest.raises(ValueError, match="applied in part"):
        hear(count, steps=20, quorum=2)
