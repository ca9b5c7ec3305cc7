"""Facts about the whole job on shard 0, besides its history: rates, losses, evaluations, checkpoints.

They are used in metrics, log lines, replies to the operator (O8) and the final message of the process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from backstay_rpc.control_pb2 import (
    CheckpointReport,
    EvaluatedRequest,
    GradientInfo,
    HeartbeatRequest,
    ProgressReply,
    Rollback,
    Staged,
    TermStart,
)

from .. import _instrument
from .._coordination import SAME, CoordinatorState, Counted, Finished, Liveness, Outcome, Rate, SameLosses, Updated
from .._data import IMPURE
from .._process import Reporter
from .._update import Untrained, warning
from ._metrics import Metrics
from ._reports import Reports
from ._traffic import Traffic
from ._wait_metrics import Waits
from ._worker_reports import WorkerReports

__all__ = ["JobObserver"]

_LOG = logging.getLogger(__name__)

TOKENS = "tokens"
"""The metric of `loss` that counts the tokens of a batch."""

_SLOW_LOG_SECONDS = 60.0
"""A rank that is slow is named in the log at most this often."""


class JobObserver:
    """An `Observer`. Thread-safe."""

    def __init__(
        self,
        liveness: Liveness,
        lock: threading.Lock,
        metrics: Metrics,
        steps: int,
        log_every: float,
        leaves: Sequence[str] = (),
        reports: Reports | None = None,
        batches: int = 1,
    ) -> None:
        """
        Args:
            liveness: the liveness of this server's peers, guarded by `lock`.
            batches: number of batches of each contribution.
            leaves: the names of the leaves of the parameters.
            reports: receives the values for the script and TensorBoard; set before `start`.
        """
        self.reports = reports or Reports(None, None)
        self._liveness, self._lock, self._metrics = liveness, lock, metrics
        self._steps = steps
        self._batches = batches
        self._reporter = Reporter(log_every, steps, batches)
        self._rate, self._update_rate = Rate(), Rate()
        self._traffic = Traffic()
        self._loss: float | None = None
        self._per_second: float | None = None
        self._train_metrics: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self._evaluation_step = 0
        self._evaluation_error = ""
        self._redone = 0  # in this term
        self._redone_before = 0  # in all terms
        self._contributed: dict[int, int] = {}
        self._checkpoint = CheckpointReport()
        self._first_staged: float | None = None
        self._leaves, self._untrained, self._untrained_leaves = tuple(leaves), Untrained(), list[str]()
        self._same_losses, self._mistakes = SameLosses(), set[str]()
        self._step = 0
        self._slow_logged: dict[int, float] = {}
        self._examples: int | None = None  # of each contribution of the newest update
        self._examples_before: int | None = None  # the same, of the run that is continued; None once it is compared
        self._changes: list[str] = []
        self._taken_over: tuple[str, ...] = ()
        self._workers = WorkerReports()
        self._waits: Waits | None = None

    def watch_waits(self, shards: int, quorum: Callable[[int], int], *, sync: bool) -> None:
        """Record the waits of updates from now on; call it before `start`. See `Waits`."""
        self._waits = Waits(
            shards, quorum, self._metrics, sync=sync, ends_at=lambda s: min(s.last or self._steps, self._steps)
        )

    # ---- Observer ----

    def staged(self, now: float, shard: int, staged: Staged) -> None:
        """A shard holds a gradient. For everything except blame, only the reports of shard 0 count."""
        if self._waits is not None:
            self._waits.staged(now, shard, staged)
        if shard != 0:
            return
        gradient = staged.id
        with self._lock:
            self._liveness.handed_in(now, gradient.rank, gradient.incarnation, gradient.version)
            self._contributed[gradient.rank] = max(gradient.incarnation, self._contributed.get(gradient.rank, 0))
            if self._first_staged is None:
                self._first_staged = now

    def counted(self, now: float, counted: Counted) -> None:
        """See `Observer`."""
        del now
        self._metrics.contributions(counted.outcome.value).inc()
        _instrument.report(
            "contribution",
            term=counted.id.term,
            rank=counted.id.rank,
            incarnation=counted.id.incarnation,
            step=counted.id.key_step,
            attempt=counted.id.attempt,
            outcome=counted.outcome.value,
            staleness=counted.staleness,
        )
        if counted.outcome is Outcome.APPLIED:
            self._metrics.staleness.observe(counted.staleness)

    def updated(self, now: float, updated: Updated) -> None:
        """See `Observer`."""
        commit, infos = updated.commit, updated.infos
        self._step = commit.version + 1
        if self._waits is not None:
            self._waits.updated(now, commit)
        examples = 0 if commit.skip else sum(info.examples for info in infos)
        self._metrics.updates.inc()
        self._metrics.examples.inc(examples)
        if not commit.skip:
            counts = (info.metrics.get(TOKENS, 0.0) for info in infos)
            # The metrics of a contribution are means over its batches.
            tokens = sum(count for count in counts if count > 0 and math.isfinite(count))
            self._metrics.tokens.inc(tokens * self._batches)
        if updated.norm is not None:
            self._metrics.gradient_norm.set(updated.norm)
        self._metrics.world.set(commit.world)
        self._metrics.grace_seconds.set(updated.grace.wait)
        self._metrics.grace_rate.set(updated.grace.per_second or 0.0)
        if commit.skip:
            self._metrics.skipped.inc()
            ranks = [c.id.rank for c, info in zip(commit.contributions, infos, strict=True) if not info.finite]
            _LOG.warning("step %d: skipped, the contribution of rank %s is not finite", commit.version, ranks[0])
        with self._lock:
            if self._first_staged is not None:
                self._metrics.quorum_seconds.observe(max(0.0, now - self._first_staged))
                _instrument.record("quorum_wait", self._first_staged, now, commit.version)
                self._first_staged = None
            self._liveness.moved(now, commit.version + 1)
            self._rate.add(now, examples)
            self._update_rate.add(now, 1)
            rate = self._per_second = self._rate.per_second(now)
            loss = self._know(infos, [contribution.weight for contribution in commit.contributions])
            train_metrics = self._train_metrics
            self._compare_examples({info.examples for info in infos})
            self._traffic.add(commit, infos)
            traffic = self._traffic.mean()
        for encoding, nbytes in traffic.items():
            self._metrics.traffic(encoding).set(nbytes)
        self._metrics.loss.set(loss)
        _instrument.report(
            "update",
            term=commit.term,
            step=commit.version,
            ranks=[contribution.id.rank for contribution in commit.contributions],
            skipped=commit.skip,
            world=commit.world,
            loss=loss,
        )
        self._metrics.examples_per_second.set(rate or 0.0)
        for name, value in train_metrics.items():
            self._metrics.train(name).set(value)
        if not commit.skip:
            self._examine(infos)
        for epoch in updated.ended:
            _LOG.info("%s (step %d)", epoch, self._step, extra={"fields": {"epoch": asdict(epoch)}})
        rates = {
            "throughput/examples_per_second": rate,
            "throughput/updates_per_second": self._update_rate.per_second(now),
        }
        self.reports.update(now, self._step, loss, train_metrics, rates, last=commit.final)
        if not updated.adopted:
            self._reporter.report(now, self._step, loss, rate, train_metrics, force=commit.final)

    def _examine(self, infos: Sequence[GradientInfo]) -> None:
        """Name leaves that no gradient reaches, and mistakes of `batches`, once."""
        if self._same_losses.update([info.loss for info in infos]):
            self._name_mistake("SameBatches", SAME)
        if any(info.impure for info in infos):
            self._name_mistake("ImpureBatches", IMPURE)
        found = self._untrained.update([info.zero.leaves if info.HasField("zero") else None for info in infos])
        if found:
            with self._lock:
                self._untrained_leaves = [self._leaves[leaf] for leaf in found]
            _LOG.warning("%s", warning(self._untrained_leaves, len(self._leaves)))

    def _name_mistake(self, reason: str, text: str) -> None:
        with self._lock:
            if reason in self._mistakes:
                return
            self._mistakes.add(reason)
        _LOG.warning("%s: %s", reason, text)

    def _know(self, infos: Sequence[GradientInfo], weights: Sequence[float] = ()) -> float:
        """The mean loss of an update's gradients, with the weights of the gradients; without any, the plain mean."""
        weights = weights or [1.0] * len(infos)
        total = sum(weights)

        def mean(values: Iterable[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total

        loss = self._loss = mean(info.loss for info in infos)
        names = set(infos[0].metrics).intersection(*(info.metrics for info in infos))
        self._train_metrics = {name: mean(info.metrics[name] for info in infos) for name in sorted(names)}
        return loss

    def _compare_examples(self, counts: set[int]) -> None:
        self._examples = counts.pop() if len(counts) == 1 else None
        before, self._examples_before = self._examples_before, None
        if before is not None and self._examples not in (None, before):
            change = f"a contribution had {before} examples and has {self._examples} now: the batch size has changed"
            _LOG.warning("changed since the checkpoint was stored: %s", change)
            self._changes.append(change)

    def takes_over(self, leases: Sequence[str]) -> None:
        """Record the leases that were not renewed, so that this run took the checkpoint folder over, as text."""
        with self._lock:
            self._taken_over = tuple(leases)

    def continues(self, changes: Sequence[str], examples: int | None) -> None:
        """Take over how this run differs from the run that stored the checkpoint.

        Args:
            changes: the differences, as text.
            examples: number of examples of each contribution of that run; None: unknown.
        """
        with self._lock:
            self._changes, self._examples_before = list(changes), examples

    def examples(self) -> int | None:
        """How many examples each contribution of the newest update has; None: they differ, or there was no update."""
        with self._lock:
            return self._examples

    def restarted(self, now: float, state: CoordinatorState) -> None:
        """See `Observer`."""
        with self._lock:
            lost = state.redone - self._redone_before
            self._redone_before = state.redone
            self._step = state.version
            self._redone = lost
            if self._waits is not None:
                self._waits.restarted(now, state)
            self._liveness.moved(now, state.version)
        self.reports.begin(state.version)
        self._metrics.redone.inc(lost)
        self._metrics.term.set(state.term)
        _instrument.report("rollback", term=state.term, step=state.version, redone=lost)
        _LOG.warning(
            "a shard was lost: back to step %d in term %d: %d updates are redone", state.version, state.term, lost
        )

    def redo(self, now: float, updates: int) -> None:
        """See `Observer`."""
        del now
        with self._lock:
            self._redone += updates
            self._redone_before += updates
        self._metrics.redone.inc(updates)
        _LOG.warning("the previous coordinator was lost with its newest updates: %d updates are redone", updates)

    def checkpoint_stored(self, now: float, uri: str, version: int) -> None:
        """See `Observer`."""
        del now
        self._metrics.checkpoints.inc()
        _LOG.info("checkpoint of step %d: %s", version, uri)
        with self._lock:
            self._checkpoint = CheckpointReport(uri=uri, step=version, unix_seconds=time.time())
            self._metrics.checkpoint_timestamp.set(self._checkpoint.unix_seconds)

    def checkpoint_failed(self, now: float, version: int, error: str) -> None:
        """See `Observer`."""
        del now
        self._metrics.checkpoint_failures.inc()
        _LOG.error("the checkpoint of step %d could not be stored: %s", version, error)
        with self._lock:
            self._checkpoint.error = error

    def finished(self, now: float, finished: Finished) -> None:
        """See `Observer`."""
        del now
        if finished.reason:
            _LOG.error("the job has failed: %s: %s", finished.reason, finished.why)
        else:
            _LOG.info("training is complete at step %d", finished.version)

    # ---- Calls of the server ----

    def start(
        self,
        state: CoordinatorState,
        checkpoint: str,
        checkpoint_step: int,
        infos: Sequence[GradientInfo] = (),
        checkpoint_time: float = 0.0,
    ) -> None:
        """The start of the history, its newest checkpoint and when that was stored (Unix time; 0: not known), and the
        gradients of its last update, if known."""
        self._step = state.version
        if self._waits is not None:
            self._waits.restarted(time.monotonic(), state)
        self._redone_before = state.redone
        _instrument.report("start", term=state.term, step=state.version)
        self.reports.begin(state.version)
        if infos:
            with self._lock:
                self._know(infos)
        self._metrics.term.set(state.term)
        if checkpoint:
            with self._lock:
                self._checkpoint = CheckpointReport(uri=checkpoint, step=checkpoint_step, unix_seconds=checkpoint_time)
            if checkpoint_time:
                self._metrics.checkpoint_timestamp.set(checkpoint_time)

    def evaluated(self, request: EvaluatedRequest) -> None:
        """The result of an evaluation, by an evaluator or worker 0."""
        if request.error:
            _LOG.error("the evaluation of step %d failed: %s", request.step, request.error)
            with self._lock:
                self._evaluation_error, self._evaluation_step = request.error, request.step
            return
        metrics = dict(request.metrics)
        with self._lock:
            self._evaluation_error = ""
            self._evaluation, self._evaluation_step = metrics, request.step
        for name, value in metrics.items():
            self._metrics.evaluation(name).set(value)
        self.reports.evaluated(request.step, metrics)
        self._metrics.evaluation_step.set(request.step)
        shown = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        _LOG.info("evaluation of step %d  %s", request.step, shown, extra={"fields": {"evaluation": metrics}})

    def evaluation(self) -> dict[str, float]:
        """The result of the newest evaluation."""
        with self._lock:
            return dict(self._evaluation)

    def evaluation_of(self, step: int) -> dict[str, float]:
        """The result of the evaluation of this step; empty if it failed or is not the newest one."""
        with self._lock:
            found = self._evaluation_step == step and not self._evaluation_error
            return dict(self._evaluation) if found else {}

    @property
    def redone(self) -> int:
        """Updates of the previous term that this one makes again, as far as this process applied them."""
        with self._lock:
            return self._redone

    def last(self) -> dict[str, Any]:
        """Loss, rate and traffic of the last updates, as far as they exist. They cover the time between the operator's
        calls."""
        with self._lock:
            known = {"loss": self._loss, "examplesPerSecond": self._per_second or self._rate.measured}
            traffic = dict(self._traffic.mean())
        found: dict[str, Any] = {
            name: value for name, value in known.items() if value is not None and math.isfinite(value)
        }
        return found | ({"traffic": traffic} if traffic else {})

    def measured(self) -> dict[str, Any]:
        """The part of a successful job's termination message that shard 0 measured."""
        fields: dict[str, Any] = {"metrics": self.evaluation(), **self.last()}
        if error := self.evaluation_error():
            fields["evaluationError"] = error
        return fields

    def evaluation_error(self) -> str:
        """Why the newest evaluation has no metrics; empty when it has."""
        with self._lock:
            return self._evaluation_error and f"at step {self._evaluation_step}: {self._evaluation_error}"

    @property
    def checkpoint(self) -> CheckpointReport:
        """The newest complete one."""
        with self._lock:
            copy = CheckpointReport()
            copy.CopyFrom(self._checkpoint)
            return copy

    def fill(
        self,
        now: float,
        reply: ProgressReply,
        state: CoordinatorState,
        stall_seconds: float,
        start: Rollback | None = None,
    ) -> None:
        """The job's part of a `Progress` reply; `start` is where the term of `state` began."""
        checkpoint = self.checkpoint
        with self._lock:
            # Only the first update shows whether the batch size changed: the changes are reported after it.
            changes = self._changes if self._examples_before is None else []
        if start is not None:
            began = TermStart(
                term=start.term,
                step=start.version,
                checkpoint=start.checkpoint,
                redone=self.redone,
                changes=changes,
                taken_over=self._taken_over,
            )
            reply.term_start.CopyFrom(began)
        with self._lock:
            reply.step, reply.term, reply.world = state.version, state.term, state.world
            reply.steps_redone = state.redone
            reply.untrained_leaves.extend(self._untrained_leaves)
            reply.mistakes_of_batches.extend(sorted(self._mistakes))
            reply.examples_per_second = self._rate.per_second(now) or 0.0
            reply.goal_steps, reply.updates_per_second = self._steps, self._update_rate.per_second(now) or 0.0
            reply.local_steps = self._batches if self._batches > 1 else 0
            if self._loss is not None:
                reply.loss, reply.has_loss = self._loss, True
            reply.stalled.extend(self._liveness.stalled(now, stall_seconds, state.world))
            stragglers = self._liveness.stragglers(now, state.world)
            reply.stragglers.extend(stragglers)
            for rank, incarnation in self._contributed.items():
                reply.contributed[rank] = incarnation
            self._set(reply.metrics, self._evaluation)
            reply.evaluation_step, reply.evaluation_error = self._evaluation_step, self._evaluation_error
            self._set(reply.train_metrics, self._train_metrics)
            self._set(reply.traffic, dict(self._traffic.mean()))
        if self._waits is not None:
            self._waits.fill(now, reply)
        self._workers.fill(now, reply)
        if checkpoint.uri or checkpoint.error:
            reply.checkpoint.CopyFrom(checkpoint)
        self._report_stragglers(now, {slow.rank: slow.delay_seconds for slow in stragglers})

    def beat(self, now: float, request: HeartbeatRequest) -> None:
        """A heartbeat of a worker or evaluator."""
        self._workers.beat(now, request)
        if self._waits is not None:
            self._waits.beat(now, request)

    def status(self, now: float) -> dict[str, Any]:
        """The job's part of the page `/status`, of the newest update."""
        with self._lock:
            checkpoint = self._checkpoint
            return {
                "step": self._step,
                "goalSteps": self._steps,
                "updatesPerSecond": self._update_rate.per_second(now),
                "examplesPerSecond": self._rate.per_second(now),
                "loss": self._loss,
                "traffic": dict(self._traffic.mean()),
                "trainMetrics": dict(self._train_metrics),
                "metrics": dict(self._evaluation),
                "evaluatedStep": self._evaluation_step or None,
                "evaluationError": self._evaluation_error,
                "checkpoint": {"step": checkpoint.step, "uri": checkpoint.uri, "unixSeconds": checkpoint.unix_seconds},
                "checkpointError": checkpoint.error,
                **({} if self._waits is None else self._waits.status(now)),
            }

    def _report_stragglers(self, now: float, delays: dict[int, float]) -> None:
        self._metrics.stragglers(delays)
        for rank, delay in delays.items():
            if now - self._slow_logged.get(rank, -_SLOW_LOG_SECONDS) >= _SLOW_LOG_SECONDS:
                self._slow_logged[rank] = now
                _LOG.warning("rank %d is slow: its gradient takes %.3g s longer than the others' median", rank, delay)

    @staticmethod
    def _set(field: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            field[name] = value
