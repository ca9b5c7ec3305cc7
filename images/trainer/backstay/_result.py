"""The result of `train`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """The result of training.

    Attributes:
        params: the parameters after the last update, the same pytree as `init` returned.
        state: the model state after the last update; None for a model without state.
        step: how many updates were applied.
        loss: the loss of the newest gradient that this process computed; NaN if it computed none, such as when the
            checkpoint already had the last step.
        metrics: the metrics that `evaluate` returned for `params`, the same in every worker of a job. Empty if
            `evaluate` was not called, or failed.
        checkpoint: the URI of the last checkpoint; None if there is none.
        train_metrics: the metrics that `loss` returned for the newest gradient of this process.
        rank: the rank of this worker; 0 in a single process.
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

    @property
    def is_leader(self) -> bool:
        """Whether this is worker 0, the process that exports, uploads or prints. True if there is no job.

        The job ends when the script of this worker ends. The operator then stops the other workers.
        """
        return self.rank == 0
