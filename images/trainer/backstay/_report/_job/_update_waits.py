"""The waits of updates, on shard 0: charges (blame) of the last minutes, and the contributions that are missing now.

Async updates wait for no rank: blame says which ranks are slower than the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from backstay_rpc.control_pb2 import Commit, Doing, HeartbeatRequest, Staged
from backstay_spec import contract
from backstay_spec.job_report import JobReport, UpdateWait, WaitedForStatus

from ... import _instrument
from ..._coordination import AsyncBlame, Blame

if TYPE_CHECKING:
    from ..._coordination import CoordinatorState
    from .._metrics import PodMetrics

__all__ = ["UpdateWaits"]

_LOG = logging.getLogger(__name__)

LONG: Final = 20.0
"""Seconds without an update after which the missing ranks are named."""

_NAMED: Final = 3
_AGAIN: Final = 60.0
_SILENT: Final = 6.0


class UpdateWaits:
    """Records what updates wait for, and reports it in the log, on the status page and to the operator. Thread-safe.

    Args:
        shards: how many servers a contribution goes to.
        quorum: ``quorum(world)`` returns how many contributions an update needs.
        sync: whether updates are synchronous.
        ends_at: ``ends_at(state)`` returns the last version of training; 0: not known.
        metrics: shard 0's metrics.
    """

    def __init__(
        self,
        shards: int,
        quorum: Callable[[int], int],
        metrics: PodMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        sync: bool = True,
        ends_at: Callable[[CoordinatorState], int] = lambda state: 0,
    ) -> None:
        self._lock = threading.Lock()
        self._sync = sync
        self._blame = (Blame if sync else AsyncBlame)(shards, now=clock())
        self._quorum, self._metrics = quorum, metrics
        self._term, self._version, self._world = 0, 0, 0
        self._ends_at, self._over = ends_at, False
        self._beats: dict[int, tuple[float, Doing | None]] = {}  # by rank
        self._evaluator: tuple[float, Doing | None] | None = None  # its newest heartbeat
        self._logged_at = -_AGAIN

    def beat(self, now: float, request: HeartbeatRequest) -> None:
        """A heartbeat."""
        found = now, request.doing if request.HasField("doing") else None
        if request.peer.role != contract.ROLE_WORKER:
            self._evaluator = found
            return
        with self._lock:
            self._beats[request.peer.index] = found
            self._blame.parts(request.peer.index, request.parts)

    def staged(self, now: float, shard: int, staged: Staged) -> None:
        """A shard holds all of a contribution."""
        found = staged.id
        with self._lock:
            at = found.term, found.version
            self._blame.staged(now, shard, found.rank, at, found.incarnation, found.attempt)

    def updated(self, now: float, commit: Commit) -> None:
        """An update was decided."""
        ranks = [contribution.id.rank for contribution in commit.contributions]
        with self._lock:
            self._over = commit.final
            charge = self._blame.updated(now, commit.term, commit.version, ranks)
            self._term, self._version, self._world = commit.term, commit.version + 1, commit.world
        if charge is None or (self._sync and len(ranks) < 2):  # a rank that trains alone delays no other one
            return
        self._metrics.waited_for(charge.rank, charge.part).inc(charge.seconds)
        if self._sync:
            shard = {} if charge.shard is None else {"shard": charge.shard}
            began = now - charge.seconds
            _instrument.record("blame", began, now, commit.version, rank=charge.rank, part=charge.part, **shard)

    def restarted(self, now: float, state: CoordinatorState) -> None:
        """Begin again: earlier reports do not count."""
        with self._lock:
            self._over = 0 < self._ends_at(state) <= state.version
            self._blame.restarted(now)
            self._term, self._version, self._world = state.term, state.version, state.world

    def now(self, now: float) -> UpdateWait:
        """Returns the wait for the next update."""
        with self._lock:
            seconds, text = self._waiting(now)
            over = self._over
        return UpdateWait(seconds=round(seconds, 1), text=text, over=over)

    def report(self, now: float) -> JobReport:
        """Returns the rows about waits."""
        with self._lock:
            worst = self._blame.worst(now)
            seconds, text = self._waiting(now)
            over = self._over
        return JobReport(
            ending=text if over else "",
            waits_for=text if seconds >= LONG and not over else "",
            waited_for=[
                WaitedForStatus(
                    rank=one.rank, shard=one.shard, part=one.part, seconds=round(one.seconds, 3), updates=one.updates
                )
                for one in worst
                if one.seconds > 0
            ],
        )

    def log_long(self, now: float) -> None:
        """Log a long wait, once a minute; call it every few seconds."""
        with self._lock:
            seconds, text = self._waiting(now)
            over = self._over
            report = seconds >= LONG and now - self._logged_at >= _AGAIN
            if report:
                self._logged_at = now
            elif seconds < LONG:
                self._logged_at = -_AGAIN
        if report:
            if over:
                _LOG.info("%s", text)
            else:
                _LOG.warning("no update for %.0f s: %s", seconds, text)

    def _waiting(self, now: float) -> tuple[float, str]:
        if not self._world:
            return 0.0, ""
        if self._over:
            seconds = self._blame.waiting(now, self._term, self._version, self._world, 0).seconds
            return seconds, f"trained to step {self._version}; {self._at_the_end(now)}"
        waiting = self._blame.waiting(now, self._term, self._version, self._world, self._quorum(self._world))
        named = [self._does(now, rank, waiting.shards.get(rank, ())) for rank in waiting.missing[:_NAMED]]
        more = len(waiting.missing) - len(named)
        if not named:
            return waiting.seconds, "every rank has contributed: the servers have not applied the update"
        text = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
        if waiting.needed < len(waiting.missing):
            text += f" ({waiting.needed} of these {len(waiting.missing)} contributions are needed)"
        return waiting.seconds, text

    def _at_the_end(self, now: float) -> str:
        """Returns the activity after the last update, which is an evaluation, the checkpoint, or the end of the job."""
        named = [("the evaluator", self._evaluator), *((f"worker {rank}", at) for rank, at in self._beats.items())]
        for name, found in named:
            if found is not None and found[1] is not None and found[1].point == "evaluate":
                return f"{name} evaluates, for {found[1].seconds + now - found[0]:.0f} s"
        return "the servers store the last checkpoint, or wait for its evaluation"

    def _does(self, now: float, rank: int, shards: tuple[int, ...]) -> str:
        """Returns the activity of a rank without a contribution, by its newest heartbeat."""
        if rank not in self._beats:
            return f"worker {rank} has not joined"
        at, doing = self._beats[rank]
        if now - at >= _SILENT:
            return f"worker {rank} has sent no heartbeat for {now - at:.0f} s"
        if shards:
            return f"worker {rank} has not reached server {', '.join(map(str, shards))}"
        if doing is None:
            return f"worker {rank} is in no part of a step"
        who = f"pod {doing.member} of worker {rank}" if doing.member else f"worker {rank}"
        return f"{who} {contract.DOES.get(doing.point, doing.point)}, for {doing.seconds + now - at:.0f} s"
