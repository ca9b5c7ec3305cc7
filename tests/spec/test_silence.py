"""The times of silent processes agree with `stallSeconds` (T8, O4), and with each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec import silence
from backstay_spec.silence import worker_silence


@given(st.integers(min_value=1, max_value=10**6))
def test_o4_a_running_worker_is_not_replaced_for_its_silence_before_its_limit(stall: int) -> None:
    """The limit is `stallSeconds`, at most 30 s or a tenth of `stallSeconds`, and at least two heartbeats."""
    found = worker_silence(stall)
    assert found.limit >= min(stall, 30, silence.HEARTBEAT * 2)
    assert found.limit >= min(stall, max(30, stall / 10)) - 1e-9
    assert found.limit <= max(6, min(stall, max(30, stall / 10))) + 1e-9
    assert 3 <= found.health <= silence.HEALTH
    assert found.reported > silence.HEARTBEAT


@given(st.integers(min_value=1, max_value=10**6))
def test_t8_a_longer_limit_never_makes_the_judgement_sooner(stall: int) -> None:
    assert worker_silence(stall).limit <= worker_silence(stall + 1).limit


@pytest.mark.parametrize(("stall", "limit"), [(1, 6), (12, 12), (30, 30), (300, 30), (600, 60)])
def test_the_limits_of_the_documentation(stall: int, limit: int) -> None:
    assert worker_silence(stall).limit == pytest.approx(limit)
