"""O1: one job is never worked on by two tasks at a time, and any number of triggers is one more look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backstay_operator.backoff import Curve
from backstay_operator.dispatch import Dispatcher, Pauses

NO_CHANCE = Curve(first=1.0, most=8.0, jitter=0.0)


class Work:
    """Takes `seconds` for each run, and notes who was at work when."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.runs: list[tuple[float, str]] = []
        self.now: set[str] = set()
        self.most = 0
        self.again: dict[str, float | None] = {}
        self.fail: dict[str, int] = {}

    async def __call__(self, key: str) -> float | None:
        assert key not in self.now, "two tasks for one key"
        self.now.add(key)
        self.most = max(self.most, len(self.now))
        self.runs.append((asyncio.get_running_loop().time(), key))
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now.discard(key)
        if self.fail.get(key, 0) > 0:
            self.fail[key] -= 1
            raise RuntimeError("as configured")
        return self.again.get(key)

    def times(self, key: str) -> list[float]:
        return [at for at, which in self.runs if which == key]


def dispatcher(
    work: Work,
    failed: list[str] | None = None,
    limit: int = 10,
    impatient: float = 1.0,
    settle: float = 0.0,
    behind: Callable[[], float] = lambda: 0.0,
) -> Dispatcher[str]:
    sink = [] if failed is None else failed
    return Dispatcher(
        work,
        limit=limit,
        draw=lambda: 0.0,
        failed=lambda key, _: sink.append(key),
        pauses=Pauses(NO_CHANCE, impatient, settle),
        behind=behind,
    )


def test_triggers_while_at_work_are_one_more_run(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(1.0)
        it = dispatcher(work)
        for _ in range(50):
            it.mark("a")
        await asyncio.sleep(0.5)
        for _ in range(50):
            it.mark("a")
        await asyncio.sleep(10)
        assert work.times("a") == [0.0, 1.0]
        assert len(it) == 0
        await it.close()

    virtual(story())


def test_keys_run_beside_each_other_up_to_the_limit(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(1.0)
        it = dispatcher(work, limit=3)
        for number in range(9):
            it.mark(f"job-{number}")
        await asyncio.sleep(20)
        assert work.most == 3
        assert len(work.runs) == 9
        assert max(at for at, _ in work.runs) == 2.0
        await it.close()

    virtual(story())


def test_an_urgent_key_gets_the_next_free_slot(virtual: Callable[..., Any]) -> None:
    """A dead pod of one job does not wait until hundreds of other jobs have been looked at."""

    async def story() -> None:
        work = Work(1.0)
        it = dispatcher(work, limit=2)
        for number in range(200):
            it.mark(f"job-{number}")
        await asyncio.sleep(0.5)
        it.mark("job-199", urgent=True)  # it waits already
        it.mark("new", urgent=True)
        await asyncio.sleep(200)
        assert work.times("job-199") == [1.0]
        assert work.times("new") == [1.0]
        assert work.times("job-0") == [0.0]
        assert work.most == 2
        assert len(work.runs) == 201
        assert len(it) == 0
        await it.close()

    virtual(story())


def test_o1_while_events_are_late_work_that_is_not_urgent_gets_fewer_slots(virtual: Callable[..., Any]) -> None:
    """A dead pod is one of the events that are late: work that creates more of them waits, its replacement does not."""

    async def story() -> None:
        late = 0.0
        work = Work(1.0)
        it = dispatcher(work, limit=8, behind=lambda: late)
        for number in range(8):
            it.mark(f"first {number}")
        await asyncio.sleep(0.5)
        assert len(work.now) == 8
        late = 3.0
        for number in range(20):
            it.mark(f"calm {number}")
        await asyncio.sleep(4.0)
        assert len(work.now) == 1  # and not none: what is late may never arrive
        it.mark("dead pod", urgent=True)
        it.mark("calm 19", urgent=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert {"dead pod", "calm 19"} < work.now
        late = 0.0
        await asyncio.sleep(1.5)
        assert 4 <= len(work.now) <= 8
        await asyncio.sleep(10.0)
        assert not work.now
        assert len(work.runs) == 8 + 20 + 1
        await it.close()

    virtual(story())


def test_triggers_that_come_together_are_one_run_unless_one_is_urgent(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(0.0)
        it = dispatcher(work, settle=0.5)
        for _ in range(4):
            it.mark("a")
            await asyncio.sleep(0.1)
        it.mark("b")
        it.mark("b", urgent=True)
        await asyncio.sleep(5)
        assert work.times("a") == [0.5]
        assert work.times("b") == pytest.approx([0.4])
        await it.close()

    virtual(story())


def test_a_trigger_at_work_settles_too_unless_it_is_urgent(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(1.0)
        it = dispatcher(work, settle=0.5)
        for key in ("a", "b"):
            it.mark(key, urgent=True)
        await asyncio.sleep(0.5)
        it.mark("a")
        it.mark("b", urgent=True)
        await asyncio.sleep(5)
        assert work.times("a") == [0.0, 1.5]
        assert work.times("b") == [0.0, 1.0]
        assert len(it) == 0
        await it.close()

    virtual(story())


def test_a_run_requests_the_next_and_the_earliest_timer_applies(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(0.0)
        work.again["a"] = 30.0
        it = dispatcher(work)
        it.mark("a")
        await asyncio.sleep(1)
        it.mark_after("a", 4.0)
        it.mark_after("a", 100.0)
        await asyncio.sleep(6)
        assert work.times("a") == [0.0, 5.0]
        work.again["a"] = None
        await asyncio.sleep(60)
        assert work.times("a") == [0.0, 5.0, 35.0]
        await it.close()

    virtual(story())


def test_a_trigger_in_the_same_moment_as_the_end_is_not_lost(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(1.0)
        it = dispatcher(work)
        it.mark("a")
        asyncio.get_running_loop().call_at(1.0, it.mark, "a")
        await asyncio.sleep(5)
        assert len(work.runs) == 2
        await it.close()

    virtual(story())


def test_failures_back_off_per_key_and_are_reported(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        failed: list[str] = []
        work = Work(0.0)
        work.fail["bad"] = 5
        it = dispatcher(work, failed)
        it.mark("bad")
        it.mark("good")
        await asyncio.sleep(100)
        assert work.times("bad") == pytest.approx([0, 1, 3, 7, 15, 23])  # 1, 2, 4, 8, then the most
        assert failed == ["bad"] * 5
        assert work.times("good") == [0.0]
        await it.close()

    virtual(story())


def test_triggers_bring_a_failing_key_forward_but_never_make_it_spin(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(0.0)
        work.fail["a"] = 4
        it = dispatcher(work)
        it.mark("a")
        for _ in range(100):  # ten triggers a second, as a failing status write might cause itself
            await asyncio.sleep(0.1)
            it.mark("a")
        assert len([at for at in work.times("a") if at < 3.9]) <= 5
        assert work.fail["a"] == 0
        await it.close()

    virtual(story())


def test_close_cancels_what_runs_and_no_timer_fires_after(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        work = Work(10.0)
        it = dispatcher(work)
        it.mark("a")
        it.mark_after("b", 1.0)
        await asyncio.sleep(0.5)
        await it.close()
        it.mark("c")
        await asyncio.sleep(50)
        assert work.runs == [(0.0, "a")]
        assert not work.now

    virtual(story())
