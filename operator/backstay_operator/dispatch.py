"""Runs one task at a time for each key, and many keys at the same time (O1).

A trigger during a run is recorded, and not queued: any number of triggers cause one more run. One run is enough,
because a run reads the whole state. This module has its own timers, because Kopf's timers would force finalizers on
the objects.

Keys that are marked as urgent run before all others. So the replacement of a dead pod does not wait for the runs of
hundreds of other jobs. Many jobs run at the same time after a change of the leader, for example.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from backstay_operator.backoff import Curve

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

# If this process is behind by more than this, keys that are not urgent get fewer slots.
BEHIND_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 0.1


class _Slots(Generic[K]):
    """A semaphore with two queues; a key in the urgent queue gets the next free slot.

    While this process is behind with the watches' events, keys that are not urgent get fewer slots. Their work would
    create more events, and one of the waiting events may report a dead pod. The number of these slots is halved or
    grows by one at each adjustment, like the window of a TCP sender (RFC 5681). It is at least one.

    Args:
        limit: slots in all.
        behind: returns the seconds by which this process is behind.
    """

    def __init__(self, limit: int, behind: Callable[[], float]) -> None:
        self._limit = self._calm_limit = limit
        self._behind = behind
        self._taken = self._taken_calmly = 0
        self._queues: tuple[dict[K, asyncio.Future[bool]], dict[K, asyncio.Future[bool]]] = ({}, {})
        self._look: asyncio.TimerHandle | None = None

    async def acquire(self, key: K, *, urgent: bool) -> bool:
        """Wait for a slot. One key waits at most once.

        Returns:
            Whether the slot was acquired as an urgent one; `release` needs it.
        """
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._adjust)
        if self._is_free(urgent=urgent):
            self._take(urgent=urgent)
            return urgent
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queues[not urgent][key] = admitted
        try:
            return await admitted
        except asyncio.CancelledError:
            for queue in self._queues:
                queue.pop(key, None)
            if admitted.done() and not admitted.cancelled():
                self.release(urgent=admitted.result())  # admitted and cancelled at the same time
            raise

    def prioritize(self, key: K) -> None:
        """Move `key` to the urgent queue, if it is waiting."""
        admitted = self._queues[1].pop(key, None)
        if admitted is not None:
            self._queues[0][key] = admitted
            self._admit()

    def release(self, *, urgent: bool) -> None:
        """Release a slot; `urgent` is what `acquire` returned."""
        self._taken -= 1
        self._taken_calmly -= not urgent
        self._admit()

    def close(self) -> None:
        """Cancel all timers."""
        if self._look is not None:
            self._look.cancel()

    def _is_free(self, *, urgent: bool) -> bool:
        return self._taken < self._limit and (urgent or self._taken_calmly < self._calm_limit)

    def _take(self, *, urgent: bool) -> None:
        self._taken += 1
        self._taken_calmly += not urgent

    def _admit(self) -> None:
        for urgent, queue in zip((True, False), self._queues, strict=True):
            while queue and self._is_free(urgent=urgent):
                admitted = queue.pop(next(iter(queue)))
                if not admitted.done():
                    self._take(urgent=urgent)
                    admitted.set_result(urgent)

    def _adjust(self) -> None:
        if self._behind() > BEHIND_SECONDS:
            self._calm_limit = max(1, self._calm_limit // 2)
        else:
            self._calm_limit = min(self._limit, self._calm_limit + 1)
        self._admit()
        idle = not self._taken and not any(self._queues) and self._calm_limit == self._limit
        self._look = None if idle else asyncio.get_running_loop().call_later(LOOK_SECONDS, self._adjust)


@dataclass
class _State:
    task: asyncio.Task[None] | None = None
    dirty: bool = False
    urgent: bool = False
    timer: asyncio.TimerHandle | None = None
    failures: int = 0


_BACK_OFF: Final = Curve(first=0.2, most=30.0)


@dataclass(frozen=True)
class Pauses:
    """The times until the next run of a key.

    Attributes:
        curve: the back-off after an exception.
        impatient: seconds. While a key backs off, a trigger brings the next try forward to at most this time from now.
            A failing write may itself cause triggers, so an immediate try could become a busy loop.
        settle: seconds from a trigger that is not urgent to the run. Events of one job that arrive together, such
            as those of its ten new pods, cause one run.
    """

    curve: Curve = _BACK_OFF
    impatient: float = 1.0
    settle: float = 0.0


class Dispatcher(Generic[K]):
    """Calls ``work(key)`` for every key that was marked.

    Args:
        work: processes one key once. Returns the seconds after which it must run again (None: only when marked).
            An exception is logged and counted, and the key is tried again with back-off; nothing escapes.
        limit: the number of keys that run at the same time.
        draw: returns a random number in [0, 1) for the back-off.
        failed: called with every exception that `work` raised.
        pauses: the times between a trigger or an exception and the next run.
        behind: returns the seconds by which this process is behind with the watches' events.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        limit: int,
        draw: Callable[[], float],
        failed: Callable[[K, Exception], None],
        pauses: Pauses | None = None,
        behind: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._work = work
        self._slots: _Slots[K] = _Slots(limit, behind)
        self._draw = draw
        self._failed = failed
        self._pauses = pauses or Pauses()
        self._states: dict[K, _State] = {}
        self._closed = False

    def mark(self, key: K, *, urgent: bool = False) -> None:
        """Run `key` as soon as a slot is free.

        Args:
            key: the key to run.
            urgent: run it before all keys that are not urgent.
        """
        if self._closed:
            return
        state = self._states.setdefault(key, _State())
        if urgent and not state.urgent:
            state.urgent = True
            self._slots.prioritize(key)
        if state.task is not None:
            state.dirty = True
        elif state.failures:
            self._wake_at(key, state, self._pauses.impatient)
        elif urgent or not self._pauses.settle:
            self._start(key, state)
        else:
            self._wake_at(key, state, self._pauses.settle)

    def mark_after(self, key: K, seconds: float) -> None:
        """Run `key` after `seconds` at the latest; an earlier timer stays."""
        if self._closed:
            return
        state = self._states.setdefault(key, _State())
        self._wake_at(key, state, seconds)

    def __len__(self) -> int:
        return len(self._states)

    async def close(self) -> None:
        """Stop: no timer fires after this, and running tasks are cancelled and awaited."""
        self._closed = True
        self._slots.close()
        tasks = []
        for state in self._states.values():
            if state.timer is not None:
                state.timer.cancel()
            if state.task is not None:
                state.task.cancel()
                tasks.append(state.task)
        self._states.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wake_at(self, key: K, state: _State, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        if state.timer is not None:
            if state.timer.when() <= due:
                return
            state.timer.cancel()
        state.timer = loop.call_at(due, self._fire, key)

    def _fire(self, key: K) -> None:
        state = self._states.get(key)
        if state is None or self._closed:
            return
        state.timer = None
        if state.task is None:
            self._start(key, state)
        else:
            state.dirty = True

    def _start(self, key: K, state: _State) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        state.task = asyncio.get_running_loop().create_task(self._run(key, state), name=f"reconcile {key}")

    async def _run(self, key: K, state: _State) -> None:
        again: float | None = None
        try:
            while True:
                as_urgent = await self._slots.acquire(key, urgent=state.urgent)
                try:
                    # With the slot acquired, the run reads state that is newer than every trigger so far.
                    state.dirty = state.urgent = False
                    again = await self._work(key)
                    state.failures = 0
                except Exception as error:  # noqa: BLE001  a fault of one job must not affect another
                    self._failed(key, error)
                    again = self._pauses.curve.seconds(state.failures, self._draw)
                    state.failures += 1
                finally:
                    self._slots.release(urgent=as_urgent)
                if state.failures or not state.dirty:
                    break
                if self._pauses.settle and not state.urgent:
                    again = self._pauses.settle if again is None else min(again, self._pauses.settle)
                    break
        finally:
            state.task = None
        if self._closed:
            return
        if state.failures and state.dirty and again is not None:
            again = min(again, self._pauses.impatient)
        if again is not None:
            self._wake_at(key, state, again)
        elif state.timer is None:
            self._states.pop(key, None)
