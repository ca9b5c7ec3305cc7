"""Decides what one process does next, as a synchronous job with one rank and without a coordinator. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from ._modes import MODES, change_batches, change_world
from ._state import CoordinatorState, EpochEnded

__all__ = ["Course", "Dispatch", "Then"]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Compute the update that makes `version`; its results are read later.

    Attributes:
        shown: whether its report has the model, which no later update may consume before it is read.
    """

    version: int
    shown: bool


class Then(Enum):
    """An action of one process between two updates."""

    READ = auto()
    """Read the results of the oldest update that is not read, and give them to `Course.read`."""
    STORE = auto()
    """Store `Course.state` and its model; every update that was dispatched is read."""


Next: TypeAlias = Dispatch | Then | None


class Course:
    """The updates of one process, of which the newest are dispatched and not read.

    Attributes:
        state: the history up to the newest update that is read.
        begun: the version at which this process began.
    """

    def __init__(
        self,
        state: CoordinatorState,
        steps: int,
        *,
        batches: int = 1,
        shown_every: int = 0,
        due: Callable[[int], bool] = lambda version: False,
    ) -> None:
        """
        Args:
            state: the history at the beginning, which this object changes.
            steps: the number of updates, with those of `state`.
            batches: the number of batches of an update.
            shown_every: the number of updates between two that are shown; 0: none is.
            due: whether a version is to be stored; called after its dispatch, and not for the last one.
        """
        change_batches(state, batches, MODES["Sync"])
        self.state, self.begun = state, state.version
        self._dispatched = state.version
        self._end = state.last or steps
        self._shown_every, self._due = shown_every, due
        self._shows = self._stores = self._asks = False

    def next(self, *, leaving: bool, ahead: int) -> Next:
        """Returns the next action, or None if there is none, because training has ended or this process leaves.

        Args:
            leaving: whether a signal ends this process.
            ahead: how many updates may be dispatched and not read.
        """
        state = self.state
        if self._asks:
            self._asks, self._stores = False, self._due(self._dispatched)
        ends = leaving or self._dispatched >= self._end
        # Several ranks are in force in the first update after a job's checkpoint only.
        waits = ends or self._shows or self._stores or state.world != 1
        if self._dispatched - state.version > (0 if waits else ahead):
            return Then.READ
        if ends:
            if self.begun < state.version == self._end:
                state.last = self._end
            return None
        if self._stores:
            self._stores = False
            return Then.STORE
        self._dispatched += 1
        self._shows = bool(self._shown_every) and self._dispatched % self._shown_every == 0
        self._asks = self._dispatched < self._end
        return Dispatch(self._dispatched, self._shows)

    def read(self, *, applied: bool) -> tuple[EpochEnded, ...]:
        """Count the oldest update that is not read, of rank 0 alone.

        If several ranks are in force, as in the checkpoint of a job, all except rank 0 leave with this update.

        Args:
            applied: whether the update was applied; otherwise its gradient was not finite.

        Returns:
            The accounts of the epochs that ended with it.
        """
        state = self.state
        number = state.offset + state.version * state.batches * state.world
        ended: tuple[EpochEnded, ...] = ()
        state.key_steps[0] = state.version + 1
        state.version += 1
        state.non_finite_run = 0 if applied else state.non_finite_run + 1
        if state.samples is not None:
            state.samples, ended = state.samples.add(number, [applied] * state.batches, state.redone)
        if state.world != 1:
            change_world(state, 1, MODES["Sync"].next_offset(state, 1, state.batches))
        return ended

    def stop(self) -> None:
        """End training early, with the update that was dispatched last."""
        self._end = self._dispatched
