"""The order of the tests names tests that exist."""

from __future__ import annotations

import pytest
from schedule import CLUSTER, LONG, WAITING, order

from .test_house import ROOT


@pytest.mark.parametrize("beginning", [*WAITING, *LONG])
def test_each_beginning_is_that_of_a_test(beginning: str) -> None:
    """After a new name, a long test would begin last."""
    if beginning == CLUSTER:
        return
    file, _, name = beginning.partition("::")
    assert (ROOT / file).exists()
    assert not name or f"def {name}" in (ROOT / file).read_text()


def test_what_waits_comes_first_and_jobs_are_spread_over_the_rest() -> None:
    jobs = [f"tests/runtime/test_jobs.py::test_{number}" for number in range(3)]
    files = [f"tests/cli/test_{number}.py::test_it" for number in range(4)]
    places = order([*files, *jobs, "tests/simulator/test_it.py::test_it", "tests/e2e/test_paused.py::test_it"])
    assert sorted(places, key=places.__getitem__) == [
        "tests/e2e/test_paused.py::test_it",
        "tests/simulator/test_it.py::test_it",
        jobs[0],
        files[0],
        files[1],
        jobs[1],
        files[2],
        files[3],
        jobs[2],
    ]
