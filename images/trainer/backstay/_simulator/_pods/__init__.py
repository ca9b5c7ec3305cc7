"""The simulated pods of a job, their failures, and the operator that plans for them. Pure."""

from __future__ import annotations

from ._cluster import SimulatedPods
from ._failures import FailureSource
from ._operator import BEGAN
from ._spans import SpanLog
from ._world import SimulatedWorld

__all__ = ["BEGAN", "FailureSource", "SimulatedPods", "SimulatedWorld", "SpanLog"]
