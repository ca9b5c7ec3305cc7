"""Says how busy this machine is, for limits that only end what would wait without end."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["slack"]


def slack() -> float:
    """Returns how many times longer something may take now than on a machine without other work."""
    try:
        average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
        busy = max(float(average), float(running.partition("/")[0]))  # the average comes late
    except (OSError, ValueError):
        busy = os.getloadavg()[0]
    return max(1.0, busy / len(os.sched_getaffinity(0)))
