"""Whether `batches` is a function of its key: the first key is passed twice, and both batches are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..errors import ConfigurationError
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
        batch_size: the rows of a batch of a data set of `from_dataset`; other batches have none.
        rows: reads some rows of a batch of such a data set (`_RowReader`); other batches have none.
    """

    def __init__(self, batches: Callable[[BatchKey], Any]) -> None:
        self._batches = batches
        self._unchecked = not isinstance(batches, Batches)
        self.impure = False
        for name in ("workers", "ahead", "ahead_bytes"):
            if hasattr(batches, name):
                setattr(self, name, getattr(batches, name))
        if isinstance(batches, Batches):
            self.rows, self.batch_size = _RowReader(batches), batches.batch_size

    def __call__(self, key: BatchKey) -> Any:
        """Returns the batch of a key.

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


class _RowReader:
    """Reads some rows of the batches of a data set. Thread-safe.

    Each pod of a rank reads other rows of a batch, and all rows are one array. NumPy would choose a dtype for the rows
    of each pod, so all rows must have the form of the first batch.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._lock = threading.Lock()
        self._form: _BatchForm | None = None

    def __call__(self, key: BatchKey, rows: slice) -> Any:
        """Returns the rows of the batch of a key. The first call also reads the whole batch.

        Raises:
            ConfigurationError: these rows have another structure, dtype or shape than the first batch.
        """
        with self._lock:
            if self._form is None:
                self._form = _BatchForm.of(self._batches(key))
        part = self._batches.rows(key, rows)
        if found := self._form.difference(_BatchForm.of(part)):
            raise ConfigurationError(
                f"from_dataset: in the batch of step {key.step}, {found}. Each pod of a rank reads some of the rows, "
                "so all samples must have one structure, and arrays of one dtype and shape. Convert them in the data "
                "set, or in transform"
            )
        return part


@dataclass(frozen=True)
class _BatchForm:
    """The form of some rows.

    Attributes:
        structure: the structure of the batch.
        leaves: the name of each array -> its dtype, and its shape without the axis of the rows.
    """

    structure: Any
    leaves: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(cls, batch: Any) -> _BatchForm:
        import jax

        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        return cls(structure, {name: (str(one.dtype), one.shape[1:]) for name, one in arrays.items()})

    def difference(self, rows: _BatchForm) -> str:
        """Returns the way in which some rows differ from the first batch, or an empty text if they have its form."""
        if rows.structure != self.structure:
            return f"the rows of this pod are {rows.structure}, and the first batch is {self.structure}"
        for name, own in rows.leaves.items():
            if own != self.leaves[name]:
                here, first = (f"{dtype} of shape {shape}" for dtype, shape in (own, self.leaves[name]))
                return f"a row of this pod has {here} at {name or 'its only array'}, and one of the first batch {first}"
        return ""


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
