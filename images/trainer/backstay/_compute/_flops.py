"""The work of a compiled function, and what a device can do at most: for the utilization of the devices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["flops_of", "peak_of"]

_PEAKS: Final = {
    # Dense BFloat16 without sparsity, of the vendors' data sheets; by JAX's name of the device, up to a ``-``.
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def flops_of(compiled: Any, devices: int) -> float | None:
    """Floating-point operations of one call, as XLA estimates them, or None if there is no true estimate.

    XLA counts the body of a loop once, however often it runs. A function with a loop therefore has no estimate.

    https://docs.jax.dev/en/latest/_autosummary/jax.stages.Compiled.cost_analysis.html

    Args:
        compiled: a compiled function, whose estimate is that of one device.
        devices: how many run it.
    """
    with contextlib.suppress(Exception):  # the analysis is not a part of JAX's stable interface
        found = compiled.cost_analysis()
        analysis = found[0] if isinstance(found, list) else found
        flops = float(analysis["flops"])
        if " while(" in compiled.as_text():
            return None
        return flops * devices if flops > 0 else None
    return None


def peak_of(devices: Sequence[Any]) -> float | None:
    """Floating-point operations a second that these devices reach at most, in BFloat16, or None if one is not known."""
    total = 0.0
    for device in devices:
        kind = str(getattr(device, "device_kind", ""))
        peaks = [peak for name, peak in _PEAKS.items() if kind == name or kind.startswith(f"{name}-")]
        if not peaks or " MIG " in kind:
            return None
        total += peaks[0]
    return total or None
