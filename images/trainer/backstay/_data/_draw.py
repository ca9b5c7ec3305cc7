"""Calls the script's `batches`, and refuses an iterator that ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BatchesEnded
from ._batch_key import BatchKey

__all__ = ["draw"]


def draw(batches: Callable[[BatchKey], Any], key: BatchKey) -> Any:
    """The batch of a key.

    Raises:
        BatchesEnded: `batches` raised StopIteration. The traceback is that of the StopIteration.
        Exception: any other that `batches` raises.
    """
    try:
        return batches(key)
    except StopIteration as error:
        text = (
            f"batches raised StopIteration at step {key.step} of rank {key.rank}: its iterator has ended. `batches` "
            "must return a batch for every key, and the same batch again for the same key. Use "
            "backstay.from_dataset(data, batch_size=...), or backstay.from_iterator(make), which calls `make` again "
            "for each epoch"
        )
        raise BatchesEnded(text).with_traceback(error.__traceback__) from None
