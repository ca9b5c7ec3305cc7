"""The history of a tested job, from the events that its coordinators wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from between import put
from hypothesis import given
from hypothesis import strategies as st

from backstay.testing import Contribution, Rollback, Update
from backstay.testing._recording import account, read_events


def update(step: int, term: int = 1, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return {
        "point": "update",
        "term": term,
        "step": step,
        "ranks": list(ranks),
        "skipped": False,
        "world": 2,
        "loss": 0.5,
    }


def contribution(step: int, rank: int, outcome: str = "applied", term: int = 1) -> dict[str, Any]:
    return {
        "point": "contribution",
        "term": term,
        "rank": rank,
        "incarnation": 1,
        "step": step,
        "attempt": step,
        "outcome": outcome,
        "staleness": 0,
    }


def rollback(term: int, step: int, redone: int) -> dict[str, Any]:
    return {"point": "rollback", "term": term, "step": step, "redone": redone}


def test_t6_a_decision_that_two_coordinators_report_counts_as_the_newer_one_reported_it() -> None:
    first = [update(0), contribution(0, 0), update(1, ranks=(0,)), contribution(1, 1, "late")]
    second = [update(1, ranks=(0, 1)), contribution(1, 1)]
    updates, contributions, rollbacks = account([*first, *second])
    assert [one.ranks for one in updates] == [(0, 1), (0, 1)]
    assert contributions == (
        Contribution(rank=0, incarnation=1, step=0, outcome="applied", staleness=0, term=1),
        Contribution(rank=1, incarnation=1, step=1, outcome="applied", staleness=0, term=1),
    )
    assert rollbacks == ()


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_t6_after_rollbacks_the_updates_are_one_history(terms: list[tuple[int, float, bool]]) -> None:
    """Each term makes some updates and then goes back by a share of all: steps have no gap and terms never fall.

    A coordinator that was replaced reports no rollback: the first update of its term shows it.
    """
    events, version = [], 0
    expected: list[int] = []  # the term of each step
    backs = []
    for term, (made, share, reported) in enumerate([*terms, (1, 1.0, True)], start=1):
        events += [update(version + n, term) for n in range(made)]
        expected += [term] * made
        version += made
        to = int(version * share)
        if reported:
            events.append(rollback(term + 1, to, version - to))
        backs.append(Rollback(term=term + 1, step=to, redone=version - to))
        expected, version = expected[:to], to
    updates, _, rollbacks = account(events)
    assert [one.step for one in updates] == list(range(version))
    assert [one.term for one in updates] == expected == sorted(expected)
    assert rollbacks == tuple(backs)
    assert all(isinstance(one, Update) for one in updates)


@given(st.integers(0, 200))
def test_an_event_that_a_killed_pod_wrote_in_part_is_left_out(tmp_path_factory: Any, cut: int) -> None:
    file: Path = tmp_path_factory.mktemp("events") / "events"
    lines = [json.dumps(update(step)) + "\n" for step in range(2)]
    text = "".join(lines)[:cut]
    put(file, text)
    assert read_events(file) == [json.loads(line) for line in text.split("\n")[:-1]]
    assert read_events(file.with_name("none")) == []
