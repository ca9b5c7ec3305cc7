"""The settings of a job that may change while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import ProgressRequest

if TYPE_CHECKING:
    from backstay_spec.runtime import RuntimeConfig

__all__ = ["LiveSettings"]


@dataclass
class LiveSettings:
    """The settings that the operator sent last.

    Attributes:
        world: `workers.replicas`.
        stall_seconds: `workers.stallSeconds`.
        keep: `checkpoint.keep`.
    """

    world: int
    stall_seconds: float
    keep: int

    @classmethod
    def of(cls, config: RuntimeConfig) -> LiveSettings:
        """The settings with which this pod was created."""
        return cls(config.workers, config.stall_seconds, config.checkpoint.keep if config.checkpoint else 1)

    def update(self, request: ProgressRequest) -> None:
        """A call of the operator; a setting that it lacks stays unchanged."""
        self.world = request.world or self.world
        self.stall_seconds = request.stall_seconds or self.stall_seconds
        if request.HasField("checkpoint"):
            self.keep = request.checkpoint.keep or self.keep
