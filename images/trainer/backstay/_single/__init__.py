"""Training in one process, without pods.

`train_alone` is what `train` does outside a job. `train_local` is the reference that a synchronous job must equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._loop import InterruptedAt, StepReport, train_alone
    from ._reference import train_local
    from ._storage import AloneStorage

__all__ = [
    "AloneStorage",
    "InterruptedAt",
    "StepReport",
    "train_alone",
    "train_local",
]

_HOMES: Final = {
    "AloneStorage": "._storage",
    "InterruptedAt": "._loop",
    "StepReport": "._loop",
    "train_alone": "._loop",
    "train_local": "._reference",
}

__getattr__ = lazily(__name__, _HOMES)
