"""A worker's pod: pull, compute a contribution, push, until the job is done; reconnects to servers that were lost."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.profiler import StepTraceAnnotation

from backstay_rpc.control_pb2 import (
    COMPILING,
    LEAVING,
    TRAINING,
    WAITING,
    GradientId,
    GradientInfo,
    Hello,
    JoinReply,
    Peer,
    RejectReason,
)
from backstay_spec import contract
from backstay_spec.goodput import MEASURED

from .. import _instrument
from .._compute import Contribution, Encoder, Placement, Sending, Start, Summary
from .._control import ControlClient, Heartbeats
from .._coordination import MODES, OUTCOME_OF, Outcome, Rate
from .._data import BatchKey, CheckedBatches, Prefetcher
from .._process import ALREADY_COMPLETE, SIGTERM_EXIT, Environment, Reporter, Stop, end_process, one_compiles
from .._report import Carried, HttpPort, Metrics, OverlapTimer, Utilization, WorkerSeconds, hang_report, process_age
from .._result import History, Result
from .._update import ZeroLeaves, parts_of_leaves
from .._wire import Arrangement, ParamBuffers, Pulled, PullKind, Push, ShardedClient, connect, record_exchange
from ..errors import PeerLost, Refused, WaitedTooLong
from ._key_steps import KEY_STEPS
from ._next_contribution import NextContribution
from ._script import Plan, Script
from ._worker_end import FIXED_BY_JOINING, Stopped, WorkerEnd

__all__ = ["Worker"]

_LOG = logging.getLogger(__name__)


def end_sending(sending: Sending, outcome: RejectReason | None) -> None:
    """Report how a contribution ended, for its residuals.

    Args:
        outcome: what the servers answered; None: it is unknown, because a server was lost before it answered.
    """
    if outcome == RejectReason.REJECT_UNSPECIFIED:
        sending.applied()
    elif outcome is not None and outcome != RejectReason.DUPLICATE:
        # Of a duplicate it is unknown whether the earlier one was applied.
        sending.dropped()


def _outcome_of(pulled: Pulled, info: GradientInfo) -> Outcome:
    """The outcome of a contribution, where `Pulled.outcome` is about it."""
    return OUTCOME_OF.get(pulled.outcome, Outcome.APPLIED) if info.finite else Outcome.NON_FINITE


class _Once:
    """A function of no arguments that is called once, by the first thread that needs its result."""

    def __init__(self, function: Callable[[], GradientInfo]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._result: GradientInfo | None = None

    def __call__(self) -> GradientInfo:
        with self._lock:
            if self._result is None:
                self._result = self._function()
            return self._result


class Worker:
    """One rank.

    Attributes:
        seconds: the parts of the time of this process.
    """

    def __init__(self, environment: Environment, script: Script, plan: Plan, metrics: Metrics, stop: Stop) -> None:
        self._env, self._script, self._plan, self._metrics, self._stop = environment, script, plan, metrics, stop
        self._rank = environment.index
        self._peer = Peer(
            role=environment.role, index=self._rank, incarnation=environment.incarnation, pod=environment.pod_name
        )
        self._joined = False
        self._control = ControlClient(environment.servers, environment.token, self._peer, environment.timeouts)
        self._streams: ShardedClient | None = None
        self.seconds = WorkerSeconds(age=process_age())
        self._heart = Heartbeats(self._control, self._silent, self.seconds.report)
        self._http = HttpPort(
            metrics,
            lambda: self._joined,
            bind=environment.bind,
            port=environment.metrics_port,
            peers=self._heart.peers,
        )
        self._arrangement = Arrangement(plan.partition)
        self._buffers = ParamBuffers(self._arrangement)
        self._computation = script.computation(plan.partition.tree, self._arrangement, self._batch)
        self._overlaps = script.overlaps(environment.config)
        self._next, self._overlap_timer = NextContribution(), OverlapTimer()
        self._zero = ZeroLeaves(plan.partition.tree)
        self._checked = CheckedBatches(script.batches)
        self._batches = Prefetcher(Placement().placing(self._checked))
        self._reporter = Reporter(script.log_every, script.steps, script.batches_of_update)
        self._rate, self._utilization = Rate(), Utilization(metrics)
        self._attempt = 0
        self._key_steps = KEY_STEPS[environment.config.mode]()
        self._term = 0
        self._fragments: frozenset[int] | None = None  # `Start.received` of the next contribution
        self._version = 0  # of the newest parameters of this term
        self._carried = Carried(plan.wires)
        self._encoder = Encoder(plan.wires, script.seed, error_feedback=bool(plan.wire.error_feedback))
        self._last: Summary | None = None  # of the newest contribution
        self._history = History()
        self._compiled = False
        self._prepared: tuple[BatchKey, Any] | None = None  # the batch that the computation needs next
        self._moved = False  # a joined server was lost
        self._returns = False  # `run` returns a result: the pod continues
        self._already_complete = False  # nothing was left to train
        self._end = WorkerEnd(environment, script, self._control, self._heart, self.seconds, stop)
        self._gone = threading.Event()
        stop.then(lambda: threading.Thread(target=self._leave, name="backstay-leaving", daemon=True).start())

    def run(self) -> Result:
        """Work until the job is done.

        Raises:
            Stopped: the process received SIGTERM.
            JobFailed: the job has failed.
            Refused: a server refuses this worker; `Superseded`: it was replaced.
            WaitedTooLong: servers were away for too long.
            Exception: any that `batches` and `loss` raise.
        """
        _instrument.follow_this_thread()
        for point, part in contract.STEP_PARTS.items():
            _instrument.observe(point, self._metrics.step_part(part).observe)
        try:
            return self._run()
        finally:
            self._close()

    @property
    def last_message(self) -> dict[str, Any]:
        """This worker's part of the termination message."""
        fields: dict[str, Any] = {"workerSeconds": self.seconds.rounded}
        return fields | ({"reason": ALREADY_COMPLETE} if self._already_complete else {})

    def _leave(self) -> None:
        """SIGTERM: drop the contribution, and leave although the script may still be computing it."""
        if (found := hang_report(_instrument.doing(), time.monotonic())) is not None:
            self._heart.report_hang(found)
        self._silent(0, "this pod received SIGTERM")
        if not self._gone.wait(self._env.timeouts.stop):
            self._control.leave()
            end_process(SIGTERM_EXIT)

    def _run(self) -> Result:
        pulled, params = self._start()
        self.seconds.ended("starting")
        while True:
            while not (pulled.done or pulled.version >= self._script.steps):
                if self._stop.requested.is_set():
                    raise Stopped
                if self._rank >= pulled.world:
                    pulled, params = self._wait_for_world(pulled, params)
                    continue
                contribution, at = self._compute(pulled, params)
                del params  # its memory receives the next ones but one
                pulled, params = self._exchange(at, contribution)
            result = self._finish(pulled, params)
            if result is not None:
                self._returns = True
                return result
            pulled, params = self._reconnect(PeerLost("a server was lost before the job was done"))

    # ---- A step ----

    def _compute(self, pulled: Pulled, params: Sequence[Any]) -> tuple[Contribution, Pulled]:
        """The next contribution, and what it was computed from."""
        step = self._key_steps.next(pulled.version)
        key = BatchKey(step=step, rank=self._rank, world=pulled.world, seed=self._script.seed, offset=pulled.offset)
        self._heart.activity = TRAINING if self._compiled else COMPILING
        began = time.monotonic()
        start = Start(params, key, self._fragments)
        ahead = self._next.take(self._term, key)
        if ahead is None:
            self._draw(start)
        point = "compute" if self._compiled else "compile"  # the first one is mostly compiling
        # `backstay trace --jax-profile` finds the steps of a profile by the annotation.
        with _instrument.span(point, step), StepTraceAnnotation("train", step_num=step):
            if not self._compiled:
                _instrument.reach("compute", step)
            given = _instrument.alter("params", params)
            if ahead is None or given is not params:
                ahead = self._computation.start(replace(start, params=given)), pulled
            contribution, at = ahead
            contribution.wait()
        if self._compiled:
            self.seconds.computed()
            # Of both, because either of the two can make a rank slow.
            self._heart.step_seconds = time.monotonic() - began
            self._metrics.gradient_seconds.observe(self._heart.step_seconds)
        else:
            self.seconds.ended("compiling")
        self._compiled = True
        if self._overlaps and pulled.version + 1 < self._script.steps:  # else this one may be the last
            following = replace(start, key=replace(key, step=step + 1))
            self._draw(following, due=False)
            self._next.keep(self._term, begun := self._computation.start(following), pulled)
            self._overlap_timer.begin(begun.wait)
            self.seconds.began_next()
        elif (early := self._computation.early()) is not None:
            self._overlap_timer.begin(early)
        return contribution, at

    def _draw(self, start: Start, *, due: bool = True) -> None:
        """Wait for the first batch of a contribution, before its computation is measured."""
        if (first := self._computation.first_batch(start)) is not None:
            if due and first.step == start.key.step * self._computation.batches:
                self.seconds.abandoned()  # what was computed early, for another key
            self._prepared = first, self._batch(first)

    def _batch(self, key: BatchKey) -> Any:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == key:
            return prepared[1]
        last = self._key_steps.last(self._script.steps * self._computation.batches)
        if self._compiled:  # between two batches of a contribution
            self.seconds.computed()
        else:
            self.seconds.ended("compiling")
        with _instrument.span("batch_wait", key.step):
            batch = self._batches.get(key, last)
        self.seconds.ended("data")
        return batch

    def _compile(self) -> None:
        """Compile the computation while the servers prepare the parameters, for the batch of a job that begins.

        An error here occurs again in the first step, which reports it.
        """
        world = max(self._env.config.workers, self._rank + 1)
        key = BatchKey(0, self._rank, world, self._script.seed, batches=self._computation.batches)
        seconds = self._env.timeouts.compiling
        self.seconds.ended("starting")
        with contextlib.suppress(Exception):
            batch = self._batch(key)
            with one_compiles("gradient", self._plan.agreement.digest, seconds=seconds):
                self._utilization.compiled(self._computation.compile(batch))
            self._prepared = key, batch
        self.seconds.ended("compiling")

    def _info(self, contribution: Contribution, carried: tuple[int, int]) -> GradientInfo:
        """The summary for the end mark of a contribution; waits until it is computed.

        Args:
            carried: `Carried.totals` before the contribution was sent.
        """
        self._last = summary = contribution.summary
        self._history.add(contribution.key.step + 1, lambda: (summary.loss, dict(summary.metrics)))
        info = GradientInfo(
            finite=summary.finite,
            examples=summary.examples,
            loss=summary.loss,
            metrics=summary.metrics,
            impure=self._checked.impure,
            carried=carried[0],
            exact=carried[1],
        )
        parts = partial(parts_of_leaves, self._plan.partition, contribution.blocks)
        zero = self._zero.examine(contribution.key.step, parts)
        if zero is not None:
            info.zero.leaves.extend(zero)
            info.zero.SetInParent()
        return info

    def _exchange(self, at: Pulled, contribution: Contribution) -> tuple[Pulled, Sequence[Any]]:
        """Push a contribution until it is known whether it was applied; returns the newest parameters."""
        self._heart.activity = WAITING
        info = _Once(partial(self._info, contribution, self._carried.totals()))
        key_step = contribution.key.step
        _instrument.reach("push", key_step)
        with self._encoder.sending(contribution) as sending:
            pulled, params, known = self._send(at, key_step, sending.blocks, info)
            end_sending(sending, pulled.outcome if known else None)
        return pulled, params

    def _send(
        self, at: Pulled, key_step: int, blocks: Sequence[Sequence[Any]], info: Callable[[], GradientInfo]
    ) -> tuple[Pulled, Sequence[Any], bool]:
        """Like `_exchange`, and also return whether `Pulled.outcome` is that of this contribution."""
        again = False
        while True:
            self._attempt += 1
            identity = GradientId(
                term=self._term,
                version=at.version,
                rank=self._rank,
                key_step=key_step,
                incarnation=self._env.incarnation,
                attempt=self._attempt,
            )
            try:
                with _instrument.span("exchange", key_step):
                    began = time.monotonic()
                    pulled, params = self._pull(Push(identity, blocks, info), 0)
                    record_exchange(pulled, identity, began, ended := time.monotonic())
            except (PeerLost, Refused) as error:
                term = self._term
                pulled, params = self._reconnect(error)
                if self._term == term and self._key_steps.undecided(key_step, at, pulled):
                    again = True
                    continue  # send the same again
                if self._term == term:
                    # As with the lost answer: other fragments did not change, and this worker keeps its own of them.
                    exchanged = MODES[self._env.config.mode].exchanged(key_step, at.version, pulled.version)
                    self._fragments = self._plan.wires[0].fragments_of(exchanged)
                known = self._term == term and pulled.next_key_step == key_step + 1
                outcome = _outcome_of(pulled, info()) if known else None
                if outcome is Outcome.APPLIED:
                    self.seconds.applied(pulled.version)
                else:
                    self.seconds.abandoned()
                self._metrics.worker_contributions("lost" if outcome is None else outcome.value).inc()
                return pulled, params, known
            outcome = _outcome_of(pulled, info())
            self._metrics.worker_contributions(outcome.value).inc()
            # The servers hold a duplicate already: this worker sent it before it connected again.
            applied_at = pulled.version if outcome in {Outcome.APPLIED, Outcome.DUPLICATE} else None
            beside, sent, answered = self._overlap_timer.seconds(began, ended), pulled.pushed_at, pulled.answered_at
            self.seconds.exchanged(sent - began, answered - began, applied_at=applied_at, beside=beside)
            self._key_steps.answered(key_step, pulled)
            self._count(pulled, info())
            # The attempt that is late may be the second one, and an update before the newest may have the first one.
            return pulled, params, not (again and pulled.outcome == RejectReason.LATE)

    def _count(self, pulled: Pulled, info: GradientInfo) -> None:
        now = time.monotonic()
        self._version = pulled.version
        self._rate.add(now, info.examples)
        rate = self._rate.per_second(now)
        self._utilization.contributed(now)
        self._metrics.step.set(pulled.version)
        self._metrics.worker_loss.set(info.loss)
        self._metrics.worker_examples.inc(info.examples)
        last = pulled.version >= self._script.steps
        self._reporter.report(now, pulled.version, info.loss, rate, info.metrics, force=last)

    def _wait_for_world(self, pulled: Pulled, params: Sequence[Any]) -> tuple[Pulled, Sequence[Any]]:
        """Wait for the next version, because this rank is not in force. The next version may be of a larger world."""
        self._heart.activity = WAITING
        del params
        try:
            at = self._pull(None, pulled.version + 1)
            self.seconds.ended("wait")
            return at
        except (PeerLost, Refused) as error:
            return self._reconnect(error)

    # ---- Connections ----

    def _pull(self, push: Push | None, min_version: int, kind: PullKind = "parameters") -> tuple[Pulled, Sequence[Any]]:
        if self._streams is None:
            raise PeerLost("not connected")
        slot = self._buffers.take()
        pulled = self._streams.exchange_all(push, min_version, slot.blocks, kind)
        self._fragments = pulled.fragments
        return pulled, slot.host() if self._computation.on_host else slot.params()

    def _start(self) -> tuple[Pulled, Sequence[Any]]:
        while True:
            try:
                return self._join()
            except (PeerLost, Refused) as error:
                self._judge(error)

    def _reconnect(self, error: Exception) -> tuple[Pulled, Sequence[Any]]:
        """Join again and again, until this worker has parameters."""
        while True:
            self._judge(error)
            self._metrics.reconnects.inc()
            _LOG.info("connecting again: %s", error)
            try:
                return self._join()
            except (PeerLost, Refused) as again:
                error = again
            finally:
                self.seconds.ended("reconnecting")

    def _judge(self, error: Exception) -> None:
        """Raise an error that connecting again cannot fix."""
        self._disconnect()
        if self._heart.superseded is not None:
            raise self._heart.superseded
        if self._stop.requested.is_set():
            raise Stopped
        if isinstance(error, WaitedTooLong):
            raise error
        if isinstance(error, Refused) and error.code not in FIXED_BY_JOINING:
            raise error
        self._stop.requested.wait(self._env.timeouts.reconnect_pause)

    def _join(self) -> tuple[Pulled, Sequence[Any]]:
        self._heart.activity = WAITING if self._compiled else COMPILING
        with _instrument.span("join"):
            replies = self._control.join_all(
                self._plan.agreement,
                self._stop.requested.is_set,
                at=(self._term, self._version),
                # Servers that have reported the end leave; the operator then replaces rank 0 where it has no result.
                seconds=self._env.timeouts.end if self._heart.job.done else None,
            )
        self._moved = False
        if replies[0].term > self._term > 0 or replies[0].version < self._version:
            self.seconds.rolled_back(replies[0].began)
        if self._term != replies[0].term:
            self._version = 0  # nothing of this term yet
        self._term = replies[0].term
        self._heart.expect([reply.incarnation for reply in replies])
        self._heart.start()  # from the first join on: the first pull waits for parameters that are being prepared
        self._key_steps.joined(replies[0].key_step)
        self._streams = connect(
            [reply.data_address for reply in replies],
            self._plan.partition.shards,
            [self._hello(shard, reply) for shard, reply in enumerate(replies)],
            token=self._env.token,
            mode=self._env.config.mode,
            wires=self._plan.wires,
            carried=self._count_carried,
        )
        self._joined = True
        if not self._compiled and self._prepared is None:
            with _instrument.span("compile"):
                self._compile()
        with _instrument.span("first_pull"):
            return self._pull(None, 0)

    def _count_carried(self, sent: int, received: int) -> None:
        self._carried.add(sent, received)
        self._metrics.carried(sent, received)

    def _hello(self, shard: int, reply: JoinReply) -> Hello:
        return Hello(
            peer=self._peer,
            shard=shard,
            expected_incarnation=reply.incarnation,
            term=reply.term,
            partition_digest=self._plan.agreement.digest,
        )

    def _disconnect(self) -> None:
        self._joined = False
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()

    def _silent(self, shard: int, why: str) -> None:
        """Heartbeats show that a server is lost: end the wait for it."""
        self._moved = True
        streams = self._streams
        if streams is not None:
            streams.cancel(f"shard {shard}: {why}")

    # ---- The end ----

    def _finish(self, pulled: Pulled, params: Sequence[Any]) -> Result | None:
        """Wait until the job is done; None when a server was lost meanwhile, and the last version may have changed."""
        self._heart.activity = LEAVING
        self.seconds.abandoned()  # what was computed early, for an update after the last
        if self._plan.wire.parameters != "Exact" or self._plan.partition.fragments > 1:
            # The result has the precision of the servers, and all fragments.
            try:
                pulled, params = self._pull(None, pulled.version, "exact")
            except (PeerLost, Refused) as error:
                # Memory that received some of the fragments holds an older version of the others.
                some = pulled.fragments is not None and len(pulled.fragments) < self._plan.partition.fragments
                if some or not self._heart.job.done:
                    return None
                _LOG.warning("the result has the precision of wire.parameters: %s", error)  # the servers have left
        average: Any = None
        if self._script.average is not None:
            try:
                last, received = self._pull(None, pulled.version, "average")
            except (PeerLost, Refused):
                if not self._heart.job.done:
                    return None
                raise  # the servers have left: the operator replaces worker 0, which then reads the last checkpoint
            if (last.term, last.version) != (pulled.term, pulled.version):
                return None
            average = self._model(received)[0]
        params, state = self._model(params)
        loss = math.nan if self._last is None else self._last.loss
        train_metrics = {} if self._last is None else dict(self._last.metrics)
        metrics = self._end.evaluate(self._term, pulled.version, params, state)
        job = self._end.wait(pulled.version, lambda: self._moved)
        if job is None:
            return None
        self._already_complete = job.already_complete
        return Result(
            params=params,
            state=state,
            step=pulled.version,
            loss=loss,
            metrics=job.evaluation or metrics,
            checkpoint=job.checkpoint or None,
            train_metrics=train_metrics,
            rank=self._rank,
            average=average,
            history=self._history,
        )

    def _model(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Parameters and model state."""
        model = self._plan.partition.tree.unflatten(jax.device_put(list(leaves), may_alias=True))
        return model if self._script.has_state else (model, None)

    def _close(self) -> None:
        self._heart.activity = LEAVING
        measured = {part: seconds for part, seconds in zip(MEASURED, self.seconds.rounded, strict=True) if seconds}
        shown = "  ".join(f"{part} {seconds:.3g}" for part, seconds in measured.items())
        _LOG.info("seconds of this worker: %s", shown, extra={"fields": {"workerSeconds": measured}})
        _instrument.report("worker_seconds", **measured)
        self._disconnect()
        self._overlap_timer.close()
        self._heart.close()
        self._batches.close()
        self._control.leave(trained=self._returns)
        self._control.close()
        if self._returns:
            self._joined = True  # the pod stays ready while the script continues
        else:
            self._http.close()
        self._gone.set()
