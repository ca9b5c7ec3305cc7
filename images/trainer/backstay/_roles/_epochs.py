"""The start of the account of epochs: what is known about the data from the function `batches`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._coordination import Samples
from .._data import Batches

if TYPE_CHECKING:
    from ._script import Script

__all__ = ["epochs_of"]


def epochs_of(script: Script) -> Samples | None:
    """The account of the first epoch; None where `batches` is a function that does not say how large an epoch is."""
    batches = script.batches
    return Samples(batches.size, batches.batch_size) if isinstance(batches, Batches) else None
