"""Provides the training data of workers by batch keys, data sets and iterators as functions of a key, and prefetching.

A `BatchKey` names a batch. `from_dataset` and `from_iterator` give a function of a key. A `Prefetcher` calls it ahead.
"""

from __future__ import annotations

from ._batch_key import BatchKey
from ._dataset import Batches, TokenFile, from_dataset, from_iterator
from ._draw import draw
from ._prefetch import Prefetcher
from ._pure import IMPURE, CheckedBatches

__all__ = [
    "IMPURE",
    "BatchKey",
    "Batches",
    "CheckedBatches",
    "Prefetcher",
    "TokenFile",
    "draw",
    "from_dataset",
    "from_iterator",
]
