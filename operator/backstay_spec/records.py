"""Defines the names of the records that a job's servers write beside the checkpoints, and the entries of a history."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["RECORD_NAME", "merged"]

RECORD_NAME: Final = re.compile(r"(trace|report|history|curve)-([0-9]{12})-[a-z0-9-]{1,100}\.(pb\.gz|json)")
"""Returns the name of a record's file, with its kind, the Unix time in seconds, a unique part, and its format."""


def merged(*histories: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Returns the entries of several histories in order of time; those of one time keep their order.

    Args:
        histories: entries as in `status.history`, the newest history last: its entries replace those that have the same
            time, reason, slot and incarnation. Other values are left out.
    """
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for entry in itertools.chain.from_iterable(histories):
        if isinstance(entry, Mapping):
            found[tuple(str(entry.get(name)) for name in ("time", "reason", "slot", "incarnation"))] = entry
    return sorted(found.values(), key=lambda entry: str(entry.get("time")))
