"""Simulates whole jobs in simulated time, with the real coordinator, update modes, credits, planner and budgets.

`simulate` runs one job under `Assumptions`. `python -m backstay._simulator` is the program behind `backstay simulate`.

Names are loaded when they are first used: the program answers an invalid request before it imports JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._assumptions import Assumptions
    from ._run import SimulatedRun, percentile, simulate, summary

__all__ = ["Assumptions", "SimulatedRun", "percentile", "simulate", "summary"]

_HOMES: Final = {
    "Assumptions": "._assumptions",
    "SimulatedRun": "._run",
    "percentile": "._run",
    "simulate": "._run",
    "summary": "._run",
}
__getattr__ = lazily(__name__, _HOMES)
