"""Defines where and how often training in one process stores checkpoints (`train(checkpoint=...)`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from backstay_spec.places import refusal
from backstay_spec.whole import number, set_whole

from ..errors import ConfigurationError
from ._manifest import JobIdentity

__all__ = ["StoreTo"]

_NAMESPACE: Final = "default"
_ALONE: Final = JobIdentity(namespace="local", name="one-process")


@dataclass(frozen=True)
class StoreTo:
    """Where and how often `train` stores checkpoints in one process, for ``train(checkpoint=...)``.

    In a job's pods, `spec.checkpoint` of the TrainingJob decides. The fields have the same meaning and defaults there.

    Attributes:
        uri: the folder, a path or any fsspec URI.
        every_steps: the number of updates between two checkpoints; None: not by updates.
        every_seconds: the number of seconds between two checkpoints; 0: not by time. The earlier of both counts. The
            last update is always stored.
        keep: how many complete checkpoints are kept.
        continue_from: the checkpoints in the folder from which training may continue. ``SameJob``: those that have this
            job's name and seed. ``Any``: the newest one of any job.
        job: the job that owns the checkpoints, as ``name`` or ``namespace/name``. Give the name of a TrainingJob to
            continue its checkpoints, or to let it continue these. Empty: ``local/one-process``.
    """

    uri: str
    every_steps: int | None = None
    every_seconds: float = 60
    keep: int = 3
    continue_from: Literal["SameJob", "Any"] = "SameJob"
    job: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", str(self.uri))
        set_whole(self, "every_steps", "every_seconds", "keep")
        if not self.uri:
            raise ConfigurationError("checkpoint has an empty uri: must name a folder")
        if (why := refusal(self.uri)) is not None:
            raise ConfigurationError(why)
        if self.every_steps is not None and not _is_count(self.every_steps, 1):
            raise ConfigurationError(
                f"checkpoint: every_steps is {self.every_steps!r}: must be a whole number, 1 or more, or None"
            )
        seconds = number(self.every_seconds)
        object.__setattr__(self, "every_seconds", seconds)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigurationError(f"checkpoint: every_seconds is {seconds!r}: must be a number, 0 or more")
        if not _is_count(self.keep, 1):
            raise ConfigurationError(f"checkpoint: keep is {self.keep!r}: must be a whole number, 1 or more")
        if self.continue_from not in ("SameJob", "Any"):
            raise ConfigurationError(f"checkpoint: continue_from is {self.continue_from!r}: must be SameJob or Any")
        parts = self.job.split("/") if isinstance(self.job, str) else [""]
        if self.job != "" and (len(parts) > 2 or not all(parts)):
            raise ConfigurationError(f"checkpoint: job is {self.job!r}: must be a name, or namespace/name")

    def owner(self, uid: str) -> JobIdentity:
        """Returns the job that owns the checkpoints; `uid` identifies this process."""
        if not self.job:
            return _ALONE.model_copy(update={"uid": uid})
        namespace, slash, name = self.job.rpartition("/")
        return JobIdentity(namespace=namespace if slash else _NAMESPACE, name=name, uid=uid)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
