"""The learning rate, where the optimizer's state has it: the metric `backstay_learning_rate` of shard 0's server."""

from __future__ import annotations

import weakref

from .._update import ShardEngine
from ._metrics import PodMetrics

__all__ = ["LearningRate"]


class LearningRate:
    """Shows the learning rate of the newest update. Not thread-safe."""

    def __init__(self, metrics: PodMetrics) -> None:
        self._metrics = metrics
        self._engine: weakref.ref[ShardEngine] | None = None

    def watch(self, engine: ShardEngine) -> None:
        """Show that of this engine from now on, for as long as the engine is used."""
        self._engine = weakref.ref(engine)

    def tick(self) -> None:
        """Call it now and then."""
        engine = None if self._engine is None else self._engine()
        if engine is not None and (rate := engine.learning_rate) is not None:
            self._metrics.learning_rate.set(rate)
