"""Selects the best checkpoint of a history, which has the best value of a metric in its evaluation. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ._manifest import Best, Evaluation
from ._names import ManifestName

__all__ = ["best_of"]


def best_of(evaluations: Mapping[ManifestName, Evaluation], rule: Best) -> ManifestName | None:
    """Returns the name of the best evaluated checkpoint, of equal ones the newest; None if no evaluation has the
    metric."""
    sign = 1.0 if rule.mode == "Max" else -1.0
    values = {
        name: sign * evaluation.metrics[rule.metric]
        for name, evaluation in evaluations.items()
        if math.isfinite(evaluation.metrics.get(rule.metric, math.nan))
    }
    return max(values, key=lambda name: (values[name], name), default=None)
