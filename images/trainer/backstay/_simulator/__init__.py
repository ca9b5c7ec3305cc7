"""Simulates whole jobs in simulated time, with the real coordinator, update modes, credits, planner and budgets.

`simulate` runs one job under `Assumptions`. `python -m backstay._simulator` is the program behind `backstay simulate`.
"""

from __future__ import annotations

from ._assumptions import Assumptions
from ._run import SimulatedRun, percentile, simulate, summary

__all__ = ["Assumptions", "SimulatedRun", "percentile", "simulate", "summary"]
