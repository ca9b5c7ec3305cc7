"""The folders of tests by what they need, for their limits of time and for the order of the stages."""

from __future__ import annotations

from typing import Final

PURE: Final = ("tests/coordination", "tests/house", "tests/plan", "tests/rpc", "tests/spec")
"""They need no processes and no training."""
