"""`Lead` decides how far the host of one process is ahead of the devices."""

from __future__ import annotations

import pytest

from backstay._single._loop import Lead


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 2), (0.0001, 16), (0.001, 16), (0.004, 5), (0.02, 2), (90.0, 2)])
def test_the_host_is_further_ahead_of_short_steps(seconds: float, steps: int) -> None:
    """The first step is read after its compilation, of 30 s here."""
    times = iter([30.0 + number * seconds * 0.999 for number in range(10)])
    lead = Lead(lambda: next(times))
    assert lead.steps == 2
    for _ in range(10):
        lead.settled()
    assert lead.steps == steps
