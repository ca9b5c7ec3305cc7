"""The tensors of requests and answers, with names, dtypes and shapes that come from a tree of examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

from ..errors import ConfigurationError

__all__ = ["DATATYPES", "Signature", "TensorSpec", "most_request_bytes", "tensors_of"]

DATATYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
"""The data types of the Open Inference Protocol that tensors may have, and their NumPy dtypes."""

_JSON_BYTES: Final = 32
"""The longest text of a number, with its comma."""

_HEAD_BYTES: Final = 1 << 16

_BY_DTYPE: Final = {dtype: name for name, dtype in DATATYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request or an answer.

    Attributes:
        name: its name in requests.
        shape: its shape without the dimension of the batch.
        dtype: its dtype in requests. A tensor of bfloat16 travels as float32, which holds all its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def datatype(self) -> str:
        """The name of the dtype in the Open Inference Protocol."""
        return _BY_DTYPE[self.dtype]

    @property
    def row_bytes(self) -> int:
        """The size of one example in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype}, shape {[-1, *self.shape]})"


def tensors_of(tree: Any, single: str, what: str) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a tree, in JAX's order of flattening.

    Args:
        tree: a tree of arrays, numbers or ``jax.ShapeDtypeStruct``, without the dimension of the batch.
        single: the name of the tensor if `tree` is one array.
        what: the name of `tree` in errors.

    Raises:
        ConfigurationError: `tree` has no leaves, or one that is not an array of numbers, or two of the same name.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or single
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)  # noqa: PLW2901  # a number of Python
        dtype = leaf.dtype
        if dtype == dtypes.bfloat16:
            dtype = np.dtype(np.float32)
        try:
            dtype = np.dtype(dtypes.canonicalize_dtype(dtype))
        except TypeError:
            dtype = np.dtype(object)
        if dtype not in _BY_DTYPE:
            raise ConfigurationError(
                f"{what} has the dtype {leaf.dtype} at {name}: must be bool, an integer or a float of at least 16 bits"
            )
        found.append(TensorSpec(name, tuple(leaf.shape), dtype))
    if not found:
        raise ConfigurationError(f"{what} has no arrays")
    names = [tensor.name for tensor in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{what} has two leaves with the name {twice}: use other keys")
    return tuple(found)


def most_request_bytes(tensors: Sequence[TensorSpec], rows: int) -> int:
    """Returns the size of the largest valid request with `rows` examples, in bytes."""
    elements = sum(max(tensor.row_bytes // tensor.dtype.itemsize, 1) for tensor in tensors) * rows
    return max(elements * _JSON_BYTES + _HEAD_BYTES * len(tensors), 1 << 20)


@dataclass(frozen=True)
class Signature:
    """The structure, dtypes and shapes of the batches of `predict`.

    Attributes:
        tensors: the leaves of one example.
        leaves: the dtype that `predict` receives for each leaf.
        treedef: the structure of the example.
    """

    tensors: tuple[TensorSpec, ...]
    leaves: tuple[np.dtype[Any], ...]
    treedef: Any

    @classmethod
    def of(cls, example: Any) -> Signature:
        """Returns the signature of an example. Raises `ConfigurationError` as `tensors_of` does."""
        tensors = tensors_of(example, "input", "`example`")
        leaves, treedef = jax.tree.flatten(example)
        given = [np.dtype(getattr(leaf, "dtype", np.asarray(leaf).dtype)) for leaf in leaves]
        own = [
            dtype if dtype == dtypes.bfloat16 else tensor.dtype for dtype, tensor in zip(given, tensors, strict=True)
        ]
        return cls(tensors, tuple(own), treedef)

    def shapes(self, rows: int) -> Any:
        """Returns the tree that `predict` receives for `rows` examples, with ``jax.ShapeDtypeStruct`` as leaves."""
        leaves = [
            jax.ShapeDtypeStruct((rows, *tensor.shape), dtype)  # type: ignore[no-untyped-call]
            for tensor, dtype in zip(self.tensors, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def batch(self, parts: Iterable[Sequence[NDArray[Any]]], rows: int) -> Any:
        """Returns the tree that `predict` receives.

        Args:
            parts: the arrays of each request, in the order of `tensors`.
            rows: the number of examples, of which the last ones are zeros where the requests have fewer.
        """
        columns = list(zip(*parts, strict=True))
        leaves = []
        for tensor, dtype, column in zip(self.tensors, self.leaves, columns, strict=True):
            held = np.zeros((rows, *tensor.shape), dtype)
            at = 0
            for array in column:
                held[at : at + len(array)] = array
                at += len(array)
            leaves.append(held)
        return jax.tree.unflatten(self.treedef, leaves)
