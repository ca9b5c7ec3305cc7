"""Keeps the state that a simulated standby holds, and the link to its server. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backstay_rpc.control_pb2 import Commit, Contribution, GradientInfo, Rollback

from ..._coordination import CoordinatorState, after
from ._world import SimulatedMachine, SimulatedWorld

__all__ = ["FollowedState", "HeldAnswers", "StandbyLink"]


@dataclass
class FollowedState:
    """The part of a server's state that its standby holds.

    Attributes:
        in_sync: whether it holds the whole state, so that updates wait for it.
        term, version, last, prepared, infos: as in `ServerPosition`.
        coordinator, start: shard 0: the state of the coordinator, and where its term began.
    """

    in_sync: bool = False
    term: int = 0
    version: int = 0
    world: int = 0
    last: Commit | None = None
    prepared: tuple[Contribution, ...] = ()
    infos: tuple[GradientInfo, ...] = ()
    coordinator: CoordinatorState | None = None
    start: Rollback | None = None
    checkpoint_began: float = 0.0

    def commit(self, commit: Commit) -> None:
        """The active server applies this commit."""
        if self.coordinator is not None and self.coordinator.version == commit.version:
            self.coordinator = after(self.coordinator, commit)
        self.version, self.world, self.last = commit.version + 1, commit.world, commit
        self.prepared, self.infos = (), ()


class HeldAnswers:
    """The answers that wait until the standby holds a commit."""

    def __init__(self) -> None:
        self.has_ended = False
        self.waiting: list[Callable[[], None]] = []

    def end(self) -> None:
        self.has_ended = True
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()


class StandbyLink:
    """A server's end of the link to its standby.

    Args:
        world: the simulation.
        machine: the machine of the server's pod.

    Attributes:
        followed: what the standby holds, once it is in sync; None: there is no such standby.
    """

    def __init__(self, world: SimulatedWorld, machine: SimulatedMachine) -> None:
        self._world, self._heap, self._machine = world, world.heap, machine
        self.followed: FollowedState | None = None
        self._owed: dict[int, Callable[[], None]] = {}
        self._number = 0

    def reset(self) -> None:
        """Drop the link. Nothing waits for the standby any more, and nothing continues."""
        self.followed = None
        self._owed.clear()

    def send(self, amount: float, arrive: Callable[[FollowedState], None], held: Callable[[], None]) -> None:
        """Send something to the standby.

        Args:
            amount: its bytes.
            arrive: called with the state of the standby when it has arrived.
            held: called when the standby has answered; immediately if there is no standby in sync.
        """
        if self.followed is None:
            held()
            return
        self._number += 1
        number, followed = self._number, self.followed
        self._owed[number] = held
        self._world.tally.replicated += amount

        def sent() -> None:
            self._heap.after(self._world.latency, come)

        def come() -> None:
            if number in self._owed:
                arrive(followed)
                self._heap.after(self._world.latency, answered)

        def answered() -> None:
            if (act := self._owed.pop(number, None)) is not None:
                act()

        self._machine.to_standby.add(amount, sent)

    def lose(self, proof: float) -> None:
        """The standby is gone. Updates that wait for it continue after `proof` seconds, in which the operator reports
        that the standby was not promoted."""
        self.followed = None
        owed = dict(self._owed)

        def proceed() -> None:
            for number in owed:
                if (act := self._owed.pop(number, None)) is not None:
                    act()

        self._heap.after(proof, proceed)
