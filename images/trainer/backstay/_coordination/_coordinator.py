"""The coordinator, which takes reports and returns decisions. It has one part for each question, and only connects
them.

| part | question |
|---|---|
| `Intake` | which gradients are accepted, and which are complete? |
| `Choosing` | which of them make the next update? |
| `Grace` | how long does an update wait for more of them than its quorum? |
| `UpdateHistory` | what is decided, what is certain, what has each shard applied? |
| `Succession` | which server's version of the history counts after a server was replaced? |
| `takeover` | what follows when a server connects? |
| `Conclusion` | when is a checkpoint written, and when is the job done? |

The order of a decision: a set is chosen, the version grows, and the commit is sent. With `clip_norm` or standbys the
commit waits for an answer of every shard, and later commits wait for it. All shards get the same commits in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    GradientInfo,
    Lost,
    Norm,
    Occupied,
    Rollback,
    ShardFailed,
    Staged,
    Written,
)

from ._conclusion import Conclusion
from ._decisions import Decision, Finished, Restart, Send, Updated, WriteManifest
from ._history import UpdateHistory, start_of
from ._intake import Intake
from ._modes import MODES, Choosing, Counting, Grace, change_batches, effective_world, next_world
from ._schedule import Intervals, Schedule
from ._shard_messages import Report
from ._state import CoordinatorState, Rules
from ._succession import Succession
from ._takeover import Adopt, Begin, Replay, ServerPosition, Takeover, takeover

__all__ = ["Coordinator"]


class Coordinator:
    """Decides every update of one job. Not thread-safe; `now` never goes back, in seconds of any monotonic clock.

    Args:
        rules: the settings that stay the same during the job.
        state: the start of the history: a new state, or that of a checkpoint with its term raised.
        checkpoint: the checkpoint that `state` is from; empty for the initial parameters.
        desired_world: `workers.replicas`.
        intervals: when to write checkpoints.
    """

    def __init__(
        self,
        rules: Rules,
        state: CoordinatorState,
        *,
        checkpoint: str = "",
        desired_world: int | None = None,
        intervals: Intervals | None = None,
        now: float = 0.0,
    ) -> None:
        self.rules = rules
        self._desired_world = desired_world or state.world
        mode = MODES[rules.mode]
        self._choosing: Choosing = mode
        self._counting: Counting = mode
        change_batches(state, rules.batches, self._counting)
        self._history = UpdateHistory(rules, self._counting, state, start_of(state, checkpoint))
        self._conclusion = Conclusion(rules, self._history, intervals, now)
        self._conclusion.begin(now, checkpoint)
        self._intake = Intake(rules, self._choosing, self._history, self._conclusion)
        self._succession = Succession(rules, self._history)
        self._grace = Grace(rules.grace, now, state.version)

    @classmethod
    def resume(
        cls,
        rules: Rules,
        state: CoordinatorState,
        start: Rollback,
        *,
        last: Commit | None,
        prepared: Iterable[Contribution],
        incarnation: int = 0,
        infos: Iterable[GradientInfo] = (),
        checkpoint: str = "",
        checkpoint_at: tuple[int, int] = (0, -1),
        since_checkpoint: float = 0.0,
        desired_world: int | None = None,
        intervals: Intervals | None = None,
        now: float = 0.0,
    ) -> Coordinator:
        """Continue in the same term for a coordinator that ended.

        Args:
            state: as of the last commit that this shard's standby held.
            start: where the term began.
            last: the commit that made `state.version`, if one of this term did.
            prepared: the gradients whose mean shard 0 holds for `state.version`: the next commit may name them.
            incarnation: the incarnation of this coordinator's server.
            infos: the infos of the contributions in `prepared`, in the same order.
            checkpoint, checkpoint_at: the newest known complete checkpoint, and its (term, version).
            since_checkpoint: seconds since the last one began.
        """
        new = cls(rules, state, desired_world=desired_world, intervals=intervals, now=now)
        new._history.start = start
        new._history.resume(last, incarnation)
        new._conclusion.resume(now, checkpoint, checkpoint_at[1], since_checkpoint)
        new._succession.resume(tuple(prepared), tuple(infos), checkpoint_at)
        return new

    # ---- Reading ----

    @property
    def state(self) -> CoordinatorState:
        """The newest decided state."""
        return self._history.state

    @property
    def over(self) -> bool:
        """Whether the last version is decided."""
        return self._history.over

    @property
    def last_version(self) -> int:
        """The version that ends training."""
        return self._history.last_version

    @property
    def schedule(self) -> Schedule:
        """The checkpoints that are being written."""
        return self._conclusion.schedule

    @property
    def checkpoint(self) -> str:
        """The URI of the newest complete checkpoint, or an empty text if there is none."""
        return self._conclusion.checkpoint

    @property
    def finished(self) -> Finished | None:
        """How the job ended; None while it has not."""
        return self._conclusion.finished

    @property
    def start_of_term(self) -> Rollback:
        """Where this term began."""
        return self._history.start

    @property
    def newest_term(self) -> int:
        """The newest term that was ever begun, as far as any server has reported."""
        return self._succession.newest_term

    def state_at(self, term: int, version: int) -> CoordinatorState | None:
        """See `UpdateHistory.state_at`."""
        return self._history.state_at(term, version)

    def open_gradients(self) -> Iterable[Staged]:
        """Undecided gradients, for tests and reports."""
        return self._intake.ledger.open()

    # ---- Servers ----

    def start(self, now: float) -> list[Decision]:
        """Call once, before anything else: a history that starts at its end has ended."""
        return self._succession.start() or self._conclusion.end_if_over(now)

    def hello(self, now: float, position: ServerPosition) -> list[Decision]:
        """Record that a shard's server has connected. After this, it reports again the gradients that it holds."""
        replaces = self._succession.connected(position.shard, position.incarnation, max(position.term, position.begun))
        self._intake.connected(position.shard)
        out: list[Decision] = []
        # A replaced server lost its gradients, so pending updates are decided again (decision 0029).
        if replaces and self._continues(position):
            out += self._take_back(now)
        next_step = self._takeover(position)
        # The server may hold a commit that the previous coordinator sent and this one does not have (decision 0069).
        if isinstance(next_step, Adopt):
            out += self._adopt(now, next_step)
            next_step = self._takeover(position)
        match next_step:
            case Restart():
                return [*out, *self._succession.lose(position.shard)]
            case Replay():
                return out + self._replay(now, position, replaces=replaces)
            case Begin():  # without the contributions that it had
                return [*out, *self._intake.take_back_gathered(), Send(position.shard, self._history.start)]
            case _:
                # A job of no steps has no checkpoint with its result: its servers give the initial parameters.
                if self._conclusion.succeeded and not (self.state.version or self._history.start.checkpoint):
                    out.append(Send(position.shard, self._history.start))
                return out + self._conclusion.final_messages(position.shard)

    def _takeover(self, position: ServerPosition) -> Takeover:
        return takeover(position, self._history, self._succession, ended=self.finished is not None)

    def _continues(self, position: ServerPosition) -> bool:
        """Returns whether a server at this position can continue the history, and not only begin it again (decision
        0069)."""
        current = position.term == self.state.term
        return self.rules.replicates and current and not self._history.lost and self.finished is None

    def _replay(self, now: float, position: ServerPosition, *, replaces: bool) -> list[Decision]:
        """Send a server what it has missed.

        Args:
            replaces: whether the server replaces one that was connected.
        """
        shard, version, conclusion = position.shard, position.version, self._conclusion
        out: list[Decision] = []
        if self._continues(position):
            if replaces:
                out += conclusion.write_again(shard, version)
            if conclusion.is_storing_the_end and self._succession.all_connected:
                out += conclusion.save(now)  # taken over at the end: no commit requests it
        if position.saves is not None and not replaces:
            out += conclusion.send_again(shard, version, position.saves)  # before the commits that follow
        missed = (*self._history.replay(shard, version), *self._intake.gathers)
        return [*out, *(Send(shard, message) for message in missed), *conclusion.final_messages(shard)]

    def report(self, now: float, shard: int, report: Report) -> list[Decision]:
        """Take the report of a shard's server."""
        match report:
            case Staged():
                return self._staged(now, shard, report)
            case Lost():
                return self._lost(now, shard, report.id)
            case Norm():
                return self._norm(now, shard, report)
            case Written():
                return self._conclusion.written(now, shard, report)
            case Occupied():
                return self._intake.occupied(report.ids)
            case Applied():
                self._history.applied(shard, report.version)
                return []
            case ShardFailed():
                return self._conclusion.fail(report.reason or "ShardFailed", f"shard {shard}: {report.why}")

    def restart(self, now: float, state: CoordinatorState, checkpoint: str) -> list[Decision]:
        """Begin a new term at `state`, whose term is higher than any before."""
        if self.finished is not None:  # a server was lost while the last checkpoint was being stored
            return []
        if state.term <= self.state.term:
            raise ValueError(f"term {state.term} is not above the term {self.state.term} in force")
        if not self._succession.begin(state):
            return [Restart(0)]  # a shard has reported that term meanwhile
        out = self._intake.begin()
        change_batches(state, self.rules.batches, self._counting)
        self._history.begin(state, start_of(state, checkpoint))
        self._conclusion.begin(now, checkpoint)
        self._grace.begin(now, state.version)
        return [*out, Send(None, self._history.start), *self._conclusion.end_if_over(now)]

    def _staged(self, now: float, shard: int, staged: Staged) -> list[Decision]:
        out, complete = self._intake.staged(shard, staged)
        if complete:
            self._grace.arrived(now, staged.id)
            out += self._intake.gather(self._desired_world)
            out += self._advance(now)
        elif self._came_late(shard, staged.id):
            self._grace.arrived(now, staged.id)
        return out

    def _lost(self, now: float, shard: int, gradient: GradientId) -> list[Decision]:
        """Take back a gradient whose stream to a shard has ended early, or which was complete too late."""
        if not self._came_late(shard, gradient):
            return self._intake.abandon(shard, gradient) if gradient.term == self.state.term else []
        self._intake.ledger.lose(shard, gradient)
        self._grace.arrived(now, gradient)
        return self._intake.late(gradient)

    def _came_late(self, shard: int, gradient: GradientId) -> bool:
        """Reports of other shards do not count: they may come after the worker's stream to shard 0 has ended."""
        return shard == 0 and gradient.term == self.state.term and gradient.version < self.state.version

    def _norm(self, now: float, shard: int, norm: Norm) -> list[Decision]:
        self._history.answer(shard, norm)
        out = self._release()
        if out:
            out += self._judge_uncertain(now)
        return [*out, *self._conclusion.end_if_over(now)]

    def manifest(self, now: float, order: WriteManifest, uri: str, error: str = "") -> list[Decision]:
        """Record that the manifest of `order` is stored at `uri`, or could not be stored."""
        return self._conclusion.manifest(now, order, uri, error)

    # ---- Workers, the evaluator, the operator, the clock ----

    def worker_at(self, now: float, term: int, version: int) -> list[Decision]:
        """Record that a worker that joins has parameters of (term, version). See `Succession.worker_at`."""
        del now
        return [] if self.finished is not None else self._succession.worker_at(term, version)

    def joined(self, now: float, rank: int, incarnation: int) -> list[Decision]:
        """Record that a worker has joined."""
        if rank == 0:
            self._conclusion.evaluator_joined()
        self._grace.joined(rank, incarnation)
        return [*self._intake.joined(rank, incarnation), *self._end_wait(now)]

    def left(self, now: float, rank: int, incarnation: int) -> list[Decision]:
        """Record that a worker has left on purpose."""
        self._intake.left(rank, incarnation)
        return self.disconnected(now, rank, incarnation)

    def disconnected(self, now: float, rank: int, incarnation: int) -> list[Decision]:
        """Record that a worker's data stream to shard 0 ended, because it is dead or connects again."""
        self._grace.gone(rank, incarnation)
        return self._end_wait(now)

    def silent(self, now: float, ranks: Iterable[int]) -> list[Decision]:
        """Replace the set of ranks that send no heartbeats or no contributions."""
        return self._end_wait(now) if self._grace.absent(ranks) else []

    def evaluates(self, now: float) -> list[Decision]:
        """Record that an evaluator has joined."""
        del now
        self._conclusion.evaluator_joined()
        return []

    def evaluated(self, now: float, step: int) -> list[Decision]:
        """An evaluation of version `step` was reported."""
        return self._conclusion.evaluated(now, step)

    def set_grace(self, now: float, grace: float | None) -> list[Decision]:
        """Take the grace that the operator has set; it is as in `Rules`."""
        self._grace.change(grace)
        return self._end_wait(now)

    def configure(self, now: float, world: int, intervals: Intervals | None = None) -> list[Decision]:
        """Take the configuration of the operator. A world of 0 and intervals of None change nothing."""
        if intervals is not None:
            self.schedule.intervals = intervals
        smaller = 0 < world < self._desired_world
        before = effective_world(self.state.world, self._desired_world)
        self._desired_world = world or self._desired_world
        out: list[Decision] = []
        if effective_world(self.state.world, self._desired_world) != before:
            out += self._intake.take_back_gathered()  # a sum may have contributions of ranks that leave
        # The ranks that stay may already have sent all contributions that the update needs.
        return out + self._advance(now) if smaller else out

    def stop_early(self, now: float) -> list[Decision]:
        """End training with the next update."""
        del now
        if self.finished is None:
            self._history.stop_early()
        return []

    def save(self, now: float) -> list[Decision]:
        """Write the newest version now, because a server will stop."""
        return self._conclusion.save(now)

    def fail(self, now: float, reason: str, why: str) -> list[Decision]:
        """Let the job fail, once."""
        del now
        return self._conclusion.fail(reason, why)

    def tick(self, now: float) -> list[Decision]:
        """Check the deadlines, about once a second and at `wakes_at` (T8)."""
        return [*self._end_wait(now), *self._conclusion.tick(now)]

    @property
    def wakes_at(self) -> float | None:
        """The time at which an update no longer waits for more contributions, or None if no update waits."""
        return self._grace.until if self.finished is None else None

    # ---- Decisions ----

    def _advance(self, now: float) -> list[Decision]:
        """Decide updates while there are enough complete gradients."""
        out: list[Decision] = []
        while not self._history.over and self.finished is None:
            candidates = self._intake.candidates(self._desired_world)
            chosen = self._choosing.choose(candidates, more=self._grace.waits)
            if chosen is None:
                self._grace.incomplete()
                break
            if not self._grace.has_ended(now, {contribution.id.rank for contribution in chosen}, candidates.world):
                break
            by_rank = {staged.id.rank: staged.info for staged in candidates.complete}
            infos = tuple(by_rank[contribution.id.rank] for contribution in chosen)
            out += self._decide(now, chosen, infos)
        return out

    def _decide(self, now: float, chosen: tuple[Contribution, ...], infos: tuple[GradientInfo, ...]) -> list[Decision]:
        history = self._history
        self._succession.decided()
        counted = self._intake.use(chosen, infos, history.state.version)
        world = next_world(history.state.world, self._desired_world, self._intake.joined_ranks)
        pending = history.decide(chosen, infos, world=world)
        commit = pending.commit
        self._conclusion.decided(now, commit)
        self._grace.decided(now, history.state.version, self._counting.quorum(self.rules.backups, world), world)
        out: list[Decision] = []
        if self.rules.replicates:
            pending.counted = tuple(counted)  # when it is certain
        else:
            out += counted
        if pending.needs_norms:
            out.append(Send(None, history.norm_request(pending)))
        out += self._release()
        out += self._intake.settle(final=commit.final)
        if commit.skip and history.state.non_finite_run >= self.rules.max_non_finite:
            gradient = next(c.id for c, info in zip(chosen, infos, strict=True) if not info.finite)
            out += self._conclusion.fail(
                "NonFiniteGradients",
                f"the contribution of rank {gradient.rank} at step {gradient.version} is not finite, and so were "
                f"{history.state.non_finite_run} updates in a row (update.maxNonFinite is {self.rules.max_non_finite})",
            )
        return [*out, *self._conclusion.end_if_over(now)]

    def _release(self) -> list[Decision]:
        """Send the decisions that have become commits."""
        out: list[Decision] = []
        for pending in self._history.release():
            updated = Updated(
                pending.commit, pending.infos, ended=pending.ended, grace=self._grace.choice, norm=pending.norm
            )
            out += [Send(None, pending.commit), *pending.counted, updated]
        return out

    def _end_wait(self, now: float) -> list[Decision]:
        """Decide an update that waited for more contributions, if it need not wait any longer."""
        return [] if self._grace.until is None else self._advance(now)

    def _adopt(self, now: float, adopted: Adopt) -> list[Decision]:
        commit, infos = adopted.commit, adopted.infos
        self._succession.decided()
        ended = self._history.adopt(commit)
        self._conclusion.adopted(now, commit)
        return [Send(None, commit), *([Updated(commit, infos, adopted=True, ended=ended)] if infos else [])]

    def _take_back(self, now: float) -> list[Decision]:
        """Withdraw the decisions that no shard received as a commit; their workers send again."""
        taken = self._history.take_back()
        self._conclusion.withdrawn([pending.commit for pending in taken])
        lost = self._intake.take_back_gathered()
        return [*self._intake.take_back(taken), *lost, *self._judge_uncertain(now)]

    def _judge_uncertain(self, now: float) -> list[Decision]:
        out: list[Decision] = []
        for shard, staged in self._intake.uncertain():
            out += self._staged(now, shard, staged)
        return out
