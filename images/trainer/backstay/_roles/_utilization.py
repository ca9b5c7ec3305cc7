"""How much of what its devices can do a worker uses (MFU): its work a second, as a share of their peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compute._flops import peak_of
from .._coordination import Rate
from ._metrics import Metrics

__all__ = ["Utilization"]


class Utilization:
    """Sets the metrics of a worker's work. Not thread-safe.

    All the time of a step counts, also that in which the worker waits: the work of dropped contributions counts too.
    """

    def __init__(self, metrics: Metrics, devices: Callable[[], Sequence[Any]] = jax.local_devices) -> None:
        self._metrics, self._devices = metrics, devices
        self._rate = Rate()
        self._flops: float | None = None
        self._peak: float | None = None

    def compiled(self, flops: float | None) -> None:
        """The computation is compiled; `flops` of one contribution, None: not known."""
        if flops is not None:
            self._flops, self._peak = flops, peak_of(self._devices())
            self._metrics.contribution_flops.set(flops)

    def contributed(self, now: float) -> None:
        """A contribution is done.

        Args:
            now: seconds of `time.monotonic`.
        """
        if self._flops is None or self._peak is None:
            return
        self._rate.add(now, 1)
        per_second = self._rate.per_second(now)
        if per_second:
            self._metrics.mfu.set(per_second * self._flops / self._peak)
