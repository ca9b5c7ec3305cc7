"""How long tests wait. No test asserts a time: a limit only ends a test that would wait without end."""

from __future__ import annotations

from typing import Final

from backstay_cluster.load import slack

__all__ = ["LONG", "slack"]

LONG: Final = 600.0
"""The seconds of a call or a wait that ends in any case, since the limit of its test ends it (`slack`)."""
