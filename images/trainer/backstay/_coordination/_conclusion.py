"""Checkpoints on the way, and how a job ends: its last version is stored and evaluated, or the job fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backstay_rpc.control_pb2 import Commit, Done, File, Save, Written

from ._decisions import CheckpointFailed, Decision, Finished, Send, WriteManifest
from ._history import UpdateHistory
from ._schedule import Intervals, Schedule
from ._state import Rules

__all__ = ["Conclusion"]


@dataclass
class _JobEnding:
    """The last version is decided. The attributes say what the job still waits for."""

    began: float
    stored: bool
    evaluated: bool
    patience: float  # for the evaluation
    began_complete: bool = False
    store_again_at: float | None = None
    pause: float = 0.5
    error: str = ""


class Conclusion:
    """The checkpoints of a history, and its end.

    Attributes:
        schedule: when to write checkpoints, and which are being written.
        checkpoint: the URI of the newest complete one; empty: there is none.
        finished: how the job ended; None while it has not.
    """

    def __init__(self, rules: Rules, history: UpdateHistory, intervals: Intervals | None, now: float) -> None:
        self._rules, self._history = rules, history
        self.schedule = Schedule(intervals or Intervals(), rules.shards, now)
        self.checkpoint = ""
        self.finished: Finished | None = None
        self._checkpoint_version = -1
        self._ending: _JobEnding | None = None

    def begin(self, now: float, checkpoint: str) -> None:
        """A term begins, at `checkpoint` if that is not empty."""
        version = self._history.state.version
        self.checkpoint, self._checkpoint_version = checkpoint, version if checkpoint else -1
        if not self._history.over:
            self._ending = None
        self.schedule.reset(now)

    def resume(self, now: float, checkpoint: str, version: int, since: float) -> None:
        """Continue for a coordinator that ended.

        Args:
            checkpoint, version: the newest complete checkpoint.
            since: seconds since its last checkpoint began.
        """
        self.checkpoint, self._checkpoint_version = checkpoint, version
        reached = self._history.state.version
        self.schedule.resume(now, since, version=reached, newest=max(self._history.start.version, version))
        if self._history.over:
            self._ending = self._end_of(now, self._rules.timeouts.succession)

    # ---- Checkpoints ----

    def save(self, now: float) -> list[Decision]:
        """Write the newest version now: a server is going to stop."""
        state, rules = self._history.state, self._rules
        if (
            not rules.stores
            or self.finished is not None
            or self._history.lost
            or state.version in {self._history.start.version, self._checkpoint_version}
            or self.schedule.in_flight(state.version)
        ):
            return []
        self._begin_checkpoint(now)
        if self._history.pending:  # the commit of this version is not sent yet: it requests the checkpoint
            self._history.pending[-1].commit.checkpoint = True
            return []
        return [Send(None, Save(term=state.term, version=state.version))]

    def decided(self, now: float, commit: Commit) -> None:
        """An update was decided; sets whether its commit requests a checkpoint."""
        version = self._history.state.version
        commit.checkpoint = self._rules.stores and (commit.final or self.schedule.due(now, version))
        self.adopted(now, commit)

    def adopted(self, now: float, commit: Commit) -> None:
        """The commit that made the newest version is part of the history."""
        if commit.checkpoint:
            self._begin_checkpoint(now)
        if commit.final:
            self._ending = self._end_of(now, self._rules.timeouts.evaluation)

    def withdrawn(self, commits: Sequence[Commit]) -> None:
        """Record that these decisions were withdrawn."""
        for commit in commits:
            if commit.checkpoint:
                self.schedule.give_up(commit.version + 1)
        if commits:
            self._ending = None

    def written(self, now: float, shard: int, written: Written) -> list[Decision]:
        """Record that a shard has stored its files, or has failed to."""
        if written.error:
            if written.term != self._history.state.term or not self.schedule.in_flight(written.version):
                return []
            return self._failed(now, written.version, f"shard {shard}: {written.error}")
        flight = self.schedule.written(shard, written)
        if flight is None:
            return []
        files: tuple[tuple[File, ...], ...] = tuple(flight.files[index] for index in range(self._rules.shards))
        return [WriteManifest(flight.term, written.version, flight.state, files)]

    def manifest(self, now: float, order: WriteManifest, uri: str, error: str) -> list[Decision]:
        """Record that the manifest of `order` is stored at `uri`, or could not be stored."""
        version = order.version
        # A term that ends while its manifest is being written may reach the same version again.
        if order.term != self._history.state.term or not self.schedule.in_flight(version):
            return []
        if error:
            return self._failed(now, version, error)
        self.schedule.end(version)
        if version > self._checkpoint_version:
            self.checkpoint, self._checkpoint_version = uri, version
        return self.end_if_over(now)

    def write_again(self, shard: int, version: int) -> list[Decision]:
        """Record that a server ended while it wrote checkpoints, so its successor, at `version`, can write that version
        again."""
        for due in self.schedule.waited_for(shard):
            if due < version:
                self.schedule.give_up(due)
        return self.send_again(shard, version, 0)

    def send_again(self, shard: int, version: int, requested: int) -> list[Decision]:
        """Send the shard that linked again at `version` each `Save` that was lost with a broken link.

        A `Save` of a later version may be lost together with the commit of that version, which is sent again too.

        Args:
            requested: the newest version that the shard was requested to store.
        """
        term, kept = self._history.state.term, self._history.stores
        lost = (due for due in self.schedule.waited_for(shard) if due >= version and due > requested)
        return [Send(shard, Save(term=term, version=due)) for due in lost if due == version or due not in kept]

    def _begin_checkpoint(self, now: float) -> None:
        state = self._history.state
        self.schedule.begin(now, state.term, state.version, state.copy().to_json())

    def _failed(self, now: float, version: int, error: str) -> list[Decision]:
        self.schedule.end(version)
        if self._ending is not None and version == self._history.state.version:
            self._ending.pause = min(2 * self._ending.pause, self._rules.timeouts.store_again)
            self._ending.store_again_at = now + self._ending.pause
            self._ending.error = error
            limit = self._rules.timeouts.storing
            error = f"{error}; it is the last version: the job fails unless it is stored within {limit:.0f} s"
        return [CheckpointFailed(version, error), *self.end_if_over(now)]

    # ---- The end ----

    @property
    def is_storing_the_end(self) -> bool:
        """Whether the last version is decided and not stored yet."""
        return self._ending is not None and not self._ending.stored

    def tick(self, now: float) -> list[Decision]:
        """Check the deadlines (T8)."""
        out: list[Decision] = []
        limit = self._rules.timeouts.storing
        for version in self.schedule.overdue(now, limit):
            out += self._failed(now, version, f"not stored within {limit:.0f} s")
        return [*out, *self.end_if_over(now)]

    def evaluated(self, now: float, step: int) -> list[Decision]:
        """An evaluation of version `step` was reported."""
        if self._ending is not None and step >= self._history.state.version:
            self._ending.evaluated = True
        return self.end_if_over(now)

    def evaluator_joined(self) -> None:
        """An evaluator connected. It reports the evaluation of the last version, immediately or later."""
        if self._ending is not None:
            self._ending.patience = self._rules.timeouts.evaluation

    def end_if_over(self, now: float) -> list[Decision]:
        """End the job if its last version is certain, stored and evaluated."""
        if self.finished is not None or not self._history.over or self._history.pending:
            return []
        if self._ending is None:
            # The job started at a checkpoint at or past the end: an earlier run evaluated it. Or it has no steps.
            complete = self._history.state.version > 0
            self._ending = _JobEnding(now, stored=True, evaluated=True, patience=0.0, began_complete=complete)
        ending = self._ending
        out: list[Decision] = []
        if not ending.stored and self._checkpoint_version >= self._history.state.version:
            ending.stored = True
            ending.began = now
        if not ending.stored:
            if now - ending.began >= self._rules.timeouts.storing:
                why = ending.error or "its shards did not answer in time"
                return self.fail("CheckpointFailed", f"the last version could not be stored: {why}")
            if ending.store_again_at is not None and now >= ending.store_again_at:
                ending.store_again_at = None
                out += self.save(now)
            return out
        if not ending.evaluated and now - ending.began < ending.patience:
            return out
        self.finished = Finished(self._history.state.version)
        return [*out, Send(None, self._done()), self.finished]

    def fail(self, reason: str, why: str) -> list[Decision]:
        """Let the job fail, once."""
        if self.finished is not None:
            return []
        self.finished = Finished(self._history.state.version, reason, why)
        return [Send(None, self._done()), self.finished]

    @property
    def succeeded(self) -> bool:
        """Whether the job has ended, and did not fail."""
        return self.finished is not None and not (self.finished.reason or self.finished.why)

    def final_messages(self, shard: int) -> list[Decision]:
        """Returns the last messages for a shard that connects after the job has ended."""
        return [] if self.finished is None else [Send(shard, self._done())]

    def _end_of(self, now: float, patience: float) -> _JobEnding:
        return _JobEnding(now, stored=not self._rules.stores, evaluated=not self._rules.evaluates, patience=patience)

    def _done(self) -> Done:
        finished = self.finished
        assert finished is not None
        failed = finished.why or finished.reason
        return Done(
            version=finished.version,
            checkpoint=self.checkpoint,
            failed=failed,
            reason=finished.reason,
            already_complete=not failed and self._ending is not None and self._ending.began_complete,
        )
