"""The result of `train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """The end of a training.

    Attributes:
        params: the parameters after the last update, the same pytree as `init` returned.
        state: the model state after the last update; None for a model without state.
        step: how many updates were applied.
        loss: the loss of the newest gradient that this process computed; None when it computed none.
        metrics: what `evaluate` returned for `params`, in a job the same in every worker; empty where it was not called
            or failed.
        checkpoint: where the last checkpoint is; None when none is stored.
        train_metrics: what `loss` returned beside the loss, of the newest gradient.
        rank: the rank of this worker; 0 in a single process.
    """

    params: Any
    step: int
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    state: Any = None

    @property
    def is_leader(self) -> bool:
        """Whether this is the one process of the job that exports, uploads or prints: the worker of rank 0.

        The job waits for the script of this worker, and stops the other workers when it ends.
        """
        return self.rank == 0
