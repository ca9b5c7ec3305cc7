"""The counts of bench/_witness.py are tested: lost, doubled and partial gradients are found, and nothing else is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._update import analyse, describe, partition

BENCH = Path(__file__).parents[2] / "bench"
WITNESS: dict[str, Any] = runpy.run_path(str(BENCH / "_witness.py"))
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
    assert count_applied([whole(quorum)], steps=20, quorum=quorum) == Applied(0, 0)


@given(st.integers(1, 4), places)
def test_t1_t3_a_changed_place_of_a_synchronous_history_is_counted(quorum: int, place: tuple[int, int]) -> None:
    count = whole(quorum)
    if count[place]:
        count[place] = 0
        assert count_applied([count], steps=20, quorum=quorum) == Applied(1, 0)
        count[place] = 2
        assert count_applied([count], steps=20, quorum=quorum) == Applied(0, 1)
    else:
        count[place] = 1
        assert count_applied([count], steps=20, quorum=quorum) == Applied(0, 1)


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), places)
def test_t3_a_changed_place_of_an_asynchronous_history_is_counted(counts: list[int], place: tuple[int, int]) -> None:
    count = np.zeros((20, 4), np.float32)
    for rank, times in enumerate(counts):
        count[:times, rank] = 1
    steps = sum(counts)
    assert count_applied([count], steps=steps, quorum=None) == Applied(0, 0)
    count[place] += 1
    found = count_applied([count], steps=steps, quorum=None)
    assert found.twice == 1
    if count[place] == 1:
        return
    count[place] = 0
    assert count_applied([count], steps=steps, quorum=None).lost == 1


def test_t1_a_gradient_in_part_is_an_error() -> None:
    count = whole(2)
    count[3, 3] = 0.5
    with pytest.raises(ValueError, match="applied in part"):
        count_applied([count], steps=20, quorum=2)


@given(st.integers(1, 4), st.integers(0, 19), st.integers(0, 3))
def test_t1_with_grace_an_update_may_have_more_gradients(quorum: int, step: int, rank: int) -> None:
    count = whole(quorum)
    count[step] = quorum / 4
    assert count_applied([count], steps=20, quorum=quorum, grace=True) == Applied(0, 0)
    count[step, rank] *= 2
    assert count_applied([count], steps=20, quorum=quorum, grace=True) == Applied(0, 1)
    count = whole(quorum)
    count[step] = 0
    assert count_applied([count], steps=20, quorum=quorum, grace=True) == Applied(quorum, 0)


@given(st.integers(1, 3), places)
def test_t1_what_one_of_two_servers_loses_or_repeats_is_counted(quorum: int, place: tuple[int, int]) -> None:
    count, of_other = whole(quorum), whole(quorum)
    of_other[place] += 1
    for counts in ([count, of_other], [of_other, count]):
        assert count_applied(counts, steps=20, quorum=quorum) == Applied(0, 1)
    of_other[place[0]] = np.roll(count[place[0]], 1)  # as many gradients, of other ranks
    with pytest.raises(ValueError, match="the servers applied different gradients"):
        count_applied([count, of_other], steps=20, quorum=quorum)


@pytest.mark.parametrize(
    ("steps", "world", "size"), [(60, 2, 0), (4000, 3, 0), (6000, 3, 0), (150, 4, 250_000), (325, 8, 250_000)]
)
def test_each_of_two_servers_has_one_of_the_counts_whole(monkeypatch, steps: int, world: int, size: int) -> None:
    """With one count, all of its rows that were used were on one server."""
    for name, value in (("STEPS", steps), ("WORLD", world), ("SIZE", size)):
        monkeypatch.setenv(name, str(value))
    silent = SimpleNamespace(follow=lambda: None, mark=lambda what: None)
    monkeypatch.setitem(sys.modules, "_timeline", silent)  # it changes the log of this process
    script = runpy.run_path(str(BENCH / "scripts" / "witness.py"))
    params = jax.eval_shape(script["init"], jax.random.key(0))
    tree = describe(params)
    parts = partition(tree, analyse(script["optimizer"](optax.adam(1e-3)), tree), 2)
    found = [
        {tree.leaves[piece.leaf].path for block in layout.blocks for piece in block.pieces} & set(WITNESS["COUNTS"])
        for layout in parts.shards
    ]
    assert found == [{"a_count"}, {"z_count"}]
