"""T3: updates that were lost with a coordinator count as redone once, by the versions of workers that join again."""

from __future__ import annotations

import pytest

from backstay._coordination import Coordinator, CoordinatorState, Redone, Restart, Rules


def coordinator(term: int, version: int, *, replicates: bool = False, redone: int = 0) -> Coordinator:
    """Returns a new process, which starts at a checkpoint."""
    state = CoordinatorState(term=term, version=version, world=2, redone=redone)
    rules = Rules(mode="Sync", shards=1, steps=1000, stores=True, replicates=replicates)
    return Coordinator(rules, state, checkpoint="/ck" if version else "")


def redone(own: Coordinator, *reports: tuple[int, int]) -> list[int]:
    found = [decision for report in reports for decision in own.worker_at(0.0, *report)]
    return [decision.updates for decision in found if isinstance(decision, Redone)]


def test_the_highest_version_of_all_workers_counts_once() -> None:
    own = coordinator(2, 400, redone=7)
    assert redone(own, (1, 418), (1, 420), (1, 420), (1, 419), (1, 418)) == [18, 2]
    assert own.state.redone == 27


@pytest.mark.parametrize("report", [(0, 0), (1, 400), (1, 12), (2, 400), (2, 3)])
def test_a_worker_that_lost_nothing_adds_nothing(report: tuple[int, int]) -> None:
    assert redone(coordinator(2, 400), report) == []


def test_a_coordinator_without_checkpoints_begins_the_same_term_again() -> None:
    assert redone(coordinator(1, 0), (1, 50), (1, 49)) == [50]


def test_what_a_rollback_counted_is_not_counted_again_when_workers_join() -> None:
    """The coordinator is alive and a shard is lost: the coordinator counts what is redone."""
    own = coordinator(1, 57)
    own.restart(0.0, CoordinatorState(term=2, version=40, world=2), "/ck")
    assert own.state.redone == 17
    assert redone(own, (1, 57), (1, 56)) == []
    assert own.state.redone == 17


def test_with_standbys_a_coordinator_that_is_behind_a_worker_begins_a_new_term_and_counts_all() -> None:
    own = coordinator(1, 100, replicates=True)
    assert [type(decision) for decision in own.worker_at(0.0, 1, 105)] == [Restart]
    own.restart(0.0, CoordinatorState(term=2, version=90, world=2), "/ck")
    assert own.state.redone == 15
    assert redone(own, (1, 105), (1, 104)) == []
