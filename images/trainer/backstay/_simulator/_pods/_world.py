"""Keeps the values that all parts of one simulation share, such as the clock, sizes and counts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ..._coordination import MODES, Intervals, Rules
from ..._timeouts import Timeouts
from ..._update import CODECS
from .._assumptions import Assumptions
from .._clock import DrawStream, EventHeap, FairShare
from ._spans import SpanLog

if TYPE_CHECKING:
    from backstay_spec.runtime import RuntimeConfig

__all__ = ["SimulatedMachine", "SimulatedWorld", "Tally", "encoded_bytes"]

_GROUP: Final = 128 * 1024


def encoded_bytes(codec: str, exact_bytes: float, exact_share: float) -> float:
    """Returns the bytes of float32 parameters on the wire.

    Args:
        codec: the name of a codec.
        exact_bytes: the bytes without a codec.
        exact_share: the share that is not encoded.
    """
    if codec == "Exact":
        return exact_bytes
    found = CODECS[codec]  # type: ignore[index]  # a valid job names one of them
    sections = found.sections(_GROUP, np.dtype(np.float32))
    ratio = sum(count * dtype.itemsize for count, dtype in sections) / (4 * _GROUP)
    return exact_bytes * (exact_share + (1 - exact_share) * ratio)


@dataclass
class Tally:
    """The counts of a simulation.

    Attributes:
        updates: the time and the version of each update.
        outcomes: how many contributions had each outcome.
        examples: examples in applied contributions.
        staleness: how many applied contributions had each staleness.
        exchange_waits: the seconds from the end of a contribution until the new parameters began to arrive.
        sent, received: bytes from workers to servers, and from servers to workers.
        replicated: bytes from servers to standbys.
        redone: updates that were made again.
        checkpoints: checkpoints that were stored.
        failures: failures by what failed.
        pod_seconds: the seconds of pods by role.
    """

    updates: list[tuple[float, int]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    examples: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    exchange_waits: list[float] = field(default_factory=list)
    sent: float = 0.0
    received: float = 0.0
    replicated: float = 0.0
    redone: int = 0
    checkpoints: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    pod_seconds: dict[str, float] = field(default_factory=dict)


class SimulatedMachine:
    """The processors and the network interface of one pod.

    Attributes:
        processor: does work in seconds of one processor.
        ingress, egress: transfer bytes from and to workers.
        to_standby: transfers bytes to a standby.
    """

    def __init__(self, heap: EventHeap, rate: float, most: float, processor: FairShare | None) -> None:
        """
        Args:
            rate: bytes a second of the pod's interface.
            most: bytes a second of one worker, by all the interfaces of its rank.
            processor: the processors that the pod shares with others; None: it has its own.
        """
        self.processor = processor or FairShare(heap, math.inf, 1.0)
        self.ingress = FairShare(heap, rate, most)
        self.egress = FairShare(heap, rate, most)
        self.to_standby = FairShare(heap, rate)


class SimulatedWorld:
    """One simulation's shared values.

    Args:
        config: the job's settings, as its pods get them.
        assumed: everything else.
        seed: the seed of all random numbers.
        spans: keeps what the pods do.

    Attributes:
        mode: the job's update mode.
        rules: the coordinator's settings.
        times: the timeouts of pods.
        gradient_bytes, parameter_bytes: the bytes of one shard's part of a contribution and of an answer, on the wire.
        shard_bytes: the bytes of one shard's parameters in memory.
        state_bytes: the bytes of one shard's whole state.
    """

    def __init__(self, config: RuntimeConfig, assumed: Assumptions, seed: int, spans: SpanLog) -> None:
        self.config, self.assumed, self.seed, self.spans = config, assumed, seed, spans
        self.heap = EventHeap()
        self.tally = Tally()
        self.times = Timeouts()
        self.mode = MODES[config.mode]
        stored = config.checkpoint
        self.rules = Rules(
            mode=config.mode,
            shards=config.shards,
            steps=assumed.steps or 1 << 40,
            backups=config.backups,
            grace=config.grace_seconds,
            weighting=config.weighting,
            max_non_finite=config.max_non_finite,
            max_staleness=config.max_staleness,
            staleness_damping=config.staleness_damping,
            stores=stored is not None,
            replicates=config.standbys > 0,
            batches=assumed.step.local_steps,
            timeouts=self.times,
        )
        self.intervals = Intervals() if stored is None else Intervals(stored.every_steps, stored.every_seconds)
        model, fragments = assumed.model, assumed.step.fragments
        one = model.bytes / config.shards
        self.shard_bytes, self.state_bytes = one, one * model.state_factor
        self.gradient_bytes = encoded_bytes(config.wire.gradients, one / fragments, model.exact_share)
        self.parameter_bytes = encoded_bytes(config.wire.parameters, one / fragments, model.exact_share)
        self.whole_bytes = encoded_bytes(config.wire.parameters, one, model.exact_share)
        self.rate = assumed.network.gigabits_per_second * 1e9 / 8
        cores = assumed.nodes.cores
        self.shared = None if cores is None else FairShare(self.heap, cores, 1.0)

    @property
    def latency(self) -> float:
        """The time of a small message."""
        return self.assumed.network.latency_seconds

    def machine(self) -> SimulatedMachine:
        """Returns the machine of a new pod."""
        # The streams of a worker to all shards share its interface, and each pod of a rank has its own interface.
        most = min(self.rate, self.rate * self.config.pods_per_rank / self.config.shards)
        return SimulatedMachine(self.heap, self.rate, most, self.shared)

    def draws(self, *purpose: str | int) -> DrawStream:
        """Returns the random numbers of one purpose."""
        return DrawStream(self.seed, *purpose)
