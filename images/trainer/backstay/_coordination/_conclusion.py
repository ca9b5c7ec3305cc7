"""How a job ends: its last version is stored and evaluated, or it fails; and what becomes of checkpoints on the way.

A part of `Coordinator`, cut off to be read alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from backstay_rpc.control_pb2 import Done, Rollback, Save

from ._decisions import CheckpointFailed, Decision, Finished, Send
from ._pending import Pending
from ._schedule import Schedule
from ._state import CoordinatorState, Rules

__all__ = ["Conclusion", "Ending"]


@dataclass
class Ending:
    """The last version is decided: what is still waited for."""

    began: float
    stored: bool
    evaluated: bool
    patience: float  # for the evaluation
    store_again_at: float | None = None
    pause: float = 0.5
    error: str = ""

    @classmethod
    def of(cls, now: float, rules: Rules) -> Ending:
        """The last update was decided now."""
        return cls(now, not rules.stores, not rules.evaluates, rules.timeouts.evaluation)


class Conclusion:
    """See the module; the attributes are `Coordinator`'s."""

    rules: Rules
    state: CoordinatorState
    schedule: Schedule
    checkpoint: str
    finished: Finished | None
    _start: Rollback
    _pending: deque[Pending]
    _restarting: bool
    _ending: Ending | None
    _checkpoint_version: int

    @property
    def over(self) -> bool:
        """The last version is decided."""
        return self.state.version >= self.last_version

    @property
    def last_version(self) -> int:
        """The version that ends training."""
        return min(self.state.last or self.rules.steps, self.rules.steps)

    def stop_early(self, now: float) -> list[Decision]:
        """End training with the next update, as if it were the last of `Rules.steps`."""
        del now
        if not self.over and self.finished is None:
            self.state.last = min(self.last_version, self.state.version + 1)
        return []

    def save(self, now: float) -> list[Decision]:
        """Write what there is, now: a server was told to stop."""
        version = self.state.version
        if (
            not self.rules.stores
            or self.finished is not None
            or self._restarting
            or version in {self._start.version, self._checkpoint_version}
            or self.schedule.in_flight(version)
        ):
            return []
        self.schedule.begin(now, self.state.term, version, self.state.copy().to_json())
        if self._pending:  # the commit that makes this version has not gone out: it carries the wish
            self._pending[-1].commit.checkpoint = True
            return []
        return [Send(None, Save(term=self.state.term, version=version))]

    def evaluates(self) -> None:
        """Somebody is here who evaluates, or has and will tell it again."""
        if self._ending is not None:
            self._ending.patience = self.rules.timeouts.evaluation

    def fail(self, reason: str, why: str) -> list[Decision]:
        """The job fails, once."""
        if self.finished is not None:
            return []
        self.finished = Finished(self.state.version, reason, why)
        return [Send(None, self._done()), self.finished]

    def _checkpoint_failed(self, now: float, version: int, error: str) -> list[Decision]:
        self.schedule.end(version)
        if self._ending is not None and version == self.state.version:
            self._ending.pause = min(2 * self._ending.pause, self.rules.timeouts.store_again)
            self._ending.store_again_at = now + self._ending.pause
            self._ending.error = error
            limit = self.rules.timeouts.storing
            error = f"{error}; it is the last version: the job fails unless it is stored within {limit:.0f} s"
        return [CheckpointFailed(version, error), *self._end_if_over(now)]

    def _end_if_over(self, now: float) -> list[Decision]:
        if self.finished is not None or not self.over or self._pending:
            return []
        if self._ending is None:
            # Started at a checkpoint at or past the end: its evaluation, if any, was made by those before.
            self._ending = Ending(now, stored=True, evaluated=True, patience=self.rules.timeouts.evaluation)
        ending = self._ending
        out: list[Decision] = []
        if not ending.stored and self._checkpoint_version >= self.state.version:
            ending.stored = True
            ending.began = now
        if not ending.stored:
            if now - ending.began >= self.rules.timeouts.storing:
                why = ending.error or "its shards did not answer in time"
                return self.fail("CheckpointFailed", f"the last version could not be stored: {why}")
            if ending.store_again_at is not None and now >= ending.store_again_at:
                ending.store_again_at = None
                out += self.save(now)
            return out
        if not ending.evaluated and now - ending.began < ending.patience:
            return out
        self.finished = Finished(self.state.version)
        return [*out, Send(None, self._done()), self.finished]

    def _done(self) -> Done:
        finished = self.finished
        assert finished is not None
        failed = finished.why or finished.reason
        return Done(version=finished.version, checkpoint=self.checkpoint, failed=failed, reason=finished.reason)

    def _farewell(self, shard: int) -> list[Decision]:
        return [] if self.finished is None else [Send(shard, self._done())]
