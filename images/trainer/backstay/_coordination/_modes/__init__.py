"""Chooses the gradients of an update, by the modes of `spec.update.mode`, worlds and grace. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .._state import Mode
from ._async import Async
from ._counting import Counting, held_by_shard
from ._grace import NO_WAIT, Choice, Grace
from ._mode import Answering, Candidates, Choosing, Contributor, UpdateMode, Waiting
from ._sync import Sync
from ._world import change_batches, change_world, effective_world, next_world

__all__ = [
    "MODES",
    "NO_WAIT",
    "Answering",
    "Candidates",
    "Choice",
    "Choosing",
    "Contributor",
    "Counting",
    "Grace",
    "UpdateMode",
    "Waiting",
    "change_batches",
    "change_world",
    "effective_world",
    "held_by_shard",
    "next_world",
]

MODES: Final[Mapping[Mode, UpdateMode]] = {"Sync": Sync(), "Async": Async()}
