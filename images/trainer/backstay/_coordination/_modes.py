"""The update modes by their names in `spec.update.mode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ._async import Async
from ._mode import UpdateMode
from ._state import Mode
from ._sync import Sync

__all__ = ["MODES"]

MODES: Final[Mapping[Mode, UpdateMode]] = {"Sync": Sync(), "Async": Async()}
