"""O5: only calls that this operator made in time, and awaited without its own pause, prove a silence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from backstay_operator.contact import TICK, TOGETHER, Attention, Calls
from backstay_operator.progress import reported

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NO_PODS: frozenset[int] = frozenset()


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.mark.parametrize(
    ("asleep", "awake", "paused"), [(0.0, True, False), (0.4, True, False), (0.6, False, False), (3.1, False, True)]
)
def test_a_process_that_got_no_processor_was_not_awake(asleep: float, awake: bool, paused: bool) -> None:
    clock = Clock()
    attention = Attention(clock)
    began = clock.at
    for _ in range(5):
        clock.at += TICK
        attention.tick()
    clock.at += TICK + asleep  # the tick itself comes later than the caller
    assert attention.awake_since(began) is awake
    assert attention.paused_since(began) is paused
    assert attention.awake_since(clock.at + 0.01)
    assert not attention.paused_since(clock.at + 0.01)


def test_time_without_jobs_is_not_a_pause() -> None:
    clock = Clock()
    attention = Attention(clock)
    clock.at += 3600
    attention.start()
    assert attention.awake_since(clock.at - 1)


def test_only_calls_that_prove_something_count_and_an_answer_ends_the_silence() -> None:
    calls = Calls()
    calls.answered("a", NOW)
    for second, proves in enumerate([True, False, True], 1):
        calls.missed("a", NOW + timedelta(seconds=second), proves=proves)
    calls.long_missed("a", calls.generation)
    contact = calls.contact(NOW, NO_PODS, NO_PODS)
    assert (contact.silent["a"].calls, contact.silent["a"].long_calls, contact.silent["a"].since) == (2, 1, NOW)
    assert not contact.answers("a")
    calls.long_answered("a")
    assert calls.contact(NOW, NO_PODS, NO_PODS).silent["a"].long_calls == 0
    calls.answered("a", NOW)
    assert calls.contact(NOW, NO_PODS, NO_PODS).answers("a")


def silence_of(calls: Calls, uid: str) -> tuple[int, int]:
    silence = calls.contact(NOW, NO_PODS, NO_PODS).silent[uid]
    return silence.calls, silence.long_calls


@pytest.mark.parametrize(("paused", "kept"), [(TOGETHER, 0), (TOGETHER - 1, TOGETHER - 1)])
def test_pods_that_were_paused_together_are_called_again_when_one_continues(paused: int, kept: int) -> None:
    calls = Calls()
    for uid in "abc":
        calls.answered(uid, NOW)
    began = calls.generation
    for _ in range(paused):
        for uid in "abc":
            calls.missed(uid, NOW, proves=True)
    calls.long_missed("b", began)
    calls.answered("a", NOW)
    calls.missed("b", NOW, proves=True)
    calls.long_missed("c", began)  # it began during the pause
    assert silence_of(calls, "b") == (kept + 1, int(kept > 0))
    assert silence_of(calls, "c") == (kept, int(kept > 0))
    calls.missed("b", NOW, proves=True)
    calls.answered("c", NOW)  # b was silent alone since then
    assert silence_of(calls, "b")[0] == kept + 2


def test_an_answer_of_a_pod_that_was_silent_alone_resets_no_other_one() -> None:
    calls = Calls()
    for uid in "abc":
        calls.answered(uid, NOW)
    for _ in range(5):
        calls.missed("a", NOW, proves=True)
        calls.missed("b", NOW, proves=True)
        calls.answered("c", NOW)
    calls.answered("a", NOW)
    assert silence_of(calls, "b") == (5, 0)


def test_a_call_that_proves_nothing_is_still_no_answer() -> None:
    """A standby that did not answer in the newest round is called again before it is promoted."""
    calls = Calls()
    calls.answered("a", NOW)
    calls.missed("a", NOW, proves=False)
    assert not calls.contact(NOW, NO_PODS, NO_PODS).answers("a")
    assert calls.silent() == {"a"}


def test_after_a_pause_everything_is_called_again() -> None:
    calls = Calls()
    calls.answered("a", NOW)
    calls.missed("b", NOW, proves=True)
    calls.reset()
    contact = calls.contact(NOW, NO_PODS, NO_PODS)
    assert not contact.silent
    assert not contact.answers("a")


@pytest.mark.parametrize(
    ("report", "reachable", "unreachable"),
    [
        ('{"0": {"answered": 1.5, "missed": 0}}', {0}, set()),
        ('{"0": {"answered": 12.0, "missed": 2}}', set(), {0}),
        ('{"0": {"answered": 40.0, "missed": 0}}', set(), set()),  # the worker itself was paused
        ('{"1": {"answered": 12.0, "missed": 2}}', set(), set()),  # not the shard in question
        (None, set(), set()),
        ("there are /metrics, /healthz and /readyz", set(), set()),
        ("[1]", set(), set()),
        ('{"0": 3}', set(), set()),
        ('{"x": {"answered": "y"}}', set(), set()),
    ],
)
def test_what_a_worker_reports(report: str | None, reachable: set[int], unreachable: set[int]) -> None:
    assert reported([report], {0}) == (frozenset(reachable), frozenset(unreachable))
