"""Returns `spec.update.grace` as text, which is a duration such as ``500ms``, or ``Auto``."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["AUTO", "PATTERN", "grace_seconds"]

AUTO: Final = "Auto"
PATTERN: Final = r"^(Auto|([0-9]+(\.[0-9]+)?(ms|s|m))+)$"

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}


def grace_seconds(text: str) -> float | None:
    """Returns the grace in seconds; None for `Auto`.

    Args:
        text: `Auto`, or numbers with the units `ms`, `s` and `m`, such as ``0s``, ``1.5s`` or ``1m30s``.

    Raises:
        ValueError: `text` is neither.
    """
    if re.fullmatch(PATTERN.replace("$", r"\Z"), text, re.ASCII) is None:
        raise ValueError(f"grace is {text!r}: must be Auto, or a duration such as 500ms, 2s or 1m30s")
    if text == AUTO:
        return None
    return float(sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m)", text)))
