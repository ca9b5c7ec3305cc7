"""The clock of a simulation, resources that many users share, and random numbers. Pure."""

from __future__ import annotations

from ._draws import DrawStream
from ._heap import EventHeap, PlannedEvent
from ._rates import FairShare, SharedWork

__all__ = ["DrawStream", "EventHeap", "FairShare", "PlannedEvent", "SharedWork"]
