"""A simulated pod, from its creation until its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ._shard import TimedShard
from ._standby import FollowedState
from ._worker import TimedWorker
from ._world import SimulatedMachine

__all__ = ["PodOnNode"]


@dataclass(eq=False)
class PodOnNode:
    """A pod that was created.

    Attributes:
        key: its role, index, incarnation and name.
        member: its index inside its rank; 0 for the pods of all other roles.
        node: the number of its node; -1: it has none yet.
        started, placed: when its process began, and when it got its node.
        worker, server, followed: what its process does. The first pod of a rank has the worker of the whole rank.
        silent_since: the time at which its node was lost; None: it is not lost.
        alive: whether its process runs, or will.
    """

    key: tuple[str, int, int, str]
    machine: SimulatedMachine
    member: int = 0
    node: int = -1
    placed: float | None = None
    started: float | None = None
    ended: float | None = None
    code: int | None = None
    measured: tuple[float, ...] = ()
    worker: TimedWorker | None = None
    server: TimedShard | None = None
    followed: FollowedState | None = None
    silent_since: float | None = None
    is_loaded: bool = False
    is_leaving: bool = False
    alive: bool = True

    @property
    def role(self) -> str:
        """The pod's role, as in its label."""
        return self.key[0]

    @property
    def name(self) -> str:
        """The name of the pod."""
        return self.key[3]

    @property
    def purpose(self) -> tuple[str | int, ...]:
        """The name of its random numbers; no other pod has the same."""
        return (*self.key[:3], self.member) if self.member else self.key[:3]

    def is_silent(self, now: float, limit: float) -> bool:
        """Returns whether its process has sent nothing for `limit` seconds, because its node is lost."""
        return self.started is not None and self.silent_since is not None and now - self.silent_since >= limit
