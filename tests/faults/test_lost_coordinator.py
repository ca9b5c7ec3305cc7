"""A coordinator dies before any checkpoint is whole, while another shard lives on, as found by chaos (T6, T8)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import Coordinator, CoordinatorState, Intervals, Rules, ServerPosition


@given(st.integers(1, 5), st.integers(0, 50))
def test_a_shard_of_an_unstored_history_is_taken_back_in_a_higher_term(term: int, version: int) -> None:
    """The new coordinator starts in term 1. The shard is in that term or a higher one, and would wait forever."""
    rules = Rules(
        mode="Sync", shards=2, steps=100, backups=0, max_non_finite=3, max_staleness=None, staleness_damping=False,
        clip_norm=None, stores=True, evaluates=False,
    )  # fmt: skip
    state = CoordinatorState(term=1, version=0, world=1)
    coordinator = Coordinator(rules, state, checkpoint="", desired_world=1, intervals=Intervals(), now=0.0)
    decisions = coordinator.hello(0.0, ServerPosition(1, term, version))
    restarts = [decision for decision in decisions if type(decision).__name__ == "Restart"]
    assert bool(restarts) == ((term, version) > (1, 0))
    assert not restarts or coordinator.newest_term >= term
