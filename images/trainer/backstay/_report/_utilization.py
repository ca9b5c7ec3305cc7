"""How much of its devices a worker uses: its work a second as a share of their peak (MFU), and their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from .._compute import peak_of
from .._coordination import Rate
from ._metrics import PodMetrics

__all__ = ["Utilization"]

_MEMORY: Final = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
"""States of a device's memory, and their keys in `jax.Device.memory_stats`."""


class Utilization:
    """Sets the metrics of a worker's work. Not thread-safe.

    All the time of a step counts, including the time of waiting: the work of dropped contributions counts too.
    """

    def __init__(self, metrics: PodMetrics, devices: Callable[[], Sequence[Any]] = jax.local_devices) -> None:
        self._metrics, self._devices = metrics, devices
        self._rate = Rate()
        self._flops: float | None = None
        self._peak: float | None = None

    def compiled(self, flops: float | None) -> None:
        """Record that the computation is compiled. `flops` are those of one contribution, or None if not known."""
        for number, device in enumerate(self._devices()):
            for state, key in _MEMORY.items():
                if key in _memory_of(device):
                    read = functools.partial(lambda device, key: _memory_of(device).get(key, 0), device, key)
                    self._metrics.device_memory(number, state).set_function(read)
        if flops is not None:
            self._flops, self._peak = flops, peak_of(self._devices())
            self._metrics.contribution_flops.set(flops)

    def contributed(self, now: float) -> None:
        """Record that a contribution is done.

        Args:
            now: seconds of `time.monotonic`.
        """
        if self._flops is None or self._peak is None:
            return
        self._rate.add(now, 1)
        per_second = self._rate.per_second(now)
        if per_second:
            self._metrics.mfu.set(per_second * self._flops / self._peak)


def _memory_of(device: Any) -> dict[str, int]:
    """Returns the memory statistics of a device. They are empty if it reports none, as processors do."""
    try:
        return device.memory_stats() or {}
    except (AttributeError, RuntimeError):  # of backends that do not implement the call
        return {}
