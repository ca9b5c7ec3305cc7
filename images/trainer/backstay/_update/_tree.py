"""A pytree of parameters as a list of named leaves.

Every other module speaks of a parameter by its index in this list: shards, blocks on the wire, checkpoints. What
gradients cannot train, or what would silently mean something else once leaves are stored apart, is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from ..errors import TreeError

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class LeafSpec:
    """One array of the tree.

    Attributes:
        path: readable and unique in its tree: the keys on the way to the leaf joined by ``.``, such as
            ``dense.kernel`` or ``layers.0.bias``. Only ``A-Z a-z 0-9 _ - . % ~`` occur, so it is safe in file names.
        shape: the array's shape.
        dtype: the array's dtype as JAX holds it (float64 is float32 unless x64 is enabled).
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.path} {self.dtype.name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class TreeSpec:
    """The leaves of a pytree in JAX's order, and how to put them together again."""

    leaves: tuple[LeafSpec, ...]
    treedef: Any  # jax.tree_util.PyTreeDef

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with `leaves` (one for each of `self.leaves`, any objects) at its places."""
        return jax.tree_util.tree_unflatten(self.treedef, list(leaves))

    def shapes(self) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` at every leaf."""
        return self.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
            for leaf in self.leaves
        )

    def difference(self, other: TreeSpec) -> str | None:
        """The first leaf in which `other` differs, in words; None if paths, shapes and dtypes are equal."""
        mine = {leaf.path: leaf for leaf in self.leaves}
        theirs = {leaf.path: leaf for leaf in other.leaves}
        for path, leaf in mine.items():
            if path not in theirs:
                return f"leaf {leaf} is missing there"
            if theirs[path] != leaf:
                return f"leaf {path} is {leaf} here and {theirs[path]} there"
        for path, leaf in theirs.items():
            if path not in mine:
                return f"leaf {leaf} is there only"
        if [leaf.path for leaf in self.leaves] != [leaf.path for leaf in other.leaves]:
            return "the leaves are in another order"
        return None


def describe(tree: Any) -> TreeSpec:
    """Name the leaves of a tree of parameters and check that gradients can train them.

    Args:
        tree: any pytree of floating-point or complex arrays (JAX, NumPy, Python floats, `jax.ShapeDtypeStruct`).
            ``None`` is an empty subtree, as everywhere in JAX.

    Raises:
        TreeError: a leaf is no array, is of a dtype without gradients (integers, booleans, keys), or is the same
            array as another leaf.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = leaf_names(path for path, _ in flat)
    leaves: list[LeafSpec] = []
    seen: dict[int, str] = {}
    for name, (_, value) in zip(names, flat, strict=True):
        leaves.append(_leaf(name, value))
        if isinstance(value, jax.Array | np.ndarray) and (other := seen.setdefault(id(value), name)) != name:
            raise TreeError(
                f"parameters: leaves {other} and {name} are the same array. Training would separate them: keep "
                f"the array at one place in the tree and use it twice in `loss`, or make the second a copy."
            )
    return TreeSpec(tuple(leaves), treedef)


def leaf_names(paths: Iterable[tuple[Any, ...]]) -> list[str]:
    """Readable, unique, file-safe names of key paths (`jax.tree_util.tree_flatten_with_path`), in the same order.

    Characters that could be mistaken for a separator are written as ``%XX``; names that are still equal (the keys
    ``0`` and ``"0"``) get ``~1``, ``~2`` ... in order.
    """
    counts: Counter[str] = Counter()
    names = []
    for path in paths:
        name = ".".join(_escape(_key(entry)) for entry in path) or "value"
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}~{counts[name] - 1}")
    return names


def arrays(tree: Any, spec: TreeSpec) -> list[np.ndarray[Any, Any]]:
    """The leaves of `tree` as C-contiguous host arrays of `spec`'s dtypes and shapes.

    Raises:
        TreeError: `tree` has other leaves than `spec`.
    """
    if (why := spec.difference(describe(tree))) is not None:
        raise TreeError(f"parameters: {why}")
    values = jax.tree_util.tree_leaves(tree)
    return [
        np.ascontiguousarray(np.asarray(value), dtype=leaf.dtype).reshape(leaf.shape)
        for leaf, value in zip(spec.leaves, values, strict=True)
    ]


def is_low_precision(dtype: np.dtype[Any]) -> bool:
    """Whether sums in `dtype` are made in float32: floats of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def _leaf(name: str, value: Any) -> LeafSpec:
    if isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic):
        dtype = value.dtype
        shape = tuple(value.shape)
    elif isinstance(value, bool | int | float | complex):
        dtype = jnp.result_type(value)
        shape = ()
    else:
        raise TreeError(
            f"parameters: leaf {name} is of type {type(value).__name__}, not an array. `init` must return a pytree "
            f"of arrays; keep configuration out of it."
        )
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TreeError(
            f"parameters: leaf {name} is {dtype}, which gradients cannot train. Keep it out of what `init` returns "
            f"(close over it in `loss`), or make it a floating-point array."
        )
    return LeafSpec(name, shape, np.dtype(jax.dtypes.canonicalize_dtype(dtype)))


def _key(entry: Any) -> str:
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return str(entry.key)
    if isinstance(entry, SequenceKey):
        return str(entry.idx)
    if isinstance(entry, GetAttrKey):
        return str(entry.name)
    return str(entry)


def _escape(key: str) -> str:
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match.group().encode()), key) or "%"
