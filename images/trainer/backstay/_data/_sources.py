"""The kinds of data that `from_dataset` accepts, behind one interface: samples that are read by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backstay_spec.whole import whole

from ..errors import ConfigurationError

__all__ = ["Source", "TokenFile", "source_of"]

_Numbers = NDArray[np.int64]

_ENDLESS: Final = 1 << 48
"""A Grain data set that repeats itself has a length of this size."""


class Source(Protocol):
    """Samples by number.

    Attributes:
        size: the number of samples.
    """

    size: int

    def batch(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Any:
        """Returns the samples of these numbers, stacked as a pytree of arrays with a leading axis.

        Args:
            epochs: for each sample, the epoch in which the sample is used.
        """

    def samples(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Sequence[Any]:
        """Returns the samples of these numbers, one by one."""


class _Columns:
    """A pytree of arrays of one length; a batch is their rows. Lists are columns, too."""

    def __init__(self, tree: Any) -> None:
        import jax

        self._tree = jax.tree_util.tree_map_with_path(_column, tree, is_leaf=lambda node: isinstance(node, list))
        paths = jax.tree_util.tree_leaves_with_path(self._tree)
        lengths = {jax.tree_util.keystr(path) or "it": len(array) if array.shape else None for path, array in paths}
        if not lengths or None in lengths.values() or len(set(lengths.values())) != 1:
            raise ConfigurationError(f"from_dataset: the columns must be arrays of one length, these have {lengths}")
        self.size = int(next(iter(lengths.values())) or 0)

    def batch(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Any:
        if isinstance(self._tree, np.ndarray):
            return self._tree[numbers]
        import jax

        return jax.tree.map(lambda column: _rows(column, numbers), self._tree)

    def samples(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Sequence[Any]:
        import jax

        return [jax.tree.map(lambda column, row=row: _row(column, row), self._tree) for row in numbers]


def _column(path: Any, column: Any) -> Any:
    """Returns the column as a NumPy array. An array of h5py or zarr may exceed the memory, so it is read row by row."""
    if hasattr(column, "shape") and hasattr(column, "chunks"):
        return column
    try:
        return np.asarray(column)
    except (TypeError, ValueError) as error:
        import jax

        raise ConfigurationError(
            f"from_dataset: the column {jax.tree_util.keystr(path) or 'it'} is not an array: {error}. Its rows "
            "must have one shape: pad or cut them, or give a list of samples and a transform that does"
        ) from None


def _row(column: Any, number: int) -> Any:
    """Not a view, because a transform may change its sample in place."""
    row = column[number]
    return row.copy() if isinstance(row, np.ndarray) else row


def _rows(column: Any, numbers: _Numbers) -> NDArray[Any]:
    if isinstance(column, np.ndarray):
        rows: NDArray[Any] = column[numbers]
        return rows
    return np.stack([np.asarray(column[number]) for number in numbers.tolist()])


class _Items:
    """Anything with ``len`` and ``[]``, such as a list, a Grain source or MapDataset, or a data set of another
    library."""

    def __init__(self, source: Any) -> None:
        try:
            self.size = len(source)
        except TypeError:
            raise ConfigurationError(
                f"from_dataset: {type(source).__name__} has no length: must have `len` and `[]`, such as a list. For a "
                "stream, use from_iterator"
            ) from None
        if not hasattr(source, "__getitem__"):
            raise ConfigurationError(
                f"from_dataset: {type(source).__name__} has no items by number: must be samples that can be reached by "
                "number, such as a list"
            )
        if self.size >= _ENDLESS:
            raise ConfigurationError(
                "from_dataset: the source repeats itself without end: leave out repeat(). from_dataset makes the epochs"
            )
        self._source = source
        self._many: Callable[[list[int]], Sequence[Any]] | None = getattr(source, "__getitems__", None)

    def batch(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Any:
        return stacked(self.samples(numbers, epochs, seed))

    def samples(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Sequence[Any]:
        listed = numbers.tolist()
        found = [self._source[number] for number in listed] if self._many is None else self._many(listed)
        for number, sample in zip(listed, found, strict=True):
            if sample is None:
                raise ConfigurationError(
                    f"from_dataset: sample {number} is None: a source cannot leave out samples, as a filtered "
                    "grain.MapDataset does; filter before, or read it with from_iterator"
                )
        return found


class _HuggingFace(_Items):
    """A ``datasets.Dataset``. Without a transform a batch is read immediately, as NumPy columns."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._columns = source.with_format("numpy") if source.format["type"] is None else source

    def batch(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> Any:
        columns = {name: np.asarray(column) for name, column in self._columns[numbers.tolist()].items()}
        bad = sorted(name for name, column in columns.items() if column.dtype.kind not in "biufc")
        if bad:
            raise ConfigurationError(
                f"from_dataset: the columns {', '.join(bad)} are not numbers of one shape: leave them out with "
                "select_columns, or give a transform that makes arrays of them"
            )
        return columns


class TokenFile:
    """Windows of a long sequence of tokens in files, for `from_dataset`. Files are mapped, and never read as a whole.

    In each epoch the windows of a file follow one another without a gap, and begin at a random place. So no token is
    used twice in an epoch, and windows begin anywhere. At the ends of a file up to two windows are left out.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        window: int,
        *,
        dtype: Any = np.uint16,
    ) -> None:
        """
        Args:
            paths: one file or several; ``.npy``, or tokens one after another without a header.
            window: tokens in a sample. Where a model predicts the next token, one more than it reads.
            dtype: the dtype of files without a header.

        Raises:
            ConfigurationError: a file cannot be mapped, has no whole tokens, or is shorter than a window.
        """
        window = whole(window)
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConfigurationError(f"TokenFile: window is {window!r}, must be a whole number of 1 or more")
        self._window = window
        try:
            self._paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        except TypeError:
            raise ConfigurationError(f"TokenFile: paths is {paths!r}, must be a path or a list of paths") from None
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise ConfigurationError(f"TokenFile: dtype is {dtype!r}, must be a dtype such as np.uint16") from None
        self._files = [_mapped(path, kind, window) for path in self._paths]
        if not self._files:
            raise ConfigurationError("TokenFile: paths is empty, must name one file or more")
        counts = [max(1, len(tokens) // window - 1) for tokens in self._files]
        self._spare = [len(tokens) - count * window for tokens, count in zip(self._files, counts, strict=True)]
        self._ends = np.cumsum(counts)
        self.size = int(self._ends[-1])

    def __len__(self) -> int:
        return self.size

    def batch(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> NDArray[np.int32]:
        """Returns windows as int32 of shape ``(len(numbers), window)``.

        Raises:
            ConfigurationError: a token is not an int32.
        """
        return np.stack(self.samples(numbers, epochs, seed))

    def samples(self, numbers: _Numbers, epochs: _Numbers, seed: int) -> list[NDArray[np.int32]]:
        """Returns the windows of these numbers, one by one."""
        shifts: dict[tuple[int, int], int] = {}
        found = []
        for number, epoch in zip(numbers.tolist(), epochs.tolist(), strict=True):
            file = int(np.searchsorted(self._ends, number, side="right"))
            if (file, epoch) not in shifts:
                random = np.random.default_rng([seed, epoch, file])
                shifts[file, epoch] = int(random.integers(0, self._spare[file], endpoint=True))
            first = number - (int(self._ends[file - 1]) if file else 0)
            start = shifts[file, epoch] + first * self._window
            tokens = self._files[file][start : start + self._window]
            window = np.asarray(tokens, np.int32)
            if not np.can_cast(tokens.dtype, np.int32) and (window != tokens).any():
                raise ConfigurationError(
                    f"TokenFile: {self._paths[file]} has a token outside int32 at one of the positions {start} to "
                    f"{start + self._window - 1}: is {tokens.dtype.name} the dtype of the file?"
                )
            found.append(window)
        return found


def _mapped(path: Path, dtype: np.dtype[Any], window: int) -> NDArray[Any]:
    try:
        if path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        elif (size := path.stat().st_size) % dtype.itemsize:
            raise ConfigurationError(f"TokenFile: {path} has {size} bytes: must be whole tokens of {dtype.name}")
        else:
            tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    except (EOFError, OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"TokenFile: {path} cannot be mapped: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigurationError(
            f"TokenFile: {path} holds {tokens.dtype.name}{list(tokens.shape)}: must be one row of integers"
        )
    if len(tokens) < window:
        raise ConfigurationError(f"TokenFile: {path} has {len(tokens)} tokens, fewer than one window of {window}")
    return tokens


def source_of(data: Any) -> Source:
    """Returns the argument of `from_dataset`, as a `Source`.

    Raises:
        ConfigurationError: its samples have no numbers.
    """
    if isinstance(data, TokenFile | _Items | _Columns):
        return data
    if isinstance(data, str | bytes | PathLike):
        raise ConfigurationError(
            f"from_dataset: the source is {data!r}: must be the data, not its name: load it, for example with np.load, "
            "or use TokenFile for a file of tokens"
        )
    if hasattr(data, "with_format") and hasattr(data, "column_names"):
        if isinstance(data, Mapping):
            raise ConfigurationError(
                f"from_dataset: this is a DatasetDict: choose one of its splits, {', '.join(map(repr, data))}"
            )
        return _HuggingFace(data) if hasattr(data, "__len__") else _Items(data)
    if hasattr(data, "to_numpy"):  # a data frame or one column of pandas or Polars
        data = {name: data[name].to_numpy() for name in data.columns} if hasattr(data, "columns") else data.to_numpy()
    if isinstance(data, Mapping):
        import jax

        if jax.tree_util.all_leaves([data]):  # a file of np.load or of h5py: as an array, it would be its keys
            data = {name: data[name] for name in data}
        return _Columns(data)
    if isinstance(data, np.ndarray):
        return _Columns(data)
    if isinstance(data, tuple) and data and all(hasattr(column, "shape") for column in data):
        return _Columns(data)
    return _Columns(data) if type(data).__module__.startswith("jax") else _Items(data)


def stacked(samples: Sequence[Any]) -> Any:
    """Returns a batch of samples that are pytrees of one structure.

    Raises:
        ConfigurationError: the samples have different structures or shapes.
    """
    import jax

    structures: list[Any] = [jax.tree.structure(sample) for sample in samples]
    if not structures[0].num_leaves:
        raise ConfigurationError(f"from_dataset: a sample is {samples[0]!r}: must have arrays or numbers")
    for other in structures:
        if other != structures[0]:
            raise ConfigurationError(
                f"from_dataset: two samples of a batch are {structures[0]} and {other}: must have the same structure"
            )

    def stack(path: Any, *leaves: Any) -> Any:
        arrays = [np.asarray(leaf) for leaf in leaves]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise ConfigurationError(
                f"from_dataset: {jax.tree_util.keystr(path) or 'it'} has the shapes {shapes[0]} and {shapes[1]} in two "
                "samples of a batch: must have one shape, so pad or cut it with a transform"
            )
        return np.stack(arrays)

    return jax.tree_util.tree_map_with_path(stack, *samples)


def check_numbers(batch: Any) -> Any:
    """`batch`, if its arrays are numbers.

    Raises:
        ConfigurationError: an array has text, dates, objects or records.
    """
    import jax

    for path, array in jax.tree_util.tree_leaves_with_path(batch):
        if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
            raise ConfigurationError(
                f"from_dataset: {jax.tree_util.keystr(path) or 'it'} is of dtype {array.dtype} in a batch: must be "
                "numbers: leave it out, or make numbers of it with a transform"
            )
    return batch
