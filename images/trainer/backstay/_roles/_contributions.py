"""Computes the contributions of a worker: draws batches, and begins the next contribution early."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jax.profiler import StepTraceAnnotation

from backstay_rpc.control_pb2 import COMPILING, TRAINING, GradientInfo

from .. import _instrument
from .._compute import ComputedContribution, Encoder, Start
from .._data import BatchKey, CheckedBatches, Prefetcher
from .._process import one_compiles
from .._result import History
from .._transport import Arrangement, DividedArrangement, Heartbeats, Pulled
from .._update import SameLeaves, Selection, ZeroLeaves, parts_of_leaves
from ._next_contribution import NextContribution

if TYPE_CHECKING:
    from .._compute import Computation, Summary
    from .._process import Environment
    from .._script import Script, ScriptPlan
    from ._observers import WorkerObserver
    from ._worker_protocol import WorkerProtocol

__all__ = ["Contributions"]


class Contributions:
    """Computes the contributions of one rank.

    Attributes:
        arrangement: the layout of the partition's blocks in this process.
        compiled: whether a contribution was computed.
        on_host: whether the computation takes parameters in the memory of the host.
        history: the losses and metrics of the contributions.
    """

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: ScriptPlan,
        protocol: WorkerProtocol,
        observer: WorkerObserver,
        heart: Heartbeats,
        encoder: Encoder,
    ) -> None:
        """
        Raises:
            ConfigurationError: see `Script.overlaps`.
        """
        self._env, self._script, self._plan, self._rank = environment, script, plan, environment.index
        self._protocol, self._observer, self._heart = protocol, observer, heart
        self.arrangement: Arrangement | DividedArrangement = Arrangement(plan.partition)
        if environment.members > 1 or script.placement.of_accelerators:
            shardings = script.placement.model(plan.partition.tree)
            self.arrangement = DividedArrangement(plan.partition, shardings, environment.member)
        self._overlaps = script.overlaps(environment.config)
        self._encoder = encoder
        self.on_host = script.placement.takes_host_memory
        self._made: Computation | None = None
        self._next = NextContribution()
        # A member of several has only parts of leaves.
        self._zero = ZeroLeaves(plan.partition.tree) if environment.members == 1 else None
        # Rounded parameters may stay while the exact ones change. All ranks receive the same.
        watches = (
            self._rank == 0
            and environment.members == 1
            and plan.wire.parameters == "Exact"
            and script.frozen is not False
        )
        self._same = SameLeaves(plan.partition.tree, script.steps) if watches else None
        self._unchanged: list[int] | None = None  # until the next contribution has reported them
        self._checked = CheckedBatches(script.batches)
        self._batches = Prefetcher(script.placement.placing(self._checked))
        self._prepared: tuple[BatchKey, Any] | None = None  # the batch that the computation needs next
        self._last: Summary | None = None  # of the newest contribution
        self.history = History()
        self.compiled = False

    def use(self, frozen: Sequence[Any]) -> None:
        """Set the values of the frozen leaves, on the devices, before anything is computed. They never change."""
        if self._made is not None:
            return
        # With overlap, a contribution is dispatched before the fate of the previous one is known.
        begin = (lambda contribution: None) if self._overlaps else self._encoder.begin
        objective = self._script.objective(frozen)
        self._made = self._script.computation(objective, self.arrangement, self._batch, begin)

    @property
    def _computation(self) -> Computation:
        assert self._made is not None, "`use` was not called"
        return self._made

    def compute(
        self, pulled: Pulled, params: Sequence[Any], received: Selection | None
    ) -> tuple[ComputedContribution, Pulled]:
        """Returns the next contribution, and what it was computed from.

        Args:
            pulled: the newest answer, with these parameters.
            received: see `Start.received`.
        """
        if self._same is not None and (received is None or received.whole):
            found = self._same.examine(pulled.version, params)
            self._unchanged = self._unchanged if found is None else found
        step = self._protocol.next(pulled.version)
        key = BatchKey(step=step, rank=self._rank, world=pulled.world, seed=self._script.seed, offset=pulled.offset)
        self._heart.activity = TRAINING if self.compiled else COMPILING
        began = time.monotonic()
        start = Start(params, key, received)
        ahead = self._next.take(self._protocol.term, key)
        if ahead is None:
            self._draw(start)
        point = "compute" if self.compiled else "compile"  # the first one is mostly compiling
        # `backstay trace --jax-profile` finds the steps of a profile by the annotation.
        with _instrument.span(point, step), StepTraceAnnotation("train", step_num=step):
            if not self.compiled:
                _instrument.reach("compute", step)
            given = _instrument.alter("params", params)
            if ahead is None or given is not params:
                ahead = self._computation.start(replace(start, params=given)), pulled
            contribution, at = ahead
            contribution.wait()
        if self.compiled:
            # Of both, because either of the two can make a rank slow.
            self._heart.step_seconds = time.monotonic() - began
            self._observer.computed(self._heart.step_seconds)
        else:
            self._observer.seconds.ended("compiling")
        self.compiled = True
        if self._overlaps and pulled.version + 1 < self._script.steps:  # else this one may be the last
            following = replace(start, key=replace(key, step=step + 1))
            self._draw(following, due=False)
            self._encoder.begin(contribution)  # before the accelerator gets the next one
            self._next.keep(self._protocol.term, begun := self._computation.start(following), pulled)
            self._observer.began_next(begun.wait)
        elif (early := self._computation.early()) is not None:
            self._observer.began_beside(early)
        return contribution, at

    def _draw(self, start: Start, *, due: bool = True) -> None:
        """Wait for the first batch of a contribution, before its computation is measured."""
        if (first := self._computation.first_batch(start)) is not None:
            if due and first.step == start.key.step * self._computation.batches:
                self._observer.seconds.abandoned()  # what was computed early, for another key
            self._prepared = first, self._batch(first)

    def _batch(self, key: BatchKey) -> Any:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == key:
            return prepared[1]
        last = self._protocol.last(self._script.steps * self._computation.batches)
        if self.compiled:  # between two batches of a contribution
            self._observer.seconds.computed()
        else:
            self._observer.seconds.ended("compiling")
        with _instrument.span("batch_wait", key.step):
            batch = self._batches.get(key, last)
        self._observer.seconds.ended("data")
        return batch

    def compile(self) -> None:
        """Compile the computation once, while the servers prepare the parameters, for the batch of a job that begins.

        An error here occurs again in the first step, which reports it.
        """
        if not self.compiled and self._prepared is None:
            with _instrument.span("compile"):
                self._compile()

    def _compile(self) -> None:
        world = max(self._env.config.workers, self._rank + 1)
        key = BatchKey(0, self._rank, world, self._script.seed, batches=self._computation.batches)
        seconds = self._env.timeouts.compiling
        self._observer.seconds.ended("starting")
        with contextlib.suppress(Exception):
            batch = self._batch(key)
            with one_compiles("gradient", self._plan.agreement.digest, seconds=seconds):
                self._observer.compiled(self._computation.compile(batch))
            self._prepared = key, batch
        self._observer.seconds.ended("compiling")

    def info(self, contribution: ComputedContribution, measured: GradientInfo) -> GradientInfo:
        """Returns the summary for the end mark of a contribution; waits until it is computed.

        Args:
            measured: see `WorkerObserver`.
        """
        self._last = summary = contribution.summary
        self.history.add(contribution.key.step + 1, lambda: (summary.loss, dict(summary.metrics)))
        info = GradientInfo(
            finite=summary.finite,
            examples=summary.examples,
            loss=summary.loss,
            metrics=summary.metrics,
            impure=self._checked.impure,
        )
        info.MergeFrom(measured)
        if self._zero is not None:
            parts = partial(parts_of_leaves, self._plan.partition, contribution.blocks)
            zero = self._zero.examine(contribution.key.step, parts)
            if zero is not None:
                info.zero.leaves.extend(zero)
                info.zero.SetInParent()
        if self._unchanged is not None:
            info.same.leaves.extend(self._unchanged)
            info.same.SetInParent()
            self._unchanged = None
        return info

    @property
    def loss(self) -> float:
        """The loss of the newest contribution; NaN before the first."""
        return math.nan if self._last is None else self._last.loss

    @property
    def train_metrics(self) -> dict[str, float]:
        """The metrics of the newest contribution."""
        return {} if self._last is None else dict(self._last.metrics)

    def close(self) -> None:
        """Draw no more batches."""
        self._batches.close()
