"""`batches` made from what people have: a data set that can be indexed, or a stream that can only be read on.

Both make a pure function of `BatchKey`, so a replaced worker computes exactly the batch that the dead one was
computing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ._batch_key import BatchKey

__all__ = ["Batches", "from_dataset", "from_iterator"]


class Indexable(Protocol):
    """Anything with a length and items by number: an array, a list of files, a Grain data source."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Batches:
    """`batches` of a data set: call it with a `BatchKey`. Made by `from_dataset`.

    Attributes:
        batches_per_epoch: how many batches of all ranks together make one epoch.
    """

    def __init__(
        self,
        size: int,
        pick: Callable[[NDArray[np.int64], BatchKey], Any],
        batch_size: int,
        seed: int | None,
        shuffle: bool,
    ) -> None:
        self.batches_per_epoch = size // batch_size
        self._size = size
        self._pick = pick
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        # Two epochs: at its border, ranks and the prefetching thread are in both.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, seed: int, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._size, dtype=np.int64)
        return np.random.default_rng([seed, epoch]).permutation(self._size)

    def indices(self, key: BatchKey) -> NDArray[np.int64]:
        """Which samples make this batch: int64, of shape ``(batch_size,)``."""
        epoch, place = divmod(key.number, self.batches_per_epoch)
        order = self._order(key.seed if self._seed is None else self._seed, epoch)
        return order[place * self._batch_size : (place + 1) * self._batch_size]

    def __call__(self, key: BatchKey) -> Any:
        """The batch: a pytree of arrays with a leading axis of `batch_size`."""
        return self._pick(self.indices(key), key)


def from_dataset(
    source: Indexable | Sequence[Any] | Mapping[str, Any] | tuple[Any, ...],
    *,
    batch_size: int,
    transform: Callable[..., Any] | None = None,
    seed: int | None = None,
    shuffle: bool = True,
) -> Batches:
    """Make `batches` of a data set, shuffled anew each epoch by (seed, epoch), each sample once an epoch over ranks.

    The ranks of one step take neighbouring places of the epoch's order: rank r of step t has place ``t * world + r``,
    and after a change of the world goes on where that left off (`BatchKey.number`).
    The last ``len(source) % batch_size`` samples of an epoch's order are left out of that epoch, so that every batch
    has the same shape. In Sync mode without backups and with a constant world each other sample is used exactly once an
    epoch. With backups a late gradient's samples are not used. When the world shrinks, the samples that the leaving
    ranks had for that step are not used; in Async mode places are left out at each change. None is used twice an epoch.

    Args:
        source: anything with ``len`` and ``[]`` that gives one sample (an array, a list, a Grain source), or a dict or
            tuple of arrays of equal length, of which a batch is the dict or tuple of their rows.
        batch_size: samples of one rank's batch.
        transform: called with each sample, or, when it takes two arguments, with each sample and a
            ``numpy.random.Generator`` of that (seed, step, rank); gives the sample to train with.
        seed: of the shuffling; by default the job's.
        shuffle: False takes the samples in their order.

    Returns:
        A `Batches` to hand to `train`.

    Raises:
        ConfigurationError: fewer samples than one batch, arrays of different lengths, or a batch size below 1.
    """
    if batch_size < 1:
        raise ConfigurationError(f"from_dataset: batch_size is {batch_size}, must be 1 or more")
    columns = _columns(source)
    if columns is not None and transform is None:
        size, rows = columns

        def pick(indices: NDArray[np.int64], key: BatchKey) -> Any:
            return rows(indices)

    else:
        if columns is not None:
            size, sample_of = columns
        else:
            size, sample_of = len(source), source.__getitem__
        apply = _two_arguments(transform)

        def pick(indices: NDArray[np.int64], key: BatchKey) -> Any:
            rng = key.rng
            return _stack([apply(sample_of(int(index)), rng) for index in indices])

    if size < batch_size:
        raise ConfigurationError(
            f"from_dataset: the source has {size} samples, batch_size is {batch_size}: needs at least one batch"
        )
    return Batches(size, pick, batch_size, seed, shuffle)


def _columns(source: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """A dict or tuple of arrays, or one array, as (rows, how to take some of them)."""
    if isinstance(source, np.ndarray):
        return len(source), source.__getitem__
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(column) for name, column in source.items()}
        length = _common_length(arrays)
        return length, lambda rows: {name: array[rows] for name, array in arrays.items()}
    if isinstance(source, tuple) and source and all(hasattr(column, "shape") for column in source):
        listed = [np.asarray(column) for column in source]
        length = _common_length(dict(enumerate(listed)))
        return length, lambda rows: tuple(array[rows] for array in listed)
    return None


def _common_length(arrays: Mapping[Any, NDArray[Any]]) -> int:
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if not lengths or None in lengths.values() or len(set(lengths.values())) != 1:
        raise ConfigurationError(f"from_dataset: the columns must be arrays of one length, these have {lengths}")
    return int(next(iter(lengths.values())) or 0)


def _two_arguments(transform: Callable[..., Any] | None) -> Callable[[Any, np.random.Generator], Any]:
    if transform is None:
        return lambda sample, rng: sample
    try:
        required = [
            parameter
            for parameter in inspect.signature(transform).parameters.values()
            if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
            and parameter.default is parameter.empty
        ]
    except ValueError:  # built-in functions have no signature
        required = []
    if len(required) >= 2:
        return transform
    return lambda sample, rng: transform(sample)


def _stack(samples: Sequence[Any]) -> Any:
    import jax

    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)


class _Stream:
    """Where one iterator stands, so that asking on is cheap and asking back starts it again."""

    def __init__(self, make: Callable[[int, int], Iterator[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._place: tuple[int, int] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._next = 0
        self._last: Any = None

    def __call__(self, key: BatchKey) -> Any:
        with self._lock:
            place = (key.rank, key.world)
            again = self._place == place and key.step == self._next - 1
            if again:
                return self._last
            if self._place != place or key.step < self._next:
                self._iterator, self._place, self._next = iter(self._make(*place)), place, 0
            while self._next <= key.step:
                self._last = self._following(place)
                self._next += 1
            return self._last

    def _following(self, place: tuple[int, int]) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._make(*place))
        try:
            return next(self._iterator)
        except StopIteration:
            self._place = None
            raise ConfigurationError(
                f"from_iterator: make(rank={place[0]}, world={place[1]}) gave an empty iterator"
            ) from None


def from_iterator(make: Callable[[int, int], Iterator[Any]]) -> Callable[[BatchKey], Any]:
    """Make `batches` of a stream that can only be read on.

    ``make(rank, world)`` gives an iterator of that rank's batches; batch number `key.step` of it is the one for `key`.
    An iterator that ends is made again (another epoch).

    Its limits: `make` must give the same batches in the same order every time, or a replaced worker computes another
    batch than the dead one did; and a replacement reads from the start and throws away `key.step` batches, which takes
    as long as reading them. Where samples can be reached by number, `from_dataset` has neither limit.

    Raises:
        ConfigurationError: (when called) the iterator is empty.
    """
    return _Stream(make)
