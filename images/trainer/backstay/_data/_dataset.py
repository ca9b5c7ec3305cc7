"""Makes samples that have numbers a pure function of `BatchKey` (`from_dataset`).

A replaced worker therefore computes exactly the batch of its predecessor (T4). Every sample of an epoch is used once
over all ranks, even when their number changes (T9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backstay_spec.whole import number, whole

from ..errors import ConfigurationError
from ._batch_key import BatchKey
from ._iterator import from_iterator
from ._order import SampleOrder
from ._sources import Source, TokenFile, check_numbers, source_of, stacked

__all__ = ["Batches", "TokenFile", "from_dataset", "from_iterator"]


class Indexable(Protocol):
    """Anything with a length and items by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class PreparedAhead:
    """How batches are prepared before they are needed. The attributes are arguments of `from_dataset`."""

    workers: int
    ahead: int
    ahead_bytes: int


class Batches:
    """The function `batches` of a data set, which `from_dataset` makes. Its argument is a `BatchKey`.

    Attributes:
        size: samples in an epoch.
        batch_size: samples of one rank's batch.
        batches_per_epoch: the number of batches of all ranks in one epoch; not always a whole number.
        workers, ahead, ahead_bytes: see `from_dataset`.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        transform: Callable[..., Any] | None,
        has_rng: bool,
        seed: int | None,
        shuffle: bool,
        prepared: PreparedAhead,
    ) -> None:
        self.size, self.batch_size = source.size, batch_size
        self.workers, self.ahead, self.ahead_bytes = prepared.workers, prepared.ahead, prepared.ahead_bytes
        self._source, self._transform, self._has_rng, self._seed = source, transform, has_rng, seed
        self._order = SampleOrder(source.size, shuffle=shuffle)

    @property
    def batches_per_epoch(self) -> float:
        return self.size / self.batch_size

    def places(self, key: BatchKey) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the samples of a batch, and the epoch of each, as int64 of shape ``(batch_size,)``.

        Epochs follow one another without a gap: a batch may hold the last samples of one and the first of the next.
        """
        seed = key.seed if self._seed is None else self._seed
        first = key.number * self.batch_size
        epoch, place = divmod(first, self.size)
        if place + self.batch_size <= self.size:
            places = np.arange(place, place + self.batch_size, dtype=np.int64)
            return self._order(seed, epoch, places), np.full(self.batch_size, epoch, np.int64)
        epochs, places = np.divmod(np.arange(first, first + self.batch_size, dtype=np.int64), self.size)
        parts = [self._order(seed, int(epoch), places[epochs == epoch]) for epoch in np.unique(epochs)]
        return np.concatenate(parts), epochs

    def indices(self, key: BatchKey) -> NDArray[np.int64]:
        """Returns the samples of this batch as int64 of shape ``(batch_size,)``."""
        return self.places(key)[0]

    def __call__(self, key: BatchKey) -> Any:
        """Returns the batch as a pytree of arrays with a leading axis of `batch_size`."""
        return self.rows(key, slice(None))

    def rows(self, key: BatchKey, rows: slice) -> Any:
        """Returns some rows of the batch. Only their samples are read."""
        numbers, epochs = (all_of[rows] for all_of in self.places(key))
        seed = key.seed if self._seed is None else self._seed
        if self._transform is None:
            return check_numbers(self._source.batch(numbers, epochs, seed))
        samples = self._source.samples(numbers, epochs, seed)
        transformed = zip(samples, numbers.tolist(), epochs.tolist(), strict=True)
        return check_numbers(stacked([self._transformed(*one, seed) for one in transformed]))

    def _transformed(self, sample: Any, number: int, epoch: int, seed: int) -> Any:
        assert self._transform is not None
        try:
            if self._has_rng:
                return self._transform(sample, np.random.default_rng([seed, epoch, number]))
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"raised by the transform of from_dataset for sample {number}")
            raise


def from_dataset(
    source: Indexable | Sequence[Any] | Mapping[str, Any] | tuple[Any, ...] | TokenFile,
    *,
    batch_size: int,
    transform: Callable[..., Any] | None = None,
    has_rng: bool = False,
    seed: int | None = None,
    shuffle: bool = True,
    workers: int = 1,
    ahead: int | None = None,
    ahead_bytes: int = 1 << 30,
) -> Batches:
    """Make `batches` of a data set, shuffled again in each epoch by (seed, epoch).

    In Sync mode without backups, the ranks together use each sample exactly once in an epoch. This also holds when the
    number of ranks changes or pods die. Epochs follow one another without a gap, so every batch has the same shape. One
    batch may contain the end of an epoch and the beginning of the next. With backups, the samples of late gradients are
    not used. At the end of each epoch, the job logs how many samples were used, dropped and repeated.

    Args:
        source: the data, in one of these forms. An array, or a dict or tuple of arrays of one length, also
            memory-mapped: a batch contains rows. A data frame of pandas or Polars: a batch is a dict of columns. A
            Hugging Face ``datasets.Dataset``. A `TokenFile`. An object with ``len`` whose ``[]`` returns one sample,
            such as a list, a Grain data source or a ``grain.MapDataset``.
        batch_size: samples of one rank's batch.
        transform: ``transform(sample)`` returns the sample to train with, a pytree of arrays or numbers.
        has_rng: whether `transform` is called as ``transform(sample, rng)``, with a ``numpy.random.Generator`` of that
            (seed, epoch, sample).
        seed: the seed of the shuffling and of `transform`. The default is the seed of the job.
        shuffle: whether the samples are shuffled. With False, they keep their order.
        workers: threads that prepare batches at the same time. More than one helps where samples come from a disk or a
            network, and where `transform` releases the interpreter's lock, as NumPy and image decoders do.
        ahead: the largest number of batches that are ready or in preparation. The default is 2, or `workers` + 1 if
            that is more.
        ahead_bytes: the memory limit for these batches. At least one batch is always prepared.

    Returns:
        A `Batches`: the argument `batches` of `train`.

    Raises:
        ConfigurationError: an argument is invalid, columns have different lengths, or there are fewer samples than a
            batch has.
    """
    batch_size, seed, workers, ahead = whole(batch_size), whole(seed), whole(workers), whole(ahead)
    for name, value in (("batch_size", batch_size), ("workers", workers), ("ahead", 1 if ahead is None else ahead)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"from_dataset: {name} is {value!r}, must be a whole number of 1 or more")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ConfigurationError(f"from_dataset: seed is {seed!r}, must be a whole number of 0 or more, or None")
    most = number(ahead_bytes)
    if isinstance(most, bool) or not isinstance(most, int | float) or not 1 <= most < math.inf:
        raise ConfigurationError(f"from_dataset: ahead_bytes is {ahead_bytes!r}, must be a number of bytes, 1 or more")
    for name, flag in (("shuffle", shuffle), ("has_rng", has_rng)):
        if not isinstance(flag, bool | np.bool_):
            raise ConfigurationError(f"from_dataset: {name} is {flag!r}, must be True or False")
    if transform is not None and not callable(transform):
        raise ConfigurationError(f"from_dataset: transform is {type(transform).__name__}, must be a function or None")
    if has_rng and transform is None:
        raise ConfigurationError("from_dataset: has_rng is True without a transform: pass a transform, or omit has_rng")
    # After the arguments, because to measure a source may take minutes.
    found = source_of(source)
    if found.size < batch_size:
        raise ConfigurationError(
            f"from_dataset: the source has {found.size} samples: must have at least batch_size, which is {batch_size}"
        )
    return Batches(
        found,
        batch_size=batch_size,
        transform=transform,
        has_rng=has_rng,
        seed=seed,
        shuffle=shuffle,
        prepared=PreparedAhead(workers, max(2, workers + 1) if ahead is None else ahead, int(most)),
    )
