"""The checkpoint that training continues from: the run that stored it, and the changes since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .._manifest import Origin

__all__ = ["Continued", "changes_of", "log_continued"]

_LOG = logging.getLogger(__name__)
_OPTIMIZER: Final = ("optimizer", "optimizer_constants", "optimizer_start", "optimizer_start_constants")


@dataclass(frozen=True)
class Continued:
    """The checkpoint that training continues from.

    Attributes:
        own: whether the checkpoint is of this job and seed.
        same_run: whether the checkpoint is of this run: the job's uid is equal.
        changes: settings that differ from those of the run that stored it, as text.
        examples: number of examples of one contribution of the checkpoint's last update; None: unknown.
    """

    step: int
    origin: Origin
    own: bool
    same_run: bool
    changes: tuple[str, ...]
    examples: int | None


def log_continued(continued: Continued) -> None:
    """Log which run stored the checkpoint that training continues from, and the user's changes since."""
    origin = continued.origin
    if not continued.own:
        _LOG.warning(
            "the checkpoint of step %d belongs to job %s with seed %d: a new history begins with its state, because "
            "checkpoint.continueFrom is Any",
            continued.step,
            origin.job,
            origin.seed,
        )
    elif not continued.same_run:
        _LOG.info(
            "this run of job %s continues the run with uid %s at step %d",
            origin.job,
            origin.job.uid or "unknown",
            continued.step,
        )
    for change in continued.changes:
        _LOG.warning("changed since the checkpoint of step %d: %s", continued.step, change)


def changes_of(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the differences between the settings of two runs, as text; settings that only one of them has are left
    out."""
    different = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    changes = [f"{name} was {before[name]} and is {now[name]}" for name in different if name not in _OPTIMIZER]
    if "optimizer_start" in different:
        begins = f"the optimizer begins with other values{_constants(before, now, 'optimizer_start')}"
        changes.insert(
            0,
            f"{begins}. They are not used, because the values of the checkpoint stay. To use them, begin with another "
            "checkpoint.uri and start_from",
        )
    # Of checkpoints before 27 November 2026, "optimizer" has these values too.
    if "optimizer" in different and "optimizer_start" in before:
        changes.insert(0, f"the optimizer computes another update{_constants(before, now, 'optimizer')}")
    return tuple(changes)


def _constants(before: Mapping[str, str], now: Mapping[str, str], name: str) -> str:
    mine, theirs = (settings.get(f"{name}_constants", "").split() for settings in (now, before))
    old, new = [one for one in theirs if one not in mine], [one for one in mine if one not in theirs]
    return _replaced(" ".join(old), " ".join(new))


def _replaced(old: str, new: str) -> str:
    if old and new:
        return f": {old} was replaced by {new}"
    return f": it no longer has {old}" if old else f": {new} is new in it" if new else ""
