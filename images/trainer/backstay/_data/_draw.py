"""Calls the script's `batches`, and refuses an iterator that ends and a batch without rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import BatchesEnded, EmptyBatch
from ._batch_key import BatchKey

__all__ = ["draw", "nbytes"]


def draw(batches: Callable[[BatchKey], Any], key: BatchKey) -> Any:
    """Returns the batch of a key.

    Raises:
        BatchesEnded: `batches` raised StopIteration. The traceback is that of the StopIteration.
        EmptyBatch: each array of the batch that has an axis has 0 rows.
        Exception: any other that `batches` raises.
    """
    try:
        batch = batches(key)
    except StopIteration as error:
        text = (
            f"batches raised StopIteration at step {key.step} of rank {key.rank}: its iterator has ended. `batches` "
            "must return a batch for every key, and the same batch again for the same key. Use "
            "backstay.from_dataset(data, batch_size=...), or backstay.from_iterator(make), which calls `make` again "
            "for each epoch"
        )
        raise BatchesEnded(text).with_traceback(error.__traceback__) from None
    if found := _without_rows(batch):
        raise EmptyBatch(
            f"the batch of step {key.step} of rank {key.rank} has no rows: {found}. A batch must have at least one "
            "row, also with update.weighting Examples, because nothing can be computed from 0 rows. A slice beyond "
            "the end of the data and a filter that keeps no sample return such batches. Use "
            "backstay.from_dataset(data, batch_size=...), or filter the data before they are divided into batches"
        )
    return batch


def _without_rows(batch: Any) -> str:
    """Returns the shapes of a batch's arrays if none of them has a row; empty for a valid batch, and for one without
    arrays."""
    import jax

    shapes = [(path, np.shape(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]]
    arrays = [(path, shape) for path, shape in shapes if shape]
    if not arrays or any(shape[0] for _, shape in arrays):
        return ""
    return ", ".join(f"batch{jax.tree_util.keystr(path)} has the shape {shape}" for path, shape in arrays[:3])


def nbytes(batch: Any) -> int:
    """Returns the bytes of the arrays in a batch."""
    import jax

    sizes = (getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(batch))
    return sum(size for size in sizes if isinstance(size, int))
