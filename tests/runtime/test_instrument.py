"""The instrumentation point defines spans, the values of histograms, and the time of injected faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from backstay import _instrument


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _instrument.keep(_instrument.CAPACITY)
    yield
    _instrument.inject_with(None)
    _instrument.observe("p", None)
    _instrument.keep(_instrument.CAPACITY)


class FaultInjector:
    def __init__(self, error: Exception | None = None) -> None:
        self.reached: list[tuple[str, int | None]] = []
        self._error = error

    def reach(self, point: str, step: int | None) -> None:
        self.reached.append((point, step))
        if self._error is not None:
            raise self._error

    def alter(self, point: str, value: int) -> int:
        return value + 1 if point == "frame" else value


def test_a_span_is_kept_and_observed_and_reaches_the_injector_once() -> None:
    seen: list[float] = []
    striker = FaultInjector()
    _instrument.inject_with(striker)
    _instrument.observe("p", seen.append)
    with _instrument.span("p", 7, shard=1):
        pass
    (kept,) = _instrument.spans()
    assert (kept.point, kept.step, kept.notes, kept.thread) == ("p", 7, {"shard": 1}, threading.current_thread().name)
    assert seen == [kept.ended - kept.began]
    assert kept.ended >= kept.began
    assert striker.reached == [("p", 7)]


def test_a_body_that_raises_is_kept_and_not_observed() -> None:
    seen: list[float] = []
    _instrument.observe("p", seen.append)
    with pytest.raises(ValueError, match="boom"), _instrument.span("p"):
        raise ValueError("boom")
    assert _instrument.spans()[0].notes == {"raised": "ValueError"}
    assert seen == []


def test_a_fault_that_raises_leaves_no_open_span() -> None:
    _instrument.follow_this_thread()
    _instrument.inject_with(FaultInjector(OSError("full")))
    with pytest.raises(OSError, match="full"), _instrument.span("p"):
        raise AssertionError("the body must not run")
    assert _instrument.doing() is None


def test_doing_is_the_innermost_span_of_the_followed_thread_alone() -> None:
    _instrument.follow_this_thread()
    with _instrument.span("outer", 1):
        with _instrument.span("inner", 2):
            other = threading.Thread(target=lambda: _instrument.span("else").__enter__())
            other.start()
            other.join()
            found = _instrument.doing()
            assert found is not None
            assert (found.point, found.step) == ("inner", 2)
        found = _instrument.doing()
        assert found is not None
        assert found.point == "outer"
    assert _instrument.doing() is None


def test_the_ring_drops_the_oldest_and_keeps_nothing_when_it_is_off() -> None:
    _instrument.keep(3)
    for step in range(5):
        _instrument.record("p", 0.0, 1.0, step)
    assert [kept.step for kept in _instrument.spans()] == [2, 3, 4]
    _instrument.keep(0)
    with _instrument.span("p"):
        pass
    assert _instrument.spans() == []


def test_values_pass_unchanged_without_a_script() -> None:
    value = object()
    assert _instrument.alter("frame", value) is value
    _instrument.reach("p")
    _instrument.inject_with(FaultInjector())
    assert (_instrument.alter("frame", 1), _instrument.alter("else", 1)) == (2, 1)


def test_the_offset_of_a_clock_is_that_of_the_shortest_recent_round_trip() -> None:
    clocks = type(_instrument.clocks)()
    clocks.observe((0, 1), 10.0, 105.5, 11.0)  # a round trip of 1 s, at 10.5 here
    assert clocks.offsets() == {(0, 1): (95.0, 0.5)}
    clocks.observe((0, 1), 20.0, 116.0, 22.0)  # slower: it would be less exact
    assert clocks.offsets() == {(0, 1): (95.0, 0.5)}
    clocks.observe((0, 1), 30.0, 125.3, 30.2)
    offset, error = clocks.offsets()[0, 1]
    assert (offset, error) == (pytest.approx(95.2), pytest.approx(0.1))
    clocks.observe((0, 1), 100.0, 195.4, 100.4)  # clocks drift: an old offset is given up
    assert clocks.offsets()[0, 1][1] == pytest.approx(0.2)


def test_means_are_those_since_the_previous_call() -> None:
    _instrument.means(())
    _instrument.record("p", 0.0, 1.0)
    _instrument.record("p", 0.0, 3.0)
    assert _instrument.means(("p", "q")) == {"p": 2.0}
    assert _instrument.means(("p",)) == {}
