"""The result of `train`."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["History", "Result"]

POINTS: Final = 1000
"""The most points of a history."""


@dataclass
class History:
    """Loss and metrics of the gradients that this process computed, for a curve. Its memory is bounded.

    A history has at most 1,000 points. When there are more, it keeps every second one, then every fourth, and so on. So
    the same steps are kept in one process and in a job.

    Attributes:
        steps: the number of the update that each gradient was computed for, from 1. In Async mode, the number of the
            gradient.
        loss: the loss at each of `steps`, of this rank's batch.
        metrics: the metrics that `loss` returned, by name; as long as `steps`.
        every: the number of steps from one point to the next.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    every: int = 1

    def add(self, step: int, read: Callable[[], tuple[float, Mapping[str, float]]]) -> None:
        """Add a point, if this step is kept. Points of this step and later ones, which a rollback repeats, are dropped.

        Args:
            read: returns loss and metrics. It is called only for a step that is kept.
        """
        if self.steps and self.steps[-1] >= step:
            self._keep(range(bisect_left(self.steps, step)))
        if step % self.every:
            return
        loss, metrics = read()
        self.steps.append(step)
        self.loss.append(loss)
        for name, value in metrics.items():
            self.metrics.setdefault(name, [math.nan] * (len(self.steps) - 1)).append(value)
        for values in self.metrics.values():
            values.extend([math.nan] * (len(self.steps) - len(values)))
        while len(self.steps) > POINTS:
            self.every *= 2
            self._keep([place for place, at in enumerate(self.steps) if at % self.every == 0])

    def drop_after(self, step: int) -> None:
        """Drop the points of later steps, which are made again."""
        self._keep(range(bisect_right(self.steps, step)))

    def _keep(self, places: Sequence[int]) -> None:
        self.steps = [self.steps[place] for place in places]
        self.loss = [self.loss[place] for place in places]
        self.metrics = {name: [values[place] for place in places] for name, values in self.metrics.items()}


@dataclass(frozen=True)
class Result:
    """The result of training.

    Attributes:
        params: the parameters after the last update, the same pytree as `init` returned.
        state: the model state after the last update; None for a model without state.
        step: how many updates were applied.
        loss: the loss of the newest gradient that this process computed; NaN if it computed none, such as when the
            checkpoint already had the last step.
        metrics: the metrics that `evaluate` returned for `params`, or for `average` if there is one; the same in every
            worker of a job. Empty if `evaluate` was not called, or failed.
        checkpoint: the URI of the last checkpoint; None if there is none.
        train_metrics: the metrics that `loss` returned for the newest gradient of this process.
        rank: the rank of this worker; 0 in a single process.
        member: the index of this pod inside its rank, if a rank has several pods; 0 elsewhere.
        history: loss and metrics of the gradients of this process, over the steps. A worker that is replaced, and a
            process that continues from a checkpoint, begin a new one.
        average: the moving average of the parameters, of the same structure and dtypes as `params`; None without
            ``train(average=...)``.
    """

    params: Any = field(repr=False)
    step: int
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    state: Any = field(default=None, repr=False)
    average: Any = field(default=None, repr=False)
    history: History = field(default_factory=History, repr=False)
    member: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this is the first pod of worker 0, which exports, uploads or prints. True if there is no job.

        The job ends when the script of this worker ends. The operator then stops the other workers.
        """
        return self.rank == self.member == 0
