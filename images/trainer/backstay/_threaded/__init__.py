"""Adds a lock, a clock and slow storage to the pure `Sequencer`, for many threads (`ThreadedCoordinator`)."""

from __future__ import annotations

from ._coordinator import CheckpointStorage, ThreadedCoordinator

__all__ = ["CheckpointStorage", "ThreadedCoordinator"]
