"""The simulated clock, shared resources and random numbers are exact, and the same each time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._simulator._clock import DrawStream, EventHeap, FairShare


@given(st.lists(st.floats(0, 100), max_size=30))
def test_events_are_called_in_order_of_time_and_then_of_planning(times: list[float]) -> None:
    heap, called = EventHeap(), list[tuple[float, int]]()
    for number, time in enumerate(times):
        heap.at(time, lambda number=number: called.append((heap.now, number)))
    heap.run(math.inf, lambda: False)
    assert called == sorted((time, number) for number, time in enumerate(times))


def test_a_cancelled_event_is_not_called() -> None:
    heap, called = EventHeap(), list[str]()
    event = heap.after(1.0, called.append, "cancelled")
    heap.after(2.0, called.append, "called")
    heap.cancel(event)
    heap.run(math.inf, lambda: False)
    assert called == ["called"]


def processor_sharing(arrivals: list[tuple[float, float]], capacity: float, cap: float) -> list[float]:
    """Returns the ends of pieces of work, by small exact steps from one change to the next."""
    left: dict[int, float] = {}
    ends, now = [0.0] * len(arrivals), 0.0
    due = sorted(range(len(arrivals)), key=lambda number: arrivals[number][0])
    while due or left:
        rate = min(cap, capacity / len(left)) if left else 0.0
        first = min(left.values(), default=math.inf) / rate if left else math.inf
        until = arrivals[due[0]][0] if due else math.inf
        step = min(first, until - now)
        now += step
        left = {number: amount - step * rate for number, amount in left.items()}
        for number in [number for number, amount in left.items() if amount <= 1e-9]:
            ends[number] = now
            del left[number]
        while due and arrivals[due[0]][0] <= now:
            number = due.pop(0)
            left[number] = arrivals[number][1]
    return ends


pieces = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=12)


@given(pieces, st.floats(0.5, 4), st.floats(0.2, 4))
def test_work_is_shared_equally_up_to_the_cap(arrivals: list[tuple[float, float]], capacity: float, cap: float) -> None:
    heap, ends = EventHeap(), [0.0] * len(arrivals)
    share = FairShare(heap, capacity, cap)

    def begin(number: int) -> None:
        share.add(arrivals[number][1], lambda: ends.__setitem__(number, heap.now))

    for number, (time, _) in enumerate(arrivals):
        heap.at(time, begin, number)
    heap.run(math.inf, lambda: False)
    assert ends == pytest.approx(processor_sharing(arrivals, capacity, cap), rel=1e-6, abs=1e-6)
    assert share.count == 0


def test_removed_work_leaves_its_share_to_the_others() -> None:
    heap, ended = EventHeap(), list[float]()
    share = FairShare(heap, 1.0)
    first = share.add(10.0, lambda: ended.append(-1.0))
    share.add(2.0, lambda: ended.append(heap.now))
    heap.at(2.0, share.remove, first)
    heap.run(math.inf, lambda: False)
    assert ended == pytest.approx([3.0])


@given(st.integers(0, 1 << 64), st.text(max_size=5), st.integers(0, 100))
def test_draws_depend_on_the_seed_and_the_purpose_only(seed: int, purpose: str, rank: int) -> None:
    one, other = DrawStream(seed, purpose, rank), DrawStream(seed, purpose, rank)
    assert [one.uniform() for _ in range(5)] == [other.uniform() for _ in range(5)]
    assert DrawStream(seed, purpose, rank).uniform() != DrawStream(seed, purpose, rank + 1).uniform()


@pytest.mark.parametrize(("median", "sigma"), [(0.0, 0.1), (2.0, 0.0), (0.0, 0.0)])
def test_a_draw_without_a_median_or_a_spread_changes_no_later_one(median: float, sigma: float) -> None:
    one, other = DrawStream(3, "check"), DrawStream(3, "check")
    assert one.around(median, sigma) == median
    other.around(2.0, 0.1)
    assert one.uniform() == other.uniform()


def test_draws_have_their_distributions() -> None:
    draws = DrawStream(3, "check")
    count = 20_000
    assert sum(draws.uniform() for _ in range(count)) / count == pytest.approx(0.5, abs=0.01)
    assert sum(draws.exponential(7.0) for _ in range(count)) / count == pytest.approx(7.0, rel=0.03)
    logs = [math.log(draws.around(2.0, 0.3)) for _ in range(count)]
    mean = sum(logs) / count
    assert mean == pytest.approx(math.log(2.0), abs=0.01)
    assert math.sqrt(sum((each - mean) ** 2 for each in logs) / count) == pytest.approx(0.3, rel=0.03)
