"""`Course` decides what one process does next: T4, T7 and T9 without a process."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import CoordinatorState, Course, Dispatch, Samples, Then


class Process:
    """A process that acts as its course says, without computing."""

    def __init__(self, state: CoordinatorState, steps: int, *, shown_every: int = 0, due: int = 0) -> None:
        self.course = Course(
            state, steps, shown_every=shown_every, due=lambda version: bool(due) and version % due == 0
        )
        self.waiting: deque[Dispatch] = deque()
        self.done: list[str] = []
        self.stored: list[int] = []

    def act(self, *, leaving: bool = False, ahead: int = 2, stops_at: int = 0) -> bool:
        """Takes one action. Returns False if there is none."""
        state, action = self.course.state, self.course.next(leaving=leaving, ahead=ahead)
        match action:
            case None:
                return False
            case Dispatch():
                # A model that is shown, and one that is stored, is read before a later update consumes it.
                assert not any(one.shown for one in self.waiting)
                assert state.world == 1 or not self.waiting
                assert len(self.waiting) <= ahead
                self.waiting.append(action)
                self.done.append(f"dispatch {action.version}")
            case Then.READ:
                oldest = self.waiting.popleft()
                self.course.read(applied=True)
                assert state.version == oldest.version
                if oldest.shown and stops_at and oldest.version >= stops_at:
                    assert not self.waiting
                    self.course.stop()
            case Then.STORE:
                assert not self.waiting
                self.stored.append(state.version)
        return True


def history(version: int = 0, world: int = 1) -> CoordinatorState:
    return CoordinatorState(term=1, version=version, world=world)


NUMBER = st.integers(0, 12)


@given(NUMBER, st.integers(1, 3), NUMBER, st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 2, 5]), st.lists(NUMBER))
def test_every_update_is_dispatched_and_read_one_time_in_order(
    begun: int, world: int, steps: int, shown_every: int, due: int, leads: list[int]
) -> None:
    """However far the host is ahead at each moment, and however many ranks were in force."""
    process = Process(history(begun, world), steps, shown_every=shown_every, due=due)
    leads.reverse()
    ahead = 2
    while process.act(ahead=ahead):
        ahead = leads.pop() if leads else ahead
    updates = range(begun + 1, max(begun, steps) + 1)
    assert process.done == [f"dispatch {version}" for version in updates]
    assert not process.waiting
    assert process.course.state.version == max(begun, steps)
    assert process.course.state.world == (1 if begun < steps else world)
    # The last version is stored at the end of training, not by the course.
    assert process.stored == [v for v in updates if due and v % due == 0 and v != steps]
    assert process.course.state.last == (steps if begun < steps else 0)


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 2]))
def test_t8_a_process_that_leaves_reads_what_it_dispatched_and_no_more(
    actions: int, ahead: int, shown_every: int, due: int
) -> None:
    process = Process(history(), 10, shown_every=shown_every, due=due)
    for _ in range(actions):
        process.act(ahead=ahead)
    dispatched, stored = len(process.done), list(process.stored)
    while process.act(leaving=True, ahead=ahead):
        pass
    assert len(process.done) == dispatched == process.course.state.version
    assert process.stored == stored
    assert process.course.state.last == (10 if dispatched == 10 else 0)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 9))
def test_training_that_is_stopped_ends_with_the_update_that_was_shown(
    stops_at: int, shown_every: int, ahead: int
) -> None:
    process = Process(history(), 12, shown_every=shown_every, due=1)
    while process.act(ahead=ahead, stops_at=stops_at):
        pass
    last = min(12, -(-stops_at // shown_every) * shown_every)
    assert process.course.state.version == process.course.state.last == last
    assert process.stored == list(range(1, last))
    again = Process(process.course.state, 12)
    assert not again.act()  # the end is part of the history


def test_t9_the_account_of_one_process_is_that_of_a_job() -> None:
    """Numbers of batches after a job with three ranks and two batches for each contribution."""
    state = CoordinatorState(term=4, version=5, world=3, samples=Samples(40, 2), batches=2)
    course = Course(state, 20, batches=2)
    assert (state.world, state.offset) == (3, 0)
    assert course.next(leaving=False, ahead=5) == Dispatch(6, shown=False)
    assert course.next(leaving=False, ahead=5) is Then.READ  # the next update has another world
    assert course.read(applied=True) == ()
    # Rank 0 took the batches 30 and 31 of the world of three ranks.
    assert (state.version, state.world, state.offset + 6 * 2 * 1) == (6, 1, 32)
    assert state.key_steps[0] == 6
    assert state.samples is not None
    for _ in range(4):
        ended = course.read(applied=False)
    assert state.non_finite_run == 4
    assert [(epoch.epoch, epoch.used, epoch.dropped) for epoch in ended] == [(1, 4, 16)]
