"""Passes the decisions of the coordinator to the parts that report them: rates, losses, evaluations, checkpoints.

Their rows are used in metrics, log lines, replies to the operator (O8) and the final message of the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backstay_rpc.control_pb2 import EvaluatedRequest, GradientInfo, HeartbeatRequest, ProgressReply, Rollback, Staged
from backstay_spec.job_report import CheckpointStatus, JobReport

from ... import _instrument
from ..._coordination import (
    CheckpointFailed,
    CoordinatorState,
    Counted,
    Finished,
    PeerTable,
    Updated,
    WriteManifest,
)
from ..._process import Reporter
from ..._update import LeafSpec, TreeSpec
from .._metrics import PodMetrics
from .._reports import EpochLines, Reports
from ._checkpoints import Checkpoints
from ._contributors import Contributors
from ._curve import JobCurve
from ._evaluations import Evaluations
from ._losses import LossMeans
from ._mistakes import Mistakes
from ._rates import Rates
from ._terms import Terms
from ._update_waits import UpdateWaits
from ._worker_reports import WorkerReports

__all__ = ["JobObserver"]

_LOG = logging.getLogger(__name__)


class JobObserver:
    """An `Observer`. Thread-safe.

    Attributes:
        reports: receives the values for the script and TensorBoard; set before `start`.
        terms, evaluations, checkpoints: parts of the report.
        curve: loss and metrics over the steps.
    """

    def __init__(
        self,
        peers: PeerTable,
        metrics: PodMetrics,
        steps: int,
        log_every: float,
        tree: TreeSpec | None = None,
        batches: int = 1,
    ) -> None:
        """
        Args:
            peers: the workers and evaluators of this server.
            batches: number of batches of each contribution.
            tree: the model; None: messages name no parameters.
        """
        self.reports = Reports(None, None)
        self.terms, self.evaluations, self.checkpoints = Terms(metrics), Evaluations(metrics), Checkpoints(metrics)
        self.curve = JobCurve()
        self._contributors = Contributors(peers, metrics)
        self._rates, self._losses, self._mistakes = Rates(metrics, batches), LossMeans(metrics), Mistakes(tree)
        self._workers = WorkerReports()
        self._waits: UpdateWaits | None = None
        self._metrics, self._steps, self._batches = metrics, steps, batches
        self._sizes = JobReport(
            trained_parameters=None if tree is None else _values(tree.parameters.leaves),
            frozen_parameters=None if tree is None or tree.frozen is None else _values(tree.frozen.leaves),
        )
        self._reporter, self._epochs = Reporter(log_every, steps, batches), EpochLines(log_every)
        self._step = 0

    def watch_waits(self, shards: int, quorum: Callable[[int], int], *, sync: bool) -> None:
        """Record the waits of updates from now on; call it before `start`. See `UpdateWaits`."""
        self._waits = UpdateWaits(
            shards, quorum, self._metrics, sync=sync, ends_at=lambda s: min(s.last or self._steps, self._steps)
        )

    # ---- Observer ----

    def staged(self, now: float, shard: int, staged: Staged) -> None:
        """A shard holds a gradient. For everything except blame, only the reports of shard 0 count."""
        if self._waits is not None:
            self._waits.staged(now, shard, staged)
        if shard == 0:
            self._contributors.staged(now, staged)

    def counted(self, now: float, counted: Counted) -> None:
        """See `Observer`."""
        del now
        self._contributors.counted(counted)

    def updated(self, now: float, updated: Updated) -> None:
        """See `Observer`."""
        commit, infos = updated.commit, updated.infos
        self._step = commit.version + 1
        if self._waits is not None:
            self._waits.updated(now, commit)
        self._metrics.world.set(commit.world)
        self._metrics.grace_seconds.set(updated.grace.wait)
        self._metrics.grace_rate.set(updated.grace.per_second or 0.0)
        if commit.skip:
            ranks = [c.id.rank for c, info in zip(commit.contributions, infos, strict=True) if not info.finite]
            _LOG.warning("step %d: skipped, the contribution of rank %s is not finite", commit.version, ranks[0])
        self._contributors.updated(now, commit.version)
        self._rates.updated(now, updated)
        loss, train_metrics = self._losses.updated(updated)
        self.terms.updated(infos)
        _instrument.report(
            "update",
            term=commit.term,
            step=commit.version,
            ranks=[contribution.id.rank for contribution in commit.contributions],
            skipped=commit.skip,
            world=commit.world,
            loss=loss,
        )
        if not commit.skip:
            self._mistakes.examine(self._step, infos)
            self._mistakes.examine_metrics(self._step, train_metrics, "loss")
        for epoch in updated.ended:
            self._epochs.ended(now, epoch, self._step)
        rates = self._rates.at_update(now, last=commit.final)
        self.curve.updated(self._step, loss, train_metrics)
        self.reports.update(now, self._step, loss, train_metrics, rates, last=commit.final)
        if not updated.adopted:
            examples = rates["throughput/examples_per_second"]
            self._reporter.report(now, self._step, loss, examples, train_metrics, force=commit.final)

    def restarted(self, now: float, state: CoordinatorState, checkpoint: str, stored_at: float) -> None:
        """See `Observer`."""
        self._step = state.version
        self.checkpoints.restarted(checkpoint, state.version, stored_at)
        if self._waits is not None:
            self._waits.restarted(now, state)
        self._contributors.restarted(now, state.version)
        self.curve.restarted(state.version)
        self.evaluations.restarted(state.version)
        self.reports.begin(state.version)
        lost = self.terms.restarted(state)
        _instrument.report("rollback", term=state.term, step=state.version, redone=lost)

    def redo(self, now: float, updates: int) -> None:
        """See `Observer`."""
        del now
        self.terms.redo(updates)

    def checkpoint_stored(self, now: float, order: WriteManifest, uri: str) -> None:
        """See `Observer`."""
        del now
        self.checkpoints.stored(order, uri)

    def checkpoint_failed(self, now: float, failed: CheckpointFailed) -> None:
        """See `Observer`."""
        del now
        self.checkpoints.failed(failed)

    def finished(self, now: float, finished: Finished) -> None:
        """See `Observer`."""
        del now
        if finished.reason:
            _LOG.error("the job has failed: %s: %s", finished.reason, finished.why)
        else:
            _LOG.info("training is complete at step %d", finished.version)

    # ---- Calls of the server; see `JobHistoryObserver` ----

    def takes_over(self, leases: Sequence[str]) -> None:
        """See `Terms.takes_over`."""
        self.terms.takes_over(leases)

    def continues(self, changes: Sequence[str], examples: int | None) -> None:
        """See `Terms.continues`."""
        self.terms.continues(changes, examples)

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Call `stop` when `stop_when` of the script returns true."""
        self.reports.stop = stop

    def close(self) -> None:
        """Write the remaining reports. See `Reports.close`."""
        self._epochs.close()
        self.reports.close()

    def start(
        self,
        state: CoordinatorState,
        checkpoint: str,
        checkpoint_step: int,
        infos: Sequence[GradientInfo] = (),
        checkpoint_time: float = 0.0,
    ) -> None:
        """Record the start of the history, its newest checkpoint and when that was stored, and the gradients of its
        last update, if known. `checkpoint_time` is Unix time, or 0 if it is not known."""
        self._step = state.version
        self._rates.begin(time.monotonic())
        if self._waits is not None:
            self._waits.restarted(time.monotonic(), state)
        self.terms.begin(state)
        _instrument.report("start", term=state.term, step=state.version)
        self.reports.begin(state.version)
        if infos:
            self._losses.inherit(infos)
        if checkpoint:
            self.checkpoints.begin(checkpoint, checkpoint_step, checkpoint_time)

    def evaluation_begins(self, request: EvaluatedRequest) -> str:
        """See `Evaluations.begins`."""
        return self.evaluations.begins(request)

    def evaluated(self, request: EvaluatedRequest) -> None:
        """The result of an evaluation, by an evaluator or worker 0."""
        metrics = self.evaluations.evaluated(request)
        self._mistakes.examine_metrics(request.step, metrics, "evaluate")
        if not request.error:
            self.curve.evaluated(request.step, metrics)
            self.reports.evaluated(request.step, metrics)

    def beat(self, now: float, request: HeartbeatRequest) -> None:
        """A heartbeat of a worker or evaluator."""
        self._workers.beat(now, request)
        if self._waits is not None:
            self._waits.beat(now, request)

    def evaluation(self) -> tuple[int | None, dict[str, float]]:
        """Returns the step and the metrics of the newest evaluation, for manifests."""
        return self.evaluations.newest()

    def evaluation_of(self, step: int) -> dict[str, float]:
        """See `Evaluations.of`."""
        return self.evaluations.of(step)

    def newest_checkpoint(self) -> CheckpointStatus:
        """See `Checkpoints.newest`."""
        return self.checkpoints.newest()

    def examples(self) -> int | None:
        """Returns the examples of each contribution of the newest update, or None if they differ or there are none. For
        manifests."""
        return self.terms.examples()

    def last_report(self, state: CoordinatorState, start: Rollback | None = None) -> dict[str, Any]:
        """Returns the last report, as rows of the termination message. A job may end between two calls of the operator.

        Args:
            state, start: as for `fill`.
        """
        return JobReport.sum((self._whole(time.monotonic(), state, start), self._rates.last())).last()

    # ---- The report ----

    def report(self, now: float) -> JobReport:
        """Returns the rows of the newest update, which do not depend on the coordinator's state."""
        plan = JobReport(
            step=self._step,
            goal_steps=self._steps or None,
            local_steps=self._batches if self._batches > 1 else None,
        )
        waits = () if self._waits is None else (self._waits.report(now),)
        parts = self._losses, self.evaluations, self.checkpoints, self._mistakes
        return JobReport.sum((plan, self._sizes, self._rates.report(now), *(part.report() for part in parts), *waits))

    def _whole(self, now: float, state: CoordinatorState, start: Rollback | None) -> JobReport:
        return JobReport.sum((self.report(now), self.terms.report(state, start)))

    def fill(
        self,
        now: float,
        reply: ProgressReply,
        state: CoordinatorState,
        stall_seconds: float,
        start: Rollback | None = None,
    ) -> None:
        """The job's part of a `Progress` reply; `start` is where the term of `state` began."""
        reply.step, reply.term, reply.world = state.version, state.term, state.world
        reply.report = self._whole(now, state, start).encoded()
        self._contributors.fill(now, reply, stall_seconds)
        self._workers.fill(now, reply)
        if self._waits is not None:
            self._waits.log_long(now)

    def status(self, now: float) -> dict[str, Any]:
        """Returns the job's part of the page `/status`, of the newest update."""
        waits = {} if self._waits is None else {"waits": self._waits.now(now).model_dump(mode="json")}
        return self.report(now).model_dump(mode="json", by_alias=True) | waits


def _values(leaves: Iterable[LeafSpec]) -> int:
    return sum(leaf.size for leaf in leaves)
