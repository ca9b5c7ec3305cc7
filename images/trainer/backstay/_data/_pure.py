"""Whether `batches` is a function of its key: the first key is passed twice, and both batches are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ._batch_key import BatchKey
from ._dataset import Batches
from ._draw import draw

__all__ = ["IMPURE", "CheckedBatches"]

IMPURE: Final = (
    "batches returned two different batches for the same key. After a death, a replacement then trains on other "
    "samples than the dead worker, and a run cannot be repeated. Make the batch from the key: with "
    "backstay.from_dataset or backstay.from_iterator, or with key.seed and key.number in place of a global generator"
)


class CheckedBatches:
    """The script's `batches`, called twice for the first key. A data set of `from_dataset` is not checked.

    Attributes:
        impure: whether the first key had two different batches; False until it was passed.
        workers, ahead, ahead_bytes: the attributes of `batches`, for `Prefetcher`.
        rows, batch_size: the attributes of a data set of `from_dataset`; other batches have none.
    """

    def __init__(self, batches: Callable[[BatchKey], Any]) -> None:
        self._batches = batches
        self._unchecked = not isinstance(batches, Batches)
        self.impure = False
        for name in ("workers", "ahead", "ahead_bytes"):
            if hasattr(batches, name):
                setattr(self, name, getattr(batches, name))
        if isinstance(batches, Batches):
            self.rows, self.batch_size = batches.rows, batches.batch_size

    def __call__(self, key: BatchKey) -> Any:
        """The batch of a key.

        Raises:
            BatchesEnded: `batches` raised StopIteration.
            EmptyBatch: `batches` returned a batch without rows.
            Exception: any other that `batches` raises.
        """
        batch = draw(self._batches, key)
        if self._unchecked:
            self._unchecked = False
            # Another object, because the first call has advanced the generator `key.rng`.
            self.impure = not _equal(batch, draw(self._batches, replace(key)))
        return batch


def _equal(one: Any, other: Any) -> bool:
    import jax

    ones, others = jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other)
    if len(ones) != len(others):
        return False
    return all(_bytes(a) == _bytes(b) for a, b in zip(ones, others, strict=True))


def _bytes(leaf: Any) -> tuple[Any, ...]:
    import jax

    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.shape, array.dtype, array.tobytes()
